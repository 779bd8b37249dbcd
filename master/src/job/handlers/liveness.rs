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
//! [`disconnected`](crate::job::lifecycle::disconnected).
//!
//! **Stalls.** A network that drops the packets between two workers breaks no link and stops no
//! heartbeat: both workers reach the master, and the whole ring waits. See
//! [`stall`](crate::job::group::stall). A member that never finishes its part of a step stops no
//! heartbeat either: see [`hung`](super::hung). If its thread stands still inside the ring, its
//! heartbeats go on reporting a wait, at links that the others have left.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::{LimitingLink, LinkPace, WorkerId};

use crate::job::event::{Heartbeat, Stall};
use crate::job::job::Job;
use crate::job::lifecycle::disconnected::RECONNECT_SLACK;
use crate::job::outbox::Timer;
use crate::job::time::Time;
use crate::job::workers::heartbeat::Stalled;
use crate::job::workers::state::{Launch, Stage, Worker};
use crate::job::workers::table::launch_of;

impl Job {
    /// Handles a heartbeat, which reports whether the worker waits for its neighbours, and where.
    ///
    /// The lowest rank reports that a group has formed. If it dies before, the others' heartbeats
    /// tell that they hold a state.
    pub(crate) fn on_heartbeat(&mut self, now: Time, worker: WorkerId, heartbeat: Heartbeat) {
        let interval = self.spec.options.heartbeat().unwrap_or_default();
        let newest = (self.group.is_formed() && !self.group.is_broken()).then(|| self.data.step());
        let Some(w) = self.workers.get_mut(worker) else { return };
        w.note_stall(now, heartbeat.stall, interval);
        w.usage = heartbeat.usage.or(w.usage);
        if let Some(pace) = heartbeat.link_pace {
            self.note_link_pace(now, worker, pace);
        }
        let Some(w) = self.workers.get_mut(worker) else { return };
        let lagged = w.lags(now);
        heartbeat.step.into_iter().for_each(|step| w.note_step(now, step, newest));
        if lagged && !w.lags(now) {
            return self.reconcile(now);
        }
        if heartbeat.holds_state && w.is_member() && !w.holds_state() {
            w.hold_state();
            self.out.mark_dirty();
            self.reconcile(now);
        }
    }

    /// Notes the link of a worker, and compares the links of all members now and then.
    fn note_link_pace(&mut self, now: Time, worker: WorkerId, pace: LinkPace) {
        if ![worker, pace.to].iter().all(|&id| self.workers.is_member(id)) {
            return;
        }
        let generation = self.group.generation();
        if !self.lifecycle.slow_links.note(now, generation, worker, pace) {
            return;
        }
        let slowest = self.lifecycle.slow_links.slowest(|id| self.node_of(id));
        let awaits = |link: &LimitingLink| {
            let sender = self.workers.get(link.from);
            sender.and_then(|w| w.pace().last()).is_some_and(|last| last.awaits_network())
        };
        let link = slowest.filter(awaits);
        for line in self.lifecycle.slow_links.find(now, link) {
            self.log_event(line);
        }
    }

    /// Sets the timer of the next heartbeat check, as long as there are workers.
    pub(crate) fn watch_heartbeats(&mut self, now: Time) {
        if let Some(timeout) = self.spec.options.worker_timeout
            && self.workers.connected().next().is_some()
            && !self.out.has_timer(Timer::HeartbeatCheck)
        {
            self.out.set_timer(now + check_interval(timeout), Timer::HeartbeatCheck);
        }
    }

    /// Evicts silent workers that the ring shows to be lost. `at` is the time at which the check
    /// was due.
    pub(crate) fn on_heartbeat_check(&mut self, now: Time, at: Time) {
        let Some(timeout) = self.spec.options.worker_timeout else { return };
        if !self.lifecycle.is_active() {
            return;
        }
        // This master itself did not run for a while, so messages that workers sent meanwhile have
        // not been read yet; or it was cut off from all workers, and hears the first of them again.
        let was_cut_off = self.workers.was_cut_off(now, timeout);
        if was_cut_off || now.since(at) > check_interval(timeout) {
            self.workers.connected_mut().for_each(|(_, w)| w.excuse_silence(now));
            self.group.note_progress(now);
        }
        let lost: Vec<(WorkerId, Duration)> = self
            .workers
            .connected()
            .filter_map(|(id, w)| Some((id, self.lost_after(w, now, timeout)?)))
            .collect();
        for (worker, silence) in lost {
            // The eviction of another worker of its pod ends it, too.
            if self.workers.get_launch(launch_of(worker)).is_some_and(Launch::is_killed) {
                continue;
            }
            self.evict(now, worker, &format!("was silent for {} ms", silence.as_millis()));
        }
        self.check_for_stalls(now, timeout);
        self.check_for_hung(now);
        self.watch_heartbeats(now);
        self.reconcile(now);
    }

