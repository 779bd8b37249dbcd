//! Workers whose control stream ended.
//!
//! A stream ends when its worker dies, and also when something between the worker and this master
//! resets it, when a cut network lasts longer than the keepalive, and when the master changes. In
//! the last three cases the worker trains on, and looks for its master until `master_timeout`. So a
//! worker without a stream is *disconnected*, and lost only by evidence:
//!
//! ```text
//!                    ┌─ Connected{resume} ──► returned ── Holding ──► as before, in the same generation
//!  stream ended ──► disconnected
//!                    ├─ its process ended, or a member reports its link to this worker as broken ──► lost at once
//!                    ├─ the group stands still: `return_wait` after the stream's end ──► lost
//!                    └─ `master_timeout` after the stream's end (it has ended by itself) ──► lost
//! ```
//!
//! While a member is disconnected no generation is published: the member could not hear of it.
//!
//! **What a returned worker holds.** The master keeps a disconnected worker's leases. Messages may
//! have been lost with the stream, so the worker says at which step it is and what it holds. Of the
//! leases that it does not name, some are in steps up to its own, and the others never arrived.
//! Once the group's ledger has reached the worker's step, those that are not absorbed never
//! arrived, and are leased anew.
//!
//! **Reports that were lost.** The lowest rank reports what its group commits. When it returns it
//! sends the whole ledger, which replaces the master's.

use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{RecordRange, WorkerId};

use super::action::{Action, ToWorker};
use super::crew::{Away, Stage};
use super::event::{ConnectionId, LaunchId, Resume};
use super::job::{Job, Phase, Timer, ZOMBIE_GRACE};
use super::liveness::RETURN_SLACK;
use super::time::Time;

/// A worker that came back to the master that it had lost.
#[derive(Debug, Default)]
pub(super) enum Returned {
    /// It has not said what it holds.
    #[default]
    Silent,
    /// It has.
    Told {
        /// Steps that its state contains.
        step: u64,
        /// Leases that it did not name, while it is unknown whether they are absorbed.
        unaccounted: Vec<RecordRange>,
    },
}

impl Job {
    pub(super) fn on_disconnected(&mut self, now: Time, worker: WorkerId) {
        match self.may_return(worker) {
            true => self.disconnect(now, worker),
            false => self.give_up(now, worker, ZOMBIE_GRACE),
        }
        self.settle(now);
    }

    /// Whether a worker whose stream ended is expected back.
    fn may_return(&self, worker: WorkerId) -> bool {
        let Some(w) = self.crew.workers.get(&worker) else { return false };
        let is_wanted = self.crew.launches.get(&w.launch).is_some_and(|l| !l.killed);
        let goes = w.released || self.group.finished.contains_key(&worker);
        let is_on = matches!(self.phase, Phase::Running | Phase::Stopping);
        is_on && self.spec.work.trains() && is_wanted && !goes
    }

    fn disconnect(&mut self, now: Time, worker: WorkerId) {
        let Some(launch) = self.crew.disconnect(now, worker) else { return };
        self.touch();
        if let Some(adoption) = &mut self.adoption {
            adoption.mute.remove(&worker);
            adoption.steps.remove(&worker);
        }
        self.returned.remove(&worker);
        self.count_eligible();
        self.pass_describing_on(worker);
        self.say(format!("worker {worker} is disconnected"));
        let broken = self.group.broken.as_ref();
        if broken.is_some_and(|b| {
            b.suspects.contains(&worker) || b.unanswered.iter().any(|s| s.1 == worker)
        }) {
            self.lose(now, launch);
        }
    }

    /// A member reports its link to `suspect` as broken. If that one has no stream either, it is
    /// lost.
    pub(super) fn lose_suspect(&mut self, now: Time, suspect: WorkerId) {
        let launch = LaunchId(suspect.0);
        let away = self.crew.launches.get(&launch).and_then(|l| l.away);
        if away.is_some_and(|away| away.rank.is_some() && away.known.is_some()) {
            self.lose(now, launch);
        }
    }

    /// Sets the timer for the next disconnected worker that does not return in time.
    pub(super) fn watch_returns(&mut self, now: Time) {
        self.cancel_timer(Timer::Return);
        if self.crew.away().next().is_none() {
            return;
        }
        let stands_still = self.stands_still(now, Time::default());
        if let Some(due) =
            self.crew.away().map(|launch| self.return_due(launch, stands_still)).min()
        {
            self.timer(due.max(now), Timer::Return);
        }
    }

