//! What a job gives back: actions, timers, and the version that has to be persisted.

use std::collections::{BTreeSet, VecDeque};

use elasticdl_proto::{Generation, WorkerId};

use super::action::Action;
use super::event::LaunchId;
use super::time::Time;

/// Pending actions and timers, and the version of the persisted state.
#[derive(Debug)]
pub(super) struct Outbox {
    actions: VecDeque<Action>,
    timers: BTreeSet<(Time, Timer)>,
    version: u64,
    durable_before: u64,
}

/// A timer. Its handler checks whether there still is something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    Broken(Generation),
    Deadline,
    Describe,
    End,
    GiveUp,
    Hello(LaunchId),
    Hung(WorkerId),
    Kill(LaunchId),
    Leave(WorkerId),
    Relaunch,
    Reconnect,
    HeartbeatCheck,
    Stop,
    Suspend,
    Window,
}

impl Default for Outbox {
    fn default() -> Self {
        Self { actions: VecDeque::new(), timers: BTreeSet::new(), version: 1, durable_before: 1 }
    }
}

impl Outbox {
    pub(super) fn push(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    pub(super) fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.timers.first().map(|&(at, _)| at)
    }

    /// Removes the first timer that is due at `now`.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<(Time, Timer)> {
        self.timers.first().is_some_and(|&(at, _)| at <= now).then(|| self.timers.pop_first())?
    }

    pub(super) fn has_timer(&self, timer: Timer) -> bool {
        self.timers.iter().any(|&(_, t)| t == timer)
    }

    pub(super) fn set_timer(&mut self, at: Time, timer: Timer) {
        self.timers.insert((at, timer));
    }

    pub(super) fn cancel_timer(&mut self, timer: Timer) {
        self.timers.retain(|&(_, t)| t != timer);
    }

    /// Cancels the timers of launches that have ended.
    pub(super) fn cancel_launches(&mut self, ended: &[LaunchId]) {
        self.timers.retain(|(_, timer)| match timer {
            Timer::Hello(launch) | Timer::Kill(launch) => !ended.contains(launch),
            _ => true,
        });
    }

    pub(super) fn clear_timers(&mut self) {
        self.timers.clear();
    }

    /// See [`Job::version`](super::Job::version).
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// See [`Job::durable_before`](super::Job::durable_before).
    pub(super) fn durable_before(&self) -> u64 {
        self.durable_before
    }

    /// Marks a change that must outlive this master.
    pub(super) fn mark_dirty(&mut self) {
        self.version += 1;
    }

    /// Marks a change that must outlive this master and that no other process knows.
    pub(super) fn mark_dirty_urgent(&mut self) {
        self.mark_dirty();
        self.durable_before = self.version;
    }
}
