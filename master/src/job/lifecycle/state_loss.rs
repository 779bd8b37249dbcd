//! State loss: the group's state is lost with its workers. If all members leave in order, a
//! checkpoint avoids it.
//!
//! ```text
//!  no worker holds the state ──no checkpoint can exist──► failed, or (if allowed) restarted
//!          └──► new workers ──from a checkpoint──► on
//!                           └─from step 0──► failed, or (if allowed) on
//!
//!  It is allowed by --restart-without-checkpoint, and until the first checkpoint is due: the
//!  beginning counts as a checkpoint.
//!
//!  all members leave ──► checkpoint requested ──replacements take over──► on
//!                              └──none starting, or half the grace──► suspended with a checkpoint
//!
//!  members end by themselves at a step, and one is left ──► checkpoint ──► the step again
//!
//!  the job gives up, and workers hold a newer state ──► checkpoint and export, at most 60 s
//!  ──► failed
//! ```
//!
//! **Invariant:** every lost state is counted and logged.

use std::time::Duration;

use elasticdl_proto::{CheckpointEvery, Work, WorkerId};

use crate::job::action::{MasterMessage, Outcome};
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::text::shortened;
use crate::job::time::Time;
use crate::job::workers::state::{Launch, Worker};

impl Job {
    /// Ends a job whose state is lost permanently, as soon as that is certain. Returns whether it
    /// ended.
    pub(crate) fn ends_without_state(&mut self, now: Time) -> bool {
        let spec = &self.spec;
        let may_begin = spec.options.checkpoints.is_some() || spec.options.resume_from.is_some();
        let is_lost = self.lifecycle.is_running()
            && spec.options.work.trains()
            && self.data.step() > 0
            && self.reporting.has_formed()
            && !(may_begin || self.may_begin_again() || self.may_hold_state());
        if is_lost {
            self.on_state_lost(now, self.data.counted());
        }
        is_lost
    }

    /// Handles a group that formed at step 0 although the job had a state, of so many records.
    /// Returns whether that ends the job.
    pub(crate) fn begins_anew(&mut self, now: Time, records: u64) -> bool {
        // A group that carries the state may be one step behind the last report of a lost lowest
        // rank.
        let held = u64::from(self.group.carries_state());
        if self.group.is_restored() || self.data.step() <= held {
            return false;
        }
        self.on_state_lost(now, records);
        !self.lifecycle.is_active()
    }

    /// Whether training may begin again from nothing, if the state is lost.
    fn may_begin_again(&self) -> bool {
        self.spec.restart_without_checkpoint || self.is_before_first_checkpoint()
    }

    /// Whether the first checkpoint was not due yet, or may still be being written, when the group
    /// made its last step. A job without checkpoints is treated as one with the default interval.
    fn is_before_first_checkpoint(&self) -> bool {
        if self.reporting.has_checkpoint() {
            return false;
        }
        match self.spec.options.checkpoints.as_ref().map(|kept| kept.every) {
            Some(CheckpointEvery::Steps(steps)) => self.data.step() <= steps.get() * 2,
            Some(CheckpointEvery::Time(interval)) => {
                self.trained() <= interval + interval.min(FIRST_CHECKPOINT)
            }
            None => self.trained() <= INTERVAL_WITHOUT_CHECKPOINTS,
        }
    }

    /// The time from the beginning of the training to the last step.
    fn trained(&self) -> Duration {
        let began =
            self.lifecycle.began.or_else(|| self.reporting.formed_first()).unwrap_or_default();
        self.reporting.reported_last().since(began)
    }

    fn on_state_lost(&mut self, now: Time, records: u64) {
        let step = self.newest_step();
        self.note_state_lost(records);
        // The whole text has been logged.
        let cause = self
            .reporting
            .last_failure()
            .map(|what| format!(" (last: {})", shortened(what)))
            .unwrap_or_default();
        let touches = self.reporting.regain_rows(0);
        let what = match touches {
            None => format!("all workers are lost{cause}"),
            Some(_) if self.spec.options.shard_optimizer => {
                format!("workers with all copies of parts of the optimizer's state are lost{cause}")
            }
            Some(touches) => format!(
                "workers with all copies of rows are lost{cause}, with {touches} row touches"
            ),
        };
        let what = format!(
            "{what}, and with them the state of step {step}, of which there is no checkpoint"
        );
        if self.may_begin_again() {
            let why = match self.spec.restart_without_checkpoint {
                true => "",
                false => ", as it had only just begun",
            };
            return self.log_event(format!("{what}; training restarts from step 0{why}"));
        }
        let wanted = match (&self.spec.options.checkpoints, self.reporting.has_checkpoint()) {
            (Some(kept), true) => &*format!(
                "some were written, and {} must be kept as it is while the job runs",
                kept.dir
            ),
            (Some(_), false) => "write them more often with --checkpoint-every",
            (None, _) => "write some with --checkpoint-dir",
        };
        let error = format!(
            "{what}; {wanted}, or let the job restart from step 0 with \
             --restart-without-checkpoint"
        );
        self.end(now, Outcome::Failed, Some(error));
    }

    /// Counts the loss of the newest state, of so many records, without a checkpoint.
    pub(crate) fn note_state_lost(&mut self, records: u64) {
        self.reporting.lose_state(self.newest_step(), records);
        self.out.mark_dirty();
    }

    /// The newest step that a worker has told of: a group that gives up its state knows of more
    /// than the lowest rank has reported before.
    pub(crate) fn newest_step(&self) -> u64 {
        self.data.step().max(self.reporting.given_up().unwrap_or(0))
    }

