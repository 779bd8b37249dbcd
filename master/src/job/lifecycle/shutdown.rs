//! Shutdown: how a job ends.
//!
//! ```text
//!  Running ──Stop──► Stopping ──10 s (60 s for files), or no members──► Ended
//!     └────────┬────────┘                                                ▲
//!    finished, failed, refused ──► Ending ──all processes ended, or 2 s──┘
//! ```
//!
//! The programs of a complete job have more time for what they do after it: tests, plots, files.
//!
//! Disconnected members hold the state, and are not known to be lost: a job that stops waits for
//! them as a running one does, until they return or are evicted.
//!
//! `StopNow` leads from each of these states to the last one.

use std::time::Duration;

use elasticdl_proto::{Ledger, WorkerId};

use super::state::Phase;
use crate::job::action::{Action, MasterMessage, Outcome};
use crate::job::event::{Finished, LaunchId};
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::text::{clip, counted};
use crate::job::time::Time;
use crate::job::workers::state::{Launch, Worker};
use crate::job::workers::table::worker_of;

impl Job {
    pub(crate) fn on_stop_requested(&mut self, now: Time) {
        self.stop(now, "stop requested");
    }

    /// Stops the job as a policy of the user says.
    pub(crate) fn stop_because(&mut self, now: Time, reason: String) {
        if self.lifecycle.is_running() {
            self.lifecycle.stop_reason = Some(reason.clone());
            self.stop(now, &reason);
        } else {
            self.log_event(reason);
        }
    }

    /// Sets the timer of the deadline, which counts from the job's start.
    pub(crate) fn watch_deadline(&mut self) {
        if let Some(deadline) = self.spec.policies.deadline {
            self.out.set_timer(Time(deadline), Timer::Deadline);
        }
    }

    pub(crate) fn on_deadline_due(&mut self, now: Time) {
        if let Some(deadline) = self.spec.policies.deadline.filter(|_| self.lifecycle.is_running())
        {
            let reason = format!("the deadline of {} s has passed", deadline.as_secs_f64());
            self.stop_because(now, reason);
        }
    }

    fn stop(&mut self, now: Time, why: &str) {
        if !self.lifecycle.is_running() {
            return;
        }
        self.lifecycle.phase = Phase::Stopping;
        self.out.mark_dirty_urgent();
        self.log_event(format!("{why}: the job stops at the end of the step"));
        self.log_stop_awaits_members();
        self.log_stop_awaits_storage();
        self.out.set_timer(now + self.stop_wait(), Timer::Stop);
        // A disconnected worker is asked to drain when it reconnects.
        let here = self.workers.launches().filter(|(_, l)| l.disconnected().is_none());
        let launches: Vec<LaunchId> = here.map(|(id, _)| id).collect();
        for launch in launches {
            let worker = worker_of(launch);
            match self.workers.get(worker) {
                // The next group may need the reserve.
                Some(w) if w.is_member() || w.is_reserve() => {
                    self.send(worker, MasterMessage::Drain)
                }
                Some(w) if w.is_released() => {}
                Some(_) => self.release(now, worker, "the job is stopping"),
                // A pod is killed only if none of its workers is needed.
                None if self.workers.is_heard(launch)
                    || self.workers.any_of_pod(launch, |l| l.disconnected().is_some()) => {}
                None => self.kill(launch),
            }
        }
        self.reconcile(now);
    }

    /// Says that a stop waits for disconnected members, and for how long.
    pub(super) fn log_stop_awaits_members(&mut self) {
        let awaited = self.workers.disconnected_members().count();
        if self.awaits_members() && awaited > 0 {
            self.log_event(format!(
                "the stop waits for {awaited} disconnected workers, which hold the state, for up \
                 to {} s; `elasticdl stop --force` ends the job without them",
                self.spec.master_timeout.as_secs()
            ));
        }
    }

    /// Says that a stop waits for storage that does not answer, and for how long.
    pub(crate) fn log_stop_awaits_storage(&mut self) {
        let storage = self.reporting.storage_awaited().filter(|_| self.lifecycle.is_stopping());
        if let Some(storage) = storage {
            self.log_event(format!(
                "the stop waits for up to {} s for storage: {storage}; `elasticdl stop --force` \
                 ends the job without it",
                self.stop_wait().as_secs()
            ));
        }
    }

    /// Ends the job without waiting for its group or for the exits of its workers.
    pub(crate) fn on_stop_now(&mut self) {
        if self.lifecycle.is_active() {
            self.end_stopped();
        } else {
            self.end_now();
        }
    }

