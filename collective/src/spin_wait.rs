use std::thread;
use std::time::{Duration, Instant};

/// How long a rank looks again and again for what it waits for, before it lets the system put it to
/// sleep.
///
/// To be woken costs more than a small message: on an idle core, several times its flight. Whoever
/// else has something to do on this core gets it meanwhile, and keeps it for its turn; who has
/// slept gets it back sooner. So who has got its core back late too often does not look again for a
/// while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinWait {
    limit: Duration,
    since: Option<Instant>,
    /// How much of a [`WINDOW`] may be lost.
    lost_max: Duration,
    /// When it first got the core back late, of late, and how much time that has taken since.
    late: Option<(Instant, Duration)>,
    /// Until then others need the core.
    busy_until: Option<Instant>,
}

impl SpinWait {
    /// For one operation on so many bytes.
    pub(crate) fn for_bytes(bytes: usize) -> Self {
        let limit = if bytes <= SPIN_BYTES_MAX { SPIN_TIME_MAX } else { Duration::ZERO };
        Self::new(limit)
    }

    /// For ranks that share memory, at any length.
    pub(crate) fn for_shared_memory() -> Self {
        Self::new(SPIN_TIME_IN_SHARED_MEMORY_MAX)
    }

    /// Never sleeps.
    #[cfg(test)]
    pub(crate) fn unlimited() -> Self {
        Self { lost_max: Duration::MAX, ..Self::new(Duration::MAX) }
    }

    fn new(limit: Duration) -> Self {
        Self { limit, since: None, lost_max: WINDOW / 2, late: None, busy_until: None }
    }

    /// Whether to look once more. Lets others run before it says so.
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
            let away = now.elapsed();
            if away > LATE_MIN {
                self.note_late(now, away);
            }
        }
        should_spin
    }

    fn note_late(&mut self, now: Instant, away: Duration) {
        let recent = self.late.filter(|(first, _)| now.duration_since(*first) < WINDOW);
        let (first, before) = recent.unwrap_or((now, Duration::ZERO));
        let lost = before + away;
        self.late = Some((first, lost));
        if lost > self.lost_max {
            self.late = None;
            self.busy_until = now.checked_add(BUSY_TIME);
        }
    }

    /// Something has come, or the rank has slept.
    pub(crate) fn reset(&mut self) {
        self.since = None;
    }
}

/// Two ranks on two cores: 4 KiB took 20 µs without, 14 µs with 20, 50 or 200 µs of it. With more
/// ranks than cores more of it only takes time from others.
const SPIN_TIME_MAX: Duration = Duration::from_micros(20);

/// 16 MiB at four ranks on two cores took 17.4 ms without, 10.2 ms with 20 µs, 11.0 with 100, 9.6
/// with 500; 1 MiB at eight 1.66, 1.67, 1.59 and 1.12 ms.
const SPIN_TIME_IN_SHARED_MEMORY_MAX: Duration = Duration::from_micros(200);

/// 1 MiB at two ranks took 422 µs without and 372 with it; 16 MiB no less with it, and on a machine
/// that others keep busy almost twice as long.
const SPIN_BYTES_MAX: usize = 1 << 20;

/// Ranks that share a core leave it to each other within a fraction of this, others after a slice
/// of the scheduler's: 3 or 4 ms.
const LATE_MIN: Duration = Duration::from_millis(1);

/// Where half of this is lost, others need the core for good: some housekeeper takes a slice now
/// and then.
const WINDOW: Duration = Duration::from_millis(40);

/// A tenth of the time is lost at most.
const BUSY_TIME: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_often_gets_its_core_back_late_stops_looking_for_a_while() {
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
