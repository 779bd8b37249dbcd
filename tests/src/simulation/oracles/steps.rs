//! Of what is committed: see the rules of steps in [`super`].

use std::collections::BTreeMap;

use elasticdl_proto::{Generation, WorkerId};
use elasticdl_worker::core::header::StepHeader;
use elasticdl_worker::core::session::Session;

use super::Line;
use crate::simulation::model::count;
use crate::simulation::story::tell;
use crate::simulation::world::World;

impl World {
    /// What the gradients hold is what the headers tell.
    pub(in crate::simulation) fn check_sum(&mut self, p: usize, headers: &[StepHeader]) {
        let model = &self.processes[p].trainer.model;
        let mut told = vec![0; model.reduced.len()];
        for header in headers {
            count(&mut told, &header.ranges, self.setting.records());
        }
        if told != model.reduced {
            self.violate(format!(
                "{}: the sum is {:?}, the headers tell {told:?}",
                self.name(p),
                model.reduced
            ));
        }
    }

    /// `p` has committed a step on top of a state with digest `before`.
    pub(in crate::simulation) fn check_commit(
        &mut self,
        p: usize,
        generation: Generation,
        before: u64,
    ) {
        let process = &self.processes[p];
        let (Some(worker), Some(state)) = (process.worker, process.trainer.state()) else { return };
        let (step, after, era) =
            (state.step, process.trainer.model.digest(), process.trainer.model.era);
        let held = self.books.leased.get_mut(&worker);
        held.into_iter().for_each(|held| held.retain(|r| state.ledger.absorbed_of(*r) < r.len()));
        tell!(
            self,
            "{}: commits step {step} in generation {generation}, {after:016x}",
            self.name(p)
        );
        let books = &mut self.books;
        books.tally.commits += 1;
        let newer = books.lines.range(generation.0 + 1..).find(|(_, line)| line.era == era);
        let zombie = newer.map(|(g, line)| (*g, line.members.contains(&worker)));
        let stable = |step: u64| books.stable.get(&(era, step)).copied();
        let known = |line: &Line| line.era == era && line.commits.get(&step) == Some(&after);
        let own = books.lines.get(&generation.0);
        let wrong = if let Some((newer, true)) = zombie {
            Some(format!("commits in generation {generation}, and is a member of {newer}"))
        } else if stable(step - 1).is_some_and(|digest| digest != before) {
            Some(format!("builds step {step} upon another step {} than others", step - 1))
        } else if zombie.is_none() && stable(step).is_some_and(|digest| digest != after) {
            Some(format!("commits another step {step} than the one that was built upon"))
        } else if own.is_none() && !books.lines.values().any(known) {
            Some(format!("repairs itself with a step {step} that nobody has committed"))
        } else if own
            .is_some_and(|line| line.commits.get(&step).is_some_and(|digest| *digest != after))
        {
            Some(format!("commits another step {step} than other ranks of generation {generation}"))
        } else {
            None
        };
        if let Some(wrong) = wrong {
            return self.violate(format!("worker {worker}: {wrong}"));
        }
        if zombie.is_some() {
            books.tally.zombie_commits += 1;
        } else {
            books.stable.insert((era, step - 1), before);
        }
        let others = books.lines.values().filter(|line| line.era == era);
        let redone =
            others.filter_map(|line| line.commits.get(&step)).any(|digest| *digest != after);
        if let Some(line) = books.lines.get_mut(&generation.0)
            && line.commits.insert(step, after).is_none()
        {
            books.tally.redone += u64::from(redone);
        }
    }

