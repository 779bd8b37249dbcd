//! Records that are left out of a data set.

use crate::reader::{DataError, Skipped};

/// Counts records that are left out, and keeps the first few.
#[derive(Debug)]
pub(super) struct SkippedLog {
    skipped: Skipped,
    bad_max: u64,
}

impl SkippedLog {
    /// A log that accepts `bad_max` bad records.
    pub(super) fn new(bad_max: u64) -> Self {
        Self { skipped: Skipped::default(), bad_max }
    }

    /// Records that a record was left out for a null.
    pub(super) fn skip_null(&mut self, place: impl FnOnce() -> DataError) {
        self.skipped.nulls += 1;
        self.list(place);
    }

    /// Records that a record cannot be read.
    ///
    /// # Errors
    /// There are more such records than may be skipped.
    pub(super) fn skip_bad(&mut self, error: impl FnOnce() -> DataError) -> Result<(), DataError> {
        self.skipped.bad += 1;
        if self.skipped.bad <= self.bad_max {
            self.list(error);
            return Ok(());
        }
        let error = error();
        let DataError::Malformed { path, line, reason } = error else { return Err(error) };
        if self.bad_max == 0 {
            return Err(DataError::Malformed { path, line, reason });
        }
        let first = self.skipped.first.join("; ");
        let reason = format!(
            "{reason}; it is bad record {}, and --bad-records skips {} ({first})",
            self.skipped.bad, self.bad_max
        );
        Err(DataError::Malformed { path, line, reason })
    }

    pub(super) fn into_skipped(self) -> Skipped {
        self.skipped
    }

    fn list(&mut self, place: impl FnOnce() -> DataError) {
        if self.skipped.first.len() < FIRST_MAX {
            self.skipped.first.push(place().to_string());
        }
    }
}

/// Number of records that are listed.
const FIRST_MAX: usize = 5;
