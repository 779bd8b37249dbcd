//! What a worker's heartbeats have said.

use std::time::Duration;

use super::state::Worker;
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

/// How a worker that is no member follows the state of the group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Follower {
    /// Steps that its state contains; `None` until it has told.
    step: Option<u64>,
    /// When it was last seen to make a step, or to have that of the group.
    moved: Time,
    /// Whether it has caught up before the first step, and has made none.
    is_at_start: bool,
}

impl Worker {
    /// Time of its last message.
    pub(crate) fn heard(&self) -> Time {
        self.heard
    }

    /// Notes a message at `now`.
    pub(crate) fn hear(&mut self, now: Time) {
        self.heard = now;
    }

    /// Ignores the time until `now`: this master did not read the worker's messages.
    pub(crate) fn excuse_silence(&mut self, now: Time) {
        (self.heard, self.stalled, self.follower.moved) = (now, None, now);
    }

    /// Whether its last heartbeats came in time.
    pub(crate) fn is_heard(&self, now: Time, heartbeat: Duration) -> bool {
        is_fresh(self.heard, now, heartbeat)
    }

    /// Set if its last heartbeat reported that it waits for its neighbours.
    pub(crate) fn stalled(&self) -> Option<&Stalled> {
        self.stalled.as_ref()
    }

    /// Notes a heartbeat.
    pub(crate) fn note_stall(&mut self, now: Time, stall: Option<Stall>, heartbeat: Duration) {
        self.stalled = stall.map(|stall| Stalled::after(self.stalled, now, stall, heartbeat));
    }

    /// Notes that its state contains `step` steps. `newest`: those of the group; `None` while the
    /// group makes none.
    pub(crate) fn note_step(&mut self, now: Time, step: u64, newest: Option<u64>) {
        let is_there = newest.is_none_or(|newest| step >= newest);
        if self.follower.step != Some(step) || (is_there && !self.lags(now)) {
            let is_at_start = self.follower.is_at_start && step == 0;
            self.follower = Follower { step: Some(step), moved: now, is_at_start };
        }
    }

    /// It has caught up, with a state of `step` if it has one: what it told before is over.
    pub(crate) fn follow_anew(&mut self, step: Option<u64>) {
        self.follower = Follower { is_at_start: step == Some(0), ..Follower::default() };
    }

    /// Steps that its state contained when it last told, while it is no member; `None` if it has
    /// not.
    pub(crate) fn followed_step(&self) -> Option<u64> {
        self.follower.step.filter(|_| !self.is_member())
    }

    /// Whether it has fetched the state, and has made no step for long while the group made some:
    /// its trainer hangs, or it fetches the state anew.
    pub(crate) fn lags(&self, now: Time) -> bool {
        self.has_state() && self.followed_step().is_some() && now.since(self.follower.moved) > LAG
    }

    /// How long the group, whose newest step was at `progressed`, has made steps of which this
    /// worker, which has fetched the state, made none. `None` if it fetches the state anew.
    pub(crate) fn stuck_for(&self, progressed: Time) -> Option<Duration> {
        let Follower { moved, is_at_start, .. } = self.follower;
        let follows = self.followed_step().is_some_and(|step| step > 0 || is_at_start);
        (self.has_state() && follows).then(|| progressed.since(moved))
    }

    /// Restarts its wait, if it waits: what it waited for has arrived.
    pub(crate) fn restart_wait(&mut self, now: Time) {
        self.stalled.iter_mut().for_each(|stalled| stalled.restart_wait(now));
    }
}

/// Whether a worker that was heard at `heard` is not silent.
pub(super) fn is_fresh(heard: Time, now: Time, heartbeat: Duration) -> bool {
    now.since(heard) <= heartbeat * FRESH_HEARTBEATS
}

/// A worker that was heard within this many heartbeat intervals is not silent.
const FRESH_HEARTBEATS: u32 = 2;
/// A worker that follows the group may make no step for so long while the group does.
const LAG: Duration = Duration::from_secs(10);
