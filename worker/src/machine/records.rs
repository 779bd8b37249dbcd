//! The training data of a worker.

use elasticdl_proto::RecordRange;

use crate::ordered_reader::ReadError;
use crate::prefetch::{Prefetch, Taken};

/// The records that a trainer computes. Ranges are positions in the epoch's order.
pub trait Records<R> {
    /// Announces that `now` will be taken next, and `later` after it, and nothing else.
    fn replace(&self, now: &[RecordRange], later: &[RecordRange]);

    /// Takes the records of `range`, in order, as far as storage answers.
    ///
    /// # Errors
    /// The reader failed.
    fn take(&self, range: RecordRange) -> Result<Taken<R>, ReadError>;

    /// While storage does not answer: number of records of `ranges` that can be taken.
    ///
    /// # Errors
    /// The reader failed.
    fn readable(&self, ranges: &[RecordRange]) -> Result<Option<u64>, ReadError>;
}

impl<R: Send + 'static> Records<R> for Prefetch<R> {
    fn replace(&self, now: &[RecordRange], later: &[RecordRange]) {
        self.replace(now, later);
    }

    fn take(&self, range: RecordRange) -> Result<Taken<R>, ReadError> {
        self.take(range)
    }

    fn readable(&self, ranges: &[RecordRange]) -> Result<Option<u64>, ReadError> {
        self.readable(ranges.iter().copied())
    }
}
