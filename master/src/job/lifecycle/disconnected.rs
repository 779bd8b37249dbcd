//! Workers whose control stream ended.
//!
//! A stream ends when its worker dies, and also when something between the worker and this master
//! resets it, when a cut network lasts longer than the keepalive, and when the master changes. In
//! the last three cases the worker continues to train, and searches for its master until
//! `master_timeout`. So a worker without a stream is *disconnected*, and it counts as lost only on
//! further evidence:
//!
//! ```text
//!                 ┌─ Connected{resume} ──► reconnected ── Reconnected ──► as before
//!  stream ended ─► disconnected
//!                 ├─ its process ended, or a member reports its link as broken ──► lost at once
//!                 ├─ the group is stalled: `reconnect_wait` after the stream's end ──► lost
//!                 ├─ the group ends: `reconnect_wait` after its first final report ──► lost
//!                 └─ `master_timeout` after the stream's end (it has ended by itself) ──► lost
//! ```
//!
//! While a member is disconnected no generation is published, because it could not receive the
//! membership.
//!
//! **Lost reports.** Messages may be lost with the stream, in both directions, so a reconnected
//! worker repeats what the master may have missed. The lowest rank reports what its group commits;
//! after it reconnects it sends the whole ledger, which replaces the master's.

use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::removal::ZOMBIE_GRACE;
use crate::job::action::{Action, MasterMessage};
use crate::job::event::{ConnectionId, LaunchId, Resume};
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::time::Time;
use crate::job::workers::state::{Disconnected, Stage};
use crate::job::workers::table::launch_of;

impl Job {
    pub(crate) fn on_disconnected(&mut self, now: Time, worker: WorkerId) {
        if self.may_return(worker) {
            self.disconnect(now, worker);
        } else {
            self.forget_with_pod(now, worker, ZOMBIE_GRACE);
        }
        self.reconcile(now);
    }

    /// Whether a worker whose stream ended is expected to reconnect.
    fn may_return(&self, worker: WorkerId) -> bool {
        let Some(launch) = self.workers.get_launch(launch_of(worker)) else { return false };
        let Some(w) = launch.worker() else { return false };
        let goes = w.is_released() || self.group.has_finished(worker) || launch.is_killed();
        self.lifecycle.is_active() && self.spec.options.work.trains() && !goes
    }

    fn disconnect(&mut self, now: Time, worker: WorkerId) {
        if !self.workers.disconnect(now, worker) {
            return;
        }
        self.out.mark_dirty();
        self.lifecycle.forget_worker(worker);
        self.reassign_describer();
        self.log_event(format!("worker {worker} is disconnected"));
        if self.group.is_suspected(worker) {
            self.evict_disconnected(now, launch_of(worker));
        }
    }

    /// Handles a member's report that its link to `suspect` broke. If the suspect is disconnected
    /// too, it is lost.
    pub(crate) fn evict_suspect(&mut self, now: Time, suspect: WorkerId) {
        let launch = launch_of(suspect);
        let is_member = |d: Disconnected| d.rank.is_some() && d.last_known.is_some();
        if self.workers.get_disconnected(launch).is_some_and(is_member) {
            self.evict_disconnected(now, launch);
        }
    }

    /// Sets the timer for the next disconnected worker that does not reconnect in time.
    pub(crate) fn watch_reconnections(&mut self, now: Time) {
        self.out.cancel_timer(Timer::Reconnect);
        if !self.workers.has_disconnected() {
            return;
        }
        let is_group_stalled = self.is_group_stalled(now, Time::default());
        let deadlines = self.workers.disconnected();
        let due = deadlines.map(|(_, d)| self.reconnect_deadline(d, is_group_stalled)).min();
        if let Some(due) = due {
            self.out.set_timer(due.max(now), Timer::Reconnect);
        }
    }

    /// When a disconnected worker is lost.
    fn reconnect_deadline(&self, disconnected: &Disconnected, is_group_stalled: bool) -> Time {
        // A group that ends makes no more steps, which would show that members are alive.
        let finishing_since = self.group.finishing_since();
        let shows_members = self.spec.options.work.trains() && finishing_since.is_none();
        let is_member = disconnected.rank.is_some();
        let wait = if is_member && shows_members && !is_group_stalled {
            self.spec.master_timeout + RECONNECT_SLACK
        } else if let Some(known) = disconnected.last_known.filter(|_| !is_member) {
            self.silence_max(known.stage, self.reconnect_wait(), JOINER_WAIT)
        } else {
            self.reconnect_wait()
        };
        disconnected.since.max(finishing_since.unwrap_or_default()) + wait
    }

