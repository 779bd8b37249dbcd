//! Reads records ahead of need, in a thread of its own.
//!
//! Ranges are positions in the epoch's [order](elasticdl_proto::Order). The trainer announces those
//! that it expects to use, in that order ([`Prefetch::replace`]). The reader thread reads them, a
//! limited number of records ahead, and [`Prefetch::take`] returns them. A range that is taken out
//! of order is read at once.
//!
//! While storage does not answer, the reader thread waits for it. The trainer gets the records that
//! have been read and learns that the rest is missing, so that it can continue with the group. The
//! rest is read when storage answers again.
//!
//! **Invariant:** a record is returned only by the `take` that names it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use elasticdl_data::Reader;
use elasticdl_data::worker::set_wait_flag;
use elasticdl_proto::RecordRange;

use crate::ordered_reader::{OrderedReader, ReadError};

/// Read-ahead of one worker.
#[derive(Debug)]
pub(crate) struct Prefetch<R> {
    buffer: Arc<ReadBuffer<R>>,
}

/// Records that were taken.
#[derive(Debug, PartialEq)]
pub struct Taken<R> {
    /// The records, in order.
    pub records: Vec<R>,
    /// Rest of the range, which cannot be read before storage answers again.
    pub rest: Option<RecordRange>,
}

#[derive(Debug)]
struct ReadBuffer<R> {
    state: Mutex<State<R>>,
    changed: Condvar,
    /// Whether the reader thread waits for storage.
    waits: Arc<AtomicBool>,
}

#[derive(Debug)]
struct State<R> {
    /// Ranges to read, in this order.
    wanted: VecDeque<RecordRange>,
    /// Records that are read, by epoch and first record.
    read: BTreeMap<(u32, u64), VecDeque<R>>,
    /// Number of records in `read`.
    records: u64,
    /// Piece that the reader thread reads now.
    reading: Option<RecordRange>,
    /// Range that the trainer waits for.
    urgent: Option<RecordRange>,
    failed: Option<ReadError>,
    /// Ranges that were announced to the reader lately, by epoch and end.
    announced: VecDeque<(u32, u64)>,
    closed: bool,
}

