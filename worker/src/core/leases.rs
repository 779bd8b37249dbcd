//! The records that this worker may train on, and what it has asked for.

use std::collections::{BTreeMap, VecDeque};

use elasticdl_proto::RecordRange;

/// Leased records that no gradient of this worker contains yet, in the order in which they came, by
/// epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leases {
    held: BTreeMap<u32, VecDeque<RecordRange>>,
    requested: BTreeMap<u32, u64>,
}

impl Leases {
    /// Takes in records that the master leased to this worker.
    pub fn add(&mut self, range: RecordRange) {
        if range.is_empty() {
            return;
        }
        if let Some(requested) = self.requested.get_mut(&range.epoch) {
            *requested = requested.saturating_sub(range.len());
        }
        self.held.entry(range.epoch).or_default().push_back(range);
    }

    /// Puts records back that were taken and must be computed again.
    pub fn put_back(&mut self, ranges: impl DoubleEndedIterator<Item = RecordRange>) {
        for range in ranges.rev() {
            self.held.entry(range.epoch).or_default().push_front(range);
        }
    }

    /// Takes the next `records` records of `epoch`, or as many as there are.
    pub fn take(&mut self, epoch: u32, mut records: u64) -> Vec<RecordRange> {
        let mut taken = Vec::new();
        let Some(held) = self.held.get_mut(&epoch) else {
            return taken;
        };
        while records > 0 {
            let Some(first) = held.front_mut() else { break };
            let part = first.len().min(records);
            taken.push(RecordRange { end: first.start + part, ..*first });
            first.start += part;
            records -= part;
            if first.is_empty() {
                held.pop_front();
            }
        }
        taken
    }

    /// Records held of `epoch`.
    pub fn held(&self, epoch: u32) -> u64 {
        self.held.get(&epoch).map_or(0, |held| held.iter().map(RecordRange::len).sum())
    }

    /// Records held of each epoch from `epoch` on.
    pub fn held_from(&self, epoch: u32) -> Vec<(u32, u64)> {
        self.held
            .range(epoch..)
            .map(|(&e, _)| (e, self.held(e)))
            .filter(|&(_, records)| records > 0)
            .collect()
    }

    /// How many records of `epoch` to ask the master for; notes them as asked for. With fewer than
    /// `least` at hand or on their way, enough for twice as many: so that a worker asks every few
    /// steps, not at each.
    pub fn request(&mut self, epoch: u32, least: u64) -> Option<u64> {
        let requested = self.requested.get(&epoch).copied().unwrap_or(0);
        let there = self.held(epoch) + requested;
        if there >= least {
            return None;
        }
        let short = least.saturating_mul(2) - there;
        self.requested.insert(epoch, requested + short);
        Some(short)
    }

    /// Everything held, in order.
    pub fn all(&self) -> impl Iterator<Item = RecordRange> + '_ {
        self.held.values().flatten().copied()
    }

    /// Forgets what was asked for: the master that was asked is gone.
    pub fn forget_requests(&mut self) {
        self.requested.clear();
    }

    /// Forgets what belongs to epochs before `epoch`: they are complete.
    pub fn forget_before(&mut self, epoch: u32) {
        self.held = self.held.split_off(&epoch);
        self.requested = self.requested.split_off(&epoch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(epoch: u32, start: u64, end: u64) -> RecordRange {
        RecordRange { epoch, start, end }
    }

    #[test]
    fn records_are_taken_in_order_and_never_twice() {
        let mut leases = Leases::default();
        leases.add(range(0, 10, 14));
        leases.add(range(0, 30, 33));
        leases.add(range(1, 0, 5));
        assert_eq!(leases.take(0, 5), [range(0, 10, 14), range(0, 30, 31)]);
        assert_eq!(leases.held_from(0), [(0, 2), (1, 5)]);
        leases.put_back([range(0, 10, 14), range(0, 30, 31)].into_iter());
        assert_eq!(leases.take(0, 100), [range(0, 10, 14), range(0, 30, 31), range(0, 31, 33)]);
        assert_eq!(leases.take(0, 1), []);
    }

    #[test]
    fn what_is_asked_for_is_not_asked_for_again() {
        let mut leases = Leases::default();
        assert_eq!(leases.request(0, 8), Some(16));
        assert_eq!(leases.request(0, 8), None);
        leases.add(range(0, 0, 10));
        leases.take(0, 8);
        assert_eq!(leases.request(0, 8), None);
        leases.take(0, 1);
        assert_eq!(leases.request(0, 8), Some(9));
        leases.forget_before(1);
        assert_eq!((leases.held(0), leases.request(0, 8)), (0, Some(16)));
        leases.forget_requests();
        assert_eq!(leases.request(0, 8), Some(16));
    }
}
