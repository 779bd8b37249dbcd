//! Checks of rows: each copy of each shard is what the committed steps have made of it.
//!
//! * After a commit or a repair, a worker has exactly the rows of the shards that the placement
//!   gives it, with the touches and the numbers of the reference after the same steps. So each pair
//!   of a record and a row counts once, and copies are equal.
//! * All ranks of a generation have one placement after each step. Each shard has a holder, and no
//!   holder twice. None comes to a worker where table servers suffice.
//! * A rank is given rows as of its last commit, or of exactly as many commits before as the lag
//!   is.
//! * The same of the chunks of an optimizer's state, each of which is what the parameters of the
//!   chunk say that it is.
//! * In a group that continues with older rows, the lost shards are those of the newest checkpoint,
//!   and the summary counts the touches that the rows then have.
//! * Rows are lost only if as many workers are lost as hold each shard. A worker that leaves is not
//!   lost until it is released.

use std::collections::BTreeSet;
use std::rc::Rc;

use elasticdl::simulated::{Placement, ReplacedRows, Settings};
use elasticdl_master::job::{LaunchId, OnRowsLost};
use elasticdl_proto::{Generation, WorkerId};

use crate::simulation::machine::checkpoint_key;
use crate::simulation::model::digest;
use crate::simulation::rows::{Rows, touches};
use crate::simulation::state::process::Process;
use crate::simulation::trace::trace;
use crate::simulation::worker::SeenRows;
use crate::simulation::world::World;

impl World {
    /// Notes that `p` has committed a step of these records on top of a state with the digest
    /// `before`.
    pub(in crate::simulation) fn note_rows(&mut self, p: usize, before: u64, records: &[usize]) {
        let Some(settings) = self.setting.tables else { return };
        let trainer = &self.processes[p].trainer;
        let Some(state) = trainer.state().filter(|_| !trainer.is_wrong()) else { return };
        let (after, states) = ((state.step, trainer.seen.digest), &mut self.oracle.rows.states);
        let from = match states.get(&(state.step - 1, before)) {
            Some(from) => from.clone(),
            None if state.step == 1 => vec![Rc::default()],
            None => return,
        };
        for rows in from {
            let next = rows.after(&settings, (after.0, records));
            let known = states.entry(after).or_default();
            if !known.iter().any(|rows| **rows == next) {
                known.push(Rc::new(next));
            }
        }
    }

    /// The rows that the state of `p` stands for, for each history that leads there.
    fn references(&self, p: usize) -> Option<Vec<Rc<Rows>>> {
        let trainer = &self.processes[p].trainer;
        let state = trainer.state().filter(|_| !trainer.is_wrong())?;
        match self.oracle.rows.states.get(&(state.step, trainer.seen.digest)) {
            Some(rows) => Some(rows.clone()),
            None => Some(vec![Rc::default()]),
        }
    }

    /// Checks the shards of `p` in the group of `generation`.
    pub(in crate::simulation) fn check_rows(
        &mut self,
        p: usize,
        generation: Option<Generation>,
        seen: &SeenRows,
    ) {
        let SeenRows { step, placement, rows } = seen;
        let process = &self.processes[p];
        let (Some(references), Some(worker)) = (self.references(p), process.worker) else { return };
        if process.trainer.state().map(|state| state.step) != Some(*step) {
            return;
        }
        let held: BTreeSet<u32> = placement.held_by(worker.0).collect();
        let fits = |reference: &Rc<Rows>| held.iter().all(|&s| reference.of(s).eq(rows.of(s)));
        if !references.iter().any(fits) {
            let of = &references[0];
            let wrong = held.iter().find(|&&s| !of.of(s).eq(rows.of(s))).copied().unwrap_or(0);
            let expected: Vec<_> = of.of(wrong).collect();
            let found: Vec<_> = rows.of(wrong).collect();
            let name = self.name(p);
            return self.violate(format!(
                "{name}: shard {wrong} after step {step} is {found:?}, not {expected:?}"
            ));
        }
        // Rows of a checkpoint have holders from the next commit on.
        let goes_on = self.setting.spec.options.on_rows_lost == OnRowsLost::Stale;
        let is_whole = !goes_on || placement.lost().next().is_none();
        let Some(generation) = generation.filter(|_| is_whole) else { return };
        self.check_placement(p, (generation.0, *step), placement);
    }

