//! Shows other threads where a rank waits for its peers, so that the master finds where a ring
//! hangs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// Progress of an endpoint, readable from any thread: the point at which the endpoint waits for its
/// peers. Clones show the same endpoint.
///
/// A neighbour that ends closes its links, which is an error. A neighbour that is cut off by the
/// network, or that is stopped, closes nothing: all ranks wait. The progress of all members
/// together shows where the ring hangs.
///
/// One thread at a time builds and uses the groups of an endpoint. With several threads, the most
/// recent wait is shown.
#[derive(Clone, Debug)]
pub struct Progress {
    cell: Arc<Cell>,
}

/// The point at which an endpoint waits, and how long no byte has moved there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Stall {
    /// Generation of the group.
    pub generation: u64,
    /// Number of operations begun in this generation, including this one. 0: the next member has
    /// been dialled, and the dial of the previous one is awaited.
    pub operation: u64,
    /// Bytes of this operation received from the previous member. The next member has received less
    /// than `sent` only while bytes are in flight.
    pub received: u64,
    /// Bytes of this operation that the kernel has accepted for the next member.
    pub sent: u64,
    /// Whether the awaited data comes from the next member. In that case, and whenever an operation
    /// uses the ring's links in both directions, `sent` and `received` are counted so that the two
    /// ends of a link still differ by the bytes in flight.
    pub waits_for_next: bool,
    /// Members from which something is awaited over links that are not of the ring.
    pub far: [Option<u64>; FAR_MAX],
    /// Time since the last byte moved.
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
            far: [number(), number()],
        };
        Self { cell: Arc::new(cell) }
    }

    /// Returns the point at which the endpoint waits; `None` while bytes move, and while the
    /// endpoint does not wait for a peer.
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
            far: [0, 1].map(|at| cell.far[at].load(Ordering::Relaxed).checked_sub(1)),
            since: cell.started.elapsed().saturating_sub(Duration::from_nanos(since)),
        };
        fence(Ordering::Acquire);
        // Sequence lock: every wait has a distinct start time, so an unchanged value means that the
        // fields were not modified in between.
        let is_whole = cell.since.load(Ordering::Relaxed) == since;
        (since != MOVING && is_whole).then_some(stall)
    }

    /// Records that the endpoint begins to wait at `point`.
    pub(crate) fn begin_wait(&self, point: WaitPoint) {
        let cell = &*self.cell;
        cell.since.store(MOVING, Ordering::Relaxed);
        fence(Ordering::Release);
        cell.generation.store(point.generation, Ordering::Relaxed);
        cell.operation.store(point.operation, Ordering::Relaxed);
        cell.received.store(point.received, Ordering::Relaxed);
        cell.sent.store(point.sent, Ordering::Relaxed);
        cell.waits_for_next.store(point.waits_for_next, Ordering::Relaxed);
        for (cell, far) in cell.far.iter().zip(point.far) {
            cell.store(far.map_or(0, |member| member.saturating_add(1)), Ordering::Relaxed);
        }
        let now = u64::try_from(cell.started.elapsed().as_nanos())
            .expect("no process runs for centuries");
        cell.since.store(now, Ordering::Release);
    }

    /// Records that the wait has ended.
    pub(crate) fn end_wait(&self) {
        self.cell.since.store(MOVING, Ordering::Relaxed);
    }
}

/// Point at which an endpoint waits; see [`Stall`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitPoint {
    pub(crate) generation: u64,
    pub(crate) operation: u64,
    pub(crate) received: u64,
    pub(crate) sent: u64,
    pub(crate) waits_for_next: bool,
    pub(crate) far: [Option<u64>; FAR_MAX],
}

/// **Invariant:** the other fields change only while `since` is [`MOVING`].
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
    /// Ids of members plus one; 0 for none.
    far: [AtomicU64; FAR_MAX],
}

/// Links of a rank, besides those of the ring, on which one operation awaits something.
pub(crate) const FAR_MAX: usize = 2;

/// Value of `since` while the endpoint does not wait.
const MOVING: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_wait_point_is_never_read_half_written() {
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
                        far: [Some(n), None],
                    });
                }
                progress.end_wait();
                over.store(true, Ordering::Relaxed);
            });
            while !over.load(Ordering::Relaxed) {
                if let Some(stall) = progress.stall() {
                    let Stall { generation, operation, received, sent, .. } = stall;
                    let Stall { waits_for_next, far, .. } = stall;
                    assert_eq!(far, [Some(generation), None]);
                    assert_eq!([operation, received, sent], [generation; 3]);
                    assert_eq!(waits_for_next, generation % 2 == 1);
                }
            }
        });
        assert_eq!(progress.stall(), None);
    }
}
