//! State loss: the group's state is lost with its workers. If all members leave in order, a
//! checkpoint avoids it.
//!
//! ```text
//!  no worker holds the state ──no checkpoint can exist──► failed, or (if allowed) restarted
//!          └──► new workers ──from a checkpoint──► on
//!                           └─from step 0──► failed, or (if allowed) on
//!  all members leave ──► checkpoint requested ──replacements take over──► on
//!                              └──none starting, or half the grace──► suspended with a checkpoint
//! ```
//!
//! **Invariant:** every lost state is counted and logged.

pub use elasticdl_proto::StateLoss;
use elasticdl_proto::WorkerId;

use crate::job::action::{Outcome, ToWorker};
use crate::job::job::{Job, Phase};
use crate::job::outbox::Timer;
use crate::job::time::Time;
use crate::job::workers::table::Scheduling;

impl Job {
    /// Ends a job whose state is lost permanently, as soon as that is certain. Returns whether it
    /// ended.
    pub(crate) fn ends_without_state(&mut self, now: Time) -> bool {
        let spec = &self.spec;
        let may_begin = spec.checkpoints.is_some() || spec.resume_from.is_some();
        let is_lost = self.phase == Phase::Running
            && spec.work.trains()
            && self.step > 0
            && self.history.has_formed()
            && !(may_begin || spec.restart_without_checkpoint || self.may_hold_state());
        if is_lost {
            self.on_state_lost(now, self.step);
        }
        is_lost
    }

    /// Handles a group that formed at step 0 although the job had a state. Returns whether that
    /// ends the job.
    pub(crate) fn begins_anew(&mut self, now: Time) -> bool {
        // A group that carries the state may be one step behind the last report of a lost lowest
        // rank.
        let held = u64::from(self.group.carries_state);
        if self.group.restored || self.step <= held {
            return false;
        }
        self.on_state_lost(now, self.step);
        !self.spec.restart_without_checkpoint
    }

    fn on_state_lost(&mut self, now: Time, step: u64) {
        self.note_state_lost(step);
        let cause = self
            .history
            .last_failure
            .as_ref()
            .map(|what| format!(" (last: {what})"))
            .unwrap_or_default();
        let what = format!(
            "all workers are lost{cause}, and with them the state of step {step}, of which there \
             is no checkpoint"
        );
        if self.spec.restart_without_checkpoint {
            return self.log_event(format!("{what}; training starts again from nothing"));
        }
        let wanted = match self.spec.checkpoints {
            Some(_) => "keep them more often with --checkpoint-every",
            None => "keep some with --checkpoint-dir",
        };
        let error = format!(
            "{what}; {wanted}, or let the job start again from nothing with \
             --restart-without-checkpoint"
        );
        self.end(now, Outcome::Failed, Some(error));
    }

    /// Counts the loss of a state of `step` without a checkpoint.
    pub(crate) fn note_state_lost(&mut self, step: u64) {
        let count = self.history.totals.state_lost.map_or(0, |loss| loss.count) + 1;
        self.history.totals.state_lost = Some(StateLoss { count, at_step: step });
        self.history.counters.state_losses += 1;
        self.out.mark_dirty();
    }

    /// Whether any worker may have the group's state, or is a member of a group that has.
    fn may_hold_state(&self) -> bool {
        let carries = self.group.carries_state;
        let here = |w: &crate::job::workers::table::Worker| {
            w.holds_state || w.fetched || (w.rank.is_some() && carries)
        };
        let disconnected = |l: &crate::job::workers::table::Launch| {
            l.disconnected
                .is_some_and(|disconnected| disconnected.holds_state || disconnected.rank.is_some())
        };
        self.workers.connected.values().any(here)
            || self.workers.launches.values().any(disconnected)
    }

    // ---- all members leave ----

    /// Checks whether all members that hold the state leave. Called when a member leaves, and when
    /// a group has formed.
    pub(crate) fn watch_leavers(&mut self, now: Time) {
        if !self.all_leave() {
            return;
        }
        if !self.checkpoint_requested {
            self.log_event("all workers that hold the state leave: a checkpoint is written".into());
            self.checkpoint_requested = true;
        }
        self.request_checkpoint();
        let is_replaced = self
            .workers
            .launches
            .values()
            .any(|l| l.stays() && l.scheduling != Scheduling::Unschedulable);
        if is_replaced {
            self.out.set_timer(now + self.spec.leave_wait() / 2, Timer::Suspend);
        } else {
            self.suspend();
        }
    }

    /// The time for replacements to take over the state has passed.
    pub(crate) fn on_suspend_due(&mut self) {
        if self.all_leave() {
            self.suspend();
        }
    }

    fn all_leave(&self) -> bool {
        let holders = || {
            self.workers
                .connected
                .values()
                .filter(|w| w.rank.is_some() && w.holds_state && !w.released)
        };
        self.phase == Phase::Running
            && self.spec.work.trains()
            && self.spec.checkpoints.is_some()
            && self.group.formed
            && holders().next().is_some()
            && holders().all(|w| w.leaving)
    }

    /// Ends the group at its next step boundary, with a checkpoint.
    fn suspend(&mut self) {
        self.log_event(
            "no worker takes over the state in time: the group ends with a checkpoint".into(),
        );
        for id in self.group.members.clone() {
            self.send(id, ToWorker::Suspend);
        }
    }

    /// Releases the members of a group that has ended with a checkpoint; the next group resumes
    /// from it.
    pub(crate) fn release_suspended(&mut self, now: Time) {
        self.step =
            self.group.finished.values().map(|(word, _)| word.step).max().unwrap_or(self.step);
        self.log_event(format!(
            "the group has ended at step {}, for all of its members leave",
            self.step
        ));
        self.group.finished.clear();
        let members: Vec<WorkerId> = self.group.members.clone();
        for id in members {
            self.release(now, id, "it leaves, and the state is in a checkpoint");
        }
        self.launch_missing(now);
    }
}
