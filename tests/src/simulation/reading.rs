//! Training data of the simulated workers: while the storage does not answer, a worker has only
//! what it has read before.

use elasticdl_proto::RecordRange;

use super::world::World;

impl World {
    /// Divides the records that a worker computes into those that it reads and the rest.
    pub(super) fn read(&mut self, ranges: &[RecordRange]) -> (Vec<RecordRange>, Vec<RecordRange>) {
        if !self.checkpoint_store.is_unavailable {
            return (ranges.to_vec(), Vec::new());
        }
        let mut left = self.rng.below(records(ranges) + 1);
        let (mut read, mut unread) = (Vec::new(), Vec::new());
        for range in ranges {
            let cut = range.start + left.min(range.len());
            left -= cut - range.start;
            read.push(RecordRange { end: cut, ..*range });
            unread.push(RecordRange { start: cut, ..*range });
        }
        read.retain(|range| !range.is_empty());
        unread.retain(|range| !range.is_empty());
        self.oracle.coverage.unread += u64::from(!unread.is_empty());
        (read, unread)
    }

    /// Tells the session of `p` how many of the next records it can read.
    pub(super) fn limit_readable(&mut self, p: usize) {
        let Some(session) = &mut self.processes[p].trainer.session else { return };
        let is_away = self.checkpoint_store.is_unavailable;
        let readable = is_away.then(|| self.rng.below(records(session.assignment.upcoming()) + 1));
        session.assignment.limit_readable(readable);
    }
}

fn records(ranges: &[RecordRange]) -> u64 {
    ranges.iter().map(RecordRange::len).sum()
}
