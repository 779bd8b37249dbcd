//! What a worker's heartbeats have said.

use std::time::Duration;

use crate::job::event::Stall;
use crate::job::time::Time;

/// A worker's stall as the master sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stalled {
    stall: Stall,
    /// Since when all its heartbeats report that it waits.
    since: Time,
    /// Time of the last such heartbeat.
    last: Time,
}

impl Stalled {
    /// `before` is the worker's previous report. A long silence since then does not count as
    /// waiting: all workers may have been stopped.
    pub(super) fn after(
        before: Option<Self>,
        now: Time,
        stall: Stall,
        heartbeat: Duration,
    ) -> Self {
        let since = before.filter(|b| is_fresh(b.last, now, heartbeat)).map_or(now, |b| b.since);
        Self { stall, since, last: now }
    }

    /// The stall as last reported.
    pub(crate) fn stall(&self) -> &Stall {
        &self.stall
    }

    /// Time of its last heartbeat.
    pub(crate) fn last(&self) -> Time {
        self.last
    }

    /// Whether it has waited for `timeout`, by heartbeats that are fresh.
    pub(crate) fn is_long(&self, now: Time, timeout: Duration, heartbeat: Duration) -> bool {
        self.stall.since >= timeout
            && self.last.since(self.since) >= timeout / 2
            && is_fresh(self.last, now, heartbeat)
    }

    /// Restarts the wait: what the worker waited for has arrived, as far as other reports show.
    pub(super) fn restart_wait(&mut self, now: Time) {
        self.since = now;
    }
}

/// Whether a worker that was heard at `heard` is not silent.
pub(super) fn is_fresh(heard: Time, now: Time, heartbeat: Duration) -> bool {
    now.since(heard) <= heartbeat * FRESH_HEARTBEATS
}

/// A worker that was heard within this many heartbeat intervals is not silent.
const FRESH_HEARTBEATS: u32 = 2;
