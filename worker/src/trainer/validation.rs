//! The validation data of a worker.

use std::ops::Range;

use elasticdl_proto::RecordRange;

use crate::ordered_reader::{OrderedReader, ReadError};
use crate::reader::Reader;
use crate::session::evaluation::Plan;

/// The validation data and its reader.
pub(crate) struct Validation<R: Reader> {
    pub(crate) plan: Plan,
    pub(crate) reader: OrderedReader<R>,
}

impl<R: Reader> Validation<R> {
    /// Reads records `range`, in the order of the data.
    pub(super) fn read(&mut self, range: Range<u64>) -> Result<Vec<R::Record>, ReadError> {
        self.reader.read(RecordRange { epoch: 0, start: range.start, end: range.end })
    }
}
