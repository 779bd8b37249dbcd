//! A snapshot of the state as a joining worker receives it, part by part.

use elasticdl_collective::Position;
use elasticdl_proto::{Generation, WorkerId};

use crate::donor::{PART_FLOATS_MAX, PartNote, StateNote};
use crate::session::header::StateRecord;
use crate::tensor::ModelSize;

/// The received parts of a donor's snapshot.
#[derive(Clone, Debug)]
pub(crate) struct IncomingSnapshot {
    pub(super) donor: WorkerId,
    /// The donor's generation when it sent the snapshot.
    pub(super) generation: Generation,
    pub(super) record: StateRecord,
    /// Number of floats of the parameters, and of parameters and optimizer state together.
    parameters: u64,
    floats: u64,
    /// Number of floats received and verified.
    received: u64,
}

impl IncomingSnapshot {
    /// The start of a snapshot; `None` if the donor starts in its middle.
    pub(super) fn begin(
        donor: WorkerId,
        generation: Generation,
        note: StateNote,
        size: ModelSize,
    ) -> Option<Self> {
        let begins = note.from == 0;
        begins.then_some(Self {
            donor,
            generation,
            record: note.record,
            parameters: size.parameters as u64,
            floats: size.total() as u64,
            received: 0,
        })
    }

    /// Whether the note announces the rest of this snapshot.
    pub(super) fn is_continued_by(&self, note: &StateNote) -> bool {
        !self.is_complete() && note.record.step == self.record.step && note.from == self.received
    }

    pub(super) fn is_complete(&self) -> bool {
        self.received == self.floats
    }

    /// Checks that this is the next part.
    ///
    /// # Errors
    /// A description of what arrived instead.
    pub(super) fn check(&self, note: PartNote, floats: u64) -> Result<(), String> {
        let end = if note.from < self.parameters { self.parameters } else { self.floats };
        if note.from != self.received {
            return Err(format!(
                "floats from {} on, where {} was expected",
                note.from, self.received
            ));
        }
        let most = (end - self.received).min(PART_FLOATS_MAX as u64);
        if floats == 0 || floats > most {
            return Err(format!("a part of {floats} floats, where 1 to {most} were expected"));
        }
        Ok(())
    }

    /// Counts a received part.
    pub(super) fn received(&mut self, floats: u64) {
        self.received += floats;
    }

    /// Position to report to the donor. `step`: number of steps of this worker's state, if it has
    /// one.
    pub(super) fn position(&self, step: u64) -> Position {
        let snapshot = self.record.step;
        Position { snapshot, floats: self.received, step: step.max(snapshot) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(step: u64, from: u64) -> StateNote {
        let record = StateRecord { step, ..StateRecord::default() };
        StateNote { program: Default::default(), record, from }
    }

    fn begin(note: StateNote) -> Option<IncomingSnapshot> {
        let size = ModelSize { parameters: 10, slots: 20 };
        IncomingSnapshot::begin(WorkerId(1), Generation(2), note, size)
    }

    #[test]
    fn parts_come_in_order_and_each_is_of_one_tensor() {
        let mut incoming = begin(note(7, 0)).unwrap();
        let part = |from| PartNote { from, digest: 0 };
        assert_eq!(incoming.check(part(0), 10), Ok(()));
        for (from, floats) in [(0, 0), (0, 11), (1, 5), (u64::MAX, 1)] {
            assert!(incoming.check(part(from), floats).is_err(), "{floats} from {from}");
        }
        incoming.received(6);
        assert_eq!((incoming.check(part(6), 4), incoming.is_complete()), (Ok(()), false));
        assert!(incoming.check(part(6), 5).is_err() && incoming.check(part(6), u64::MAX).is_err());
        assert_eq!(incoming.position(0), Position { snapshot: 7, floats: 6, step: 7 });
        incoming.received(4);
        assert!(incoming.check(part(10), 20).is_ok() && incoming.check(part(10), 21).is_err());
        incoming.received(20);
        assert!(incoming.is_complete() && incoming.check(part(30), 1).is_err());
        assert_eq!(incoming.position(9), Position { snapshot: 7, floats: 30, step: 9 });
    }

    #[test]
    fn only_the_rest_of_the_same_snapshot_continues_it() {
        assert!(begin(note(7, 6)).is_none());
        let mut incoming = begin(note(7, 0)).unwrap();
        incoming.received(6);
        assert!(incoming.is_continued_by(&note(7, 6)));
        assert!(!incoming.is_continued_by(&note(7, 0)) && !incoming.is_continued_by(&note(8, 6)));
        incoming.received(4);
        incoming.received(20);
        assert!(!incoming.is_continued_by(&note(7, 30)));
    }
}
