//! The leases of an inference job's shards.
//!
//! A shard is to do, leased or done. The shards of a lost worker are to do again at once: no
//! parameters have absorbed them, and a result that was written is overwritten with the same
//! content.
//!
//! ```text
//!  0 ············ next ············ len
//!  done, leased,  to do, except those
//!  or returned    in done_ahead
//! ```
//!
//! **Invariant:** a shard is leased to at most one worker.

use std::collections::BTreeSet;

use elasticdl_proto::{RecordRange, ShardCounts, WorkerId};

use super::shards::Shards;

/// The shards of an inference job, and who processes them.
#[derive(Debug)]
pub(crate) struct ShardLeases {
    shards: Shards,
    /// The first shard that this master has never leased.
    next: u32,
    /// Shards from `next` on that an earlier master knew to be done.
    done_ahead: BTreeSet<u32>,
    /// Shards before `next` whose workers were lost.
    returned: BTreeSet<u32>,
    leased: BTreeSet<(WorkerId, u32)>,
}

impl ShardLeases {
    /// No shard is leased or done.
    pub(crate) fn new(shards: Shards) -> Self {
        let (next, done_ahead, returned, leased) = Default::default();
        Self { shards, next, done_ahead, returned, leased }
    }

    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Marks the shards of `records`, which an earlier master knew to be done. Called before the
    /// first lease, in the order of the records.
    ///
    /// # Errors
    /// `records` are not whole shards, or a shard is done already; nothing is changed then.
    pub(crate) fn restore_done(&mut self, records: RecordRange) -> Result<(), RecordRange> {
        let RecordRange { epoch, start, end } = records;
        let ends = (start < end && epoch == 0)
            .then(|| Some((self.shards.of(start)?, self.shards.of(end - 1)?)));
        let Some((first, last)) = ends.flatten() else { return Err(records) };
        let is_whole =
            self.shards.range(first).start == start && self.shards.range(last).end == end;
        let is_new = first >= self.next && self.done_ahead.range(first..=last).next().is_none();
        if !(is_whole && is_new) {
            return Err(records);
        }
        if first == self.next {
            self.next = last + 1;
        } else {
            self.done_ahead.extend(first..=last);
        }
        Ok(())
    }

    /// Leases a shard to `worker`: the first that is to do.
    pub(crate) fn lease(&mut self, worker: WorkerId) -> Option<RecordRange> {
        while self.done_ahead.remove(&self.next) {
            self.next += 1;
        }
        let shard = self.returned.pop_first().or_else(|| {
            let shard = self.next;
            let is_left = shard < self.shards.len();
            self.next += u32::from(is_left);
            is_left.then_some(shard)
        })?;
        self.leased.insert((worker, shard));
        Some(self.records_of(shard))
    }

    /// Ends the lease of `worker` on exactly these records: they are done. Returns whether there
    /// was one.
    pub(crate) fn finish(&mut self, worker: WorkerId, records: RecordRange) -> bool {
        let shard = self.shards.of(records.start);
        let is_whole = |shard: &u32| self.records_of(*shard) == records;
        let Some(shard) = shard.filter(is_whole) else { return false };
        self.leased.remove(&(worker, shard))
    }

    /// Ends the leases of a lost worker: its shards are to do again.
    pub(crate) fn forget(&mut self, worker: WorkerId) {
        let lost: Vec<u32> = self.leased_to(worker).collect();
        for shard in lost {
            self.leased.remove(&(worker, shard));
            self.returned.insert(shard);
        }
    }

    /// Records that are leased to `worker`.
    pub(crate) fn records_leased_to(&self, worker: WorkerId) -> u64 {
        self.leased_to(worker).map(|shard| self.records_of(shard).len()).sum()
    }

    /// Number of shards by state.
    pub(crate) fn counts(&self) -> ShardCounts {
        let ahead = self.shards.len() - self.next - count(&self.done_ahead);
        let todo = count(&self.returned) + ahead;
        let leased = count(&self.leased);
        ShardCounts { todo, leased, done: self.shards.len() - todo - leased }
    }

