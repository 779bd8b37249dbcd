//! Bounds of chunks and segments: a buffer is split into one chunk per rank, and each chunk into
//! segments. Pure.

use std::ops::Range;

/// Returns chunk `index` of `world` of a buffer of `len` elements. Chunks cover the buffer in
/// order. Their lengths differ by at most one, and the longer ones come first; with fewer elements
/// than ranks the last ones are empty.
pub(crate) fn chunk(len: usize, world: usize, index: usize) -> Range<usize> {
    assert!(index < world, "chunk {index} of {world}");
    let (base, longer) = (len / world, len % world);
    let start = index * base + index.min(longer);
    start..start + base + usize::from(index < longer)
}

/// Returns the number of segments of a chunk. It is at least one: an empty chunk is sent as well,
/// so that every rank receives a frame from its neighbour in every ring step.
pub(crate) fn segment_count(chunk: &Range<usize>, segment_len: usize) -> usize {
    chunk.len().div_ceil(segment_len).max(1)
}

/// Returns segment `index` of a chunk: `segment_len` elements; the last segment has the remainder.
pub(crate) fn segment(chunk: &Range<usize>, segment_len: usize, index: usize) -> Range<usize> {
    assert!(index < segment_count(chunk, segment_len), "segment {index} of {chunk:?}");
    let start = chunk.start + index * segment_len;
    start..chunk.end.min(start + segment_len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_buffer_in_order_with_balanced_lengths() {
        for world in 1..=9 {
            for len in 0..=100 {
                let chunks: Vec<_> = (0..world).map(|index| chunk(len, world, index)).collect();
                assert_eq!(chunks[0].start, 0);
                assert_eq!(chunks[world - 1].end, len);
                for pair in chunks.windows(2) {
                    assert_eq!(pair[0].end, pair[1].start, "len {len}, world {world}");
                    assert!(pair[0].len() == pair[1].len() || pair[0].len() == pair[1].len() + 1);
                }
                assert!(chunks[0].len() <= chunks[world - 1].len() + 1, "len {len}, world {world}");
            }
        }
    }

    #[test]
    fn segments_cover_the_chunk_in_order() {
        for (start, len) in [(0, 0), (5, 0), (5, 1), (0, 7), (3, 8), (3, 9)] {
            let chunk = start..start + len;
            for segment_len in 1..=10 {
                let count = segment_count(&chunk, segment_len);
                let segments: Vec<_> =
                    (0..count).map(|index| segment(&chunk, segment_len, index)).collect();
                assert_eq!(segments[0].start, chunk.start);
                assert_eq!(segments[count - 1].end, chunk.end);
                assert!(segments.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert!(segments.iter().all(|segment| segment.len() <= segment_len));
                assert!(count == 1 || segments.iter().all(|segment| !segment.is_empty()));
            }
        }
    }
}
