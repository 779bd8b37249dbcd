//! How a job ends.
//!
//! ```text
//!  Running ──Stop──► Stopping ──10 s (60 s with checkpoints), or no members──► Ended
//!     └────────┬────────┘                                                ▲
//!    finished, failed, refused ──► Ending ──all processes ended, or 2 s──┘
//! ```

use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::action::{Action, Outcome, ToWorker};
use super::event::LaunchId;
use super::job::{Job, Phase, Timer};
use super::time::Time;

impl Job {
    pub(super) fn on_stop(&mut self, now: Time) {
        if self.phase != Phase::Running {
            return;
        }
        self.phase = Phase::Stopping;
        self.touch_first();
        self.say("the job is told to stop: the group finishes its step".into());
        self.timer(now + self.stop_wait(), Timer::Stop);
        // Who is away is told when it is back.
        let here = self.crew.launches.iter().filter(|(_, l)| l.away.is_none());
        let launches: Vec<(LaunchId, Option<WorkerId>)> =
            here.map(|(&id, l)| (id, l.worker)).collect();
        for (launch, worker) in launches {
            let w = worker.and_then(|id| Some((id, self.crew.workers.get(&id)?)));
            match w.map(|(id, w)| (id, w.rank.is_some(), w.released)) {
                Some((id, true, _)) => self.send(id, ToWorker::Drain),
                // The group of the generation before may need it until its last step is done.
                Some((_, false, true)) => {}
                Some((id, false, false)) => self.release(now, id, "the job is stopping"),
                // As long as none of its pod is needed.
                None if self.crew.is_heard(launch)
                    || self.crew.any_of_pod(launch, |l| l.away.is_some()) => {}
                None => self.kill(launch),
            }
        }
        self.settle(now);
    }

    /// How long a group may take to finish its step, and to write its last checkpoint.
    pub(super) fn stop_wait(&self) -> Duration {
        if self.spec.checkpoints.is_some() { STOP_WITH_CHECKPOINT_WAIT } else { STOP_WAIT }
    }

    pub(super) fn on_stop_due(&mut self) {
        if self.phase == Phase::Stopping {
            self.say(format!("the group has not finished within {} s", self.stop_wait().as_secs()));
            self.end_stopped();
        }
    }

    /// Every member holds the final state.
    pub(super) fn conclude(&mut self, now: Time) {
        let words: Vec<_> =
            self.group.members.iter().map(|m| (m, &self.group.finished[m])).collect();
        let (first, ledger) = words[0].1;
        let same = |(word, other): &(super::Finished, elasticdl_proto::Ledger)| {
            (word.digest, word.step, word.records_trained)
                == (first.digest, first.step, first.records_trained)
                && other == ledger
        };
        let (first, ledger) = (first.clone(), ledger.clone());
        if let Some((other, (word, _))) = words.iter().find(|(_, word)| !same(word)) {
            let error = format!(
                "replica mismatch: worker {} ended at step {} with digest {:016x}, worker {other} at step {} with \
                 digest {:016x}",
                words[0].0, first.step, first.digest, word.step, word.digest
            );
            return self.end(now, Outcome::Failed, Some(error));
        }
        let Some(records) = &mut self.records else {
            return;
        };
        let missing = records.expected() - ledger.counted();
        records.rebuild(first.step, ledger, |_| false);
        let at_max =
            first.stopped_early || self.spec.max_steps.is_some_and(|max| first.step >= max);
        self.step = first.step;
        self.story.steps_skipped = first.steps_skipped;
        self.last_word = Some(first);
        if let Some(error) = self.failure_told() {
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

    /// Why the group can't go on, if it says so, though it holds a state. Remembers the records
    /// that are at fault.
    fn failure_told(&mut self) -> Option<String> {
        let words = self.group.finished.iter();
        let failures: Vec<_> =
            words.filter_map(|(&id, (word, _))| Some((id, word.failure.clone()?))).collect();
        let error = super::story::clip(&failures.first()?.1.error).to_owned();
        for (worker, failure) in failures {
            self.keep_failed(worker, &error, &failure.ranges);
        }
        Some(error)
    }

    /// Tells everybody that it is over, and waits a little for them to end.
    pub(super) fn end(&mut self, now: Time, outcome: Outcome, error: Option<String>) {
        if matches!(self.phase, Phase::Ended(_) | Phase::Ending(_)) {
            return;
        }
        self.say_recovered();
        let state = name(outcome);
        let line = match &error {
            Some(error) => format!("the job is {state}: {error}"),
            None => format!("the job is {state} at step {}", self.step),
        };
        self.say(line);
        self.story.error = error;
        self.phase = Phase::Ending(outcome);
        self.touch_first();
        self.clear_timers();
        for worker in self.crew.workers.keys().copied().collect::<Vec<_>>() {
            self.send(worker, ToWorker::Shutdown(format!("the job is {state}")));
        }
        let mute: Vec<LaunchId> =
            self.crew.pods().filter(|&pod| !self.crew.is_heard(pod)).collect();
        for launch in mute {
            self.kill(launch);
        }
        if self.crew.launches.is_empty() {
            self.end_now();
        } else {
            self.timer(now + END_WAIT, Timer::End);
        }
    }

    /// Ends a job that the user stopped and whose group can't finish.
    pub(super) fn end_stopped(&mut self) {
        if self.spec.work.trains() && self.step > 0 && self.story.checkpoints.newest.is_none() {
            self.note_state_lost(self.step);
        }
        self.phase = Phase::Ending(Outcome::Stopped);
        self.say_recovered();
        self.touch_first();
        self.say(format!("the job is {} at step {}", name(Outcome::Stopped), self.step));
        self.end_now();
    }

    pub(super) fn end_now(&mut self) {
        let Phase::Ending(outcome) = self.phase else {
            return;
        };
        for launch in self.crew.launches.keys().copied().collect::<Vec<_>>() {
            self.kill(launch);
        }
        self.phase = Phase::Ended(outcome);
        self.clear_timers();
        self.push(Action::End(outcome));
    }
}

/// An outcome as it is shown.
pub(super) fn name(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Failed => "failed",
        Outcome::Refused => "refused",
        Outcome::Stopped => "stopped",
    }
}

/// How long a group may take to finish its step.
const STOP_WAIT: Duration = Duration::from_secs(10);
const STOP_WITH_CHECKPOINT_WAIT: Duration = Duration::from_secs(60);
/// How long processes may take to end when the job is over.
const END_WAIT: Duration = Duration::from_secs(2);
