//! Blocks of objects that were read, and those that will be.
//!
//! Who reads an object from one block to the next is likely to go on: then blocks behind are
//! fetched meanwhile, the more the longer it goes on, several with one request. Several such
//! streams may run side by side, as the columns of a table do.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// Blocks, by object and number.
#[derive(Debug)]
pub(super) struct Blocks {
    state: Mutex<State>,
    filled: Condvar,
}

#[derive(Debug)]
struct State {
    blocks: BTreeMap<PathBuf, BTreeMap<u64, Slot>>,
    /// How many have come.
    ready: usize,
    /// Looks at blocks so far: which block was looked at last.
    accesses: u64,
    scans: Vec<Scan>,
}

#[derive(Debug)]
enum Slot {
    /// Somebody fetches it.
    Claimed,
    Ready {
        bytes: Bytes,
        last_access: u64,
    },
}

/// An object that is read from one block to the next.
#[derive(Debug)]
struct Scan {
    object: PathBuf,
    /// The block that comes next.
    next: u64,
    /// How many behind it are to be there when it is read.
    window: u64,
    /// Up to here they have been asked for.
    asked: u64,
    last_access: u64,
}

impl Blocks {
    pub(super) const fn new() -> Self {
        let state = State { blocks: BTreeMap::new(), ready: 0, accesses: 0, scans: Vec::new() };
        Self { state: Mutex::new(state), filled: Condvar::new() }
    }

    /// A block is about to be read: which ones behind it are to be fetched meanwhile.
    pub(super) fn access(&self, object: &Path, index: u64) -> Range<u64> {
        self.lock().access(object, index)
    }