    /// Checks who holds shards after a step of a group.
    pub(in crate::simulation) fn check_placement(
        &mut self,
        p: usize,
        at: (u64, u64),
        placement: &Placement,
    ) {
        let mut holders = (0..placement.shards()).map(|shard| placement.holders(shard));
        let is_wrong = |holders: &&[u64]| {
            holders.is_empty() || holders.iter().collect::<BTreeSet<_>>().len() < holders.len()
        };
        if let Some(wrong) = holders.find(is_wrong) {
            return self.violate(format!("{}: {wrong:?} hold a shard", self.name(p)));
        }
        let known = self.oracle.rows.placements.entry(at).or_insert_with(|| placement.clone());
        if known != placement {
            self.violate(format!("{}: the placement after {at:?} differs", self.name(p)));
        }
        if let Some(worker) = self.misplaced(at, placement) {
            let name = self.name(p);
            self.violate(format!("{name}: worker {worker} comes to hold a shard at {at:?}"));
        }
    }

    /// A worker that has received a shard with a step of a group, though the group's table servers
    /// are as many as there are copies.
    fn misplaced(&self, at: (u64, u64), placement: &Placement) -> Option<u64> {
        let published = self.oracle.published.iter().find(|m| m.generation.0 == at.0)?;
        let serves = |worker: WorkerId| {
            self.process_of(LaunchId(worker.0)).is_some_and(|p| self.serves_tables(p))
        };
        let servers = published.members.iter().filter(|(id, _)| serves(*id)).count();
        if servers < self.setting.copies() || self.setting.spec.options.table_servers == 0 {
            return None;
        }
        let before = self.oracle.rows.placements.get(&(at.0, at.1.checked_sub(1)?))?;
        let joiners = (0..placement.shards()).flat_map(|shard| {
            let before = before.holders(shard);
            placement.holders(shard).iter().filter(|worker| !before.contains(worker))
        });
        joiners.copied().find(|worker| !serves(WorkerId(*worker)))
    }

    /// Notes who holds shards after a step of a group, if each has all of its copies.
    pub(in crate::simulation) fn note_whole(&mut self, at: (u64, u64), placement: &Placement) {
        let Some(published) = self.oracle.published.iter().find(|m| m.generation.0 == at.0) else {
            return;
        };
        let is_member = |worker| published.members.iter().any(|(id, _)| id.0 == worker);
        let placement = placement.within(is_member);
        let holders = (0..placement.shards()).map(|shard| placement.holders(shard));
        let copies = self.setting.copies();
        let least = holders.clone().map(<[u64]>::len).min().unwrap_or(0);
        if least >= copies.min(published.members.len()) {
            let holders = holders.flatten().copied().collect();
            self.oracle.rows.whole.insert(at, (holders, least));
        }
    }

    /// `p` leaves its group in order. Its rows are on others, unless a fault interrupts that, or
    /// the steps are done: then the next group makes the copies, as after a loss.
    pub(in crate::simulation) fn note_left_rows(&mut self, p: usize) {
        let Process { worker, trainer, .. } = &self.processes[p];
        let (options, state) = (&self.setting.spec.options, trainer.state());
        let is_done = state.is_some_and(|state| {
            state.ledger.epoch() >= options.epochs
                || options.max_steps.is_some_and(|most| state.step >= most)
        });
        if let Some(worker) = worker.filter(|_| !is_done && !self.fault_plan.links_may_break) {
            for (holders, _) in self.oracle.rows.whole.values_mut() {
                holders.remove(&worker.0);
            }
        }
    }

