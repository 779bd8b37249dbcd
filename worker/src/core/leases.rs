//! Records that this worker may train on, and records that it has requested.

use std::collections::{BTreeMap, VecDeque};

use elasticdl_proto::RecordRange;

/// Leased records that no gradient of this worker contains yet, by epoch and in order of arrival.
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

    /// Puts taken records back that must be computed again.
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

    /// Number of records held of `epoch`.
    pub fn held(&self, epoch: u32) -> u64 {
        self.held.get(&epoch).map_or(0, |held| held.iter().map(RecordRange::len).sum())
    }

    /// Number of records held of each epoch from `epoch` on.
    pub fn held_from(&self, epoch: u32) -> Vec<(u32, u64)> {
        self.held
            .range(epoch..)
            .map(|(&e, _)| (e, self.held(e)))
            .filter(|&(_, records)| records > 0)
            .collect()
    }

    /// Number of records of `epoch` to request from the master, which counts as requested from now
    /// on. If fewer than `least` are held or requested, the request fills up to twice `least`, so
    /// that a worker sends one every few steps, not at each step.
    pub fn request(&mut self, epoch: u32, least: u64) -> Option<u64> {
        let requested = self.requested.get(&epoch).copied().unwrap_or(0);
        let expected = self.held(epoch) + requested;
        if expected >= least {
            return None;
        }
        let short = least.saturating_mul(2) - expected;
        self.requested.insert(epoch, requested + short);
        Some(short)
    }

    /// All held records, in order.
    pub fn all(&self) -> impl Iterator<Item = RecordRange> + '_ {
        self.held.values().flatten().copied()
    }

    /// Forgets the requests: the master that received them is gone.
    pub fn forget_requests(&mut self) {
        self.requested.clear();
    }

    /// Forgets epochs before `epoch`, which are complete.
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
    fn requested_records_are_not_requested_again() {
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
