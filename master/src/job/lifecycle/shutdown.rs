//! Shutdown: how a job ends.
//!
//! ```text
//!  Running ──Stop──► Stopping ──10 s (60 s with checkpoints), or no members──► Ended
//!     └────────┬────────┘                                                ▲
//!    finished, failed, refused ──► Ending ──all processes ended, or 2 s──┘
//! ```

use std::time::Duration;

use elasticdl_proto::WorkerId;

use crate::job::action::{Action, Outcome, ToWorker};
use crate::job::event::LaunchId;
use crate::job::job::{Job, Phase};
use crate::job::outbox::Timer;
use crate::job::time::Time;

impl Job {
    pub(crate) fn on_stop(&mut self, now: Time) {
        if self.phase != Phase::Running {
            return;
        }
        self.phase = Phase::Stopping;
        self.out.mark_dirty_urgent();
        self.log_event("stop requested: the job stops at the end of the step".into());
        self.out.set_timer(now + self.stop_wait(), Timer::Stop);
        // A disconnected worker is asked to drain when it reconnects.
        let here = self.workers.launches.iter().filter(|(_, l)| l.disconnected.is_none());
        let launches: Vec<(LaunchId, Option<WorkerId>)> =
            here.map(|(&id, l)| (id, l.worker)).collect();
        for (launch, worker) in launches {
            let w = worker.and_then(|id| Some((id, self.workers.connected.get(&id)?)));
            match w.map(|(id, w)| (id, w.rank.is_some(), w.released)) {
                Some((id, true, _)) => self.send(id, ToWorker::Drain),
                // The previous generation's group may need it until its last step is done.
                Some((_, false, true)) => {}
                Some((id, false, false)) => self.release(now, id, "the job is stopping"),
                // A pod is killed only if none of its workers is needed.
                None if self.workers.is_heard(launch)
                    || self.workers.any_of_pod(launch, |l| l.disconnected.is_some()) => {}
                None => self.kill(launch),
            }
        }
        self.reconcile(now);
    }

    /// How long a group may take to finish its step, and to write its last checkpoint.
    pub(crate) fn stop_wait(&self) -> Duration {
        if self.spec.checkpoints.is_some() { STOP_WITH_CHECKPOINT_WAIT } else { STOP_WAIT }
    }

    pub(crate) fn on_stop_due(&mut self) {
        if self.phase == Phase::Stopping {
            self.log_event(format!(
                "the group has not finished within {} s",
                self.stop_wait().as_secs()
            ));
            self.end_stopped();
        }
    }

    /// Ends the job: every member holds the final state.
    pub(crate) fn finish(&mut self, now: Time) {
        let words: Vec<_> =
            self.group.members.iter().map(|m| (m, &self.group.finished[m])).collect();
        let (first, ledger) = words[0].1;
        let same = |(word, other): &(crate::job::Finished, elasticdl_proto::Ledger)| {
            (word.digest, word.step, word.records_trained)
                == (first.digest, first.step, first.records_trained)
                && other == ledger
        };
        let (first, ledger) = (first.clone(), ledger.clone());
        if let Some((other, (word, _))) = words.iter().find(|(_, word)| !same(word)) {
            let error = format!(
                "replica mismatch: worker {} ended at step {} with digest {:016x}, worker \
                 {other} at step {} with \
                 digest {:016x}",
                words[0].0, first.step, first.digest, word.step, word.digest
            );
            return self.end(now, Outcome::Failed, Some(error));
        }
        let Some(leases) = &mut self.leases else {
            return;
        };
        let missing = leases.expected() - ledger.counted();
        leases.rebuild(first.step, ledger, |_| false);
        let at_max =
            first.stopped_early || self.spec.max_steps.is_some_and(|max| first.step >= max);
        self.step = first.step;
        self.history.totals.steps_skipped = first.steps_skipped;
        self.final_report = Some(first);
        if let Some(error) = self.reported_failure() {
            return self.end(now, Outcome::Failed, Some(error));
        }
        if missing == 0 || at_max {
            self.end(now, Outcome::Completed, None);
        } else if self.phase == Phase::Stopping {
            self.end(now, Outcome::Stopped, None);
        } else {
            let error = format!("the group ended at step {} without {missing} records", self.step);
            self.end(now, Outcome::Failed, Some(error));
        }
    }

    /// The error for which the group ended, if any. Notes the failed records.
    fn reported_failure(&mut self) -> Option<String> {
        let words = self.group.finished.iter();
        let failures: Vec<_> =
            words.filter_map(|(&id, (word, _))| Some((id, word.failure.clone()?))).collect();
        let error = crate::job::reporting::history::clip(&failures.first()?.1.error).to_owned();
        for (worker, failure) in failures {
            self.note_failed_shards(worker, &error, &failure.ranges);
        }
        Some(error)
    }

    /// Asks all workers to end, and waits briefly for their exits.
    pub(crate) fn end(&mut self, now: Time, outcome: Outcome, error: Option<String>) {
        if matches!(self.phase, Phase::Ended(_) | Phase::Ending(_)) {
            return;
        }
        self.log_recovery();
        let state = name(outcome);
        let line = match &error {
            Some(error) => format!("the job is {state}: {error}"),
            None => format!("the job is {state} at step {}", self.step),
        };
        self.log_event(line);
        self.history.error = error;
        self.phase = Phase::Ending(outcome);
        self.out.mark_dirty_urgent();
        self.out.clear_timers();
        for worker in self.workers.connected.keys().copied().collect::<Vec<_>>() {
            self.send(worker, ToWorker::Shutdown(format!("the job is {state}")));
        }
        let awaiting_holdings: Vec<LaunchId> =
            self.workers.pods().filter(|&pod| !self.workers.is_heard(pod)).collect();
        for launch in awaiting_holdings {
            self.kill(launch);
        }
        if self.workers.launches.is_empty() {
            self.end_now();
        } else {
            self.out.set_timer(now + END_WAIT, Timer::End);
        }
    }

    /// Ends a job that the user stopped and whose group can't finish.
    pub(crate) fn end_stopped(&mut self) {
        if self.spec.work.trains()
            && self.step > 0
            && self.history.totals.checkpoints.newest.is_none()
        {
            self.note_state_lost(self.step);
        }
        self.phase = Phase::Ending(Outcome::Stopped);
        self.log_recovery();
        self.out.mark_dirty_urgent();
        self.log_event(format!("the job is {} at step {}", name(Outcome::Stopped), self.step));
        self.end_now();
    }

    pub(crate) fn end_now(&mut self) {
        let Phase::Ending(outcome) = self.phase else {
            return;
        };
        for launch in self.workers.launches.keys().copied().collect::<Vec<_>>() {
            self.kill(launch);
        }
        self.phase = Phase::Ended(outcome);
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
const STOP_WITH_CHECKPOINT_WAIT: Duration = Duration::from_secs(60);
/// How long processes may take to end when the job is over.
const END_WAIT: Duration = Duration::from_secs(2);
