//! Records, read ahead of need by a thread of their own.
//!
//! The trainer says which ranges it will want ([`Prefetch::want`]), in the order in which it expects to; the thread
//! reads them, some records ahead; [`Prefetch::take`] hands them over. What is taken out of order is read at once.
//!
//! **Invariant:** a record is handed over only by the `take` that names it.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use elasticdl_proto::RecordRange;

use crate::failure::panic_text;
use crate::reader::{Dataset, Reader};

/// Reads ahead for one worker.
#[derive(Debug)]
pub(crate) struct Prefetch<R> {
    shelf: Arc<Shelf<R>>,
}

#[derive(Debug)]
struct Shelf<R> {
    state: Mutex<State<R>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<R> {
    /// What is to be read, in this order.
    wanted: VecDeque<RecordRange>,
    /// What was read, by epoch and first record.
    read: BTreeMap<(u32, u64), VecDeque<R>>,
    /// Records in `read`.
    records: u64,
    /// What the trainer waits for.
    urgent: Option<RecordRange>,
    failed: Option<(RecordRange, String)>,
    closed: bool,
}

impl<R: Send + 'static> Prefetch<R> {
    /// Starts reading for a trainer that takes about `ahead` records at a time.
    pub(crate) fn new<D: Reader<Record = R>>(
        reader: D,
        dataset: Dataset,
        ahead: u64,
    ) -> std::io::Result<Self> {
        let state = State {
            wanted: VecDeque::new(),
            read: BTreeMap::new(),
            records: 0,
            urgent: None,
            failed: None,
            closed: false,
        };
        let shelf = Arc::new(Shelf { state: Mutex::new(state), changed: Condvar::new() });
        let thread_shelf = Arc::clone(&shelf);
        thread::Builder::new()
            .name("reader".into())
            .spawn(move || thread_shelf.fill(reader, &dataset, ahead.max(1)))?;
        Ok(Self { shelf })
    }

    /// Says that `range` will be taken, after what was wanted before.
    pub(crate) fn want(&self, range: RecordRange) {
        self.shelf.lock().wanted.push_back(range);
        self.shelf.changed.notify_all();
    }

