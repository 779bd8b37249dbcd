//! Liveness: which workers without heartbeats are lost.
//!
//! Missing heartbeats have two possible causes: the worker is stopped or cut off, or this master is
//! (its network failed, or it was stopped itself). The ring tells them apart, because every
//! heartbeat reports whether its worker waits for its neighbours:
//!
//! | members heard recently | a silent member is |
//! |---|---|
//! | none | not judged: this master is cut off from all members |
//! | some, and one of them makes progress | alive: no step is committed without it |
//! | some, and all of them wait, or their group is broken | evicted |
//!
//! Silence during which no worker was heard is this master's own: when it hears one again, the
//! silence of the others begins anew.
//!
//! A member may wait for a silent one that computes for a long time, so its wait has to exceed the
//! longest usual step. A worker's control thread sends heartbeats while its model computes: a slow
//! worker is not silent.
//!
//! The same evidence decides about members whose stream ended; see
//! [`disconnected`](crate::job::handlers::disconnected).

use std::time::Duration;

use elasticdl_proto::WorkerId;

use crate::job::handlers::stall::Stalled;
use crate::job::job::{Job, Phase};
use crate::job::outbox::Timer;
use crate::job::time::Time;
use crate::job::workers::table::Worker;

impl Job {
    /// Sets the timer of the next heartbeat check, as long as there are workers.
    pub(crate) fn watch_heartbeats(&mut self, now: Time) {
        if let Some(timeout) = self.spec.worker_timeout
            && !self.workers.connected.is_empty()
            && !self.out.has_timer(Timer::HeartbeatCheck)
        {
            self.out.set_timer(now + check_interval(timeout), Timer::HeartbeatCheck);
        }
    }

    /// Evicts silent workers that the ring shows to be lost. `at` is the time at which the check
    /// was due.
    pub(crate) fn on_heartbeat_check(&mut self, now: Time, at: Time) {
        let Some(timeout) = self.spec.worker_timeout else { return };
        if !matches!(self.phase, Phase::Running | Phase::Stopping) {
            return;
        }
        // This master itself did not run for a while, so messages that workers sent meanwhile have
        // not been read yet; or it was cut off from all workers, and hears the first of them again.
        let was_cut_off = self.was_cut_off(now, timeout);
        if was_cut_off || now.0.saturating_sub(at.0) > check_interval(timeout) {
            for w in self.workers.connected.values_mut() {
                (w.heard, w.stalled) = (now, None);
            }
        }
        let lost: Vec<(WorkerId, Duration)> = self
            .workers
            .connected
            .iter()
            .filter_map(|(&id, w)| Some((id, self.lost_after(w, now, timeout)?)))
            .collect();
        for (worker, silence) in lost {
            self.evict(now, worker, &format!("was silent for {} ms", silence.as_millis()));
        }
        self.check_for_stalls(now, timeout);
        self.watch_heartbeats(now);
        self.reconcile(now);
    }

    /// Whether all workers had been silent for longer than `timeout`, and one is heard again.
    fn was_cut_off(&mut self, now: Time, timeout: Duration) -> bool {
        let last = self.workers.connected.values().map(|w| w.heard).max().unwrap_or_default();
        let is_cut_off = now.0.saturating_sub(last.0) > timeout;
        std::mem::replace(&mut self.is_cut_off, is_cut_off) && !is_cut_off
    }

    /// Whether all members that are heard are stalled: they wait for those that are not, or their
    /// group is broken. `false` if no member is heard. Heartbeats older than `after` are ignored.
    pub(crate) fn is_group_stalled(&self, now: Time, after: Time) -> bool {
        let (Some(timeout), Some(heartbeat)) = (self.spec.worker_timeout, self.spec.heartbeat())
        else {
            let is_broken = self.group.is_broken() || self.group.broken.is_some();
            return is_broken && self.taking_part().next().is_some();
        };
        let heard = || {
            self.taking_part()
                .map(|id| &self.workers.connected[&id])
                .filter(|w| w.is_heard(now, heartbeat))
        };
        if !self.spec.work.trains() || heard().next().is_none() {
            return false;
        }
        if self.group.is_broken() || self.group.broken.is_some() {
            return true;
        }
        let long = (timeout / 2).max(self.longest_step());
        let waits =
            |s: Stalled| self.is_of_group(&s) && s.since_last_byte() >= long && s.last() >= after;
        heard().all(|w| w.stalled.is_some_and(waits))
    }

    /// The longest usual compute time of a step among the members.
    fn longest_step(&self) -> Duration {
        let here = self.workers.members().filter_map(|(_, w)| w.pace.usual_us());
        let disconnected =
            self.workers.launches.values().filter_map(|l| l.disconnected?.last_known?.usual_us);
        Duration::from_micros(here.chain(disconnected).max().unwrap_or_default())
    }

    /// How long a worker has been silent, if it is lost.
    fn lost_after(&self, w: &Worker, now: Time, timeout: Duration) -> Option<Duration> {
        let silence = now.0.saturating_sub(w.heard.0);
        let heartbeat = self.spec.heartbeat().unwrap_or_default();
        if silence <= timeout + heartbeat {
            return None;
        }
        // A worker that stops just before its next heartbeat has already been silent for one
        // interval.
        let limit = match (w.rank.is_some() || w.released, self.spec.work.trains()) {
            (true, true) if self.is_group_stalled(now, w.heard + timeout + heartbeat) => {
                timeout + heartbeat
            }
            // A worker without a master ends by itself.
            (true, true) => self.spec.master_timeout.max(timeout) + RECONNECT_SLACK,
            // A worker that is no member holds no other worker up.
            (false, true) => timeout.max(JOINER_SILENCE_MAX) + heartbeat,
            (_, false) => timeout + heartbeat,
        };
        let heard = |other: &Worker| other.is_heard(now, heartbeat);
        let is_cut_off = !self.workers.connected.values().any(heard);
        let limit = if is_cut_off {
            self.spec.master_timeout.max(timeout) + RECONNECT_SLACK
        } else {
            limit
        };
        (silence > limit).then_some(silence)
    }
}

impl Worker {
    /// Whether its last heartbeats came in time.
    pub(crate) fn is_heard(&self, now: Time, heartbeat: Duration) -> bool {
        is_fresh(self.heard, now, heartbeat)
    }
}

/// Whether a worker that was heard at `heard` is not silent.
pub(crate) fn is_fresh(heard: Time, now: Time, heartbeat: Duration) -> bool {
    now.since(heard) <= heartbeat * FRESH_HEARTBEATS
}

/// The interval between heartbeat checks, and so the maximum delay of an eviction.
fn check_interval(timeout: Duration) -> Duration {
    timeout / 20
}

/// A worker that was heard within this many heartbeat intervals is not silent.
const FRESH_HEARTBEATS: u32 = 2;
/// How long a worker that is no member yet may be silent.
const JOINER_SILENCE_MAX: Duration = Duration::from_secs(10);
/// Time for a worker that found no master to end, and for its exit to become known.
pub(crate) const RECONNECT_SLACK: Duration = Duration::from_secs(2);
