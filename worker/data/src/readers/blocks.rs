//! Cache and read-ahead of blocks of objects.
//!
//! Access to consecutive blocks of an object is treated as a sequential scan. The blocks after the
//! current one are then fetched in the background, in a window that grows as the scan continues,
//! several blocks with one request. Several scans may run concurrently, for example one per column
//! of a table.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// The block cache, by object and block number.
#[derive(Debug)]
pub(super) struct Blocks {
    state: Mutex<State>,
    filled: Condvar,
}

#[derive(Debug)]
struct State {
    blocks: BTreeMap<PathBuf, BTreeMap<u64, Slot>>,
    /// Number of ready blocks.
    ready: usize,
    /// Number of accesses so far; used as the clock of the LRU order.
    accesses: u64,
    scans: Vec<Scan>,
}

#[derive(Debug)]
enum Slot {
    /// A thread is fetching the block.
    Claimed,
    Ready {
        bytes: Bytes,
        last_access: u64,
    },
}

/// A sequential scan of an object.
#[derive(Debug)]
struct Scan {
    object: PathBuf,
    /// Block that the scan accesses next.
    next: u64,
    /// Number of blocks after it that should be fetched ahead.
    window: u64,
    /// End of the blocks that have been requested.
    requested: u64,
    last_access: u64,
}

impl Blocks {
    pub(super) const fn new() -> Self {
        let state = State { blocks: BTreeMap::new(), ready: 0, accesses: 0, scans: Vec::new() };
        Self { state: Mutex::new(state), filled: Condvar::new() }
    }

    /// Records the access to a block. Returns the blocks that should be fetched in the background.
    pub(super) fn access(&self, object: &Path, index: u64) -> Range<u64> {
        self.lock().access(object, index)
    }

    /// Returns the block, if it is cached or being fetched; waits in the second case.
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

    /// Claims the first run of blocks in `wanted` that are neither cached nor being fetched. The
    /// caller has to fetch them and call [`fill`](Self::fill).
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

    /// Completes a claimed run: with its bytes, or `None` if the fetch failed.
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
            // Copied, so that a cached block does not keep the whole run in memory.
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
        let scan =
            self.scans.iter_mut().find(|scan| continues(scan)).expect("the entry was found above");
        scan.window = (scan.window * 4).min(most);
        let (begins, ends) = (scan.requested.max(scan.next), scan.next + scan.window);
        // Batches blocks into a few large requests.
        if ends.saturating_sub(begins) < scan.window.div_ceil(2) {
            return 0..0;
        }
        scan.requested = ends;
        begins..ends
    }

    fn begin_scan(&mut self, object: &Path, index: u64) -> Range<u64> {
        if self.scans.len() == SCANS_MAX
            && let Some(oldest) = (0..SCANS_MAX).min_by_key(|&i| self.scans[i].last_access)
        {
            self.scans.swap_remove(oldest);
        }
        // A scan that starts at the beginning of an object mostly reads all of it.
        let window = if index == 0 { WINDOW_FIRST } else { 1 };
        let (next, requested) = (index + 1, index + 1 + window);
        self.scans.push(Scan {
            object: object.into(),
            next,
            window,
            requested,
            last_access: self.accesses,
        });
        next..requested
    }

    /// Evicts the least recently used blocks.
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
            let blocks = self.blocks.get_mut(&object).expect("the entry was found above");
            blocks.remove(&index);
            if blocks.is_empty() {
                self.blocks.remove(&object);
            }
            self.ready -= 1;
        }
    }
}

pub(super) const BLOCK_BYTES: u64 = 256 << 10;
/// Maximum number of blocks per request: 8 MiB.
pub(super) const RUN_BLOCKS: u64 = 32;
/// Capacity of the cache in blocks: 64 MiB.
const BLOCKS_MAX: usize = 256;
/// Maximum read-ahead window of a scan: 16 MiB.
const WINDOW_MAX: u64 = 64;
/// Initial window of a scan that starts at the beginning of an object: 4 MiB.
const WINDOW_FIRST: u64 = 16;
const SCANS_MAX: usize = 64;
/// A scan without an access among this many accesses has probably ended.
const SCAN_ACCESSES: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    /// The read-ahead requests while `blocks` are accessed in this order.
    fn ahead(blocks: impl IntoIterator<Item = u64>) -> Vec<Range<u64>> {
        let all = Blocks::new();
        let requests = blocks.into_iter().map(|index| all.access(Path::new("s3://b/a"), index));
        requests.filter(|request| !request.is_empty()).collect()
    }

    #[test]
    fn a_sequential_scan_grows_its_window_and_fetches_each_block_once() {
        let requests = ahead(0..1000);
        assert_eq!(requests[0], 1..17);
        assert!(requests.windows(2).all(|pair| pair[0].end == pair[1].start), "{requests:?}");
        assert!(requests.len() < 40, "{} requests for 250 MiB", requests.len());
        assert!(requests.iter().all(|request| request.end - request.start <= WINDOW_MAX));
    }

    #[test]
    fn random_access_causes_little_read_ahead() {
        let requests = ahead((1..100).map(|i| i * 37 % 1009));
        let fetched: u64 = requests.iter().map(|request| request.end - request.start).sum();
        assert!(fetched <= 99, "{fetched} blocks for 99");
    }

    #[test]
    fn repeated_accesses_to_a_block_count_once() {
        assert_eq!(ahead([5, 5, 5, 5]), ahead([5]));
    }

    #[test]
    fn concurrent_scans_share_the_cache() {
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
    fn blocks_are_fetched_once_delivered_to_all_and_evicted() {
        let (blocks, object) = (Blocks::new(), Path::new("s3://b/a"));
        assert_eq!(blocks.claim(object, 0..4), 0..4);
        assert_eq!(blocks.claim(object, 2..6), 4..6);
        assert_eq!(blocks.claim(object, 0..6), 6..6);
        blocks.fill(object, &(4..6), None);
        assert_eq!(blocks.wait(object, 5), None, "a failed run is unclaimed");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| blocks.wait(object, 1));
            let bytes = Bytes::from(vec![7; 2 * BLOCK_BYTES as usize + 3]);
            blocks.fill(object, &(0..4), Some(&bytes));
            assert_eq!(waiter.join().unwrap().map(|block| block.len() as u64), Some(BLOCK_BYTES));
        });
        assert_eq!(blocks.wait(object, 2), Some(Bytes::from_static(&[7; 3])));
        assert_eq!(blocks.wait(object, 3), None, "the object ends before this block");
        for index in 10..10 + BLOCKS_MAX as u64 {
            assert_eq!(blocks.claim(object, index..index + 1), index..index + 1);
            blocks.fill(object, &(index..index + 1), Some(&Bytes::from_static(b"x")));
        }
        assert_eq!((blocks.wait(object, 0), blocks.lock().ready), (None, BLOCKS_MAX));
    }
}