impl<R: Send + 'static> Prefetch<R> {
    /// Starts the reader thread for a trainer that takes about `ahead` records at a time.
    pub(crate) fn new<D: Reader<Record = R>>(
        reader: OrderedReader<D>,
        ahead: u64,
    ) -> std::io::Result<Self> {
        let buffer = Arc::new(ReadBuffer::new(Arc::default()));
        let thread_buffer = Arc::clone(&buffer);
        thread::Builder::new()
            .name("reader".into())
            .spawn(move || thread_buffer.fill(reader, ahead.max(1)))?;
        Ok(Self { buffer })
    }

    /// Announces that `range` will be taken, after the ranges announced before.
    pub(crate) fn want(&self, range: RecordRange) {
        self.buffer.lock().wanted.push_back(range);
        self.buffer.changed.notify_all();
    }

    /// Replaces what was announced: `now` will be taken next, and `later` after it. Other records
    /// that are read already are dropped.
    pub(crate) fn replace(&self, now: &[RecordRange], later: &[RecordRange]) {
        let mut state = self.buffer.lock();
        state.wanted = now.iter().chain(later).copied().collect();
        let read = std::mem::take(&mut state.read);
        for ((epoch, start), records) in read {
            let piece = RecordRange { epoch, start, end: start + records.len() as u64 };
            if state.wanted.iter().any(|wanted| overlap(wanted, &piece)) {
                state.unwant(piece);
                state.read.insert((epoch, start), records);
            } else {
                state.records -= records.len() as u64;
            }
        }
        if let Some(piece) = state.reading {
            state.unwant(piece);
        }
        drop(state);
        self.buffer.changed.notify_all();
    }

    /// Takes the records of `range`, in order. Waits for them to be read, but not for storage that
    /// does not answer.
    ///
    /// # Errors
    /// The reader failed.
    pub(crate) fn take(&self, range: RecordRange) -> Result<Taken<R>, ReadError> {
        let mut records = Vec::new();
        let mut state = self.buffer.lock();
        let mut at = range.start;
        let mut waited = Duration::ZERO;
        while at < range.end {
            if let Some((epoch, start)) = state.entry_at(range.epoch, at) {
                let more = state.cut(epoch, start, at, range.end);
                at += more.len() as u64;
                records.extend(more);
                self.buffer.changed.notify_all();
                continue;
            }
            if let Some(failed) = state.failed.take() {
                return Err(failed);
            }
            let rest = RecordRange { start: at, ..range };
            let is_outage = self.buffer.waits.load(Ordering::Acquire);
            if is_outage && waited >= STORAGE_WAIT_MAX {
                state.urgent = None;
                return Ok(Taken { records, rest: Some(rest) });
            }
            state.urgent = Some(rest);
            self.buffer.changed.notify_all();
            let begun = Instant::now();
            let woken = self.buffer.changed.wait_timeout(state, POLL_INTERVAL);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
            if is_outage {
                waited += begun.elapsed();
            }
        }
        state.urgent = None;
        Ok(Taken { records, rest: None })
    }

    /// While the reader thread waits for storage: number of records of `ranges`, in the announced
    /// order, that can be taken without a wait. Otherwise `None`: all can be taken eventually.
    ///
    /// # Errors
    /// The reader failed.
    pub(crate) fn readable(
        &self,
        ranges: impl Iterator<Item = RecordRange>,
    ) -> Result<Option<u64>, ReadError> {
        let mut state = self.buffer.lock();
        if let Some(failed) = state.failed.take() {
            return Err(failed);
        }
        if !self.buffer.waits.load(Ordering::Acquire) {
            return Ok(None);
        }
        let mut records = 0;
        for range in ranges {
            let mut at = range.start;
            while let (true, Some(key)) = (at < range.end, state.entry_at(range.epoch, at)) {
                at = range.end.min(key.1 + state.read[&key].len() as u64);
            }
            records += at - range.start;
            if at < range.end {
                break;
            }
        }
        Ok(Some(records))
    }
}

impl<R> Drop for Prefetch<R> {
    fn drop(&mut self) {
        self.buffer.lock().closed = true;
        self.buffer.changed.notify_all();
    }
}

impl<R> ReadBuffer<R> {
    /// `waits`: whether the reader thread waits for storage.
    fn new(waits: Arc<AtomicBool>) -> Self {
        let state = State {
            wanted: VecDeque::new(),
            read: BTreeMap::new(),
            records: 0,
            reading: None,
            urgent: None,
            failed: None,
            announced: VecDeque::new(),
            closed: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new(), waits }
    }

    fn lock(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loop of the reader thread: reads one piece after the other, at most `ahead` records ahead of
    /// the trainer.
    fn fill<D: Reader<Record = R>>(&self, mut reader: OrderedReader<D>, ahead: u64) {
        let piece_max = ahead.div_ceil(2);
        set_wait_flag(Arc::clone(&self.waits));
        let mut state = self.lock();
        while !state.closed {
            let Some(piece) = state.next_piece(piece_max, ahead) else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let upcoming = state.upcoming();
            state.reading = Some(piece);
            drop(state);
            for range in upcoming {
                reader.read_ahead(range);
            }
            let records = reader.read(piece);
            state = self.lock();
            state.reading = None;
            match records {
                Ok(records) => {
                    state.records += records.len() as u64;
                    state.read.insert((piece.epoch, piece.start), records.into());
                }
                Err(error) => state.failed = Some(error),
            }
            self.changed.notify_all();
        }
    }
}

impl<R> State<R> {
    /// The entry that holds record `at` of an epoch.
    fn entry_at(&self, epoch: u32, at: u64) -> Option<(u32, u64)> {
        let (&key, records) = self.read.range(..=(epoch, at)).next_back()?;
        (key.0 == epoch && key.1 + records.len() as u64 > at).then_some(key)
    }

