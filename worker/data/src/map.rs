//! Records that are converted as they are read.

use std::fmt;
use std::ops::Range;

use crate::reader::{Access, DataError, Dataset, File, ReadOptions, Reader};

/// A reader that converts the records of another one to `T`; see [`Reader::map`].
pub struct Map<R: Reader, T> {
    reader: R,
    convert: Convert<R::Record, T>,
}

/// Converts a record.
type Convert<R, T> = Box<dyn FnMut(R) -> Result<T, DataError> + Send>;

impl<R: Reader, T> Map<R, T> {
    pub(crate) fn new(
        reader: R,
        convert: impl FnMut(R::Record) -> Result<T, DataError> + Send + 'static,
    ) -> Self {
        Self { reader, convert: Box::new(convert) }
    }
}

impl<R: Reader + fmt::Debug, T> fmt::Debug for Map<R, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Map").field("reader", &self.reader).finish_non_exhaustive()
    }
}

impl<R: Reader, T: Send + 'static> Reader for Map<R, T> {
    type Record = T;

    fn configure(&mut self, options: ReadOptions) -> Result<(), DataError> {
        self.reader.configure(options)
    }

    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        self.reader.describe(source)
    }

    fn access(&self, dataset: &Dataset) -> Access {
        self.reader.access(dataset)
    }

    fn read_ahead(&mut self, file: &File, range: Range<u64>) {
        self.reader.read_ahead(file, range);
    }

    fn begin_epoch(&mut self, epoch: u32) {
        self.reader.begin_epoch(epoch);
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<T>, DataError> {
        self.reader.read(file, range)?.into_iter().map(&mut self.convert).collect()
    }

    fn read_records(&mut self, file: &File, records: &[u64]) -> Result<Vec<T>, DataError> {
        self.reader.read_records(file, records)?.into_iter().map(&mut self.convert).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::readers::FixedRecords;

    #[test]
    fn every_way_of_reading_converts_each_record_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        std::fs::write(&path, [0, 10, 1, 11, 2, 12, 3, 13]).unwrap();
        let mut reader = FixedRecords::new(2).map(|bytes| match bytes[..] {
            [3, _] => Err(DataError::Other("record 3 is refused".into())),
            [first, second] => Ok((first, second - first)),
            _ => unreachable!("records have two bytes"),
        });
        reader.configure(ReadOptions::default()).unwrap();
        let plain = FixedRecords::new(2);
        let dataset = reader.describe(path.to_str().unwrap()).unwrap();
        assert_eq!(reader.access(&dataset), plain.access(&dataset));
        let file = &dataset.files[0];
        assert_eq!(reader.read(file, 1..3).unwrap(), [(1, 10), (2, 10)]);
        assert_eq!(reader.read_records(file, &[0, 2]).unwrap(), [(0, 10), (2, 10)]);
        for refused in [reader.read(file, 2..4), reader.read_records(file, &[1, 3])] {
            assert_eq!(refused.unwrap_err().to_string(), "record 3 is refused");
        }
    }

    #[test]
    fn the_options_of_a_job_reach_the_reader_that_is_converted() {
        let mut reader = FixedRecords::new(2).map(Ok);
        let options = ReadOptions { bad_records_max: 1, ..ReadOptions::default() };
        assert!(reader.configure(options).unwrap_err().to_string().contains("cannot skip records"));
    }
}
