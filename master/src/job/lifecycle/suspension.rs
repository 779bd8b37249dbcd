//! Suspension: the user takes the workers away from a job and gives it others later.
//!
//! ```text
//!  running ──Suspend──► suspending ──checkpoint written, workers ended──► suspended
//!     ▲                      │                                                │
//!     └──────Resume──────────┴────────────────────────────────────────────────┘
//! ```
//!
//! The group ends at a step boundary, with a checkpoint of that step. Workers that are no members
//! are released at once, launches without a worker are killed, and no worker is started. The master
//! stays. When the job is resumed, its next group starts from the checkpoint.
//!
//! A group that has lost a member forms again first, with however few members. If all of them are
//! lost, the newest earlier checkpoint counts, as in any other job.
//!
//! **Invariant:** a member that may hold the state ends with a checkpoint, or is lost. If it can't
//! be written, the job is resumed.

use crate::job::event::LaunchId;
use crate::job::job::Job;
use crate::job::time::Time;
use crate::job::workers::table::worker_of;

impl Job {
    /// Why the job can't be suspended, if it can't.
    pub(crate) fn obstacle_to_suspension(&self) -> Option<&'static str> {
        let keeps_state =
            self.spec.options.checkpoints.is_some() || !self.spec.options.work.trains();
        match (self.is_ending(), keeps_state) {
            (true, _) => Some(
                "the job is not suspended: it is ending, and its workers end by themselves; wait \
                 for that, or end them at once with `elasticdl stop --force`",
            ),
            (false, false) => Some(
                "this job writes no checkpoints, so its state would be lost: it was started \
                 without --checkpoint-dir",
            ),
            (false, true) => None,
        }
    }

    /// Whether the user has suspended the job.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.lifecycle.is_suspended()
    }

    /// Whether the job is suspended, and some of its workers have not ended yet.
    pub(crate) fn is_suspending(&self) -> bool {
        self.is_suspended() && self.workers.has_launches()
    }

    /// Whether the job has no more steps: it stops, or is over.
    pub(crate) fn is_ending(&self) -> bool {
        !self.lifecycle.is_running()
    }

    pub(crate) fn on_suspend(&mut self, now: Time) {
        if self.lifecycle.is_suspended || self.obstacle_to_suspension().is_some() {
            return;
        }
        self.lifecycle.is_suspended = true;
        self.lifecycle.suspended_generation = None;
        self.out.mark_dirty_urgent();
        let how = if self.spec.options.work.trains() { " with a checkpoint" } else { "" };
        self.log_event(format!("suspension requested: the workers end{how}"));
        self.reconcile(now);
    }

    pub(crate) fn on_resume(&mut self, now: Time) {
        if !self.lifecycle.is_suspended || !self.lifecycle.is_running() {
            return;
        }
        let is_suspending = self.is_suspending();
        self.lifecycle.is_suspended = false;
        self.lifecycle.restart_autoscale();
        self.out.mark_dirty_urgent();
        let ends_first = is_suspending
            && self.group.is_formed()
            && self.lifecycle.suspended_generation == Some(self.group.generation());
        let when = match ends_first {
            true => " as soon as its workers have ended with their checkpoint",
            false => "",
        };
        self.log_event(format!("the job is resumed{when}"));
        // The workers that start now replace none that has failed, and wait for nothing.
        self.lifecycle.restarts.end_pauses();
        let staying = self.workers.launches().filter(|(_, l)| l.stays()).count();
        let staying = u32::try_from(staying).expect("launches are limited by max_workers");
        let beside = self.spec.spares + self.spec.options.table_servers;
        let wanted = self.lifecycle.wanted + beside;
        self.lifecycle.initial_launches_left = wanted.saturating_sub(staying);
        self.launch_missing(now);
        self.reconcile(now);
    }

    /// The checkpoint of the last step can't be written: the members go on, as their state would be
    /// lost.
    pub(crate) fn give_suspension_up(&mut self, now: Time) {
        if self.lifecycle.is_suspended && self.lifecycle.is_running() {
            self.log_event("the job is not suspended: its checkpoint can't be written".into());
            self.on_resume(now);
        }
    }

    /// Releases the workers that the state does not depend on, and asks the group to end.
    pub(crate) fn advance_suspension(&mut self, now: Time) {
        // The report that a group has formed may be on its way, or lost.
        let has_members = self.workers.members().next().is_some();
        let keeps_state = self.spec.options.work.trains() && (has_members || self.may_hold_state());
        let launches: Vec<LaunchId> = self.workers.launches().map(|(id, _)| id).collect();
        for launch in launches {
            self.withdraw(now, launch, keeps_state);
        }
        let generation = self.group.generation();
        let is_asked = self.lifecycle.suspended_generation == Some(generation);
        if keeps_state && !is_asked && self.group.is_formed() && !self.group.is_broken() {
            self.lifecycle.suspended_generation = Some(generation);
            self.end_group_with_checkpoint();
        }
    }

    /// Releases the worker of a launch, unless it may hold the state, or cancels the launch.
    fn withdraw(&mut self, now: Time, launch: LaunchId, keeps_state: bool) {
        let worker = worker_of(launch);
        match self.workers.get(worker) {
            Some(w) if w.is_released() => {}
            Some(w) if keeps_state && (w.is_member() || w.is_reserve()) => {}
            Some(_) => self.release(now, worker, "the job is suspended"),
            // A pod is killed only if none of its workers may be needed.
            None if self.workers.is_heard(launch)
                || self.workers.any_of_pod(launch, |l| l.disconnected().is_some())
                || self.workers.any_of_pod(launch, |l| l.is_forgotten()) => {}
            None => {
                for l in self.workers.pod_mut(launch) {
                    l.leave();
                    l.expect_exit_unless_counted();
                }
                self.kill(launch);
            }
        }
    }
}