    /// The last step of a running job that has trained all it should, and has not saved its model
    /// yet.
    pub(crate) fn unsaved_model(&self) -> Option<u64> {
        let (expected, step) = (self.data.expected(), self.data.step());
        let is_trained = self.group.finishing_since().is_some()
            || (expected > 0 && self.data.counted() == expected)
            || self.spec.options.max_steps.is_some_and(|max| step >= max);
        let trains = self.lifecycle.is_running() && self.spec.options.work.trains();
        (trains && is_trained).then_some(step)
    }

    /// How long a group may take to finish its step, and to write its last checkpoint or its model.
    pub(crate) fn stop_wait(&self) -> Duration {
        let writes = self.spec.options.checkpoints.is_some() || self.spec.exports();
        if writes || self.group.finishing_since().is_some() {
            STOP_WITH_FILES_WAIT
        } else {
            STOP_WAIT
        }
    }

    /// Gives a group that has lost a member, has written or given up a checkpoint, or writes its
    /// model, while the job stops its whole time again.
    pub(crate) fn restart_stop_wait(&mut self, now: Time) {
        if self.lifecycle.is_stopping() {
            self.out.cancel_timer(Timer::Stop);
            self.out.set_timer(now + self.stop_wait(), Timer::Stop);
        }
    }

    pub(crate) fn on_stop_due(&mut self, now: Time) {
        if !self.lifecycle.is_stopping() {
            return;
        }
        if self.awaits_members() {
            self.out.set_timer(now + self.stop_wait(), Timer::Stop);
        } else if self.evict_unfinished(now) {
            self.reconcile(now);
        } else {
            let why = format!("the group has not finished within {} s", self.stop_wait().as_secs());
            self.log_event(why.clone());
            self.note_unsaved(why);
            self.end_stopped();
        }
    }

    /// Ends the job: every member holds the final state.
    pub(crate) fn finish(&mut self, now: Time) {
        let reports: Vec<(WorkerId, &Finished, &Ledger)> = self.group.final_reports().collect();
        let Some(&lowest) = reports.iter().find(|(id, ..)| Some(*id) == self.group.reporter())
        else {
            return;
        };
        let same = |(_, other, ledger): &(WorkerId, &Finished, &Ledger)| {
            (other.digest, other.step, other.records_trained)
                == (lowest.1.digest, lowest.1.step, lowest.1.records_trained)
                && *ledger == lowest.2
        };
        let differs = |id: &WorkerId| reports.iter().find(|r| r.0 == *id).filter(|r| !same(r));
        let mismatch = self.group.members().iter().find_map(differs);
        let (worker, first, ledger) = (lowest.0, lowest.1.clone(), lowest.2.clone());
        if let Some((other, report, _)) = mismatch {
            let error = format!(
                "replica mismatch: worker {worker} ended at step {} with digest {:016x}, worker \
                 {other} at step {} with digest {:016x}",
                first.step, first.digest, report.step, report.digest
            );
            return self.end(now, Outcome::Failed, Some(error));
        }
        let missing = self.data.expected() - ledger.counted();
        self.data.replace_ledger(ledger);
        let step = first.step;
        let at_max =
            first.stopped_early || self.spec.options.max_steps.is_some_and(|max| step >= max);
        self.data.set_step(step);
        self.reporting.finish(first);
        if let Some(error) = self.reported_failure() {
            let error = self.lifecycle.failing.take().unwrap_or(error);
            return self.end(now, Outcome::Failed, Some(error));
        }
        if missing == 0 || at_max {
            let error = self.unwritten_model();
            let outcome = if error.is_some() { Outcome::Failed } else { Outcome::Completed };
            self.end(now, outcome, error);
        } else if self.lifecycle.is_stopping() {
            self.log_unevaluated(step);
            self.end(now, Outcome::Stopped, None);
        } else {
            let error = format!("the group ended at step {step} without {missing} records");
            self.end(now, Outcome::Failed, Some(error));
        }
    }

    /// The error for which the group ended, if any. Notes the failed records.
    fn reported_failure(&mut self) -> Option<String> {
        let reports = self.group.final_reports();
        let failures: Vec<_> =
            reports.filter_map(|(id, report, _)| Some((id, report.failure.clone()?))).collect();
        let error = clip(&failures.first()?.1.error).to_owned();
        for (worker, failure) in failures {
            self.note_failed_shards(worker, &error, &failure.ranges);
        }
        Some(error)
    }

