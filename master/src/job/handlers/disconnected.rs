//! Workers whose control stream ended.
//!
//! A stream ends when its worker dies, and also when something between the worker and this master
//! resets it, when a cut network lasts longer than the keepalive, and when the master changes. In
//! the last three cases the worker continues to train, and searches for its master until
//! `master_timeout`. So a worker without a stream is *disconnected*, and it counts as lost only on
//! further evidence:
//!
//! ```text
//!                 ┌─ Connected{resume} ──► reconnected ── HeldLeases ──► as before
//!  stream ended ─► disconnected
//!                 ├─ its process ended, or a member reports its link as broken ──► lost at once
//!                 ├─ the group is stalled: `reconnect_wait` after the stream's end ──► lost
//!                 └─ `master_timeout` after the stream's end (it has ended by itself) ──► lost
//! ```
//!
//! While a member is disconnected no generation is published, because it could not receive the
//! membership.
//!
//! **Leases of a reconnected worker.** The master retains a disconnected worker's leases. Messages
//! may have been lost with the stream, so the worker reports its step and the leases that it holds.
//! Of the leases that it does not name, some are in steps up to its own, and the others never
//! arrived. Once the group's ledger has reached the worker's step, those that are not absorbed
//! never arrived, and are leased again.
//!
//! **Lost reports.** The lowest rank reports what its group commits. After it reconnects it sends
//! the whole ledger, which replaces the master's.

use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{RecordRange, WorkerId};

use crate::job::action::{Action, ToWorker};
use crate::job::event::{ConnectionId, LaunchId, Resume};
use crate::job::handlers::liveness::RECONNECT_SLACK;
use crate::job::job::{Job, Phase, ZOMBIE_GRACE};
use crate::job::outbox::Timer;
use crate::job::time::Time;
use crate::job::workers::table::{Disconnected, Stage};