    /// The block, if it is there or somebody fetches it.
    pub(super) fn wait(&self, object: &Path, index: u64) -> Option<Bytes> {
        let mut state = self.lock();
        loop {
            state.accesses += 1;
            let accesses = state.accesses;
            match state.blocks.get_mut(object)?.get_mut(&index)? {
                Slot::Claimed => {}
                Slot::Ready { bytes, last_access } => {
                    *last_access = accesses;
                    return Some(bytes.clone());
                }
            }
            state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The first run of blocks among `wanted` that nobody has or fetches; the caller fetches them.
    pub(super) fn claim(&self, object: &Path, wanted: Range<u64>) -> Range<u64> {
        let mut state = self.lock();
        let blocks = state.blocks.entry(object.into()).or_default();
        let Some(start) = wanted.clone().find(|index| !blocks.contains_key(index)) else {
            return wanted.end..wanted.end;
        };
        let end =
            (start..wanted.end).find(|index| blocks.contains_key(index)).unwrap_or(wanted.end);
        blocks.extend((start..end).map(|index| (index, Slot::Claimed)));
        start..end
    }

    /// What has become of a run that was claimed: its bytes, if they came.
    pub(super) fn fill(&self, object: &Path, run: &Range<u64>, bytes: Option<&Bytes>) {
        let mut state = self.lock();
        let last_access = state.accesses;
        let blocks = state.blocks.entry(object.into()).or_default();
        let mut ready = 0;
        for index in run.clone() {
            let begins = ((index - run.start) * BLOCK_BYTES) as usize;
            let Some(bytes) = bytes.filter(|bytes| bytes.len() > begins) else {
                blocks.remove(&index);
                continue;
            };
            let end = bytes.len().min(begins + BLOCK_BYTES as usize);
            // A copy: one block that is kept does not keep the whole run.
            let bytes = Bytes::copy_from_slice(&bytes[begins..end]);
            blocks.insert(index, Slot::Ready { bytes, last_access });
            ready += 1;
        }
        state.ready += ready;
        state.evict_excess();
        drop(state);
        self.filled.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn access(&mut self, object: &Path, index: u64) -> Range<u64> {
        self.accesses += 1;
        let accesses = self.accesses;
        let continues =
            |scan: &Scan| scan.object == object && (scan.next == index || scan.next == index + 1);
        let Some(scan) = self.scans.iter_mut().find(|scan| continues(scan)) else {
            return self.begin_scan(object, index);
        };
        scan.last_access = accesses;
        if scan.next == index + 1 {
            return 0..0;
        }
        scan.next = index + 1;
        let recent =
            self.scans.iter().filter(|s| accesses - s.last_access < SCAN_ACCESSES).count() as u64;
        let most = (BLOCKS_MAX as u64 / 2 / recent).clamp(1, WINDOW_MAX);
        let scan = self.scans.iter_mut().find(|scan| continues(scan)).expect("it was just found");
        scan.window = (scan.window * 4).min(most);
        let (begins, ends) = (scan.asked.max(scan.next), scan.next + scan.window);
        // A few large requests rather than one for each block.
        if ends.saturating_sub(begins) < scan.window.div_ceil(2) {
            return 0..0;
        }
        scan.asked = ends;
        begins..ends
    }

    fn begin_scan(&mut self, object: &Path, index: u64) -> Range<u64> {
        if self.scans.len() == SCANS_MAX
            && let Some(oldest) = (0..SCANS_MAX).min_by_key(|&i| self.scans[i].last_access)
        {
            self.scans.swap_remove(oldest);
        }
        // Who begins at an object's beginning mostly reads it all.
        let window = if index == 0 { WINDOW_FIRST } else { 1 };
        let (next, asked) = (index + 1, index + 1 + window);
        self.scans.push(Scan {
            object: object.into(),
            next,
            window,
            asked,
            last_access: self.accesses,
        });
        next..asked
    }

    /// Drops the blocks that were looked at longest ago.
    fn evict_excess(&mut self) {
        while self.ready > BLOCKS_MAX {
            let ready = self.blocks.iter().flat_map(|(object, blocks)| {
                blocks.iter().filter_map(move |(index, slot)| match slot {
                    Slot::Ready { last_access, .. } => Some((*last_access, object, *index)),
                    Slot::Claimed => None,
                })
            });
            let Some((_, object, index)) = ready.min() else { return };
            let object = object.clone();
            let blocks = self.blocks.get_mut(&object).expect("it was just found");
            blocks.remove(&index);
            if blocks.is_empty() {
                self.blocks.remove(&object);
            }
            self.ready -= 1;
        }
    }
}

pub(super) const BLOCK_BYTES: u64 = 256 << 10;
/// One request is for so many at most: 8 MiB.
pub(super) const RUN_BLOCKS: u64 = 32;
/// 64 MiB are kept.
const BLOCKS_MAX: usize = 256;
/// One stream has 16 MiB fetched ahead at most,
const WINDOW_MAX: u64 = 64;
/// and 4 MiB where an object is begun.
const WINDOW_FIRST: u64 = 16;
const SCANS_MAX: usize = 64;
/// A stream that was not looked at for so many looks has probably ended.
const SCAN_ACCESSES: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    /// The requests that are made ahead while `blocks` are read in this order.
    fn ahead(blocks: impl IntoIterator<Item = u64>) -> Vec<Range<u64>> {
        let all = Blocks::new();
        let requests = blocks.into_iter().map(|index| all.access(Path::new("s3://b/a"), index));
        requests.filter(|request| !request.is_empty()).collect()
    }

    #[test]
    fn who_reads_on_has_more_and_more_fetched_ahead_and_nothing_twice() {
        let requests = ahead(0..1000);
        assert_eq!(requests[0], 1..17);
        assert!(requests.windows(2).all(|pair| pair[0].end == pair[1].start), "{requests:?}");
        assert!(requests.len() < 40, "{} requests for 250 MiB", requests.len());
        assert!(requests.iter().all(|request| request.end - request.start <= WINDOW_MAX));
    }

    #[test]
    fn who_jumps_about_has_little_fetched_ahead() {
        let requests = ahead((1..100).map(|i| i * 37 % 1009));
        let fetched: u64 = requests.iter().map(|request| request.end - request.start).sum();
        assert!(fetched <= 99, "{fetched} blocks for 99");
    }

    #[test]
    fn a_block_that_is_read_again_and_again_is_one_look() {
        assert_eq!(ahead([5, 5, 5, 5]), ahead([5]));
    }

    #[test]
    fn streams_side_by_side_share_the_room() {
        let all = Blocks::new();
        let mut most = 0;
        for index in 0..100 {
            for column in 0..16 {
                let request = all.access(Path::new("s3://b/a"), column * 10_000 + index);
                most = most.max(request.end.saturating_sub(column * 10_000 + index));
            }
        }
        assert!(
            16 * most <= BLOCKS_MAX as u64 + 16 * WINDOW_FIRST,
            "{most} blocks ahead in each of 16 columns"
        );
    }

    #[test]
    fn blocks_are_claimed_once_come_to_all_and_go_when_there_are_too_many() {
        let (blocks, object) = (Blocks::new(), Path::new("s3://b/a"));
        assert_eq!(blocks.claim(object, 0..4), 0..4);
        assert_eq!(blocks.claim(object, 2..6), 4..6);
        assert_eq!(blocks.claim(object, 0..6), 6..6);
        blocks.fill(object, &(4..6), None);
        assert_eq!(blocks.wait(object, 5), None, "what did not come is nobody's");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| blocks.wait(object, 1));
            let bytes = Bytes::from(vec![7; 2 * BLOCK_BYTES as usize + 3]);
            blocks.fill(object, &(0..4), Some(&bytes));
            assert_eq!(waiter.join().unwrap().map(|block| block.len() as u64), Some(BLOCK_BYTES));
        });
        assert_eq!(blocks.wait(object, 2), Some(Bytes::from_static(&[7; 3])));
        assert_eq!(blocks.wait(object, 3), None, "the object has ended before");
        for index in 10..10 + BLOCKS_MAX as u64 {
            assert_eq!(blocks.claim(object, index..index + 1), index..index + 1);
            blocks.fill(object, &(index..index + 1), Some(&Bytes::from_static(b"x")));
        }
        assert_eq!((blocks.wait(object, 0), blocks.lock().ready), (None, BLOCKS_MAX));
    }
}