    /// Removes the next piece to read from the list: first what the trainer waits for, then
    /// announced ranges.
    fn next_piece(&mut self, piece_max: u64, ahead: u64) -> Option<RecordRange> {
        if self.failed.is_some() {
            return None;
        }
        if let Some(mut urgent) = self.urgent.take() {
            // Records that are already in the buffer end the urgent piece.
            if let Some((&(_, start), _)) =
                self.read.range((urgent.epoch, urgent.start)..(urgent.epoch, urgent.end)).next()
            {
                urgent.end = start;
            }
            urgent.end = urgent.end.min(urgent.start + piece_max);
            self.unwant(urgent);
            return (!urgent.is_empty()).then_some(urgent);
        }
        if self.records >= ahead {
            return None;
        }
        let first = self.wanted.front_mut()?;
        let piece = RecordRange { end: first.end.min(first.start + piece_max), ..*first };
        first.start = piece.end;
        if first.is_empty() {
            self.wanted.pop_front();
        }
        Some(piece)
    }

    /// Ranges that will be read after the first one and that the reader does not know of yet.
    fn upcoming(&mut self) -> Vec<RecordRange> {
        let next = self.wanted.iter().skip(1).take(UPCOMING).copied();
        let unknown = |range: &RecordRange| !self.announced.contains(&(range.epoch, range.end));
        let upcoming: Vec<RecordRange> = next.filter(unknown).collect();
        self.announced.extend(upcoming.iter().map(|range| (range.epoch, range.end)));
        let superfluous = self.announced.len().saturating_sub(2 * UPCOMING);
        self.announced.drain(..superfluous);
        upcoming
    }

    fn unwant(&mut self, piece: RecordRange) {
        let mut rest = VecDeque::with_capacity(self.wanted.len() + 1);
        for range in self.wanted.drain(..) {
            if range.epoch != piece.epoch || range.end <= piece.start || range.start >= piece.end {
                rest.push_back(range);
                continue;
            }
            let before = RecordRange { end: piece.start, ..range };
            let after = RecordRange { start: piece.end, ..range };
            rest.extend([before, after].into_iter().filter(|r| !r.is_empty()));
        }
        self.wanted = rest;
    }

    /// Cuts records `at..end`, or as many as there are, out of the entry that starts at `start`.
    fn cut(&mut self, epoch: u32, start: u64, at: u64, end: u64) -> VecDeque<R> {
        let mut entry = self.read.remove(&(epoch, start)).expect("the entry was just found");
        let mut records = entry.split_off((at - start) as usize);
        if records.len() as u64 > end - at {
            let rest = records.split_off((end - at) as usize);
            self.read.insert((epoch, end), rest);
        }
        if !entry.is_empty() {
            self.read.insert((epoch, start), entry);
        }
        self.records -= records.len() as u64;
        records
    }
}

fn overlap(a: &RecordRange, b: &RecordRange) -> bool {
    a.epoch == b.epoch && a.start < b.end && b.start < a.end
}

/// Number of ranges, after the one being read, that are announced to the reader.
const UPCOMING: usize = 2;
/// Interval at which the trainer checks for records while storage does not answer.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time after which the trainer continues without the missing records: a short outage does not make
/// a step smaller.
const STORAGE_WAIT_MAX: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use elasticdl_data::{DataError, Dataset, File};

    use super::*;
    use crate::ordered_reader::data_order;

    #[derive(Debug)]
    struct Numbers {
        fail_at: Option<u64>,
    }

    impl Reader for Numbers {
        type Record = (String, u64);

        fn describe(&mut self, _source: &str) -> Result<Dataset, DataError> {
            Ok(dataset())
        }

        fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Self::Record>, DataError> {
            if self.fail_at.is_some_and(|at| range.contains(&at)) {
                return Err(DataError::Other("no such record".into()));
            }
            Ok(range.map(|i| (file.path.clone(), i)).collect())
        }
    }