    /// Whether any worker may have the group's state, or is a member of a group that has.
    pub(super) fn may_hold_state(&self) -> bool {
        let carries = self.group.carries_state();
        let here = |w: &Worker| w.has_state() || (w.is_member() && carries);
        self.workers.connected().any(|(_, w)| here(w))
            || self.workers.disconnected().any(|(_, d)| d.holds_state || d.rank.is_some())
    }

    // ---- the job gives up ----

    /// Fails the job. Workers that hold a state that is neither in a checkpoint nor exported store
    /// it before.
    pub(super) fn give_up(&mut self, now: Time, error: String) {
        let newest = self.reporting.newest_checkpoint().map(|kept| kept.step);
        let holders: Vec<WorkerId> = self.workers.select(Worker::is_holder);
        let is_failing = self.lifecycle.failing.is_some();
        if is_failing && !holders.is_empty() {
            return self.delay_replacement(now);
        }
        let step = self.data.step();
        let is_stored =
            self.spec.options.checkpoints.is_none() || newest.is_some_and(|at| at >= step);
        let exports = matches!(self.spec.options.work, Work::Train { export: Some(_) });
        let has_more = self.spec.options.work.trains()
            && step > 0
            && !holders.is_empty()
            && (!is_stored || exports);
        if !has_more || is_failing {
            return self.end(now, Outcome::Failed, Some(error));
        }
        self.log_event("the job fails as soon as its newest state is stored".into());
        self.lifecycle.failing = Some(error);
        self.out.set_timer(now + GIVE_UP_WAIT, Timer::GiveUp);
        // A group that forms meanwhile ends as well.
        holders.into_iter().for_each(|id| self.send(id, MasterMessage::GiveUp));
        self.delay_replacement(now);
    }

    /// Delays the replacement of a worker that has failed too often, of which a group may need one
    /// to store its state.
    fn delay_replacement(&mut self, now: Time) {
        let start = self.lifecycle.restarts.back_off(now);
        self.out.set_timer(start, Timer::Relaunch);
    }

    /// The time in which a job that fails stores its state has passed.
    pub(crate) fn on_give_up_due(&mut self, now: Time) {
        let error = self.lifecycle.failing.take();
        self.end(now, Outcome::Failed, error);
    }

    // ---- a program ends by itself ----

    /// If members have ended by themselves since about the last step, and one member is left, it
    /// stores the state before its next step, at which it may end as well.
    pub(crate) fn store_last_copy(&mut self) {
        let step = self.data.step();
        let has_exited = self.lifecycle.exited_at.is_some_and(|at| step <= at + 1);
        let is_stored = self.reporting.newest_checkpoint().is_some_and(|kept| kept.step >= step);
        let is_alone = self.group.members().len() == 1 && self.group.carries_state();
        if has_exited && is_alone && !is_stored && self.spec.options.checkpoints.is_some() {
            self.reporting.want_checkpoint();
            self.request_checkpoint();
        }
    }

    // ---- all members leave ----

    /// Checks whether all members that hold the state leave. Called when a member leaves, and when
    /// a group has formed.
    pub(crate) fn watch_leavers(&mut self, now: Time) {
        if !self.all_leave() {
            return;
        }
        if self.reporting.want_checkpoint() {
            self.log_event("all workers with the state are leaving: writing a checkpoint".into());
        }
        self.request_checkpoint();
        let may_replace = |l: &Launch| l.stays() && !l.scheduling().is_held();
        let is_replaced = self.workers.launches().any(|(_, l)| may_replace(l));
        if is_replaced {
            self.out.set_timer(now + self.spec.options.leave_wait() / 2, Timer::Suspend);
        } else {
            self.suspend("no other worker is there to take over the state");
        }
    }

    /// The time for replacements to take over the state has passed.
    pub(crate) fn on_suspend_due(&mut self) {
        if self.all_leave() {
            self.suspend("no other worker took over the state in time");
        }
    }

    fn all_leave(&self) -> bool {
        let holders = || self.workers.connected().map(|(_, w)| w).filter(|w| w.is_holder());
        self.lifecycle.is_running()
            && self.spec.options.work.trains()
            && self.spec.options.checkpoints.is_some()
            && self.group.is_formed()
            && holders().next().is_some()
            && holders().all(Worker::is_leaving)
    }

    /// Ends the group at its next step boundary, with a checkpoint.
    fn suspend(&mut self, why: &str) {
        self.log_event(format!("{why}: the group writes a checkpoint and ends"));
        self.end_group_with_checkpoint();
    }

    /// Ends the group at its next step boundary, as soon as a checkpoint of that step is written.
    pub(super) fn end_group_with_checkpoint(&mut self) {
        for id in self.group.members().to_vec() {
            self.send(id, MasterMessage::Suspend);
        }
    }

    /// Releases the members of a group that has ended with a checkpoint at `step`; the next group
    /// resumes from it.
    pub(crate) fn release_suspended(&mut self, now: Time, step: u64) {
        self.data.set_step(step);
        if self.lifecycle.failing.is_some() {
            return self.on_give_up_due(now);
        }
        self.log_event(match self.lifecycle.is_suspended {
            true => format!("the job suspended at step {step}; its state is in a checkpoint"),
            false => format!("the group ended at step {step}: all of its workers left"),
        });
        for id in self.group.members().to_vec() {
            self.release(now, id, "it leaves, and the state is in a checkpoint");
        }
        self.launch_missing(now);
    }
}

/// How long a job that fails waits until its newest state is stored.
const GIVE_UP_WAIT: Duration = Duration::from_secs(60);
/// The first checkpoint is due after this time, if the interval is longer.
pub(crate) const FIRST_CHECKPOINT: Duration = Duration::from_secs(30);
/// The default of `--checkpoint-every`.
const INTERVAL_WITHOUT_CHECKPOINTS: Duration = Duration::from_secs(300);
