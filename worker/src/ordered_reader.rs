//! Reads records by their positions in an epoch's [order](Order).
//!
//! | order | how records are read |
//! |---|---|
//! | of the data | one range per file |
//! | records are shuffled | those of a file together, in ascending order |
//! | blocks are shuffled | whole blocks; what is not needed yet is kept, up to two buffers |
//!
//! **Invariant:** records are returned in the order of their positions.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use elasticdl_data::{DataError, Dataset, File, Reader};
use elasticdl_proto::{Order, RecordRange, WorkerOptions};

use crate::failure::{Failure, call_user, panic_text};
use crate::split::PartReader;

/// A reader, and the order of the records that it reads.
pub(crate) struct OrderedReader<D: Reader> {
    reader: PartReader<D>,
    dataset: Dataset,
    /// First record of each file.
    firsts: Vec<u64>,
    order: Arc<Order>,
    blocks: BTreeMap<BlockKey, Vec<Option<D::Record>>>,
    /// The keys of `blocks`, the block read first at the front.
    oldest: VecDeque<BlockKey>,
    /// Number of records in `blocks`, those that were returned included.
    kept: u64,
}

/// Epoch, and first record of the block.
type BlockKey = (u32, u64);

/// Why records cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadError {
    /// The error.
    pub text: String,
    /// The records, numbered through the data set.
    pub records: Vec<RecordRange>,
    /// See [`DataError::ends_job`].
    pub ends_job: bool,
    /// Storage did not answer or refused access, for as long as it was waited for.
    pub is_outage: bool,
}

impl From<ReadError> for Failure {
    fn from(ReadError { text, records, ends_job, .. }: ReadError) -> Self {
        Self { fatal: ends_job, ..Self::on_records(text, records) }
    }
}

impl<D: Reader> OrderedReader<D> {
    pub(crate) fn new(reader: PartReader<D>, dataset: Dataset, order: Arc<Order>) -> Self {
        let firsts = dataset
            .files
            .iter()
            .scan(0, |at, file| Some(std::mem::replace(at, *at + file.records)))
            .collect();
        let (blocks, oldest) = Default::default();
        Self { reader, dataset, firsts, order, blocks, oldest, kept: 0 }
    }

    /// Announces positions that will be read soon, so that the reader can fetch their records.
    pub(crate) fn read_ahead(&mut self, positions: RecordRange) {
        let parts: Vec<Range<u64>> = if self.order.is_of_data() {
            vec![positions.records()]
        } else {
            let mut blocks: Vec<Range<u64>> = Vec::new();
            for record in self.order.records(positions) {
                let Some(block) = self.order.block(record) else { return };
                if !self.blocks.contains_key(&(positions.epoch, block.start))
                    && !blocks.contains(&block)
                {
                    blocks.push(block);
                }
            }
            blocks
        };
        for part in parts {
            for (file, range) in self.by_file(part) {
                let file = &self.dataset.files[file];
                // A hint that fails now is retried by `read`. A panic recurs there and is reported
                // then.
                let hint = AssertUnwindSafe(|| self.reader.read_ahead(file, range));
                drop(catch_unwind(hint));
            }
        }
    }

    /// The records at these positions.
    ///
    /// # Errors
    /// The reader failed, or a position lies outside the data set.
    pub(crate) fn read(&mut self, positions: RecordRange) -> Result<Vec<D::Record>, ReadError> {
        let total = self.dataset.files.iter().map(|file| file.records).sum();
        if positions.end > total {
            let text = format!("{positions} lie outside the data set of {total}");
            return Err(ReadError { records: vec![positions], ..ReadError::from(text) });
        }
        if self.order.is_of_data() {
            return self.read_range(positions.epoch, positions.records());
        }
        // Number of the result that each record is, in ascending order of records.
        let mut places: Vec<(u64, usize)> =
            self.order.records(positions).into_iter().zip(0..).collect();
        places.sort_unstable();
        let mut results: Vec<Option<D::Record>> = Vec::new();
        results.resize_with(places.len(), || None);
        let mut rest = &places[..];
        while let Some(&(first, _)) = rest.first() {
            let block = self.order.block(first);
            let file_end = self.file_end(first);
            let end = block.as_ref().map_or(file_end, |block| block.end);
            let (now, later) = rest.split_at(rest.partition_point(|&(record, _)| record < end));
            rest = later;
            let records: Vec<u64> = now.iter().map(|&(record, _)| record).collect();
            let read = match block {
                Some(block) => self.take_from_block(positions.epoch, block, &records)?,
                None => self.read_each(positions.epoch, &records)?,
            };
            for (&(_, place), record) in now.iter().zip(read) {
                results[place] = Some(record);
            }
        }
        self.forget_oldest();
        Ok(results.into_iter().map(|record| record.expect("every place was read")).collect())
    }