    /// Checks the values of rows, by table and id, that `p` reads. `read_of`: which rows it is to
    /// read, given those of its state.
    pub(in crate::simulation) fn check_read(
        &mut self,
        p: usize,
        read: &[((usize, u64), Vec<f32>)],
        read_of: for<'a> fn(&'a Rows, &Settings) -> &'a Rows,
    ) {
        let (Some(settings), Some(references)) = (self.setting.tables, self.references(p)) else {
            return;
        };
        let is_wrong = |reference: &Rc<Rows>| {
            let wrong = |(row, values): &&((usize, u64), Vec<f32>)| {
                read_of(reference, &settings).values(&settings, *row) != *values
            };
            read.iter().find(wrong)
        };
        if references.iter().any(|reference| is_wrong(reference).is_none()) {
            return;
        }
        if let Some((row, values)) = is_wrong(&references[0]) {
            let expected = read_of(&references[0], &settings).values(&settings, *row);
            let name = self.name(p);
            self.violate(format!("{name} reads row {row:?} as {values:?}, not {expected:?}"));
        }
    }

    /// `p` says that all copies of a shard are lost.
    ///
    /// A step that no member of the group has committed is undone, with the copies that it brought:
    /// the last placement counts that a step up to `step`, the group's, had.
    pub(in crate::simulation) fn check_lost_rows(&mut self, p: usize, step: u64) {
        trace!(self, "{}: rows are lost", self.name(p));
        let generation = self.processes[p].trainer.seen.group.map(|(generation, _)| generation);
        let published = &self.oracle.published;
        let members = published.iter().find(|m| Some(m.generation) == generation);
        let is_here = |worker: &u64| {
            let is_it = |id| id == *worker;
            let is_member = members.is_some_and(|m| m.members.iter().any(|(id, _)| is_it(id.0)));
            let held = |&q: &usize| {
                let process = &self.processes[q];
                let is_here = process.worker.is_some_and(|id| is_it(id.0)) && process.is_alive();
                // Rows of one that was outside the group meanwhile are too old.
                let is_near = process.trainer.state().is_some_and(|state| state.step + 1 >= step);
                is_here && process.trainer.has_rows && is_near
            };
            let holders = (0..self.processes.len()).filter(held);
            holders.into_iter().any(|q| is_member || self.is_in_reserve(q))
        };
        let rows = &self.oracle.rows;
        let mut whole = rows.whole.iter().rev();
        let Some((_, (holders, copies))) = whole.find(|((_, at), _)| *at <= step) else { return };
        let lost = holders.iter().filter(|worker| !is_here(worker)).count();
        // A shard may have been made whole, by members that came later, before the others were.
        let newest = rows.placements.iter().rev().find(|((_, at), _)| *at <= step);
        let is_lost = |placement: &Placement, shard| {
            let holders = placement.holders(shard);
            holders.len() >= *copies && !holders.iter().any(is_here)
        };
        let explains = |p: &Placement| (0..p.shards()).any(|shard| is_lost(p, shard));
        if lost < *copies && !newest.is_some_and(|(_, placement)| explains(placement)) {
            let name = self.name(p);
            self.violate(format!("{name}: rows are lost with {lost} workers, of {copies} copies"));
        }
    }

    /// Older rows have taken the place of lost ones in the state of `p`, if it is at that step.
    pub(in crate::simulation) fn note_replaced(&mut self, p: usize, replaced: &ReplacedRows) {
        let ReplacedRows { step, shards, checkpoint } = replaced;
        let trainer = &self.processes[p].trainer;
        let Some(state) = trainer.state().filter(|state| state.step == *step) else { return };
        let at = (state.step, trainer.seen.digest);
        let of_checkpoint = checkpoint.as_deref().map(|name| {
            let key = checkpoint_key(name);
            (key.0, digest(&self.checkpoint_store.complete[&key].1))
        });
        let none = || vec![Rc::default()];
        let states = &mut self.oracle.rows.states;
        let older =
            of_checkpoint.map_or_else(none, |of| states.get(&of).cloned().unwrap_or_else(none));
        let known = states.entry(at).or_insert_with(none);
        for (rows, older) in
            known.clone().iter().flat_map(|rows| older.iter().map(move |o| (rows, o)))
        {
            let next = rows.with(shards, older);
            if !known.iter().any(|rows| **rows == next) {
                known.push(Rc::new(next));
            }
        }
        trace!(self, "{}: rows of {checkpoint:?} take the place of {shards:?}", self.name(p));
        self.oracle.coverage.rows_replaced += 1;
        self.check_lost_rows(p, *step);
    }

    /// Checks the touches that the master reports at the end, after steps that have absorbed these
    /// parameters, in a state of this step.
    pub(in crate::simulation) fn check_touches(
        &self,
        step: u64,
        parameters: &[u8],
    ) -> Result<(), String> {
        let reported = self.master.job.summary(self.time()).row_touches;
        let absorbed = (0..parameters.len()).filter(|&record| parameters[record] > 0);
        let expected = self.setting.tables.map(|_: Settings| touches(absorbed));
        let found = reported.map(|touches| (touches.expected, touches.counted));
        // What the rows have counted, in each history that leads to the state.
        let states = self.oracle.rows.states.get(&(step, digest(parameters)));
        let histories = states.into_iter().flatten().map(|rows| rows.touches());
        let histories: BTreeSet<u64> = histories.chain(expected.filter(|_| step == 0)).collect();
        if found.is_none() && expected.is_none() {
            return Ok(());
        }
        let is_counted = |(of_steps, of_rows): (u64, u64)| {
            Some(of_steps) == expected && histories.contains(&of_rows)
        };
        if found.is_some_and(is_counted) {
            return Ok(());
        }
        Err(format!(
            "the summary reports {reported:?} row touches, and there are {expected:?}, and \
             {histories:?} in the rows"
        ))
    }
}