    /// When a disconnected worker is lost.
    fn return_due(&self, launch: LaunchId, stands_still: bool) -> Time {
        let away = self.crew.launches[&launch].away.unwrap_or_default();
        // A group that ends makes no more steps that would show who is alive.
        let shows_members = self.spec.work.trains() && self.group.finished.is_empty();
        let is_waited_for = away.rank.is_some() && shows_members && !stands_still;
        let wait = match (is_waited_for, away.rank.is_none() && away.known.is_some()) {
            (true, _) => self.spec.master_timeout + RETURN_SLACK,
            (false, true) => self.return_wait().max(NEWCOMER_WAIT),
            (false, false) => self.return_wait(),
        };
        away.since + wait
    }

    /// How long a worker is waited for that nothing shows to be alive. Workers look for their
    /// master once a second at least; one that is stopped for less than the timeout is to have its
    /// chance.
    fn return_wait(&self) -> Duration {
        let silence = self.spec.worker_timeout.unwrap_or_default();
        (silence + RETURN_SLACK).max(RETURN_WAIT_MIN)
    }

    /// Whether the group can't be judged yet, because members may be on their way.
    pub(super) fn awaits_members(&self) -> bool {
        let any = self.adoption.is_some() && self.crew.away().next().is_some();
        any || self.crew.members_away().next().is_some()
    }

    /// Whoever is not back in time is lost.
    pub(super) fn on_return_due(&mut self, now: Time) {
        let stands_still = self.stands_still(now, Time::default());
        let due = |launch: &LaunchId| self.return_due(*launch, stands_still) <= now;
        for launch in self.crew.away().filter(due).collect::<Vec<_>>() {
            let l = &self.crew.launches[&launch];
            let Some(away) = l.away else { continue };
            if l.worker.is_none() && away.rank.is_none() {
                // It may never have said hello.
                self.miss(launch);
                continue;
            }
            self.say(format!("worker {} has not come back and is taken out", launch.0));
            self.group.hung |= away.rank.is_some();
            self.miss(launch);
            self.take_pod_along(now, launch);
            self.kill(launch);
        }
        self.settle(now);
    }

    /// A worker has neither a stream nor all its links.
    fn lose(&mut self, now: Time, launch: LaunchId) {
        self.say(format!("worker {} is lost: its stream and its links ended", launch.0));
        self.miss(launch);
        self.take_pod_along(now, launch);
        // A process that dies takes its stream and links down before its exit is known.
        self.timer(now + self.exit_wait(ZOMBIE_GRACE), Timer::Kill(launch));
    }

    /// A worker that was expected back is not coming.
    pub(super) fn miss(&mut self, launch: LaunchId) {
        let Some(l) = self.crew.launches.get_mut(&launch) else {
            return;
        };
        let Some(away) = l.away.take() else { return };
        let in_order = l.leaving || l.retired || away.known.is_some_and(|k| k.leaving);
        let worker = WorkerId(launch.0);
        if let Some(records) = &mut self.records {
            records.forget(worker);
        }
        self.touch();
        if away.rank.is_some() {
            if in_order { &mut self.group.left } else { &mut self.group.lost }.push(worker);
        }
    }

    /// A worker is back whose stream had ended, at this master or at one before it.
    pub(super) fn on_returned(
        &mut self,
        now: Time,
        connection: ConnectionId,
        launch: LaunchId,
        address: SocketAddr,
        pid: u32,
        resume: Resume,
    ) {
        if self.may_return(resume.worker) && resume.worker.0 == launch.0 {
            // Its old stream is dead, and this master has not noticed.
            self.disconnect(now, resume.worker);
        }
        let away = self.crew.launches.get(&launch).and_then(|l| l.away);
        let generation = resume.generation();
        let Some(away) = away.filter(|_| resume.worker.0 == launch.0) else {
            self.pass_over(generation);
            let reason = "this master has given this worker up, or never knew it";
            return self.push(Action::Refuse { connection, reason: reason.into() });
        };
        if let Some(newer) =
            resume.membership.as_ref().filter(|m| m.generation > self.group.generation)
            && !self.learn(now, newer)
        {
            self.pass_over(generation);
            return self.dismiss(
                now,
                connection,
                launch,
                "this master has gone on with another group",
            );
        }
        let away = self.crew.launches[&launch].away.unwrap_or(away);
        let is_ready = away.rank.is_some() || resume.parameters.is_some();
        if self.parameters.is_some() && is_ready && resume.parameters != self.parameters {
            return self.dismiss(now, connection, launch, "its model is not that of the others");
        }
        if resume.membership.is_none() && away.rank.is_none() && away.known.is_none() {
            // It has not cost much yet.
            return self.dismiss(
                now,
                connection,
                launch,
                "it was no member yet; another takes its place",
            );
        }
        let Some(worker) = self.crew.readmit(now, launch, address, pid) else { return };
        if away.rank.is_some() {
            self.parameters = self.parameters.or(resume.parameters);
        }
        self.touch();
        self.count_eligible();
        self.watch_silence(now);
        self.push(Action::Admit { connection, worker });
        match away {
            Away { rank: Some(_), .. } => self.on_member_returned(worker, &resume),
            Away { known: Some(_), .. } => self.on_newcomer_returned(worker, &resume),
            // It was let go: it ends at the switch.
            _ => {
                self.tell_published(worker, &resume);
                self.excuse(now, launch);
            }
        }
        self.stop_awaiting(now);
    }