    /// Takes `records`, in ascending order, out of their block.
    fn take_from_block(
        &mut self,
        epoch: u32,
        block: Range<u64>,
        records: &[u64],
    ) -> Result<Vec<D::Record>, ReadError> {
        let key = (epoch, block.start);
        let place = |record: &u64| (record - block.start) as usize;
        let is_kept = self
            .blocks
            .get(&key)
            .is_some_and(|kept| records.iter().all(|record| kept[place(record)].is_some()));
        if !is_kept {
            let Ok(read) = self.read_range(epoch, block.clone()) else {
                // Another record of the block may be at fault.
                return self.read_each(epoch, records);
            };
            if self.blocks.insert(key, read.into_iter().map(Some).collect()).is_none() {
                self.oldest.push_back(key);
                self.kept += block.end - block.start;
            }
        }
        let kept = self.blocks.get_mut(&key).expect("it was just read");
        let taken = records.iter().map(|record| kept[place(record)].take());
        Ok(taken.map(|record| record.expect("it was just read")).collect())
    }

    fn forget_oldest(&mut self) {
        while self.kept > 2 * self.order.buffer()
            && let Some(key) = self.oldest.pop_front()
        {
            let block = self.blocks.remove(&key).expect("the lists agree");
            self.kept -= block.len() as u64;
        }
    }

    /// Reads `records` of one file, in ascending order. If they fail, reads them one by one, to
    /// name the record that is at fault.
    fn read_each(&mut self, epoch: u32, records: &[u64]) -> Result<Vec<D::Record>, ReadError> {
        let first = *records.first().expect("the caller reads something");
        let file = self.file_of(first);
        let within: Vec<u64> = records.iter().map(|record| record - self.firsts[file]).collect();
        let range = |record: u64| RecordRange { epoch, start: record, end: record + 1 };
        let count = within.len() as u64;
        let what = || format!("{count} single records");
        let all =
            self.call(epoch, file, count, what, |reader, file| reader.read_records(file, &within));
        let error = match all {
            Ok(read) => return Ok(read),
            Err(error) => error,
        };
        // Storage that is away is not waited for once more for each record.
        for &record in records.iter().filter(|_| !error.is_outage) {
            let at = record - self.firsts[file];
            let what = || format!("{at}..{}", at + 1);
            let one = self.call(epoch, file, 1, what, |reader, file| reader.read(file, at..at + 1));
            if let Err(error) = one {
                return Err(ReadError { records: vec![range(record)], ..error });
            }
        }
        let records = records.iter().map(|&record| range(record)).collect();
        Err(ReadError { records, ..error })
    }

    /// Reads consecutive records.
    fn read_range(&mut self, epoch: u32, records: Range<u64>) -> Result<Vec<D::Record>, ReadError> {
        let mut all = Vec::new();
        for (file, range) in self.by_file(records) {
            let first = self.firsts[file];
            let failed = RecordRange { epoch, start: first + range.start, end: first + range.end };
            let what = || format!("{}..{}", range.start, range.end);
            let count = range.end - range.start;
            let read = self
                .call(epoch, file, count, what, |reader, file| reader.read(file, range.clone()));
            all.extend(read.map_err(|error| ReadError { records: vec![failed], ..error })?);
        }
        Ok(all)
    }

    /// Calls the user's reader, which must return `count` records.
    fn call(
        &mut self,
        epoch: u32,
        file: usize,
        count: u64,
        what: impl Fn() -> String,
        read: impl FnOnce(&mut PartReader<D>, &File) -> Result<Vec<D::Record>, DataError>,
    ) -> Result<Vec<D::Record>, ReadError> {
        let (reader, file) = (&mut self.reader, &self.dataset.files[file]);
        let called = AssertUnwindSafe(|| {
            reader.begin_epoch(epoch);
            read(reader, file)
        });
        let records = match catch_unwind(called) {
            Ok(Ok(records)) => records,
            Ok(Err(error)) => {
                let (ends_job, is_outage) = (error.ends_job(), error.is_outage());
                return Err(ReadError {
                    ends_job,
                    is_outage,
                    ..ReadError::from(error.to_string())
                });
            }
            Err(panic) => {
                let text = format!("the reader panicked: {}", panic_text(&*panic));
                return Err(ReadError::from(text));
            }
        };
        if records.len() as u64 != count {
            let (got, what) = (records.len(), what());
            return Err(ReadError::from(format!(
                "{}: the reader gave {got} records for {what}, which is {count}",
                file.path
            )));
        }
        Ok(records)
    }

    /// The files that `records` lie in, and their parts in each.
    fn by_file(&self, records: Range<u64>) -> Vec<(usize, Range<u64>)> {
        let (mut at, mut parts) = (records.start, Vec::new());
        while at < records.end {
            let (file, end) = (self.file_of(at), records.end.min(self.file_end(at)));
            parts.push((file, at - self.firsts[file]..end - self.firsts[file]));
            at = end;
        }
        parts
    }

    /// The file that holds `record`, which lies in the data set.
    fn file_of(&self, record: u64) -> usize {
        // Of the files that start at one record, only the last one can hold it.
        self.firsts.partition_point(|&first| first <= record) - 1
    }