    fn dataset() -> Dataset {
        let file = |path: &str, records| File::new(path, records);
        Dataset::new(vec![file("a", 10), file("b", 100)])
    }

    fn prefetch(fail_at: Option<u64>) -> Prefetch<(String, u64)> {
        Prefetch::new(in_order(Numbers { fail_at }), 4).unwrap()
    }

    fn in_order<D: Reader>(reader: D) -> OrderedReader<D> {
        OrderedReader::new(reader.into(), dataset(), data_order(&dataset()))
    }

    fn taken(prefetch: &Prefetch<(String, u64)>, range: RecordRange) -> Vec<(String, u64)> {
        let Taken { records, rest } = prefetch.take(range).unwrap();
        assert_eq!(rest, None);
        records
    }

    fn range(epoch: u32, start: u64, end: u64) -> RecordRange {
        RecordRange { epoch, start, end }
    }

    fn records(file: &str, range: Range<u64>) -> Vec<(String, u64)> {
        range.map(|i| (file.to_string(), i)).collect()
    }

    #[test]
    fn records_come_in_order_for_any_sizes_of_pieces() {
        let prefetch = prefetch(None);
        prefetch.want(range(0, 2, 10));
        prefetch.want(range(0, 10, 60));
        assert_eq!(taken(&prefetch, range(0, 2, 5)), records("a", 2..5));
        assert_eq!(taken(&prefetch, range(0, 5, 10)), records("a", 5..10));
        assert_eq!(taken(&prefetch, range(0, 10, 41)), records("b", 0..31));
        assert_eq!(taken(&prefetch, range(0, 41, 60)), records("b", 31..50));
    }

    #[test]
    fn records_taken_out_of_order_or_again_are_read_at_once() {
        let prefetch = prefetch(None);
        prefetch.want(range(0, 20, 60));
        prefetch.want(range(1, 0, 10));
        assert_eq!(taken(&prefetch, range(1, 3, 7)), records("a", 3..7));
        assert_eq!(taken(&prefetch, range(0, 30, 50)), records("b", 20..40));
        assert_eq!(taken(&prefetch, range(0, 20, 30)), records("b", 10..20));
        assert_eq!(taken(&prefetch, range(0, 20, 60)), records("b", 10..50));
    }

    #[test]
    fn announced_records_taken_out_of_order_are_not_read_again() {
        let prefetch = prefetch(None);
        prefetch.want(range(0, 20, 60));
        for (start, end) in [(30, 50), (20, 30), (50, 60)] {
            assert_eq!(taken(&prefetch, range(0, start, end)), records("b", start - 10..end - 10));
        }
        let state = prefetch.buffer.lock();
        assert_eq!((state.wanted.len(), state.records, state.read.len()), (0, 0, 0));
    }

    #[test]
    fn records_are_taken_from_the_middle_of_a_piece() {
        let prefetch = prefetch(None);
        prefetch.want(range(0, 20, 22));
        let mut state = prefetch.buffer.lock();
        while !state.read.contains_key(&(0, 20)) {
            state = prefetch.buffer.changed.wait(state).unwrap();
        }
        drop(state);
        assert_eq!(taken(&prefetch, range(0, 21, 22)), records("b", 11..12));
        assert_eq!(taken(&prefetch, range(0, 20, 21)), records("b", 10..11));
    }

    #[test]
    fn a_failing_reader_is_an_error_that_names_the_range() {
        let prefetch = prefetch(Some(7));
        prefetch.want(range(0, 12, 20));
        let failed = prefetch.take(range(0, 16, 20)).unwrap_err();
        let [at] = failed.records[..] else { panic!("{failed:?}") };
        assert!(at.start <= 17 && at.end > 17, "{failed:?}");
        assert_eq!(failed.text, "no such record");
        let failed = prefetch.take(range(0, 105, 200)).unwrap_err();
        assert!(failed.text.contains("outside the data set of 110"), "{failed:?}");
    }

