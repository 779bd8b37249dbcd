//! The ledger: the set of records that the parameters have absorbed.
//!
//! The group owns the ledger: the commit of a step adds the ranges of all ranks to it together with
//! the update of the parameters. So on each rank the ledger states exactly which records those
//! parameters have absorbed. The master holds a copy as a cache.
//!
//! **Invariant:** two ranks at the same step hold equal ledgers.

use std::collections::BTreeMap;

use crate::ranges::{RangeSet, RecordRange};

/// The records of all epochs that the parameters have absorbed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// Number of records of one epoch.
    records: u64,
    /// The first epoch that is not absorbed completely.
    epochs_complete: u32,
    /// Absorbed records of the epochs from `epochs_complete` on. No entry is empty, and the first
    /// one is not complete.
    absorbed: BTreeMap<u32, RangeSet>,
    /// Number of records absorbed more than once.
    repeated: u64,
}

impl Ledger {
    /// The empty ledger of a data set of `records` records.
    #[must_use]
    pub fn new(records: u64) -> Self {
        Self { records, epochs_complete: 0, absorbed: BTreeMap::new(), repeated: 0 }
    }

    /// Rebuilds a ledger from the values of [`Ledger::ranges`] and its other accessors.
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

    /// Adds `range`. Returns the number of its records that had been absorbed before; any value but
    /// 0 indicates an error.
    pub fn absorb(&mut self, range: RecordRange) -> u64 {
        let repeated = if range.epoch < self.epochs_complete {
            range.len()
        } else {
            self.absorbed.entry(range.epoch).or_default().insert(range.records())
        };
        self.repeated = self.repeated.saturating_add(repeated);
        while self.absorbed.get(&self.epochs_complete).is_some_and(|set| set.len() >= self.records)
        {
            self.absorbed.remove(&self.epochs_complete);
            self.epochs_complete = self.epochs_complete.saturating_add(1);
        }
        repeated
    }

    /// The first epoch that is not complete.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epochs_complete
    }

    /// Number of records of `epoch` that are not absorbed.
    #[must_use]
    pub fn remaining(&self, epoch: u32) -> u64 {
        self.records - self.absorbed_in(epoch)
    }

    /// Number of records of `range` that are absorbed.
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

    /// Number of distinct records absorbed over all epochs.
    #[must_use]
    pub fn counted(&self) -> u64 {
        let open: u64 = self.absorbed.values().map(RangeSet::len).sum();
        u64::from(self.epochs_complete) * self.records + open
    }

    /// Number of records absorbed more than once.
    #[must_use]
    pub fn repeated(&self) -> u64 {
        self.repeated
    }

    /// Number of records of one epoch.
    #[must_use]
    pub fn records_per_epoch(&self) -> u64 {
        self.records
    }

    /// Absorbed ranges of the epochs that are not complete, in order.
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
    fn a_record_absorbed_twice_is_counted_as_repeated() {
        let mut ledger = Ledger::new(10);
        ledger.absorb(range(0, 0, 6));
        assert_eq!(ledger.absorb(range(0, 4, 8)), 2);
        ledger.absorb(range(0, 8, 10));
        assert_eq!(ledger.absorb(range(0, 0, 3)), 3);
        assert_eq!((ledger.counted(), ledger.repeated()), (10, 5));
    }

    #[test]
    fn a_ledger_round_trips_through_its_parts_and_an_invalid_one_is_refused() {
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
