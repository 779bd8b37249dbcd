use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// Shows whoever looks, from any thread, where an endpoint waits for its peers. All clones show the
/// same.
///
/// A neighbour that is gone ends its links, and that is an error. One that the network has cut off,
/// or that has stopped, ends nothing: all wait. What is seen here of all members together tells
/// where it hangs.
///
/// One thread at a time builds and uses the rings of an endpoint; were there more, the last one to
/// wait is shown.
#[derive(Clone, Debug)]
pub struct Progress {
    cell: Arc<Cell>,
}

/// Where an endpoint waits, and since when no byte has moved there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stall {
    /// The generation of its group.
    pub generation: u64,
    /// Operations begun in this generation, this one included. 0: the next member has been dialled,
    /// and the dial of the previous one is awaited.
    pub operation: u64,
    /// Bytes of this operation that came from the previous member. What the next one has received
    /// of it is less than `sent` only while something is on its way.
    pub received: u64,
    /// Bytes of this operation that the system has taken for the next member.
    pub sent: u64,
    /// What is awaited comes from the next member. Then, and whenever the operation's bytes run
    /// both ways on the ring's links, `sent` and `received` are counted so that the two ends of a
    /// link still differ by what is on its way.
    pub waits_for_next: bool,
    /// How long no byte has moved.
    pub since: Duration,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let number = || AtomicU64::new(0);
        let cell = Cell {
            started: Instant::now(),
            since: AtomicU64::new(MOVING),
            generation: number(),
            operation: number(),
            received: number(),
            sent: number(),
            waits_for_next: AtomicBool::new(false),
        };
        Self { cell: Arc::new(cell) }
    }

    /// Where the endpoint waits; `None` while it moves bytes, and while it waits for no peer at
    /// all.
    #[must_use]
    pub fn stall(&self) -> Option<Stall> {
        let cell = &*self.cell;
        let since = cell.since.load(Ordering::Acquire);
        let stall = Stall {
            generation: cell.generation.load(Ordering::Relaxed),
            operation: cell.operation.load(Ordering::Relaxed),
            received: cell.received.load(Ordering::Relaxed),
            sent: cell.sent.load(Ordering::Relaxed),
            waits_for_next: cell.waits_for_next.load(Ordering::Relaxed),
            since: cell.started.elapsed().saturating_sub(Duration::from_nanos(since)),
        };
        fence(Ordering::Acquire);
        // Each wait begins at another moment: the same one twice, and nothing has changed in
        // between.
        let is_whole = cell.since.load(Ordering::Relaxed) == since;
        (since != MOVING && is_whole).then_some(stall)
    }

    /// The endpoint is about to wait at `place`.
    pub(crate) fn begin_wait(&self, point: WaitPoint) {
        let cell = &*self.cell;
        cell.since.store(MOVING, Ordering::Relaxed);
        fence(Ordering::Release);
        cell.generation.store(point.generation, Ordering::Relaxed);
        cell.operation.store(point.operation, Ordering::Relaxed);
        cell.received.store(point.received, Ordering::Relaxed);
        cell.sent.store(point.sent, Ordering::Relaxed);
        cell.waits_for_next.store(point.waits_for_next, Ordering::Relaxed);
        let now = u64::try_from(cell.started.elapsed().as_nanos())
            .expect("no process runs for centuries");
        cell.since.store(now, Ordering::Release);
    }

    /// It goes on.
    pub(crate) fn end_wait(&self) {
        self.cell.since.store(MOVING, Ordering::Relaxed);
    }
}

/// As in [`Stall`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitPoint {
    pub(crate) generation: u64,
    pub(crate) operation: u64,
    pub(crate) received: u64,
    pub(crate) sent: u64,
    pub(crate) waits_for_next: bool,
}

/// **Invariant:** the place changes only while `since` is [`MOVING`].
#[derive(Debug)]
struct Cell {
    started: Instant,
    /// Nanoseconds from the start to the last byte before the wait.
    since: AtomicU64,
    generation: AtomicU64,
    operation: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
    waits_for_next: AtomicBool,
}

/// It waits for nobody.
const MOVING: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_place_is_never_seen_half_written() {
        let progress = Progress::new();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..3_000_000 {
                    progress.begin_wait(WaitPoint {
                        generation: n,
                        operation: n,
                        received: n,
                        sent: n,
                        waits_for_next: n % 2 == 1,
                    });
                }
                progress.end_wait();
                over.store(true, Ordering::Relaxed);
            });
            while !over.load(Ordering::Relaxed) {
                if let Some(stall) = progress.stall() {
                    let Stall { generation, operation, received, sent, waits_for_next, .. } = stall;
                    assert_eq!([operation, received, sent], [generation; 3]);
                    assert_eq!(waits_for_next, generation % 2 == 1);
                }
            }
        });
        assert_eq!(progress.stall(), None);
    }
}
