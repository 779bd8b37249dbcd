//! The cached ledger: the records that the group has absorbed, as last reported.
//!
//! Records are named by their positions in the epoch's order, which the workers know. In an
//! inference job these are the records of the shards that are done.
//!
//! **Invariant:** the cache holds each record once, whatever is reported twice.

use elasticdl_proto::{Ledger, RecordRange};

use crate::job::event::LedgerReport;

/// A copy of the group's ledger.
#[derive(Debug)]
pub(crate) struct LedgerCache {
    epochs: u32,
    ledger: Ledger,
}

impl LedgerCache {
    /// The empty ledger of a job of `epochs` epochs, with `records` records each.
    pub(crate) fn new(records: u64, epochs: u32) -> Self {
        Self { epochs, ledger: Ledger::new(records) }
    }

    /// The ledger.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Records of all epochs.
    pub(crate) fn expected(&self) -> u64 {
        u64::from(self.epochs) * self.ledger.records_per_epoch()
    }

    /// Adds records that the group has committed.
    ///
    /// # Errors
    /// The first range that lies outside the data set; nothing is changed then.
    pub(crate) fn absorb(&mut self, ranges: &[RecordRange]) -> Result<(), RecordRange> {
        if let Some(&wrong) = ranges.iter().find(|r| !self.is_valid(r)) {
            return Err(wrong);
        }
        for &range in ranges {
            // The group counts repetitions.
            for missing in self.ledger.missing_of(range) {
                self.ledger.absorb(missing);
            }
        }
        Ok(())
    }

    /// Replaces the ledger with the group's.
    pub(crate) fn replace(&mut self, ledger: Ledger) {
        self.ledger = ledger;
    }

    /// Checks a group's report against the data set.
    ///
    /// # Errors
    /// The first inconsistency.
    pub(crate) fn check(&self, report: &LedgerReport) -> Result<Ledger, String> {
        if report.epochs_complete > self.epochs {
            return Err(format!(
                "a ledger of {} complete epochs of {}",
                report.epochs_complete, self.epochs
            ));
        }
        if report.repeated > u64::MAX / 4 {
            return Err(format!("a ledger of {} repeated records", report.repeated));
        }
        if let Some(wrong) = report.ranges.iter().find(|r| !self.is_valid(r)) {
            return Err(format!("a ledger with {wrong}, outside the data set"));
        }
        let ranges = report.ranges.iter().copied();
        Ledger::from_parts(
            self.ledger.records_per_epoch(),
            report.epochs_complete,
            ranges,
            report.repeated,
        )
        .map_err(|wrong| format!("a ledger that repeats {wrong}"))
    }

    /// A report with the same totals as the ledger and a few ranges at most, for the next master.
    /// The ledger of an inference job may have a range for every other shard.
    pub(crate) fn totals(&self) -> LedgerReport {
        let (first, records) = (self.ledger.epoch(), self.ledger.records_per_epoch());
        let mut rest = self.ledger.counted() - u64::from(first) * records;
        let mut ranges = Vec::new();
        for epoch in first..self.epochs {
            // The first epoch that is not complete lacks a record at least.
            let end = rest.min(records - u64::from(epoch == first));
            rest -= end;
            ranges.extend((end > 0).then_some(RecordRange { epoch, start: 0, end }));
            if rest == 0 {
                break;
            }
        }
        LedgerReport { epochs_complete: first, ranges, repeated: self.ledger.repeated() }
    }

    /// Whether `range` holds records of the job.
    pub(crate) fn is_valid(&self, range: &RecordRange) -> bool {
        !range.is_empty()
            && range.end <= self.ledger.records_per_epoch()
            && range.epoch < self.epochs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> RecordRange {
        RecordRange { epoch: 0, start, end }
    }

    #[test]
    fn an_epoch_ends_when_its_ledger_is_full_and_repetitions_count_once() {
        let mut cache = LedgerCache::new(10, 2);
        cache.absorb(&[range(0, 4), range(2, 6)]).unwrap();
        cache.absorb(&[range(0, 9)]).unwrap();
        assert_eq!((cache.ledger().epoch(), cache.ledger().counted()), (0, 9));
        cache.absorb(&[range(9, 10), range(0, 10)]).unwrap();
        let ledger = cache.ledger();
        assert_eq!((ledger.epoch(), ledger.counted(), ledger.repeated()), (1, 10, 0));
        assert_eq!(cache.expected(), 20);
    }

    #[test]
    fn a_group_that_goes_back_a_step_replaces_the_ledger() {
        let mut cache = LedgerCache::new(10, 2);
        cache.absorb(&[range(0, 10)]).unwrap();
        let mut ledger = Ledger::new(10);
        ledger.absorb(range(0, 5));
        cache.replace(ledger.clone());
        assert_eq!(cache.ledger(), &ledger);
    }

    #[test]
    fn reports_outside_the_data_set_have_no_effect() {
        let mut cache = LedgerCache::new(8, 2);
        let report = |epochs_complete, ranges: &[RecordRange], repeated| LedgerReport {
            epochs_complete,
            ranges: ranges.to_vec(),
            repeated,
        };
        let past = RecordRange { epoch: 2, start: 0, end: 1 };
        for wrong in [range(0, 9), range(3, 3), range(5, 4), range(8, u64::MAX), past] {
            assert_eq!(cache.absorb(&[range(0, 1), wrong]), Err(wrong));
            assert!(cache.check(&report(0, &[wrong], 0)).is_err());
        }
        assert_eq!(cache.ledger().counted(), 0);
        for wrong in [
            report(3, &[], 0),
            report(u32::MAX, &[], 0),
            report(0, &[], u64::MAX),
            report(0, &[range(0, 4), range(3, 5)], 0),
            report(1, &[range(0, 1)], 0),
            report(2, &[RecordRange { epoch: 1, start: 0, end: 1 }], 0),
        ] {
            assert!(cache.check(&wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(cache.check(&report(2, &[], 7)).unwrap().counted(), 16);
    }

    #[test]
    fn totals_are_those_of_the_ledger_in_every_epoch() {
        for records in [1, 5] {
            for mask in 0..1u32 << (2 * records) {
                let mut cache = LedgerCache::new(records, 2);
                let absorbed = (0..2 * records).filter(|i| mask >> i & 1 == 1);
                let range = |i: u64| RecordRange {
                    epoch: (i / records) as u32,
                    start: i % records,
                    end: i % records + 1,
                };
                cache.absorb(&absorbed.map(range).collect::<Vec<_>>()).unwrap();
                let totals = cache.check(&cache.totals()).unwrap();
                let counts = |l: &Ledger| (l.epoch(), l.counted(), l.repeated());
                assert_eq!(counts(&totals), counts(cache.ledger()), "{mask:b}");
            }
        }
    }
}