    /// How long to wait for a worker without evidence that it is alive. Workers search for their
    /// master at least once a second; a worker that is stopped for less than the timeout must get
    /// its chance.
    fn reconnect_wait(&self) -> Duration {
        let silence = self.spec.options.worker_timeout.unwrap_or_default();
        (silence + RECONNECT_SLACK).max(RECONNECT_WAIT_MIN)
    }

    /// Whether the group can't be changed yet, because members may still reconnect.
    pub(crate) fn awaits_members(&self) -> bool {
        (self.lifecycle.takeover.is_some() && self.workers.has_disconnected())
            || self.workers.has_disconnected_members()
            || (self.group.is_broken() && self.workers.disconnected().any(|(_, d)| d.is_reserve()))
    }

    /// Evicts workers that have not reconnected in time.
    pub(crate) fn on_reconnect_due(&mut self, now: Time) {
        let is_group_stalled = self.is_group_stalled(now, Time::default());
        let is_due = |d: &Disconnected| self.reconnect_deadline(d, is_group_stalled) <= now;
        let due: Vec<LaunchId> =
            self.workers.disconnected().filter(|(_, d)| is_due(d)).map(|(id, _)| id).collect();
        for launch in due {
            let Some(l) = self.workers.get_launch(launch) else { continue };
            let Some(disconnected) = l.disconnected() else { continue };
            let is_member = disconnected.rank.is_some();
            if !l.has_registered() && !is_member {
                // It may never have connected.
                self.forget_disconnected(launch);
                continue;
            }
            self.log_event(format!("worker {} has not reconnected and is evicted", launch.0));
            if is_member {
                self.group.note_hung();
            }
            self.forget_disconnected(launch);
            self.release_rest_of_pod(now, launch);
            self.kill_unresponsive(now, launch);
        }
        self.reconcile(now);
    }

    /// Handles the hello of a worker whose earlier stream, to this or a previous master, had ended.
    pub(crate) fn on_reconnected(
        &mut self,
        now: Time,
        connection: ConnectionId,
        launch: LaunchId,
        address: SocketAddr,
        pid: u32,
        resume: Resume,
    ) {
        let is_of_launch = launch_of(resume.worker) == launch;
        if is_of_launch && self.may_return(resume.worker) {
            // Its old stream is dead, and its end has not been noticed yet.
            self.disconnect(now, resume.worker);
        }
        if !is_of_launch || self.workers.get_disconnected(launch).is_none() {
            self.raise_generation_floor(resume.generation());
            let reason = "this master has given this worker up, or never knew it";
            if is_of_launch && self.workers.get_launch(launch).is_some_and(|l| !l.has_registered())
            {
                // The master that welcomed it could not persist that before it died. So the exit of
                // this worker is no failure.
                self.expect_exit(now, launch);
            }
            return self.out.push(Action::Refuse { connection, reason: reason.into() });
        }
        if let Err(reason) = self.check_resume(now, launch, &resume) {
            return self.refuse_reconnection(now, connection, launch, reason);
        }
        if resume.membership.is_none() {
            self.workers.note_joiner(launch);
        }
        let Some(disconnected) = self.workers.get_disconnected(launch) else { return };
        let Some(worker) = self.workers.readmit(now, launch, address, pid) else { return };
        if resume.holds_state
            && disconnected.rank.is_some()
            && let Some(w) = self.workers.get_mut(worker)
        {
            w.hold_state();
        }
        self.reporting.lifetimes.connect(now, worker);
        if let Some(parameters) = resume.parameters {
            self.data.expect_parameters(parameters);
        }
        self.out.mark_dirty();
        self.watch_heartbeats(now);
        self.out.push(Action::Admit { connection, worker });
        match disconnected {
            Disconnected { rank: Some(_), .. } => self.on_member_reconnected(worker, &resume),
            d if d.is_reserve() => self.on_reserve_reconnected(now, worker, &resume),
            _ => self.on_joiner_reconnected(worker, &resume),
        }
        self.on_awaited_returned(now);
    }

