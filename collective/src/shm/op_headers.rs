//! Operation headers: each rank posts its sequence number, the length of its buffer, the length of
//! its note, a digest of these three, and the note when it begins an operation.

use xxhash_rust::xxh3::xxh3_64;

use super::notes::Notes;
use super::region::{SharedRegion, WaitContext};
use crate::transfer::LocalFault;

/// Layout of the headers: two slots per rank, used alternately. A rank that begins operation k+2
/// has seen all ranks begin k+1, and so finish k: the slot of k is free.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpHeaders {
    /// Offset in the region, in bytes.
    pub(super) start: usize,
    pub(super) world: usize,
}

impl OpHeaders {
    pub(super) fn end(self) -> usize {
        self.offset(self.world, 0)
    }

    /// Posts the header of this rank. The caller then increments `Begun`.
    pub(super) fn post(
        self,
        region: &SharedRegion,
        operation: u64,
        sequence: u64,
        note: &[u8],
        len: usize,
    ) {
        let offset = self.offset(region.local.rank, operation);
        let header = seal([sequence, len as u64, note.len() as u64]);
        region.memory.write(offset, bytemuck::cast_slice(&header));
        if note.len() <= NOTE_BYTES {
            region.memory.write(offset + HEADER_BYTES, note);
        }
    }

    /// Posts that this rank has begun an exchange.
    pub(super) fn post_exchange(self, region: &SharedRegion, operation: u64, sequence: u64) {
        self.post(region, operation, sequence, &[], EXCHANGE);
    }

    /// Checks that all ranks, which have begun, are in the same operation, and reads their notes.
    pub(super) fn collect(
        self,
        region: &SharedRegion,
        context: WaitContext<'_>,
        operation: u64,
        len: usize,
    ) -> Result<Notes, LocalFault> {
        let mut notes = Vec::with_capacity(self.world);
        let mut is_too_long = false;
        for local_rank in 0..self.world {
            let offset = self.offset(local_rank, operation);
            let mut header = [0; 4];
            region.memory.read(offset, bytemuck::cast_slice_mut(&mut header));
            let [sequence, its_len, note_bytes] =
                open(header).map_err(|reason| region.broken(local_rank, reason))?;
            if sequence != context.sequence {
                let reason =
                    format!("expected sequence number {}, got {sequence}", context.sequence);
                return Err(region.broken(local_rank, reason));
            }
            if its_len == EXCHANGE as u64 {
                return Err(region.broken(local_rank, "expected a sum, got an exchange".to_owned()));
            }
            if its_len != len as u64 {
                let reason = format!("expected a buffer length of {len} elements, got {its_len}");
                return Err(region.broken(local_rank, reason));
            }
            is_too_long |= note_bytes > NOTE_BYTES as u64;
            if !is_too_long {
                let mut note = vec![0; note_bytes as usize];
                region.memory.read(offset + HEADER_BYTES, &mut note);
                notes.push(note);
            }
        }
        Ok(if is_too_long { Notes::TooLong } else { Notes::All(notes) })
    }

    fn offset(self, local_rank: usize, operation: u64) -> usize {
        self.start + (local_rank * 2 + (operation % 2) as usize) * (HEADER_BYTES + NOTE_BYTES)
    }
}

/// Numbers, and their digest.
pub(super) fn seal(numbers: [u64; 3]) -> [u64; 4] {
    let [first, second, third] = numbers;
    [first, second, third, xxh3_64(bytemuck::cast_slice(&numbers))]
}

/// Returns the numbers that were [sealed](seal).
///
/// # Errors
/// A message, if a bit has changed in memory.
pub(super) fn open(header: [u64; 4]) -> Result<[u64; 3], String> {
    let [first, second, third, _] = header;
    match seal([first, second, third]) == header {
        true => Ok([first, second, third]),
        false => Err("expected a header, got one that was changed in memory".to_owned()),
    }
}

const HEADER_BYTES: usize = 32;

/// Takes the place of the length of a buffer.
const EXCHANGE: usize = usize::MAX;

/// Maximum length of a note in the region; longer notes are exchanged over TCP.
pub(super) const NOTE_BYTES: usize = (16 << 10) - HEADER_BYTES;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_with_a_flipped_bit_is_refused() {
        let header = seal([1, 2, 3]);
        assert_eq!(open(header), Ok([1, 2, 3]));
        for bit in 0..256 {
            let mut flipped = header;
            flipped[bit / 64] ^= 1 << (bit % 64);
            assert!(open(flipped).is_err(), "bit {bit}");
        }
    }
}
