//! What each rank says when it begins an operation: which one it is, how long its buffer is, and a
//! note.

use super::region::{SharedFault, SharedRegion, WaitContext};

/// Where ranks say it: two places per rank, by turns. Who begins the operation after the next has
/// seen all others begin the next, and so be done with this one.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpHeaders {
    /// In the memory, in bytes.
    pub(super) start: usize,
    pub(super) world: usize,
}

/// The notes that have been told.
#[derive(Debug)]
pub(crate) enum Notes {
    /// One per rank.
    All(Vec<Vec<u8>>),
    /// One is too long for the memory, so that they have to be told otherwise.
    TooLong,
}

impl OpHeaders {
    pub(super) fn end(self) -> usize {
        self.offset(self.world, 0)
    }

    /// To be counted as begun by the caller.
    pub(super) fn post(
        self,
        region: &SharedRegion,
        operation: u64,
        sequence: u64,
        note: &[u8],
        len: usize,
    ) {
        let offset = self.offset(region.local.rank, operation);
        let head = [sequence, len as u64, note.len() as u64];
        region.memory.write(offset, bytemuck::cast_slice(&head));
        if note.len() <= NOTE_BYTES {
            region.memory.write(offset + HEAD_BYTES, note);
        }
    }

    /// Checks that all, who have begun, are in the same operation, and reads their notes.
    pub(super) fn collect(
        self,
        region: &SharedRegion,
        context: WaitContext<'_>,
        operation: u64,
        len: usize,
    ) -> Result<Notes, SharedFault> {
        let mut notes = Vec::with_capacity(self.world);
        let mut is_too_long = false;
        for local_rank in 0..self.world {
            let offset = self.offset(local_rank, operation);
            let mut head = [0_u64; 3];
            region.memory.read(offset, bytemuck::cast_slice_mut(&mut head));
            let [sequence, its_len, note_bytes] = head;
            if sequence != context.sequence {
                let reason =
                    format!("expected sequence number {}, got {sequence}", context.sequence);
                return Err(region.broken(local_rank, reason));
            }
            if its_len != len as u64 {
                let reason = format!("expected a buffer length of {len} elements, got {its_len}");
                return Err(region.broken(local_rank, reason));
            }
            is_too_long |= note_bytes > NOTE_BYTES as u64;
            if !is_too_long {
                let mut note = vec![0; note_bytes as usize];
                region.memory.read(offset + HEAD_BYTES, &mut note);
                notes.push(note);
            }
        }
        Ok(if is_too_long { Notes::TooLong } else { Notes::All(notes) })
    }

    fn offset(self, local_rank: usize, operation: u64) -> usize {
        self.start + (local_rank * 2 + (operation % 2) as usize) * (HEAD_BYTES + NOTE_BYTES)
    }
}

const HEAD_BYTES: usize = 24;

/// Longer notes take another way.
pub(super) const NOTE_BYTES: usize = (16 << 10) - HEAD_BYTES;
