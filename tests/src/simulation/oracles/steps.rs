//! Checks of commits and states: the rules of steps in [`super`].

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl::session::State;
use elasticdl::session::evaluation::{Evaluation, Plan};
use elasticdl::session::header::StepHeader;
use elasticdl_proto::{Batch, Generation, RangeSet, WorkerId};

use crate::simulation::clock::Micros;
use crate::simulation::model::{count, right_digest};
use crate::simulation::state::oracle::GenerationHistory;
use crate::simulation::state::process::Process;
use crate::simulation::state::setting::Setting;
use crate::simulation::trace::trace;
use crate::simulation::world::World;

impl World {
    /// Checks a commit: `p` has committed a step on top of a state with digest `before`.
    pub(in crate::simulation) fn check_commit(
        &mut self,
        p: usize,
        generation: Generation,
        before: u64,
    ) {
        self.check_program(p);
        let process = &self.processes[p];
        let (Some(worker), Some(state)) = (process.worker, process.trainer.state()) else { return };
        let (step, after, lineage) =
            (state.step, process.trainer.seen.digest, process.trainer.lineage);
        if process.trainer.is_wrong() {
            // Its reduced gradient is right, and may repair others.
            let right = right_digest(&process.trainer.seen.parameters);
            if let Some(history) = self.oracle.histories.get_mut(&generation.0) {
                history.commits.entry(step).or_insert(right);
            }
            return;
        }
        trace!(
            self,
            "{}: commits step {step} in generation {generation}, {after:016x}",
            self.name(p)
        );
        let now = self.clock.now();
        let oracle = &mut self.oracle;
        oracle.committed_at = now;
        oracle.coverage.commits += 1;
        let newer = oracle
            .histories
            .range(generation.0 + 1..)
            .find(|(_, history)| history.lineage == lineage);
        let zombie = newer.map(|(g, history)| (*g, history.members.contains(&worker)));
        let stable = |step: u64| oracle.stable.get(&(lineage, step)).copied();
        let known = |history: &GenerationHistory| {
            history.lineage == lineage && history.commits.get(&step) == Some(&after)
        };
        let own = oracle.histories.get(&generation.0);
        let wrong = if let Some((newer, true)) = zombie {
            Some(format!("commits in generation {generation}, and is a member of {newer}"))
        } else if zombie.is_none() && stable(step - 1).is_some_and(|digest| digest != before) {
            Some(format!(
                "commits step {step} on top of another step {} than other ranks",
                step - 1
            ))
        } else if zombie.is_none() && stable(step).is_some_and(|digest| digest != after) {
            Some(format!("commits another step {step} than the stable one"))
        } else if own.is_none() && !oracle.histories.values().any(known) {
            Some(format!("is repaired with a step {step} that no rank has committed"))
        } else if own.is_some_and(|history| {
            history.commits.get(&step).is_some_and(|digest| *digest != after)
        }) {
            Some(format!("commits another step {step} than other ranks of generation {generation}"))
        } else {
            None
        };
        if let Some(wrong) = wrong {
            return self.violate(format!("worker {worker}: {wrong}"));
        }
        if zombie.is_some() {
            oracle.coverage.zombie_commits += 1;
        } else {
            oracle.stable.insert((lineage, step - 1), before);
        }
        let others = oracle.histories.values().filter(|history| history.lineage == lineage);
        let others: Vec<u64> =
            others.filter_map(|history| history.commits.get(&step)).copied().collect();
        let redone = !others.is_empty();
        let differs = others.iter().any(|digest| *digest != after);
        if let Some(history) = oracle.histories.get_mut(&generation.0)
            && history.commits.insert(step, after).is_none()
        {
            oracle.coverage.redone += u64::from(redone);
        }
        // Each group would give the step the same records.
        if differs && matches!(self.setting.spec.options.batch, Batch::Global(_)) {
            self.violate(format!(
                "worker {worker}: commits another step {step} than an earlier group"
            ));
        }
    }

