//! The buckets that NCCL sums: several of the model's in one operation, because each operation
//! takes about a tenth of a millisecond of the NCCL thread, and small ones do not use the network
//! fully.
//!
//! ```text
//! model's buckets   |  6 |  5 |  4 |  3 |  2 |  1 |  0 |   cut from the end
//! summed            |   third |     second     | first |
//! ```
//!
//! **Invariant:** the cuts follow from the lengths of the gradient and of the model's buckets, so
//! they are the same on all ranks.

use std::ops::Range;

use crate::buckets;

/// Cuts of a gradient. The first bucket is one of the model's, so that its sum starts early.
#[derive(Clone, Copy, Debug)]
pub(super) struct MergedBuckets {
    /// Length of the gradient.
    len: usize,
    /// Length of the first bucket.
    first_len: usize,
    /// Length of the others, but for the last one, which is the rest.
    next_len: usize,
}

impl MergedBuckets {
    /// Cuts a gradient of `len` elements, each of `element_bytes` on the wire, of a model with
    /// buckets of `bucket_len` elements: into buckets of 16 MiB at least, or quarters of the
    /// gradient if these are smaller, so that a small gradient is still summed while it is
    /// computed.
    pub(super) fn new(len: usize, bucket_len: usize, element_bytes: usize) -> Self {
        let first_len = bucket_len.max(1);
        let wanted = (MERGED_BYTES / element_bytes).min(len.div_ceil(4));
        Self { len, first_len, next_len: wanted.div_ceil(first_len).max(1) * first_len }
    }

    /// Start of the next bucket, which ends at `end`; `None` if it is the last one, which reaches
    /// to the start of the gradient.
    pub(super) fn next_start(&self, end: usize) -> Option<usize> {
        let bucket_len = if end == self.len { self.first_len } else { self.next_len };
        buckets::last_bucket(end, bucket_len)
    }

    /// All buckets, in the order in which they are summed.
    pub(super) fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        buckets::ranges_by(self.len, move |end| self.next_start(end))
    }
}

const MERGED_BYTES: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn lens(len: usize, bucket_len: usize, element_bytes: usize) -> Vec<usize> {
        let ranges: Vec<_> = MergedBuckets::new(len, bucket_len, element_bytes).ranges().collect();
        assert!(ranges.windows(2).all(|pair| pair[1].end == pair[0].start), "{ranges:?}");
        assert_eq!((ranges[0].end, ranges[ranges.len() - 1].start), (len, 0), "{ranges:?}");
        ranges.iter().map(Range::len).collect()
    }

    #[test]
    fn buckets_are_merged_to_16_mib_after_the_first_one() {
        const MIB: usize = (1 << 20) / 4;
        assert_eq!(lens(70 * MIB, 4 * MIB, 4), [4, 16, 16, 16, 16, 2].map(|mib| mib * MIB));
        // As bytes on the wire.
        assert_eq!(lens(140 * MIB, 4 * MIB, 2), [4, 32, 32, 32, 32, 8].map(|mib| mib * MIB));
        // The model's boundaries are kept, and its larger buckets.
        assert_eq!(lens(70 * MIB, 5 * MIB, 4), [5, 20, 20, 20, 5].map(|mib| mib * MIB));
        assert_eq!(lens(70 * MIB, 25 * MIB, 4), [25, 25, 20].map(|mib| mib * MIB));
    }

    #[test]
    fn a_small_gradient_is_summed_in_quarters() {
        assert_eq!(lens(6000, 1000, 4), [1000, 2000, 2000, 1000]);
        assert_eq!(lens(20_000, 5000, 4), [5000; 4]);
        assert_eq!(lens(10, 20, 4), [10]);
        assert_eq!(lens(0, 4, 4), [0]);
        assert_eq!(lens(3, 0, 4), [1, 1, 1]);
    }
}