    /// Asks all workers to end, and waits briefly for their exits.
    pub(crate) fn end(&mut self, now: Time, outcome: Outcome, error: Option<String>) {
        if !self.lifecycle.is_active() {
            return;
        }
        self.log_recovery();
        let state = match outcome {
            Outcome::InvalidInput => "is refused",
            outcome => name(outcome),
        };
        let is_unheeded = outcome == Outcome::Completed && self.is_suspended();
        let before = if is_unheeded { ", before it could be suspended" } else { "" };
        let line = match &error {
            Some(error) => format!("the job {state}: {error}"),
            None => format!("the job {state} at step {}{before}", self.data.step()),
        };
        self.log_event(line);
        let has_failed = self.checkpoints().is_some_and(|known| known.error.is_some());
        if outcome != Outcome::Completed || self.exported().is_none() || has_failed {
            self.log_unsaved();
        }
        self.reporting.set_error(error);
        self.lifecycle.was_stopping = self.lifecycle.is_stopping();
        self.lifecycle.phase = Phase::Ending(outcome);
        self.out.mark_dirty_urgent();
        self.out.clear_timers();
        for worker in self.workers.select(|_: &Worker| true) {
            let reason = format!("the job {state}");
            self.send(worker, MasterMessage::Shutdown { reason, job_is_over: true });
        }
        let silent: Vec<LaunchId> =
            self.workers.pods().filter(|&pod| !self.workers.is_heard(pod)).collect();
        for launch in silent {
            self.kill(launch);
        }
        self.await_ends(now, outcome);
    }

    /// Whether the job is over, and waits for its processes to end.
    pub(crate) fn awaits_ends(&self) -> bool {
        self.lifecycle.is_ending()
    }

    /// Gives the processes of a job that is over time to end, of which programs have more. Workers
    /// that were no members of a group have nothing to do after it.
    pub(super) fn await_ends(&mut self, now: Time, outcome: Outcome) {
        if outcome == Outcome::Completed {
            self.workers.idle_pods().into_iter().for_each(|launch| self.kill(launch));
        }
        if self.workers.has_launches() {
            let limit = self.spec.policies.end_timeout.filter(|_| outcome == Outcome::Completed);
            self.lifecycle.awaits_programs_until = limit.map(|limit| now + limit);
            self.out.set_timer(now + END_WAIT, Timer::End);
        } else {
            self.end_now();
        }
    }

    /// The processes that still run had time to end.
    pub(crate) fn on_end_due(&mut self, now: Time) {
        let waited = self.spec.policies.end_timeout.map(|limit| limit.as_secs_f64());
        let is_awaited = |&pod: &LaunchId| !self.workers.any_of_pod(pod, Launch::is_killed);
        let awaited = self.workers.pods().filter(is_awaited).count() as u64;
        let running = counted(awaited, "program");
        match self.lifecycle.awaits_programs_until.take() {
            Some(until) if until > now && awaited > 0 => {
                let limit = waited.unwrap_or_default();
                self.log_event(format!(
                    "the job is complete, and waits for {running} to end, for up to {limit} s \
                     (--end-timeout)"
                ));
                self.out.set_timer(until, Timer::End);
            }
            Some(_) => self.end_now(),
            None => {
                if let (Some(limit), Phase::Ending(Outcome::Completed)) =
                    (waited, self.lifecycle.phase)
                {
                    self.log_event(format!(
                        "killed {limit} s after the job was complete (--end-timeout): {running}"
                    ));
                }
                self.end_now();
            }
        }
    }

    /// Ends a job that the user stopped and whose group can't finish, or is not waited for.
    pub(crate) fn end_stopped(&mut self) {
        let step = self.data.step();
        if self.spec.options.work.trains() && step > 0 && !self.reporting.has_checkpoint() {
            self.note_state_lost(self.data.counted());
        }
        self.log_unexported();
        self.lifecycle.phase = Phase::Ending(Outcome::Stopped);
        self.log_recovery();
        self.out.mark_dirty_urgent();
        self.log_event(format!("the job {} at step {step}", name(Outcome::Stopped)));
        self.log_unsaved();
        self.end_now();
    }

    pub(crate) fn end_now(&mut self) {
        let Phase::Ending(outcome) = self.lifecycle.phase else { return };
        let launches: Vec<LaunchId> = self.workers.launches().map(|(id, _)| id).collect();
        for launch in launches {
            self.kill(launch);
        }
        self.lifecycle.phase = Phase::Ended(outcome);
        self.out.clear_timers();
        self.out.push(Action::End(outcome));
    }
}

/// The user-visible name of an outcome.
pub(crate) fn name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Failed => "failed",
        Outcome::InvalidInput => "refused",
        Outcome::Stopped => "stopped",
    }
}

/// How long a group may take to finish its step.
const STOP_WAIT: Duration = Duration::from_secs(10);
const STOP_WITH_FILES_WAIT: Duration = Duration::from_secs(60);
/// How long processes may take to end when the job is over.
const END_WAIT: Duration = Duration::from_secs(2);
