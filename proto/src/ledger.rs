//! The record of what the parameters have absorbed.
//!
//! The group owns it: a step's commit adds every rank's ranges to it together with the update of
//! the parameters, so on every rank it says exactly what those parameters have seen. The master
//! keeps a copy, as a cache.
//!
//! **Invariant:** two ranks at the same step hold equal ledgers.

use std::collections::BTreeMap;

use crate::ranges::{RangeSet, RecordRange};

/// Which records of which epochs the parameters have absorbed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// Records of one epoch.
    records: u64,
    /// All epochs before this one are absorbed completely.
    epochs_complete: u32,
    /// What is absorbed of the epochs from `epochs_complete` on; no entry is empty or, at the
    /// front, full.
    absorbed: BTreeMap<u32, RangeSet>,
    /// Records absorbed more than once.
    repeated: u64,
}

impl Ledger {
    /// The ledger of parameters that have seen nothing of a data set of `records` records.
    #[must_use]
    pub fn new(records: u64) -> Self {
        Self { records, epochs_complete: 0, absorbed: BTreeMap::new(), repeated: 0 }
    }

    /// Rebuilds a ledger from what [`Ledger::ranges`] and its other accessors gave.
    ///
    /// # Errors
    /// The first range that is empty, reaches past the data set, or repeats another.
    pub fn from_parts(
        records: u64,
        epochs_complete: u32,
        ranges: impl IntoIterator<Item = RecordRange>,
        repeated: u64,
    ) -> Result<Self, RecordRange> {
        let mut ledger = Self { records, epochs_complete, absorbed: BTreeMap::new(), repeated };
        for range in ranges {
            let valid = !range.is_empty() && range.end <= records && range.epoch >= epochs_complete;
            if !valid || ledger.absorb(range) != 0 {
                return Err(range);
            }
        }
        Ok(ledger)
    }

    /// Adds `range`; returns how many of its records had been absorbed before (0, or something is
    /// wrong).
    pub fn absorb(&mut self, range: RecordRange) -> u64 {
        let repeated = if range.epoch < self.epochs_complete {
            range.len()
        } else {
            self.absorbed.entry(range.epoch).or_default().insert(range.records())
        };
        self.repeated += repeated;
        while self.absorbed.get(&self.epochs_complete).is_some_and(|set| set.len() >= self.records)
        {
            self.absorbed.remove(&self.epochs_complete);
            self.epochs_complete += 1;
        }
        repeated
    }

    /// The first epoch that is not complete.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epochs_complete
    }

    /// Records of `epoch` that are not absorbed.
    #[must_use]
    pub fn remaining(&self, epoch: u32) -> u64 {
        self.records - self.absorbed_in(epoch)
    }

    /// Records of `range` that are absorbed.
    #[must_use]
    pub fn absorbed_of(&self, range: RecordRange) -> u64 {
        if range.epoch < self.epochs_complete {
            return range.len();
        }
        self.absorbed.get(&range.epoch).map_or(0, |set| set.count_in(range.records()))
    }

    /// The parts of `range` that are not absorbed, in order.
    #[must_use]
    pub fn missing_of(&self, range: RecordRange) -> Vec<RecordRange> {
        if range.epoch < self.epochs_complete || range.is_empty() {
            return Vec::new();
        }
        let Some(set) = self.absorbed.get(&range.epoch) else {
            return vec![range];
        };
        let part = |r: std::ops::Range<u64>| RecordRange {
            epoch: range.epoch,
            start: r.start,
            end: r.end,
        };
        set.gaps(range.records()).into_iter().map(part).collect()
    }

    /// Records absorbed over all epochs, each once.
    #[must_use]
    pub fn counted(&self) -> u64 {
        let open: u64 = self.absorbed.values().map(RangeSet::len).sum();
        u64::from(self.epochs_complete) * self.records + open
    }

    /// Records absorbed more than once.
    #[must_use]
    pub fn repeated(&self) -> u64 {
        self.repeated
    }

    /// Records of one epoch.
    #[must_use]
    pub fn records_per_epoch(&self) -> u64 {
        self.records
    }

    /// What is absorbed of epochs that are not complete, in order.
    pub fn ranges(&self) -> impl Iterator<Item = RecordRange> + '_ {
        self.absorbed.iter().flat_map(|(&epoch, set)| {
            set.iter().map(move |r| RecordRange { epoch, start: r.start, end: r.end })
        })
    }

    fn absorbed_in(&self, epoch: u32) -> u64 {
        if epoch < self.epochs_complete {
            return self.records;
        }
        self.absorbed.get(&epoch).map_or(0, RangeSet::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(epoch: u32, start: u64, end: u64) -> RecordRange {
        RecordRange { epoch, start, end }
    }

    #[test]
    fn an_epoch_is_complete_when_each_of_its_records_is_absorbed() {
        let mut ledger = Ledger::new(10);
        assert_eq!(ledger.absorb(range(0, 0, 6)), 0);
        assert_eq!(ledger.absorb(range(1, 0, 10)), 0);
        assert_eq!((ledger.epoch(), ledger.remaining(0), ledger.counted()), (0, 4, 16));
        assert_eq!(ledger.missing_of(range(0, 4, 10)), [range(0, 6, 10)]);
        assert_eq!(ledger.absorb(range(0, 6, 10)), 0);
        assert_eq!((ledger.epoch(), ledger.counted(), ledger.repeated()), (2, 20, 0));
        assert_eq!(ledger.ranges().count(), 0);
    }

    #[test]
    fn what_is_absorbed_twice_is_counted_as_repeated() {
        let mut ledger = Ledger::new(10);
        ledger.absorb(range(0, 0, 6));
        assert_eq!(ledger.absorb(range(0, 4, 8)), 2);
        ledger.absorb(range(0, 8, 10));
        assert_eq!(ledger.absorb(range(0, 0, 3)), 3);
        assert_eq!((ledger.counted(), ledger.repeated()), (10, 5));
    }

    #[test]
    fn a_ledger_survives_the_wire_and_a_wrong_one_is_refused() {
        let mut ledger = Ledger::new(10);
        for r in [range(0, 0, 10), range(1, 2, 4), range(2, 8, 9)] {
            ledger.absorb(r);
        }
        let back = Ledger::from_parts(10, ledger.epoch(), ledger.ranges(), 0);
        assert_eq!(back.as_ref(), Ok(&ledger));
        for wrong in [range(1, 5, 5), range(1, 5, 11), range(0, 0, 1)] {
            assert_eq!(Ledger::from_parts(10, 1, [wrong], 0), Err(wrong));
        }
        let twice = [range(1, 0, 5), range(1, 4, 6)];
        assert_eq!(Ledger::from_parts(10, 1, twice, 0), Err(twice[1]));
    }
}