    #[test]
    fn records_that_are_not_wanted_any_more_are_dropped_and_the_others_are_read_once() {
        let prefetch = prefetch(None);
        prefetch.want(range(0, 20, 24));
        let mut state = prefetch.buffer.lock();
        while state.records < 4 {
            state = prefetch.buffer.changed.wait(state).unwrap();
        }
        drop(state);
        prefetch.replace(&[range(0, 30, 32)], &[range(0, 22, 24), range(0, 40, 42)]);
        assert_eq!(taken(&prefetch, range(0, 30, 32)), records("b", 20..22));
        assert_eq!(taken(&prefetch, range(0, 22, 24)), records("b", 12..14));
        assert_eq!(taken(&prefetch, range(0, 40, 42)), records("b", 30..32));
        let state = prefetch.buffer.lock();
        assert_eq!((state.wanted.len(), state.records, state.read.len()), (0, 0, 0));
    }

    /// Blocks at record 10 of file b until the test continues it.
    struct Blocking {
        begins: std::sync::mpsc::Sender<()>,
        goes_on: std::sync::mpsc::Receiver<()>,
        waits: Option<Arc<AtomicBool>>,
    }

    impl Reader for Blocking {
        type Record = (String, u64);

        fn describe(&mut self, _source: &str) -> Result<Dataset, DataError> {
            Ok(dataset())
        }

        fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Self::Record>, DataError> {
            if range.contains(&10)
                && let Some(waits) = self.waits.take()
            {
                waits.store(true, Ordering::Release);
                self.begins.send(()).unwrap();
                self.goes_on.recv().unwrap();
                waits.store(false, Ordering::Release);
            }
            Ok(range.map(|i| (file.path.clone(), i)).collect())
        }
    }

    #[test]
    fn records_already_read_are_returned_during_an_outage_and_the_rest_after_it() {
        let (begins, begun) = std::sync::mpsc::channel();
        let (go_on, goes_on) = std::sync::mpsc::channel();
        let waits = Arc::new(AtomicBool::new(false));
        let reader = Blocking { begins, goes_on, waits: Some(Arc::clone(&waits)) };
        let prefetch = Prefetch { buffer: Arc::new(ReadBuffer::new(waits)) };
        let buffer = Arc::clone(&prefetch.buffer);
        thread::spawn(move || buffer.fill(in_order(reader), 16));
        prefetch.want(range(0, 12, 60));
        begun.recv().unwrap();
        let wanted = || [range(0, 12, 24), range(0, 24, 60)].into_iter();
        assert_eq!(prefetch.readable(wanted()), Ok(Some(8)));
        // What wakes the trainer early does not shorten its wait for storage.
        let (asked, is_over) = (Instant::now(), AtomicBool::new(false));
        let Taken { records: read, rest } = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Acquire) {
                    prefetch.buffer.changed.notify_all();
                    thread::yield_now();
                }
            });
            let taken = prefetch.take(range(0, 12, 24)).unwrap();
            is_over.store(true, Ordering::Release);
            taken
        });
        assert!(asked.elapsed() >= STORAGE_WAIT_MAX);
        assert_eq!((read, rest), (records("b", 2..10), Some(range(0, 20, 24))));
        assert_eq!(prefetch.readable(wanted().skip(1)), Ok(Some(0)));
        go_on.send(()).unwrap();
        assert_eq!(taken(&prefetch, range(0, 20, 60)), records("b", 10..50));
        assert_eq!(prefetch.readable(wanted()), Ok(None));
    }

    #[test]
    fn a_failure_of_the_reader_ends_the_wait_for_storage() {
        let prefetch = prefetch(Some(7));
        prefetch.want(range(0, 16, 20));
        let mut state = prefetch.buffer.lock();
        while state.failed.is_none() {
            state = prefetch.buffer.changed.wait(state).unwrap();
        }
        drop(state);
        let error = prefetch.readable([range(0, 16, 20)].into_iter()).unwrap_err();
        assert_eq!(error.text, "no such record");
    }
}