    /// Evicts workers that the network has cut off from their neighbours, if all members wait for
    /// longer than the timeout and all were heard recently. (Silent members are judged by the
    /// heartbeat check.)
    fn check_for_stalls(&mut self, now: Time, timeout: Duration) {
        let is_broken = self.group.is_broken() || self.group.awaits_explanation();
        // A disconnected member can't report where it waits.
        if is_broken || self.workers.has_disconnected_members() {
            return;
        }
        let Some(Stuck { waiting, behind }) = self.stuck(now, timeout) else { return };
        self.reporting.count_stall();
        let generation = self.group.generation();
        let ms = timeout.as_millis();
        if behind.is_empty() {
            self.log_event(format!(
                "generation {generation}: all members have waited for each other for {ms} ms"
            ));
            return self.evict_for(now, self.group.stalling_links(&waiting));
        }
        for worker in behind {
            let why = format!("has not left the links before generation {generation} for {ms} ms");
            self.evict(now, worker, &why);
        }
    }

    /// The members that wait, if no member computes; `None` while the group may still make
    /// progress.
    fn stuck(&self, now: Time, timeout: Duration) -> Option<Stuck> {
        let heartbeat = self.spec.options.heartbeat()?;
        let mut stuck = Stuck::default();
        for id in self.taking_part().filter(|&id| !self.group.has_finished(id)) {
            let stalled = self.workers.get(id)?.stalled()?;
            if !stalled.is_long(now, timeout, heartbeat) {
                return None;
            } else if self.group.is_stall_of(stalled.stall()) {
                stuck.waiting.insert(id, *stalled.stall());
            } else {
                stuck.behind.push(id);
            }
        }
        (!stuck.waiting.is_empty()).then_some(stuck)
    }

    /// Whether all members that are heard are stalled: they wait for those that are not, at links
    /// or with their final reports, or their group is broken. `false` if no member is heard.
    /// Heartbeats older than `after` are ignored.
    pub(crate) fn is_group_stalled(&self, now: Time, after: Time) -> bool {
        let is_broken = self.group.is_broken() || self.group.awaits_explanation();
        let (Some(timeout), Some(heartbeat)) =
            (self.spec.options.worker_timeout, self.spec.options.heartbeat())
        else {
            return is_broken && self.taking_part().next().is_some();
        };
        let heard = || {
            let workers = self.taking_part().filter_map(|id| Some((id, self.workers.get(id)?)));
            workers.filter(|(_, w)| w.is_heard(now, heartbeat))
        };
        if !self.spec.options.work.trains() || heard().next().is_none() {
            return false;
        }
        if is_broken {
            return true;
        }
        let long = (timeout / 2).max(self.longest_step());
        let waits = |s: &Stalled| {
            self.group.is_stall_of(s.stall()) && s.stall().since >= long && s.last() >= after
        };
        let await_reports =
            self.group.finishing_since().is_some_and(|since| now.since(since) >= timeout);
        let has_finished = |id| await_reports && self.group.has_finished(id);
        heard().all(|(id, w)| has_finished(id) || w.stalled().is_some_and(waits))
    }

    /// The longest usual compute time of a step among the members.
    pub(super) fn longest_step(&self) -> Duration {
        let here = self.workers.members().filter_map(|(_, w)| w.pace().usual_us());
        let disconnected = self.workers.disconnected().filter_map(|(_, d)| d.last_known?.usual_us);
        Duration::from_micros(here.chain(disconnected).max().unwrap_or_default())
    }

    /// How long a worker has been silent, if it is lost.
    fn lost_after(&self, w: &Worker, now: Time, timeout: Duration) -> Option<Duration> {
        let silence = now.since(w.heard());
        let heartbeat = self.spec.options.heartbeat().unwrap_or_default();
        if silence <= timeout + heartbeat {
            return None;
        }
        // A worker without a master ends by itself.
        let until_its_end = self.spec.master_timeout.max(timeout) + RECONNECT_SLACK;
        let is_cut_off = !self.workers.connected().any(|(_, w)| w.is_heard(now, heartbeat));
        let may_hold_up = w.is_member() || w.is_reserve() || w.is_released();
        let limit = if is_cut_off {
            until_its_end
        } else if !self.spec.options.work.trains() {
            timeout + heartbeat
        } else if !may_hold_up {
            // A worker that is no member holds no other worker up.
            self.silence_max(w.stage(), timeout, JOINER_SILENCE_MAX) + heartbeat
        } else if self.is_group_stalled(now, w.heard() + timeout + heartbeat) {
            // A worker that stops just before its next heartbeat has already been silent for one
            // interval.
            timeout + heartbeat
        } else {
            until_its_end
        };
        (silence > limit).then_some(silence)
    }

    /// How long a worker that is no member may be silent: at least `usual`, unless it is a spare
    /// for which a group that trains has room, and which keeps the slot of one that would join.
    pub(crate) fn silence_max(&self, stage: Stage, timeout: Duration, usual: Duration) -> Duration {
        let is_missed = stage == Stage::Ready
            && self.workers.members().any(|(_, w)| w.stays() && w.holds_state())
            && self.has_room();
        if is_missed { timeout } else { timeout.max(usual) }
    }
}

/// Members that wait, when none computes.
#[derive(Default)]
struct Stuck {
    waiting: BTreeMap<WorkerId, Stall>,
    /// Those that still wait at links that were aborted while the others waited: their trainer
    /// threads do not run.
    behind: Vec<WorkerId>,
}

/// The interval between heartbeat checks, and so the maximum delay of an eviction.
fn check_interval(timeout: Duration) -> Duration {
    timeout / 20
}

/// How long a worker that is no member yet may be silent.
const JOINER_SILENCE_MAX: Duration = Duration::from_secs(10);