/// A worker that reconnected to the same master.
#[derive(Debug, Default)]
pub(crate) enum Reconnected {
    /// It has not reported what it holds.
    #[default]
    AwaitingHoldings,
    /// It has reported what it holds.
    Reported {
        /// Steps that its state contains.
        step: u64,
        /// Leases that its report did not name, while it is unknown whether they are absorbed.
        unaccounted: Vec<RecordRange>,
    },
}

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
        let Some(w) = self.workers.connected.get(&worker) else { return false };
        let is_wanted = self.workers.launches.get(&w.launch).is_some_and(|l| !l.killed);
        let goes = w.released || self.group.finished.contains_key(&worker);
        let is_on = matches!(self.phase, Phase::Running | Phase::Stopping);
        is_on && self.spec.work.trains() && is_wanted && !goes
    }

    fn disconnect(&mut self, now: Time, worker: WorkerId) {
        let Some(launch) = self.workers.disconnect(now, worker) else { return };
        self.out.mark_dirty();
        if let Some(takeover) = &mut self.takeover {
            takeover.awaiting_holdings.remove(&worker);
            takeover.steps.remove(&worker);
        }
        self.reconnected.remove(&worker);
        self.count_eligible();
        self.reassign_describer(worker);
        self.log_event(format!("worker {worker} is disconnected"));
        let broken = self.group.broken.as_ref();
        if broken.is_some_and(|b| {
            b.suspects.contains(&worker) || b.unanswered.iter().any(|s| s.1 == worker)
        }) {
            self.evict_disconnected(now, launch);
        }
    }

    /// Handles a member's report that its link to `suspect` broke. If the suspect is disconnected
    /// too, it is lost.
    pub(crate) fn evict_suspect(&mut self, now: Time, suspect: WorkerId) {
        let launch = LaunchId(suspect.0);
        let disconnected = self.workers.launches.get(&launch).and_then(|l| l.disconnected);
        if disconnected.is_some_and(|disconnected| {
            disconnected.rank.is_some() && disconnected.last_known.is_some()
        }) {
            self.evict_disconnected(now, launch);
        }
    }

    /// Sets the timer for the next disconnected worker that does not reconnect in time.
    pub(crate) fn watch_reconnections(&mut self, now: Time) {
        self.out.cancel_timer(Timer::Reconnect);
        if self.workers.disconnected().next().is_none() {
            return;
        }
        let is_group_stalled = self.is_group_stalled(now, Time::default());
        if let Some(due) = self
            .workers
            .disconnected()
            .map(|launch| self.reconnect_deadline(launch, is_group_stalled))
            .min()
        {
            self.out.set_timer(due.max(now), Timer::Reconnect);
        }
    }

    /// When a disconnected worker is lost.
    fn reconnect_deadline(&self, launch: LaunchId, is_group_stalled: bool) -> Time {
        let disconnected = self.workers.launches[&launch].disconnected.unwrap_or_default();
        // A group that ends makes no more steps, which would show that members are alive.
        let shows_members = self.spec.work.trains() && self.group.finished.is_empty();
        let is_waited_for = disconnected.rank.is_some() && shows_members && !is_group_stalled;
        let wait =
            match (is_waited_for, disconnected.rank.is_none() && disconnected.last_known.is_some())
            {
                (true, _) => self.spec.master_timeout + RECONNECT_SLACK,
                (false, true) => self.reconnect_wait().max(JOINER_WAIT),
                (false, false) => self.reconnect_wait(),
            };
        disconnected.since + wait
    }

    /// How long to wait for a worker without evidence that it is alive. Workers search for their
    /// master at least once a second; a worker that is stopped for less than the timeout must get
    /// its chance.
    fn reconnect_wait(&self) -> Duration {
        let silence = self.spec.worker_timeout.unwrap_or_default();
        (silence + RECONNECT_SLACK).max(RECONNECT_WAIT_MIN)
    }

    /// Whether the group can't be changed yet, because members may still reconnect.
    pub(crate) fn awaits_members(&self) -> bool {
        let any = self.takeover.is_some() && self.workers.disconnected().next().is_some();
        any || self.workers.disconnected_members().next().is_some()
    }

    /// Evicts workers that have not reconnected in time.
    pub(crate) fn on_reconnect_due(&mut self, now: Time) {
        let is_group_stalled = self.is_group_stalled(now, Time::default());
        let due = |launch: &LaunchId| self.reconnect_deadline(*launch, is_group_stalled) <= now;
        for launch in self.workers.disconnected().filter(due).collect::<Vec<_>>() {
            let l = &self.workers.launches[&launch];
            let Some(disconnected) = l.disconnected else { continue };
            if l.worker.is_none() && disconnected.rank.is_none() {
                // It may never have connected.
                self.forget_disconnected(launch);
                continue;
            }
            self.log_event(format!("worker {} has not reconnected and is evicted", launch.0));
            self.group.hung |= disconnected.rank.is_some();
            self.forget_disconnected(launch);
            self.release_rest_of_pod(now, launch);
            self.kill(launch);
        }
        self.reconcile(now);
    }

    /// Evicts a disconnected worker whose links broke too.
    fn evict_disconnected(&mut self, now: Time, launch: LaunchId) {
        self.log_event(format!("worker {} is lost: its stream and its links ended", launch.0));
        self.forget_disconnected(launch);
        self.release_rest_of_pod(now, launch);
        // A process that dies takes its stream and links down before its exit is known.
        self.out.set_timer(now + self.exit_wait(ZOMBIE_GRACE), Timer::Kill(launch));
    }

    /// Forgets a disconnected worker that does not reconnect.
    pub(crate) fn forget_disconnected(&mut self, launch: LaunchId) {
        let Some(l) = self.workers.launches.get_mut(&launch) else {
            return;
        };
        let Some(disconnected) = l.disconnected.take() else { return };
        let in_order = l.leaving || l.retired || disconnected.last_known.is_some_and(|k| k.leaving);
        let worker = WorkerId(launch.0);
        if let Some(leases) = &mut self.leases {
            leases.forget(worker);
        }
        self.out.mark_dirty();
        if disconnected.rank.is_some() {
            if in_order { &mut self.group.left } else { &mut self.group.lost }.push(worker);
        }
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
        if self.may_return(resume.worker) && resume.worker.0 == launch.0 {
            // Its old stream is dead, and its end has not been noticed yet.
            self.disconnect(now, resume.worker);
        }
        let disconnected = self.workers.launches.get(&launch).and_then(|l| l.disconnected);
        let generation = resume.generation();
        let Some(disconnected) = disconnected.filter(|_| resume.worker.0 == launch.0) else {
            self.raise_generation_floor(generation);
            let reason = "this master has given this worker up, or never knew it";
            return self.out.push(Action::Refuse { connection, reason: reason.into() });
        };
        if let Some(newer) =
            resume.membership.as_ref().filter(|m| m.generation > self.group.generation)
            && !self.adopt_membership(now, newer)
        {
            self.raise_generation_floor(generation);
            return self.refuse_reconnection(
                now,
                connection,
                launch,
                "this master continues with another group",
            );
        }
        let disconnected = self.workers.launches[&launch].disconnected.unwrap_or(disconnected);
        let is_ready = disconnected.rank.is_some() || resume.parameters.is_some();
        if self.parameters.is_some() && is_ready && resume.parameters != self.parameters {
            return self.refuse_reconnection(
                now,
                connection,
                launch,
                "its model is not that of the others",
            );
        }
        if resume.membership.is_none()
            && disconnected.rank.is_none()
            && disconnected.last_known.is_none()
        {
            // Restarting it loses little work.
            return self.refuse_reconnection(
                now,
                connection,
                launch,
                "it was no member yet; another takes its place",
            );
        }
        let Some(worker) = self.workers.readmit(now, launch, address, pid) else { return };
        if disconnected.rank.is_some() {
            self.parameters = self.parameters.or(resume.parameters);
        }
        self.out.mark_dirty();
        self.count_eligible();
        self.watch_heartbeats(now);
        self.out.push(Action::Admit { connection, worker });
        match disconnected {
            Disconnected { rank: Some(_), .. } => self.on_member_reconnected(worker, &resume),
            Disconnected { last_known: Some(_), .. } => self.on_joiner_reconnected(worker, &resume),
            // It was released: it ends at the switch.
            _ => {
                self.send_newer_membership(worker, &resume);
                self.expect_exit(now, launch);
            }
        }
        self.on_awaited_returned(now);
    }

    fn on_member_reconnected(&mut self, worker: WorkerId, resume: &Resume) {
        self.send_newer_membership(worker, resume);
        let w = self.workers.connected.get_mut(&worker).expect("it was just admitted");
        w.joined.get_or_insert(self.group.generation);
        if self.phase == Phase::Stopping {
            self.send(worker, ToWorker::Drain);
        }
        match &mut self.takeover {
            Some(takeover) => {
                takeover.awaiting_holdings.insert(worker);
            }
            None => {
                self.log_event(format!("worker {worker} is connected again"));
                self.reconnected.insert(worker, Reconnected::AwaitingHoldings);
                // Its reports since its stream ended were lost.
                self.group.report_is_due |= self.group.members.first() == Some(&worker);
            }
        }
    }

    /// Handles the reconnection of a worker that is no member yet. Messages in both directions may
    /// have been lost.
    fn on_joiner_reconnected(&mut self, worker: WorkerId, resume: &Resume) {
        self.log_event(format!("worker {worker} is connected again"));
        self.reconnected.insert(worker, Reconnected::AwaitingHoldings);
        let w = self.workers.connected.get_mut(&worker).expect("it was just admitted");
        match w.stage {
            Stage::Joining | Stage::Describing | Stage::Preparing
                if resume.parameters.is_none() =>
            {
                w.stage = Stage::Joining;
                self.welcome(worker);
            }
            // It reports again that it is ready.
            Stage::Joining | Stage::Describing | Stage::Preparing => w.stage = Stage::Preparing,
            Stage::Fetching => {
                let donors = self.donors(worker);
                if !donors.is_empty() {
                    self.send(worker, ToWorker::Fetch(donors));
                }
            }
            Stage::Ready => {}
        }
        if self.phase == Phase::Stopping {
            self.send(worker, ToWorker::Shutdown("the job is stopping".into()));
        }
    }

    fn send_newer_membership(&mut self, worker: WorkerId, resume: &Resume) {
        let published = self.group.published.clone().filter(|m| m.generation > resume.generation());
        if let Some(membership) = published {
            self.send(worker, ToWorker::Membership(membership));
        }
    }

    /// Handles a reconnected worker's report of the leases that it holds.
    pub(crate) fn on_holding(
        &mut self,
        now: Time,
        worker: WorkerId,
        step: u64,
        ranges: &[RecordRange],
    ) {
        let is_awaited = match &self.takeover {
            Some(takeover) => takeover.awaiting_holdings.contains(&worker),
            None => matches!(self.reconnected.get(&worker), Some(Reconnected::AwaitingHoldings)),
        };
        let Some(leases) = self.leases.as_mut().filter(|_| is_awaited) else {
            return;
        };
        let unaccounted = match leases.reconcile_holdings(worker, ranges) {
            Ok(unaccounted) => unaccounted,
            Err(wrong) => {
                return self.fail_worker(now, worker, &format!("it holds {wrong}, which can't be"));
            }
        };
        match &mut self.takeover {
            // During a take-over nothing is leased before the ledger has reached its step.
            Some(takeover) => {
                leases.release_missing(worker, &unaccounted);
                takeover.awaiting_holdings.remove(&worker);
                takeover.steps.insert(worker, step);
                self.try_finish_takeover(now);
            }
            None => {
                self.reconnected.insert(worker, Reconnected::Reported { step, unaccounted });
                self.release_unaccounted();
            }
        }
    }

    /// Leases again what reconnected workers did not name and the group has not absorbed.
    pub(crate) fn release_unaccounted(&mut self) {
        if self.reconnected.is_empty()
            || !self.group.formed
            || self.group.is_broken()
            || self.takeover.is_some()
        {
            return;
        }
        let (step, mut released) = (self.step, false);
        let Self { reconnected, leases: Some(leases), .. } = self else { return };
        reconnected.retain(|&worker, state| {
            let Reconnected::Reported { step: its, unaccounted } = state else { return true };
            if *its > step {
                return true;
            }
            released |= leases.release_missing(worker, unaccounted);
            false
        });
        if released {
            leases.requeue();
            // A group that waits for these records reports nothing that would lead to a lease.
            self.fill_all();
        }
    }
}

/// A worker without a master searches for one once a second, and then its hello has to arrive.
const RECONNECT_WAIT_MIN: Duration = Duration::from_secs(3);
/// A disconnected joiner holds no member up.
const JOINER_WAIT: Duration = Duration::from_secs(10);
