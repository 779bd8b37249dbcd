//! Replicas that differ, and workers of another build.
//!
//! A bit flips in the parameters of a member. Each step compares a part of the state, and each
//! checkpoint the whole, so the ranks find it within a few steps.
//!
//! **Oracle:** no checkpoint is complete with that bit, and no job ends with it. Where most ranks
//! agree, only a rank with that bit gives up its state. A worker of another build commits no step.
//!
//! What no rank can tell is not judged: a wrong state that is the only one, or that is copied
//! before it is compared.

use elasticdl::session::origin::{Origin, Program};
use elasticdl::session::replicas::StateMismatch;
use elasticdl_master::job::WorkerMessage;

use super::state::trainer::Trainer;
use super::trace::trace;
use super::world::World;

impl World {
    /// Whether `p` has committed a step in the newest group, another member has as well, and no
    /// fault is active that could leave `p` alone with its state.
    pub(super) fn may_flip(&self, p: usize) -> bool {
        let newest = self.oracle.newest_generation();
        let is_in = |q: usize| {
            let process = &self.processes[q];
            let Trainer { committed_in, is_hung, .. } = process.trainer;
            process.is_alive() && !process.paused && !is_hung && committed_in == Some(newest)
        };
        let members = (0..self.processes.len()).filter(|&q| is_in(q)).count();
        members > 1 && is_in(p) && self.fault_plan.unhealed == 0 && self.master.is_alive
    }

    /// A bit of the parameters of `p` flips.
    pub(super) fn flip(&mut self, p: usize) {
        if !self.may_flip(p) {
            return;
        }
        let model = &mut self.processes[p].trainer.model;
        let parameter = self.rng.below(model.parameters.len() as u64) as usize;
        model.flip(parameter);
        trace!(self, "{}: a bit of parameter {parameter} flips", self.name(p));
        self.fault_plan.links_may_break = true;
        self.processes.iter_mut().for_each(|process| process.is_degraded = true);
        self.oracle.failures_max += 1;
        self.oracle.coverage.flipped += 1;
    }

    /// The only member of a group has no other state to compare its own with.
    pub(super) fn check_copy(&mut self, p: usize) {
        if self.oracle.coverage.flipped > 0 {
            self.oracle.is_void |= self.processes[p].trainer.model.is_wrong();
        }
    }

    /// Replicas of the group of `p` differ.
    pub(super) fn differs(&mut self, p: usize, mismatch: &StateMismatch) {
        let what = mismatch.to_string();
        if self.oracle.coverage.flipped == 0 {
            return self.violate(format!("{}: {what}", self.name(p)));
        }
        if !mismatch.is_failing() {
            return self.broke(p, None, "replicas differ");
        }
        let has_majority = mismatch.verdict.has_majority;
        if has_majority && !self.processes[p].trainer.model.is_wrong() {
            return self.violate(format!("{} gives up a right state: {what}", self.name(p)));
        }
        self.oracle.coverage.diverged += 1;
        self.fail(p, WorkerMessage::Diverged { error: what, has_majority });
    }

    /// The group of `p` runs another build.
    pub(super) fn is_other(&mut self, p: usize, error: String) {
        if self.setting.other_build != Some(self.processes[p].launch) {
            return self.violate(format!("{}: {error}", self.name(p)));
        }
        self.oracle.coverage.other_builds += 1;
        // The master may count the report before the process has ended.
        self.oracle.failures_max += 1;
        self.fail(p, WorkerMessage::Failed { error, ranges: Vec::new(), fatal: false });
    }

    fn fail(&mut self, p: usize, report: WorkerMessage) {
        trace!(self, "{}: fails: {report:?}", self.name(p));
        self.fault_plan.links_may_break = true;
        self.processes[p].is_degraded = true;
        self.queue_for_master(p, report);
        self.stop_trainer(p, 1);
    }

    /// What `p` runs.
    pub(super) fn origin(&self, p: usize) -> Origin {
        let is_other = self.setting.other_build == Some(self.processes[p].launch);
        let program = Program { executable: 1 + u64::from(is_other), ..Program::default() };
        Origin { host: String::new(), program }
    }

    /// Checks that `p` runs the program of the job.
    pub(super) fn check_program(&mut self, p: usize) {
        if self.setting.other_build == Some(self.processes[p].launch) {
            self.violate(format!("{} of another build takes part in a group", self.name(p)));
        }
    }
}