    /// Checks whether a disconnected worker can continue with this master.
    fn check_resume(
        &mut self,
        now: Time,
        launch: LaunchId,
        resume: &Resume,
    ) -> Result<(), &'static str> {
        if let Some(newer) =
            resume.membership.as_ref().filter(|m| m.generation > self.group.generation())
            && !self.adopt_membership(now, newer)
        {
            self.raise_generation_floor(resume.generation());
            return Err("this master continues with another group");
        }
        // The membership may have changed its rank.
        let disconnected = self.workers.get_disconnected(launch).unwrap_or_default();
        let is_ready = disconnected.rank.is_some() || resume.parameters.is_some();
        let known = self.data.parameters();
        if known.is_some() && is_ready && resume.parameters != known {
            return Err("its model is not that of the others");
        }
        let was_known = disconnected.rank.is_some() || disconnected.last_known.is_some();
        let is_prepared = resume.parameters.is_some() && self.data.files().is_some();
        let may_join =
            self.spec.options.work.trains() && is_prepared && disconnected.joined.is_none();
        if resume.membership.is_none() && !was_known && !may_join {
            // Restarting it loses little work.
            return Err("it was no member yet; another takes its place");
        }
        Ok(())
    }

    fn on_member_reconnected(&mut self, worker: WorkerId, resume: &Resume) {
        self.send_newer_membership(worker, resume);
        let w = self.workers.get_mut(worker).expect("it was just admitted");
        w.join(self.group.generation());
        self.send_joiners(worker);
        if self.lifecycle.is_stopping() {
            self.send(worker, MasterMessage::Drain);
        }
        // Its request may have been lost with the stream.
        self.lifecycle.suspended_generation = None;
        // Its reports since its stream ended were lost.
        self.group.note_lost_reports(worker);
        if let Some(takeover) = &mut self.lifecycle.takeover {
            return takeover.await_step(worker);
        }
        self.log_event(format!("worker {worker} is connected again"));
    }

    /// Handles the reconnection of a worker that the newest group does without.
    fn on_reserve_reconnected(&mut self, now: Time, worker: WorkerId, resume: &Resume) {
        self.send_newer_membership(worker, resume);
        let w = self.workers.get_mut(worker).expect("it was just admitted");
        w.join(resume.generation());
        if resume.holds_state {
            w.hold_state();
        }
        self.hold_in_reserve(now, &[worker]);
        if self.group.is_formed() {
            self.release_reserve(now);
        } else if self.lifecycle.is_stopping() {
            self.send(worker, MasterMessage::Drain);
        }
    }

    /// Handles the reconnection of a worker that is no member yet. Messages in both directions may
    /// have been lost.
    fn on_joiner_reconnected(&mut self, worker: WorkerId, resume: &Resume) {
        self.log_event(format!("worker {worker} is connected again"));
        let w = self.workers.get_mut(worker).expect("it was just admitted");
        match w.stage() {
            Stage::Joining | Stage::Describing | Stage::Preparing
                if resume.parameters.is_none() =>
            {
                w.set_stage(Stage::Joining);
                self.welcome(worker);
            }
            // It reports again that it is ready.
            Stage::Joining | Stage::Describing | Stage::Preparing => w.set_stage(Stage::Preparing),
            Stage::Fetching => {
                let donors = self.donors(worker);
                if !donors.is_empty() {
                    self.send_fetch(worker, donors);
                }
            }
            Stage::Ready | Stage::Member { .. } => {}
        }
        if self.lifecycle.is_stopping() {
            self.send(worker, MasterMessage::release("the job is stopping"));
        }
    }

    fn send_newer_membership(&mut self, worker: WorkerId, resume: &Resume) {
        let published = self.group.published().filter(|m| m.generation > resume.generation());
        if let Some(membership) = published.cloned() {
            self.send(worker, MasterMessage::Membership(membership));
        }
    }

    /// Handles the first message of a worker that has reconnected: the steps that its state
    /// contains.
    pub(crate) fn on_returned(&mut self, now: Time, worker: WorkerId, step: u64) {
        let Some(takeover) = &mut self.lifecycle.takeover else { return };
        if takeover.awaits_step_of(worker) {
            takeover.note_step(worker, step);
            self.try_finish_takeover(now);
        }
    }
}

/// Time for a worker that found no master to end, and for its exit to become known.
pub(crate) const RECONNECT_SLACK: Duration = Duration::from_secs(2);
/// A worker without a master searches for one once a second, and then its hello has to arrive.
const RECONNECT_WAIT_MIN: Duration = Duration::from_secs(3);
/// A disconnected joiner holds no member up.
const JOINER_WAIT: Duration = Duration::from_secs(10);