    fn on_member_returned(&mut self, worker: WorkerId, resume: &Resume) {
        self.tell_published(worker, resume);
        let w = self.crew.workers.get_mut(&worker).expect("it was just admitted");
        w.joined.get_or_insert(self.group.generation);
        if self.phase == Phase::Stopping {
            self.send(worker, ToWorker::Drain);
        }
        match &mut self.adoption {
            Some(adoption) => {
                adoption.mute.insert(worker);
            }
            None => {
                self.say(format!("worker {worker} is connected again"));
                self.returned.insert(worker, Returned::Silent);
                // What it has reported since its stream ended was lost.
                self.group.report_is_due |= self.group.members.first() == Some(&worker);
            }
        }
    }

    /// A worker is back that is on its way to be a member: messages in both directions may have
    /// been lost.
    fn on_newcomer_returned(&mut self, worker: WorkerId, resume: &Resume) {
        self.say(format!("worker {worker} is connected again"));
        self.returned.insert(worker, Returned::Silent);
        let w = self.crew.workers.get_mut(&worker).expect("it was just admitted");
        match w.stage {
            Stage::Joining | Stage::Describing | Stage::Preparing
                if resume.parameters.is_none() =>
            {
                w.stage = Stage::Joining;
                self.welcome(worker);
            }
            // It says again that it is ready.
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

    fn tell_published(&mut self, worker: WorkerId, resume: &Resume) {
        let published = self.group.published.clone().filter(|m| m.generation > resume.generation());
        if let Some(membership) = published {
            self.send(worker, ToWorker::Membership(membership));
        }
    }

    /// A worker that is back says what it holds.
    pub(super) fn on_holding(
        &mut self,
        now: Time,
        worker: WorkerId,
        step: u64,
        ranges: &[RecordRange],
    ) {
        let is_mute = match &self.adoption {
            Some(adoption) => adoption.mute.contains(&worker),
            None => matches!(self.returned.get(&worker), Some(Returned::Silent)),
        };
        let Some(records) = self.records.as_mut().filter(|_| is_mute) else {
            return;
        };
        let unaccounted = match records.reconcile(worker, ranges) {
            Ok(unaccounted) => unaccounted,
            Err(wrong) => {
                return self.fail_worker(now, worker, &format!("it holds {wrong}, which can't be"));
            }
        };
        match &mut self.adoption {
            // Nothing is leased before the ledger has reached its step.
            Some(adoption) => {
                records.release_missing(worker, &unaccounted);
                adoption.mute.remove(&worker);
                adoption.steps.insert(worker, step);
                self.conclude_adoption(now);
            }
            None => {
                self.returned.insert(worker, Returned::Told { step, unaccounted });
                self.conclude_returns();
            }
        }
    }

    /// Leases anew what returned workers did not name and the group has not absorbed.
    pub(super) fn conclude_returns(&mut self) {
        if self.returned.is_empty()
            || !self.group.formed
            || self.group.is_broken()
            || self.adoption.is_some()
        {
            return;
        }
        let (step, mut released) = (self.step, false);
        let Self { returned, records: Some(records), .. } = self else { return };
        returned.retain(|&worker, state| {
            let Returned::Told { step: its, unaccounted } = state else { return true };
            if *its > step {
                return true;
            }
            released |= records.release_missing(worker, unaccounted);
            false
        });
        if released {
            records.requeue();
        }
    }
}

/// A worker without a master looks for one once a second, and then it has to be heard.
const RETURN_WAIT_MIN: Duration = Duration::from_secs(3);
/// A newcomer that is disconnected disturbs nobody.
const NEWCOMER_WAIT: Duration = Duration::from_secs(10);
