//! What each rank says when it begins an operation: which one it is, how long its buffer is, and a
//! note.

use super::room::{Room, SharedFault, Watch};

/// Where ranks say it: two places per rank, by turns. Who begins the operation after the next has
/// seen all others begin the next, and so be done with this one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
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

impl Heads {
    pub(super) fn end(self) -> usize {
        self.place(self.world, 0)
    }

    /// To be counted as begun by the caller.
    pub(super) fn say(self, room: &Room, operation: u64, sequence: u64, note: &[u8], len: usize) {
        let place = self.place(room.seat.rank, operation);
        let head = [sequence, len as u64, note.len() as u64];
        room.memory.write(place, bytemuck::cast_slice(&head));
        if note.len() <= NOTE_BYTES {
            room.memory.write(place + HEAD_BYTES, note);
        }
    }

    /// Checks that all, who have begun, are in the same operation, and reads their notes.
    pub(super) fn hear(
        self,
        room: &Room,
        watch: Watch<'_>,
        operation: u64,
        len: usize,
    ) -> Result<Notes, SharedFault> {
        let mut notes = Vec::with_capacity(self.world);
        let mut is_too_long = false;
        for seat in 0..self.world {
            let place = self.place(seat, operation);
            let mut head = [0_u64; 3];
            room.memory.read(place, bytemuck::cast_slice_mut(&mut head));
            let [sequence, its_len, note_bytes] = head;
            if sequence != watch.sequence {
                let reason = format!("expected sequence number {}, got {sequence}", watch.sequence);
                return Err(room.broken(seat, reason));
            }
            if its_len != len as u64 {
                let reason = format!("expected a buffer length of {len} elements, got {its_len}");
                return Err(room.broken(seat, reason));
            }
            is_too_long |= note_bytes > NOTE_BYTES as u64;
            if !is_too_long {
                let mut note = vec![0; note_bytes as usize];
                room.memory.read(place + HEAD_BYTES, &mut note);
                notes.push(note);
            }
        }
        Ok(if is_too_long { Notes::TooLong } else { Notes::All(notes) })
    }

    fn place(self, seat: usize, operation: u64) -> usize {
        self.start + (seat * 2 + (operation % 2) as usize) * (HEAD_BYTES + NOTE_BYTES)
    }
}

const HEAD_BYTES: usize = 24;

/// Longer notes take another way.
pub(super) const NOTE_BYTES: usize = (16 << 10) - HEAD_BYTES;
