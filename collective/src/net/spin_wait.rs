//! How long a rank polls before it sleeps, by the length of the operation and by how late it was
//! woken before.

use std::thread;
use std::time::{Duration, Instant};

/// Spin-then-block policy of a rank that waits: it polls for a limited time before it blocks in the
/// kernel.
///
/// A wake-up by the scheduler costs more than a small message: on an idle core, several times the
/// latency of the message. While a rank spins, it yields the core to other threads, which keep it
/// for their time slice; a thread that has slept gets the core back sooner. So a rank that often
/// gets its core back late does not spin for a while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinWait {
    limit: Duration,
    since: Option<Instant>,
    /// Time that may be lost within a [`WINDOW`].
    lost_max: Duration,
    /// Start of the current window of late returns, and the time lost since then.
    late: Option<(Instant, Duration)>,
    /// End of the period in which other threads need the core.
    busy_until: Option<Instant>,
}

impl SpinWait {
    /// Policy of one operation on `bytes` bytes.
    pub(crate) fn for_bytes(bytes: usize) -> Self {
        let limit = if bytes <= SPIN_BYTES_MAX { SPIN_TIME_MAX } else { Duration::ZERO };
        Self::new(limit)
    }

    /// Policy of ranks that share memory, at any length.
    pub(crate) fn for_shared_memory() -> Self {
        Self::new(SPIN_TIME_IN_SHARED_MEMORY_MAX)
    }

    /// Policy of the wait for an operation of NCCL, at any length.
    #[cfg(feature = "gpu")]
    pub(crate) fn for_nccl() -> Self {
        Self::new(SPIN_TIME_WITH_NCCL_MAX)
    }

    /// Policy without a limit: never blocks.
    #[cfg(test)]
    pub(crate) fn unlimited() -> Self {
        Self { lost_max: Duration::MAX, ..Self::new(Duration::MAX) }
    }

    fn new(limit: Duration) -> Self {
        Self { limit, since: None, lost_max: WINDOW / 2, late: None, busy_until: None }
    }

    /// Returns whether to poll once more. Yields the core to other threads first.
    pub(crate) fn should_spin(&mut self) -> bool {
        if self.limit.is_zero() {
            return false;
        }
        let now = Instant::now();
        let is_busy = self.busy_until.is_some_and(|until| now < until);
        let should_spin =
            !is_busy && now.duration_since(*self.since.get_or_insert(now)) < self.limit;
        if should_spin {
            thread::yield_now();
            let delay = now.elapsed();
            if delay > LATE_MIN {
                self.note_late(now, delay);
            }
        }
        should_spin
    }

    fn note_late(&mut self, now: Instant, delay: Duration) {
        let recent = self.late.filter(|(first, _)| now.duration_since(*first) < WINDOW);
        let (first, before) = recent.unwrap_or((now, Duration::ZERO));
        let lost = before + delay;
        self.late = Some((first, lost));
        if lost > self.lost_max {
            self.late = None;
            self.busy_until = now.checked_add(BUSY_TIME);
        }
    }

    /// Restarts the spin time: data has arrived, or the rank has slept.
    pub(crate) fn reset(&mut self) {
        self.since = None;
    }
}

/// Spin time over TCP. Two ranks on two cores: 4 KiB took 20 µs without spinning, 14 µs with 20, 50
/// or 200 µs. With more ranks than cores, a longer time only takes the core from other ranks.
const SPIN_TIME_MAX: Duration = Duration::from_micros(20);

/// Spin time in shared memory. 16 MiB at four ranks on two cores took 17.4 ms without spinning,
/// 10.2 ms with 20 µs, 11.0 with 100, 9.6 with 500; 1 MiB at eight ranks 1.66, 1.67, 1.59 and 1.12
/// ms.
const SPIN_TIME_IN_SHARED_MEMORY_MAX: Duration = Duration::from_micros(200);

/// Spin time during an operation of NCCL: 1 MiB within a host takes tens of microseconds, about as
/// long as a wake-up. Of longer operations, a wake-up is a small part.
#[cfg(feature = "gpu")]
const SPIN_TIME_WITH_NCCL_MAX: Duration = Duration::from_micros(500);

/// Largest operation over TCP that spins. 1 MiB at two ranks took 422 µs without spinning and 372
/// µs with it; 16 MiB was not faster with it, and took almost twice as long on a machine that other
/// processes keep busy.
const SPIN_BYTES_MAX: usize = 1 << 20;

/// Minimum delay that counts as late. Ranks that share a core yield it to each other within a
/// fraction of this; other threads after a time slice of the scheduler: 3 or 4 ms.
const LATE_MIN: Duration = Duration::from_millis(1);

/// Window of the accounting. If half of it is lost, other threads need the core continuously;
/// background tasks take a slice only now and then.
const WINDOW: Duration = Duration::from_millis(40);

/// Time without spinning after that: at most a tenth of the time is lost.
const BUSY_TIME: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_often_gets_its_core_back_late_stops_spinning_for_a_while() {
        let now = Instant::now();
        let (slice, rare) = (Duration::from_millis(4), Duration::from_millis(10));
        for (pause, sleeps) in [(Duration::ZERO, true), (rare, false)] {
            let mut spin_wait = SpinWait::for_shared_memory();
            let mut at = now;
            for _ in 0..8 {
                spin_wait.note_late(at, slice);
                at += slice + pause;
            }
            assert_eq!(spin_wait.should_spin(), !sleeps, "{pause:?} between");
        }
    }
}
