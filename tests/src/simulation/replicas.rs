//! Replicas that differ, wrong gradients, and workers of another build.
//!
//! A bit flips in the parameters of a member. Each step compares a part of the state, and each
//! checkpoint the whole, so the ranks find it within a few steps.
//!
//! **Oracle:** no checkpoint is complete with that bit, and no job ends with it. Where most ranks
//! agree, only a rank with that bit gives up its state. A worker of another build commits no step.
//!
//! In jobs that are audited, a worker computes wrong gradients, once or several times, or a sum of
//! gradients is changed on its way: to all ranks, or to one.
//!
//! **Oracle:** no step has a wrong sum. Where most ranks agree, only a rank that has computed a
//! wrong gradient fails; no rank fails for a sum.
//!
//! What no rank can tell is not judged: a wrong state that is the only one, or that is copied
//! before it is compared.

use elasticdl::session::header::{self, StepHeader};
use elasticdl::session::origin::{Origin, Program};
use elasticdl_master::job::WorkerMessage;

use super::state::coverage::Coverage;
use super::state::endpoint::Ring;
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
            let Trainer { committed_in, is_hung, .. } = &process.trainer;
            process.is_alive() && !process.paused && !is_hung && *committed_in == Some(newest)
        };
        let members = (0..self.processes.len()).filter(|&q| is_in(q)).count();
        members > 1 && is_in(p) && self.fault_plan.unhealed == 0 && self.master.is_alive
    }

    /// A bit of the parameters of `p` flips after its current task.
    pub(super) fn flip(&mut self, p: usize) {
        if self.may_flip(p) {
            let parameter = self.rng.below(self.setting.parameters() as u64) as usize;
            self.processes[p].trainer.flips.set(Some(parameter));
        }
    }

    /// `p` computes some wrong gradients, as long as they are audited, or changes a sum.
    pub(super) fn begin_miscounts(&mut self, p: usize) {
        if !self.may_flip(p) {
            return;
        }
        let miscounts = self.rng.between(1, 5) as u32;
        let [changes_sum, is_second, of_all] = [(); 3].map(|()| self.rng.below(2) == 0);
        let trainer = &mut self.processes[p].trainer;
        if changes_sum {
            trainer.changes_sum = Some((is_second, of_all));
        } else if !trainer.has_miscounted {
            trainer.miscounts = miscounts;
        }
    }

    /// By how much `p` changes the sum that begins, or ends at this rank: `of_all`. `header`: its
    /// own, which a second sum of the same gradients has not.
    pub(super) fn changes_sum(&mut self, p: usize, header: &[u8], of_all: bool) -> f32 {
        let is_second = header.is_empty();
        let is_audited = is_second
            || header::decode(header).is_some_and(|header: StepHeader| header.audit.is_some());
        let trainer = &mut self.processes[p].trainer;
        let is_due = is_audited && trainer.changes_sum == Some((is_second, of_all));
        if !is_due || self.setting.chunks.is_some() {
            return 0.0;
        }
        trainer.changes_sum = None;
        trace!(self, "{}: changes a sum, of all ranks: {of_all}", self.name(p));
        self.fault_plan.links_may_break = true;
        self.processes.iter_mut().for_each(|process| process.is_degraded = true);
        self.oracle.coverage.sums_changed += 1;
        WRONG
    }

    /// By how much the gradient that `p` computes is wrong: in half of the jobs by another number
    /// each time. That of a worker alone is right: it would be wrong a second time.
    pub(super) fn miscounts(&mut self, p: usize) -> f32 {
        let trainer = &mut self.processes[p].trainer;
        let is_alone = trainer.ring.as_ref().is_none_or(|ring| ring.world() == 1);
        if trainer.miscounts == 0 || is_alone || !trainer.is_auditing.get() {
            return 0.0;
        }
        let is_irregular = self.setting.spec.options.seed.is_multiple_of(2);
        let wrong = if is_irregular { WRONG * trainer.miscounts as f32 } else { WRONG };
        trainer.miscounts -= 1;
        if !std::mem::replace(&mut trainer.has_miscounted, true) {
            self.oracle.failures_max += 1;
            self.fault_plan.links_may_break = true;
            self.processes.iter_mut().for_each(|process| process.is_degraded = true);
        }
        trace!(self, "{}: computes a wrong gradient", self.name(p));
        self.oracle.coverage.miscounted += 1;
        wrong
    }

    /// A bit of a parameter of `p` has flipped.
    pub(super) fn note_flip(&mut self, p: usize, parameter: usize) {
        trace!(self, "{}: a bit of parameter {parameter} flips", self.name(p));
        self.fault_plan.links_may_break = true;
        self.processes.iter_mut().for_each(|process| process.is_degraded = true);
        self.oracle.failures_max += 1;
        self.oracle.coverage.flipped += 1;
    }

    /// The only member of a group has no other state to compare its own with.
    pub(super) fn check_copy(&mut self, p: usize) {
        let trainer = &self.processes[p].trainer;
        let is_alone = trainer.ring.as_ref().map(Ring::world) == Some(1);
        if self.oracle.coverage.flipped > 0 && is_alone {
            self.oracle.is_void |= trainer.is_wrong();
        }
    }

    /// Checks that `p` may have left a group whose replicas differ from its own.
    pub(super) fn check_difference(&mut self, p: usize) {
        let Coverage { flipped, miscounted, sums_changed, .. } = self.oracle.coverage;
        if flipped + miscounted + sums_changed == 0 {
            self.violate(format!("{}: replicas differ", self.name(p)));
        }
    }

    /// `p` has failed.
    pub(super) fn check_failure(&mut self, p: usize, failure: &WorkerMessage) {
        self.fault_plan.links_may_break = true;
        self.processes[p].is_degraded = true;
        let is_wrong = self.processes[p].trainer.is_wrong();
        let miscounted = self.processes[p].trainer.has_miscounted;
        match failure {
            WorkerMessage::Diverged { has_majority, .. }
                if self.oracle.coverage.miscounted > 0 && (miscounted || !has_majority) =>
            {
                self.oracle.coverage.audited += 1;
            }
            WorkerMessage::Diverged { has_majority, .. }
                if self.oracle.coverage.flipped > 0 && (is_wrong || !has_majority) =>
            {
                self.oracle.coverage.diverged += 1;
            }
            WorkerMessage::Failed { .. }
                if self.setting.other_build == Some(self.processes[p].launch) =>
            {
                self.oracle.coverage.other_builds += 1;
                // The master may count the report before the process has ended.
                self.oracle.failures_max += 1;
            }
            _ => self.violate(format!("{} fails: {failure:?}", self.name(p))),
        }
    }

    /// What `p` runs.
    pub(super) fn origin(&self, p: usize) -> Origin {
        let is_other = self.setting.other_build == Some(self.processes[p].launch);
        let program = Program { executable: 1 + u64::from(is_other), ..Program::default() };
        let serves_tables = self.serves_tables(p);
        Origin { host: self.processes[p].host.to_string(), program, serves_tables }
    }

    /// Checks that `p` runs the program of the job. One other rank can't outvote it.
    pub(super) fn check_program(&mut self, p: usize) {
        if self.setting.other_build != Some(self.processes[p].launch) {
            return;
        }
        match self.processes[p].trainer.ring.as_ref().map_or(1, Ring::world) {
            1 | 2 => self.oracle.is_void = true,
            _ => self.violate(format!("{} of another build takes part in a group", self.name(p))),
        }
    }
}

/// What is added to a count that is wrong.
const WRONG: f32 = 0.5;