    /// Checks the state that `p` begins a generation with, after the repair.
    pub(in crate::simulation) fn check_repaired(&mut self, p: usize, generation: Generation) {
        self.check_program(p);
        let process = &self.processes[p];
        if process.trainer.is_wrong() {
            return;
        }
        let (Some(worker), Some(state)) = (process.worker, process.trainer.state()) else {
            return self.violate(format!("{} is repaired, and has no state", self.name(p)));
        };
        let trainer = &process.trainer;
        let (base, lineage) = ((state.step, trainer.seen.digest), trainer.lineage);
        trace!(
            self,
            "{}: is at step {} in generation {generation}, {:016x}",
            self.name(p),
            base.0,
            base.1
        );
        let newer = self
            .oracle
            .histories
            .range(generation.0 + 1..)
            .find(|(_, history)| history.lineage == lineage);
        let newer = newer.map(|(newer, history)| (*newer, history.members.contains(&worker)));
        let stable = self.oracle.stable.range((lineage, 0)..(lineage + 1, 0)).next_back();
        let stable = stable.map(|(key, digest)| (key.1, *digest));
        let same =
            self.oracle.stable.get(&(lineage, base.0)).is_none_or(|digest| *digest == base.1);
        let is_older = stable.is_some_and(|(step, _)| base.0 < step) || !same;
        let carrier = stable.and_then(|(step, _)| self.carrier(lineage, step));
        // One of several spares goes on if all members are lost, and others may be further.
        // Another master gives up workers that have found only the former one.
        let is_split = self.oracle.coverage.masters_replaced > 0;
        let carrier = carrier.filter(|&worker| !is_split || self.is_known_to_leader(worker));
        let carrier = carrier.filter(|&worker| {
            let has_spares = self.setting.spec.spares > 0;
            !has_spares || self.was_member(worker, generation) || self.has_member(generation)
        });
        let oracle = &mut self.oracle;
        let history = oracle.histories.get(&generation.0);
        let goes_back = newer.is_none() && history.is_none() && is_older;
        let wrong = if let Some((newer, true)) = newer {
            Some(format!(
                "worker {worker} begins generation {generation}, and is a member of {newer}"
            ))
        } else if goes_back && carrier.is_some() {
            Some(format!(
                "generation {generation} begins with {base:?}; {stable:?} is stable, \
                 {carrier:?} has it"
            ))
        } else if history.is_some_and(|history| {
            let origin = |lineage| oracle.origin(lineage, base.0);
            history.base != base || origin(history.lineage) != origin(lineage)
        }) {
            Some(format!("generation {generation} begins with two states"))
        } else {
            None
        };
        if goes_back {
            oracle.lineages += 1;
            oracle.parents.insert(oracle.lineages, (lineage, base.0));
            oracle.coverage.gone_back += 1;
        }
        let of = if goes_back { oracle.lineages } else { lineage };
        let membership = oracle.published.iter().find(|m| m.generation == generation);
        let members =
            membership.map(|m| m.members.iter().map(|(id, _)| *id).collect()).unwrap_or_default();
        let formed_at = self.clock.now();
        let history =
            GenerationHistory { lineage: of, formed_at, members, base, commits: BTreeMap::new() };
        let history = oracle.histories.entry(generation.0).or_insert(history);
        self.processes[p].trainer.lineage = history.lineage;
        wrong.into_iter().for_each(|wrong| self.violate(wrong));
    }

    /// Checks the state of `step` that `p` serves to joiners in the group of `generation`: all
    /// members must have committed that step.
    pub(in crate::simulation) fn check_served_step(
        &mut self,
        p: usize,
        generation: Generation,
        step: u64,
    ) {
        let membership = self.oracle.published.iter().find(|m| m.generation == generation);
        let members = membership
            .into_iter()
            .flat_map(|m| &m.members)
            .map(|(id, _)| self.oracle.processes[id]);
        let lags =
            |q: &usize| self.processes[*q].trainer.state().is_none_or(|state| state.step < step);
        if let Some(q) = members.into_iter().find(lags) {
            let (donor, member) = (self.name(p), self.name(q));
            self.violate(format!(
                "{donor} serves the state of step {step}, which {member} has not committed"
            ));
        }
    }

    /// `p` has evaluated its state. The loss is the lower the more records the state has absorbed,
    /// so each evaluation is the best one so far.
    pub(in crate::simulation) fn check_evaluation(
        &mut self,
        p: usize,
        (step, evaluation): (u64, Evaluation),
    ) {
        self.oracle.coverage.evaluations += 1;
        if self.oracle.coverage.flipped > 0 {
            return;
        }
        let absorbed: u64 =
            self.processes[p].trainer.seen.parameters.iter().map(|&n| u64::from(n)).sum();
        let expected = Evaluation {
            at: step,
            best: Some((step, -(absorbed as f64))),
            ..Evaluation::default()
        };
        if evaluation != expected {
            let name = self.name(p);
            self.violate(format!("{name}: step {step} is evaluated as {evaluation:?}"));
        }
    }

    /// Whether a worker was a member of a group before this one.
    fn was_member(&self, worker: WorkerId, generation: Generation) -> bool {
        let before = self.oracle.published.iter().filter(|group| group.generation < generation);
        before.flat_map(|group| &group.members).any(|(id, _)| *id == worker)
    }

    /// Whether a group has a member of one before it.
    fn has_member(&self, generation: Generation) -> bool {
        let group = self.oracle.published.iter().find(|group| group.generation == generation);
        let members = group.into_iter().flat_map(|group| &group.members);
        members.into_iter().any(|(id, _)| self.was_member(*id, generation))
    }

    /// A worker that the master does not know to be gone, and whose state contains `step`.
    fn carrier(&self, lineage: u64, step: u64) -> Option<WorkerId> {
        let carries = |p: usize| {
            let trainer = &self.processes[p].trainer;
            self.processes[p].is_alive()
                && !self.processes[p].is_kill_requested
                && trainer.lineage == lineage
                && trainer.state().is_some_and(|state| state.step >= step)
        };
        let known = self.oracle.processes.iter().filter(|(id, _)| !self.oracle.gone.contains(id));
        known.into_iter().find(|&(_, &p)| carries(p)).map(|(id, _)| *id)
    }

