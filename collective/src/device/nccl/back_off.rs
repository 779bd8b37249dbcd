//! The wait between two polls of NCCL.

use std::thread;
use std::time::{Duration, Instant};

/// Back-off between two polls: yields at first, then sleeps, so that other threads get the core.
pub(super) struct BackOff {
    pub(super) begun: Instant,
    spin_time: Duration,
}

impl BackOff {
    pub(super) fn new(spin_time: Duration) -> Self {
        Self { begun: Instant::now(), spin_time }
    }

    pub(super) fn wait(&self) {
        if self.begun.elapsed() < self.spin_time {
            thread::yield_now();
        } else {
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Time before the back-off sleeps, at least and at most: from a small operation's duration to that
/// of a large one within a host. Over a network, a pause is a small part of it.
pub(super) const SPIN_TIME_MIN: Duration = Duration::from_millis(1);
pub(super) const SPIN_TIME_MAX: Duration = Duration::from_millis(10);
pub(super) const POLL_INTERVAL: Duration = Duration::from_micros(50);