    /// `p` has come to the state of the group of `generation`.
    pub(in crate::simulation) fn check_repaired(&mut self, p: usize, generation: Generation) {
        let process = &self.processes[p];
        let (Some(worker), Some(state)) = (process.worker, process.trainer.state()) else {
            return self.violate(format!("{} is repaired, and has no state", self.name(p)));
        };
        let model = &process.trainer.model;
        let (base, era) = ((state.step, model.digest()), model.era);
        tell!(
            self,
            "{}: is at step {} in generation {generation}, {:016x}",
            self.name(p),
            base.0,
            base.1
        );
        let newer = self.books.lines.range(generation.0 + 1..).find(|(_, line)| line.era == era);
        let newer = newer.map(|(newer, line)| (*newer, line.members.contains(&worker)));
        let stable = self.books.stable.range((era, 0)..(era + 1, 0)).next_back();
        let stable = stable.map(|(key, digest)| (key.1, *digest));
        let same = self.books.stable.get(&(era, base.0)).is_none_or(|digest| *digest == base.1);
        let is_older = stable.is_some_and(|(step, _)| base.0 < step) || !same;
        let carrier = stable.and_then(|(step, _)| self.carrier(era, step));
        let books = &mut self.books;
        let line = books.lines.get(&generation.0);
        let goes_back = newer.is_none() && line.is_none() && is_older;
        let wrong = if let Some((newer, true)) = newer {
            Some(format!(
                "worker {worker} begins generation {generation}, and is a member of {newer}"
            ))
        } else if goes_back && carrier.is_some() {
            Some(format!(
                "generation {generation} begins with {base:?}; {stable:?} is stable, {carrier:?} has it"
            ))
        } else if line
            .is_some_and(|line| line.base != base || (line.era != era && line.came_from != era))
        {
            Some(format!("generation {generation} begins with two states"))
        } else {
            None
        };
        if goes_back {
            books.eras += 1;
            books.tally.gone_back += 1;
        }
        let of = if goes_back { books.eras } else { era };
        let membership = books.published.iter().find(|m| m.generation == generation);
        let members =
            membership.map(|m| m.members.iter().map(|(id, _)| *id).collect()).unwrap_or_default();
        let formed_at = self.clock.now();
        let line =
            Line { era: of, came_from: era, formed_at, members, base, commits: BTreeMap::new() };
        let line = books.lines.entry(generation.0).or_insert(line);
        self.processes[p].trainer.model.era = line.era;
        wrong.into_iter().for_each(|wrong| self.violate(wrong));
    }

    /// `p` gives newcomers the state of `step`, in the group of `generation`: all its members must
    /// have come to that step.
    pub(in crate::simulation) fn check_given(
        &mut self,
        p: usize,
        generation: Generation,
        step: u64,
    ) {
        let membership = self.books.published.iter().find(|m| m.generation == generation);
        let members =
            membership.into_iter().flat_map(|m| &m.members).map(|(id, _)| self.books.processes[id]);
        let lags =
            |q: &usize| self.processes[*q].trainer.state().is_none_or(|state| state.step < step);
        if let Some(q) = members.into_iter().find(lags) {
            let (giver, member) = (self.name(p), self.name(q));
            self.violate(format!(
                "{giver} gives the state of step {step}, which {member} has not committed"
            ));
        }
    }

    /// A worker that the master does not know to be gone, and whose state contains `step`.
    fn carrier(&self, era: u64, step: u64) -> Option<WorkerId> {
        let carries = |p: usize| {
            let trainer = &self.processes[p].trainer;
            self.processes[p].is_alive()
                && trainer.model.era == era
                && trainer.state().is_some_and(|state| state.step >= step)
        };
        let known = self.books.processes.iter().filter(|(id, _)| !self.books.gone.contains(id));
        known.into_iter().find(|&(_, &p)| carries(p)).map(|(id, _)| *id)
    }

    /// `p` begins from nothing for its group.
    pub(in crate::simulation) fn check_beginning(&mut self, p: usize) {
        let place = self.processes[p].trainer.session.as_ref().and_then(Session::place);
        // A group that is not the newest any more may still begin, on its own.
        let newest = self.books.newest.as_ref();
        let membership = newest.filter(|m| Some(m.generation) == place.map(|(g, _)| g));
        let members =
            membership.into_iter().flat_map(|m| &m.members).map(|(id, _)| self.books.processes[id]);
        let holder = members.filter(|&q| q != p && self.processes[q].is_alive());
        let holder = holder.into_iter().find(|&q| self.processes[q].trainer.state().is_some());
        if let Some(q) = holder {
            self.violate(format!(
                "{} begins from nothing, and {} holds a state",
                self.name(p),
                self.name(q)
            ));
        }
    }
}