    /// Whether the master knows that a worker outside the newest group has a state. The lowest rank
    /// tells that its group has formed, or else a heartbeat; and it is too late to tell it when
    /// another group was published.
    fn is_known_to_hold_state(&self, p: usize) -> bool {
        let Process { trainer, returned_late, .. } = &self.processes[p];
        let timeout = self.setting.spec.options.worker_timeout;
        let group = trainer.committed_in.and_then(|of| self.oracle.histories.get(&of.0));
        let is_old = |timeout: Duration| {
            let told_at =
                group.map_or(0, |group| group.formed_at) + timeout.as_micros() as Micros / 2;
            told_at <= self.clock.now()
        };
        !returned_late && timeout.is_some_and(is_old)
    }

    /// Checks that `p` may create the initial state for its group: no other member has a state, nor
    /// a worker that leaves and was not released, unless the group gives up what it has.
    pub(in crate::simulation) fn check_initial(&mut self, p: usize) {
        // The others have found the same, and may not have come to it.
        if self.processes[p].trainer.seen.has_lost_rows {
            return;
        }
        let generation = self.generation_of(p);
        // A group that is no longer the newest may still begin.
        let newest = self.oracle.newest.as_ref();
        let membership = newest.filter(|m| Some(m.generation) == generation);
        let members = membership
            .into_iter()
            .flat_map(|m| &m.members)
            .map(|(id, _)| self.oracle.processes[id]);
        let holds = |q: usize| {
            let process = &self.processes[q];
            // The initial state is the same wherever it is created.
            let has_more = process.trainer.state().is_some_and(|state| state.step > 0);
            q != p && process.is_alive() && has_more
        };
        let leaves = |q: &usize| membership.is_some() && self.is_in_reserve(*q);
        let leavers = (0..self.processes.len()).filter(leaves);
        let leavers = leavers.filter(|&q| self.is_known_to_hold_state(q));
        let holder = members.chain(leavers).find(|&q| holds(q));
        if let Some(q) = holder {
            self.violate(format!(
                "{} creates an initial state, and {} holds a state",
                self.name(p),
                self.name(q)
            ));
        }
    }
}

/// Checks that the reduced gradient of a step counts exactly the records that the headers list.
pub(in crate::simulation) fn check_sum(
    setting: &Setting,
    headers: &[StepHeader],
    sum: &[f32],
) -> Result<(), String> {
    let mut expected = vec![0.0; sum.len()];
    for header in headers {
        count(&mut expected, &header.ranges, setting.records());
    }
    if expected == sum {
        return Ok(());
    }
    Err(format!("the sum is {sum:?}, the headers list {expected:?}"))
}

/// Checks that a state that a round has gone on from was evaluated before, if that was due.
pub(in crate::simulation) fn check_evaluated(
    before: &State,
    plan: Option<Plan>,
) -> Result<(), String> {
    match plan.filter(|plan| plan.is_due(&before.evaluation, before.step, false)) {
        Some(_) => Err(format!("step {} was not evaluated", before.step)),
        None => Ok(()),
    }
}

/// Checks that the right records were added to the state `before`.
pub(in crate::simulation) fn check_order(
    setting: &Setting,
    before: &State,
    headers: &[StepHeader],
) -> Result<(), String> {
    let (epoch, all) = (before.ledger.epoch(), setting.records());
    let mut records = RangeSet::default();
    let mut repeated = 0;
    for range in headers.iter().flat_map(|header| &header.ranges) {
        repeated += records.insert(range.records());
        repeated += u64::from(range.epoch != epoch);
    }
    let start = all - before.ledger.remaining(epoch);
    let batch = setting.spec.options.batch;
    let of_step = match batch {
        Batch::Global(batch) => {
            let batch = batch.get();
            let start = before.step % all.div_ceil(batch) * batch;
            start..all.min(start + batch)
        }
        // A group that shrinks within a step keeps what the lost workers' peers have computed.
        Batch::PerWorker(_) => {
            // A table server has no records, and can't read any.
            let serves =
                |header: &&StepHeader| header.ranges.is_empty() && header.readable == Some(0);
            let servers = setting.spec.options.table_servers as usize;
            let servers = headers.iter().filter(serves).count().min(servers);
            let workers = headers.len().saturating_sub(servers).max(1);
            let least = all.min(start + batch.records(workers));
            start..records.iter().last().map_or(least, |last| last.end.max(least))
        }
    };
    if repeated == 0 && start == of_step.start && records.iter().eq([of_step.clone()]) {
        return Ok(());
    }
    let step = before.step + 1;
    Err(format!("step {step} consists of {records:?}, not {of_step:?} of epoch {epoch}"))
}