    /// The records of `range`, in order; waits for them.
    ///
    /// # Errors
    /// The reader failed: on what, and its words.
    pub(crate) fn take(&self, range: RecordRange) -> Result<Vec<R>, (RecordRange, String)> {
        let mut taken = Vec::new();
        let mut state = self.shelf.lock();
        let mut at = range.start;
        while at < range.end {
            let key = state.read.range(..=(range.epoch, at)).next_back().map(|(&key, _)| key);
            if let Some((epoch, start)) = key
                && epoch == range.epoch
                && start + state.read[&(epoch, start)].len() as u64 > at
            {
                let records = state.cut(epoch, start, at, range.end);
                at += records.len() as u64;
                taken.extend(records);
                self.shelf.changed.notify_all();
                continue;
            }
            if let Some(failed) = state.failed.take() {
                return Err(failed);
            }
            state.urgent = Some(RecordRange { start: at, ..range });
            self.shelf.changed.notify_all();
            state = self.shelf.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.urgent = None;
        Ok(taken)
    }
}

impl<R> Drop for Prefetch<R> {
    fn drop(&mut self) {
        self.shelf.lock().closed = true;
        self.shelf.changed.notify_all();
    }
}

impl<R> Shelf<R> {
    fn lock(&self) -> MutexGuard<'_, State<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The reading thread: one piece after the other, at most `ahead` records ahead of what is taken.
    fn fill<D: Reader<Record = R>>(&self, mut reader: D, dataset: &Dataset, ahead: u64) {
        let piece_max = ahead.div_ceil(2);
        let mut state = self.lock();
        while !state.closed {
            let Some(piece) = state.next_piece(piece_max, ahead) else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let records = read_piece(&mut reader, dataset, piece);
            state = self.lock();
            match records {
                Ok(records) => {
                    state.records += records.len() as u64;
                    state.read.insert((piece.epoch, piece.start), records.into());
                }
                Err(error) => state.failed = Some((piece, error)),
            }
            self.changed.notify_all();
        }
    }
}

impl<R> State<R> {
    /// Takes what is to be read next off the list: what the trainer waits for, else what it will want.
    fn next_piece(&mut self, piece_max: u64, ahead: u64) -> Option<RecordRange> {
        if self.failed.is_some() {
            return None;
        }
        if let Some(mut urgent) = self.urgent.take() {
            // Records that lie on the shelf already end the urgent piece.
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

    /// Cuts records `at..end` (as far as they reach) out of the entry that starts at `start`.
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

/// Reads one piece, which may not cross a file.
pub(crate) fn read_piece<D: Reader>(
    reader: &mut D,
    dataset: &Dataset,
    piece: RecordRange,
) -> Result<Vec<D::Record>, String> {
    let mut first = 0;
    for file in &dataset.files {
        if piece.start < first + file.records {
            let range = piece.start - first..piece.end - first;
            if range.end > file.records {
                return Err(format!("{}: a lease of {piece} reaches past this file's end", file.path));
            }
            let count = range.end - range.start;
            let read = catch_unwind(AssertUnwindSafe(|| reader.read(file, range.clone())));
            let records = match read {
                Ok(Ok(records)) => records,
                Ok(Err(error)) => return Err(error.to_string()),
                Err(panic) => return Err(format!("the reader panicked: {}", panic_text(&*panic))),
            };
            if records.len() as u64 != count {
                let got = records.len();
                return Err(format!(
                    "{}: the reader gave {got} records for {}..{}, which is {count}",
                    file.path, range.start, range.end
                ));
            }
            return Ok(records);
        }
        first += file.records;
    }
    Err(format!("a lease of {piece} lies outside the data set of {first} records"))
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::reader::{DataError, File};

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
        let file = |path: &str, records| File { path: path.into(), records };
        Dataset { files: vec![file("a", 10), file("b", 100)] }
    }

    fn prefetch(fail_at: Option<u64>) -> Prefetch<(String, u64)> {
        Prefetch::new(Numbers { fail_at }, dataset(), 4).unwrap()
    }

    fn range(epoch: u32, start: u64, end: u64) -> RecordRange {
        RecordRange { epoch, start, end }
    }

    fn records(file: &str, range: Range<u64>) -> Vec<(String, u64)> {
        range.map(|i| (file.to_string(), i)).collect()
    }

    #[test]
    fn records_come_in_order_whatever_the_sizes_of_pieces() {
        let prefetch = prefetch(None);
        prefetch.want(range(0, 2, 10));
        prefetch.want(range(0, 10, 60));
        assert_eq!(prefetch.take(range(0, 2, 5)), Ok(records("a", 2..5)));
        assert_eq!(prefetch.take(range(0, 5, 10)), Ok(records("a", 5..10)));
        assert_eq!(prefetch.take(range(0, 10, 41)), Ok(records("b", 0..31)));
        assert_eq!(prefetch.take(range(0, 41, 60)), Ok(records("b", 31..50)));
    }

    #[test]
    fn what_is_taken_out_of_order_or_again_is_read_at_once() {
        let prefetch = prefetch(None);
        prefetch.want(range(0, 20, 60));
        prefetch.want(range(1, 0, 10));
        assert_eq!(prefetch.take(range(1, 3, 7)), Ok(records("a", 3..7)));
        assert_eq!(prefetch.take(range(0, 30, 50)), Ok(records("b", 20..40)));
        assert_eq!(prefetch.take(range(0, 20, 30)), Ok(records("b", 10..20)));
        assert_eq!(prefetch.take(range(0, 20, 60)), Ok(records("b", 10..50)));
    }

    #[test]
    fn what_was_wanted_and_taken_out_of_order_is_not_read_again() {
        let prefetch = prefetch(None);
        prefetch.want(range(0, 20, 60));
        for (start, end) in [(30, 50), (20, 30), (50, 60)] {
            assert_eq!(prefetch.take(range(0, start, end)), Ok(records("b", start - 10..end - 10)));
        }
        let state = prefetch.shelf.lock();
        assert_eq!((state.wanted.len(), state.records, state.read.len()), (0, 0, 0));
    }

    #[test]
    fn records_are_taken_from_the_middle_of_a_piece() {
        let prefetch = prefetch(None);
        prefetch.want(range(0, 20, 22));
        let mut state = prefetch.shelf.lock();
        while !state.read.contains_key(&(0, 20)) {
            state = prefetch.shelf.changed.wait(state).unwrap();
        }
        drop(state);
        assert_eq!(prefetch.take(range(0, 21, 22)), Ok(records("b", 11..12)));
        assert_eq!(prefetch.take(range(0, 20, 21)), Ok(records("b", 10..11)));
    }

    #[test]
    fn a_failing_reader_is_an_error_that_names_the_range() {
        let prefetch = prefetch(Some(7));
        prefetch.want(range(0, 12, 20));
        let failed = prefetch.take(range(0, 16, 20)).unwrap_err();
        assert!(failed.0.start <= 17 && failed.0.end > 17, "{failed:?}");
        assert_eq!(failed.1, "no such record");
        let failed = prefetch.take(range(0, 105, 200)).unwrap_err();
        assert!(failed.1.contains("b: a lease of epoch 0 records"), "{failed:?}");
    }
}