    fn leased_to(&self, worker: WorkerId) -> impl Iterator<Item = u32> + '_ {
        self.leased.range((worker, 0)..=(worker, u32::MAX)).map(|(_, shard)| *shard)
    }

    fn records_of(&self, shard: u32) -> RecordRange {
        let std::ops::Range { start, end } = self.shards.range(shard);
        RecordRange { epoch: 0, start, end }
    }
}

/// Number of elements of a set of shards.
fn count<T>(shards: &BTreeSet<T>) -> u32 {
    u32::try_from(shards.len()).expect("a data set has at most 2^24 shards")
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;
    use crate::job::data::dataset::Dataset;
    use crate::job::testing::{dataset, spec};

    const A: WorkerId = WorkerId(1);
    const B: WorkerId = WorkerId(2);

    /// Shards of 4 records.
    fn leases(files: &[u64]) -> ShardLeases {
        let data = Dataset::new(dataset(files), &spec()).unwrap();
        ShardLeases::new(Shards::cut(&data, NonZeroU64::new(4)).unwrap())
    }

    fn range(start: u64, end: u64) -> RecordRange {
        RecordRange { epoch: 0, start, end }
    }

    fn counts(leases: &ShardLeases) -> (u32, u32, u32) {
        let ShardCounts { todo, leased, done } = leases.counts();
        (todo, leased, done)
    }

    #[test]
    fn each_shard_is_leased_once_in_order_and_no_shard_crosses_a_file() {
        let mut leases = leases(&[10, 7]);
        let all: Vec<_> = std::iter::from_fn(|| leases.lease(A)).collect();
        assert_eq!(all, [(0, 4), (4, 8), (8, 10), (10, 14), (14, 17)].map(|(s, e)| range(s, e)));
        assert_eq!((counts(&leases), leases.records_leased_to(A)), ((0, 5, 0), 17));
    }

    #[test]
    fn the_shards_of_a_lost_worker_are_leased_again_and_first() {
        let mut leases = leases(&[16]);
        assert_eq!(leases.lease(A), Some(range(0, 4)));
        assert_eq!(leases.lease(B), Some(range(4, 8)));
        assert_eq!(leases.lease(A), Some(range(8, 12)));
        assert!(leases.finish(A, range(0, 4)));
        leases.forget(A);
        assert_eq!((counts(&leases), leases.records_leased_to(A)), ((2, 1, 1), 0));
        assert!(!leases.finish(A, range(8, 12)), "its report comes too late");
        let rest: Vec<_> = std::iter::from_fn(|| leases.lease(B)).collect();
        assert_eq!(rest, [range(8, 12), range(12, 16)]);
    }

    #[test]
    fn only_the_owner_of_a_lease_finishes_it_and_as_a_whole() {
        let mut leases = leases(&[16]);
        leases.lease(A);
        leases.lease(B);
        for wrong in [range(0, 3), range(0, 8), range(4, 8), range(12, 16), range(100, 104)] {
            assert!(!leases.finish(A, wrong), "{wrong}");
        }
        assert!(!leases.finish(A, RecordRange { epoch: 1, ..range(0, 4) }));
        assert!(leases.finish(A, range(0, 4)));
        assert!(!leases.finish(A, range(0, 4)));
        assert_eq!(counts(&leases), (2, 1, 1));
    }

    #[test]
    fn shards_that_an_earlier_master_knew_to_be_done_are_not_leased() {
        let mut leases = leases(&[10, 16]);
        for done in [range(0, 8), range(10, 14), range(18, 22)] {
            assert_eq!(leases.restore_done(done), Ok(()), "{done}");
        }
        for wrong in [range(4, 8), range(10, 14), range(8, 9), range(22, 27), range(9, 9)] {
            assert_eq!(leases.restore_done(wrong), Err(wrong));
        }
        assert_eq!(counts(&leases), (3, 0, 4));
        let rest: Vec<_> = std::iter::from_fn(|| leases.lease(A)).collect();
        assert_eq!(rest, [range(8, 10), range(14, 18), range(22, 26)]);
        assert_eq!(counts(&leases), (0, 3, 4));
    }
}