    fn file_end(&self, record: u64) -> u64 {
        let file = self.file_of(record);
        self.firsts[file] + self.dataset.files[file].records
    }
}

/// The order of the job's data set, which `reader` reads.
pub(crate) fn order_of<R: Reader>(
    reader: &R,
    options: &WorkerOptions,
    dataset: &Dataset,
) -> Result<Arc<Order>, String> {
    let access = call_user("access()", || Ok(reader.access(dataset)))?;
    Ok(Arc::new(Order::new(options.shuffle, options.seed, &counts(dataset), access)))
}

/// The order of the data itself.
pub(crate) fn data_order(dataset: &Dataset) -> Arc<Order> {
    Arc::new(Order::of_data(&counts(dataset)))
}

/// Number of records of each file.
fn counts(dataset: &Dataset) -> Vec<u64> {
    dataset.files.iter().map(|file| file.records).collect()
}

impl From<String> for ReadError {
    fn from(text: String) -> Self {
        Self { text, records: Vec::new(), ends_job: false, is_outage: false }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use elasticdl_proto::{Shuffle, ShuffleMode};

    use elasticdl_data::Access;

    use super::*;

    /// Records are their numbers; counts the records that it has read.
    #[derive(Debug, Default)]
    struct Numbers {
        fails_at: Option<u64>,
        read: u64,
    }

    impl Reader for Numbers {
        type Record = u64;

        fn describe(&mut self, _source: &str) -> Result<Dataset, DataError> {
            Ok(dataset())
        }

        fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<u64>, DataError> {
            let first: u64 = file.path.parse().unwrap();
            let records: Vec<u64> = range.map(|at| first + at).collect();
            self.read += records.len() as u64;
            match self.fails_at.filter(|at| records.contains(at)) {
                Some(at) => Err(DataError::Other(format!("bad {at}").into())),
                None => Ok(records),
            }
        }
    }

    /// The paths are the numbers of the first records.
    fn dataset() -> Dataset {
        let file = |first: &str, records| File::new(first, records);
        Dataset::new(vec![file("0", 70), file("70", 0), file("70", 30)])
    }

    fn reader(mode: ShuffleMode, fails_at: Option<u64>) -> OrderedReader<Numbers> {
        let shuffle = Shuffle { mode, buffer: NonZeroU64::new(40) };
        let order = Order::new(shuffle, 5, &counts(&dataset()), Access::Block { records: 8 });
        OrderedReader::new(Numbers { fails_at, read: 0 }.into(), dataset(), Arc::new(order))
    }

    fn positions(start: u64, end: u64) -> RecordRange {
        RecordRange { epoch: 1, start, end }
    }

    #[test]
    fn records_come_in_the_order_of_their_positions() {
        for mode in [ShuffleMode::Block, ShuffleMode::None, ShuffleMode::Record] {
            let mut reader = reader(mode, None);
            for (start, end) in [(0, 7), (7, 80), (80, 100), (20, 30), (90, 90)] {
                reader.read_ahead(positions(start, end));
                let expected = reader.order.records(positions(start, end));
                assert_eq!(reader.read(positions(start, end)), Ok(expected), "{mode:?}");
            }
        }
    }

    #[test]
    fn a_block_is_read_once_while_its_buffer_is_trained() {
        let mut reader = reader(ShuffleMode::Block, None);
        for start in 0..100 {
            reader.read(positions(start, start + 1)).unwrap();
        }
        assert_eq!(reader.reader.reader.read, 100);
        assert!(reader.kept <= 2 * 48, "{}", reader.kept);
        // What was returned is read again.
        reader.read(positions(99, 100)).unwrap();
        assert!((101..=108).contains(&reader.reader.reader.read), "{}", reader.reader.reader.read);
    }

    #[test]
    fn an_error_names_the_record_at_fault() {
        for mode in [ShuffleMode::Block, ShuffleMode::Record] {
            let mut reader = reader(mode, Some(33));
            let error = reader.read(positions(0, 100)).unwrap_err();
            let at_fault = RecordRange { epoch: 1, start: 33, end: 34 };
            assert_eq!((error.text.as_str(), error.records), ("bad 33", vec![at_fault]));
            // The other records of its block can be read.
            let at = (0..100).find(|&at| reader.order.records(positions(at, at + 1)) == [33]);
            let at = at.unwrap();
            assert!(reader.read(positions(0, at)).is_ok());
            assert!(reader.read(positions(at + 1, 100)).is_ok());
        }
        let mut reader = reader(ShuffleMode::None, Some(33));
        let error = reader.read(positions(30, 40)).unwrap_err();
        assert_eq!(error.records, [RecordRange { epoch: 1, start: 30, end: 40 }]);
    }

    #[test]
    fn positions_outside_the_data_set_are_an_error() {
        let error = reader(ShuffleMode::Record, None).read(positions(99, 101)).unwrap_err();
        assert!(error.text.contains("outside the data set of 100"), "{error:?}");
    }
}
