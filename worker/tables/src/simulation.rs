//! Groups of workers that train tables while workers are lost, cut off and added, at any message.
//!
//! The simulated collectives keep one law: a rank completes an operation only if all ranks have
//! entered it, and a rank enters the next one only when it has completed this one. Which ranks
//! complete the last operation of a group that breaks is random.
//!
//! A reference applies each committed step to a table in one piece. After each commit every copy of
//! every shard must equal it, and every row that a rank is given must be a row of it.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use crate::lookup::{Ids, RowGradients};
use crate::optimizer::RowOptimizer;
use crate::placement::{Member, Placement, shard_of};
use crate::table::Table;
use crate::{LostShards, Owned, Recovery, Settings, StepCommit};

/// Touches and values of all rows, by table and id.
type Reference = BTreeMap<(usize, u64), (u32, Vec<f32>)>;

struct Worker {
    host: u64,
    /// Its last commit: step and generation; `None` if it has no state.
    at: Option<(u64, u64)>,
    owned: Owned,
    /// Records whose gradient it holds, and the gradient.
    pending: BTreeSet<u64>,
    gradients: RowGradients,
    /// Last commit whose result it can send: what was committed.
    result: Option<StepCommit>,
}

struct World {
    rng: ChaCha8Rng,
    settings: Settings,
    tables: Vec<Table>,
    workers: BTreeMap<u64, Worker>,
    next_worker: u64,
    generation: u64,
    /// State after each commit, by step and generation.
    references: BTreeMap<(u64, u64), Rc<Reference>>,
    /// The newest commit of the group's history.
    newest: (u64, u64),
    /// Copies of each shard when all were last where they should be.
    copies: usize,
    /// Workers that the group has lost since.
    lost_lately: usize,
    commits: u64,
    losses: u64,
}

/// Why a group ends.
struct Broken;

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let settings = Settings {
            seed,
            shards: rng.random_range(1..24),
            copies: rng.random_range(1..4),
            copy_bytes: rng.random_range(1..1000),
        };
        let tables = vec![
            Table::new("exact", 2).optimized(RowOptimizer::sgd(1.0)),
            Table::new("adagrad", 1).optimized(RowOptimizer::adagrad(0.5)),
        ];
        let mut world = Self {
            rng,
            settings,
            tables,
            workers: BTreeMap::new(),
            next_worker: 1,
            generation: 0,
            references: BTreeMap::new(),
            newest: (0, 0),
            copies: 0,
            lost_lately: 0,
            commits: 0,
            losses: 0,
        };
        (0..world.rng.random_range(1..5)).for_each(|_| world.start_worker());
        world
    }

    fn start_worker(&mut self) {
        let id = self.next_worker;
        self.next_worker += 1;
        let worker = Worker {
            host: self.rng.random_range(0..4),
            at: None,
            owned: Owned::new(id, self.settings, self.tables.clone()),
            pending: BTreeSet::new(),
            gradients: RowGradients::default(),
            result: None,
        };
        self.workers.insert(id, worker);
    }

    /// Runs groups with faults, and a last one without any until all shards lie where they should.
    fn run(&mut self, groups: u64) {
        for _ in 0..groups {
            let members = self.form();
            let rounds = self.rng.random_range(0..12);
            let _ = self.live(&members, rounds, true);
        }
        let mut members = self.form();
        members.iter_mut().for_each(|member| member.leaves = false);
        let _ = self.repair(&members, false);
        let wanted = Placement::new(self.settings.shards, self.settings.copies, &members);
        for _ in 0..200 {
            let owned = &self.workers[&members[0].worker].owned;
            let placement = owned.placement().unwrap();
            let mut shards = 0..self.settings.shards;
            if shards.all(|shard| placement.holders(shard) == wanted.holders(shard)) {
                return assert_eq!(owned.at_risk(), 0);
            }
            let _ = self.round(&members, false);
        }
        panic!("after 200 steps without a fault the shards do not lie where they should");
    }

    /// The members of the next group. Some workers are lost for it, some are cut off, some join.
    fn form(&mut self) -> Vec<Member> {
        self.generation += 1;
        for id in self.workers.keys().copied().collect::<Vec<_>>() {
            if self.workers.len() > 1 && self.rng.random_range(0..12) == 0 {
                self.workers.remove(&id);
                self.lost_lately += 1;
            }
        }
        if self.workers.len() < 6 && self.rng.random_range(0..3) == 0 {
            self.start_worker();
        }
        let mut members: Vec<u64> = self.workers.keys().copied().collect();
        members.shuffle(&mut self.rng);
        if members.len() > 1 && self.rng.random_range(0..6) == 0 {
            members.pop();
            self.lost_lately += 1;
        }
        let leaver = (self.rng.random_range(0..6) == 0).then(|| members[0]);
        let member = |&worker: &u64| {
            let host = self.workers[&worker].host;
            Member { worker, host, leaves: leaver == Some(worker) }
        };
        members.iter().map(member).collect()
    }

    /// One operation. Returns the ranks that complete it, and whether the group is broken after it.
    fn operation(&mut self, members: &[Member], is_faulty: bool) -> (Vec<u64>, bool) {
        let all: Vec<u64> = members.iter().map(|member| member.worker).collect();
        if !is_faulty || self.rng.random_range(0..25) > 0 {
            return (all, false);
        }
        // If a rank did not enter it, no rank completes it.
        let have_all_entered = self.rng.random_range(0..3) > 0;
        let completes: Vec<u64> = all
            .into_iter()
            .filter(|_| have_all_entered && self.rng.random_range(0..2) == 0)
            .collect();
        (completes, true)
    }

    fn live(&mut self, members: &[Member], rounds: u64, is_faulty: bool) -> Result<(), Broken> {
        self.repair(members, is_faulty)?;
        for _ in 0..rounds {
            self.round(members, is_faulty)?;
        }
        Ok(())
    }

    // ---- a new group ----

    fn repair(&mut self, members: &[Member], is_faulty: bool) -> Result<(), Broken> {
        let (_, is_broken) = self.operation(members, is_faulty);
        if is_broken {
            return Err(Broken);
        }
        let ids: Vec<u64> = members.iter().map(|member| member.worker).collect();
        self.forget_other_histories(&ids);
        let top = ids.iter().filter_map(|id| self.workers[id].at).max().unwrap_or_default();
        if top.0 == 0 {
            return self.begin(members);
        }
        let headers: Vec<_> = ids.iter().map(|id| self.workers[id].owned.header()).collect();
        let Some(recovery) = Recovery::plan(top.0, top.1, &headers) else {
            return self.lose(members);
        };
        // Ranks that are one step behind receive the result.
        let donor = ids.iter().find(|id| {
            let worker = &self.workers[id];
            worker.at == Some(top) && worker.result.is_some()
        });
        if let Some(result) = donor.map(|id| self.workers[id].result) {
            let commit = result.expect("the donor has a result");
            let (completes, is_broken) = self.operation(members, is_faulty);
            for id in completes {
                if self.workers[&id].at.is_some_and(|(step, _)| step + 1 == top.0) {
                    self.commit(id, commit);
                }
            }
            if is_broken {
                return Err(Broken);
            }
        }
        // The others receive the state, and who holds what.
        let (completes, is_broken) = self.operation(members, is_faulty);
        let root = &self.workers[&ids[recovery.root]];
        if root.owned.step() != Some(top.0) {
            // No rank has the result of the step that it needs.
            return self.lose(members);
        }
        let placement = root.owned.placement().unwrap().clone();
        let mut lost = None;
        for id in completes {
            let worker = self.workers.get_mut(&id).unwrap();
            if worker.at != Some(top) {
                (worker.at, worker.result) = (Some(top), None);
                worker.pending.clear();
                worker.gradients.clear();
            }
            let group = (self.generation, members.to_vec());
            let state = (top.0, placement.clone());
            if let Err(LostShards(shards)) = worker.owned.regroup(state, &recovery, group) {
                lost = Some(shards);
            }
        }
        if lost.is_some() {
            return self.lose(members);
        }
        if is_broken {
            return Err(Broken);
        }
        self.check(members, top);
        Ok(())
    }

    /// A worker that was cut off does not come back with its state once others have gone on.
    fn forget_other_histories(&mut self, members: &[u64]) {
        let (step, generation) = self.newest;
        for id in members {
            let worker = self.workers.get_mut(id).unwrap();
            let is_ours = worker.at.is_some_and(|(at, of)| {
                (at == step && of == generation) || at + 1 == step || (at == 0 && step == 0)
            });
            if worker.at.is_some() && !is_ours {
                worker.at = None;
                worker.result = None;
                worker.pending.clear();
                worker.gradients.clear();
                worker.owned = Owned::new(*id, self.settings, self.tables.clone());
            }
        }
    }

    /// No worker has a state.
    fn begin(&mut self, members: &[Member]) -> Result<(), Broken> {
        self.references.clear();
        self.references.insert((0, 0), Rc::default());
        self.newest = (0, 0);
        for member in members {
            let worker = self.workers.get_mut(&member.worker).unwrap();
            worker.at = Some((0, 0));
            worker.owned.create(self.generation, members.to_vec());
        }
        self.check(members, (0, 0));
        // A worker that leaves gets no copies.
        let placement = self.workers[&members[0].worker].owned.placement().unwrap();
        let copies = (0..self.settings.shards).map(|shard| placement.holders(shard).len());
        (self.copies, self.lost_lately) = (copies.min().unwrap(), 0);
        Ok(())
    }

    /// Rows are lost, which needs the loss of as many workers as there are copies. All begin anew.
    fn lose(&mut self, members: &[Member]) -> Result<(), Broken> {
        let (lost, copies) = (self.lost_lately, self.copies);
        assert!(lost >= copies, "rows are lost with {lost} workers; there were {copies} copies");
        self.losses += 1;
        for (&id, worker) in &mut self.workers {
            worker.at = None;
            worker.result = None;
            worker.pending.clear();
            worker.gradients.clear();
            worker.owned = Owned::new(id, self.settings, self.tables.clone());
        }
        self.begin(members)
    }

    // ---- a round ----

    fn round(&mut self, members: &[Member], is_faulty: bool) -> Result<(), Broken> {
        let ids: Vec<u64> = members.iter().map(|member| member.worker).collect();
        let step = self.workers[&ids[0]].at.unwrap().0;
        let at = self.workers[&ids[0]].at.unwrap();
        let shares = self.share(&ids, step);
        let lookups: Vec<Ids> = shares.iter().map(|share| self.ids(share)).collect();
        let owned = |id: &u64| &self.workers[id].owned;
        let requests: Vec<_> =
            ids.iter().zip(&lookups).map(|(id, lookup)| owned(id).requests(lookup)).collect();
        let (_, is_broken) = self.operation(members, is_faulty);
        if is_broken {
            return Err(Broken);
        }
        let owned = |id: &u64| &self.workers[id].owned;
        let replies: Vec<_> = (0..)
            .zip(&ids)
            .map(|(rank, id)| owned(id).replies(&transposed(&requests, rank)).unwrap())
            .collect();
        let (completes, is_broken) = self.operation(members, is_faulty);
        for (rank, id) in ids.iter().enumerate().filter(|(_, id)| completes.contains(id)) {
            self.compute(*id, at, &shares[rank], &lookups[rank], &transposed(&replies, rank));
        }
        if is_broken {
            return Err(Broken);
        }
        let push = |id: &u64| self.workers[id].owned.pushes(&self.workers[id].gradients);
        let pushes: Vec<_> = ids.iter().map(push).collect();
        let (completes, is_broken) = self.operation(members, is_faulty);
        for (rank, id) in ids.iter().enumerate().filter(|(_, id)| completes.contains(id)) {
            let owned = &mut self.workers.get_mut(id).unwrap().owned;
            owned.stage(&transposed(&pushes, rank)).unwrap();
        }
        if is_broken {
            return Err(Broken);
        }
        let (completes, is_broken) = self.operation(members, is_faulty);
        let is_applied = self.rng.random_range(0..10) > 0;
        let commit = StepCommit { generation: self.generation, records: RECORDS, is_applied };
        self.remember(at, commit);
        for id in completes {
            self.commit(id, commit);
        }
        if is_broken {
            return Err(Broken);
        }
        self.check(members, (step + 1, self.generation));
        Ok(())
    }

    /// Divides the records of the step after `step` that no rank has computed yet.
    fn share(&mut self, ids: &[u64], step: u64) -> Vec<BTreeSet<u64>> {
        let mut left: BTreeSet<u64> = (step * RECORDS..(step + 1) * RECORDS).collect();
        for id in ids {
            let worker = self.workers.get_mut(id).unwrap();
            if worker.pending.is_subset(&left) {
                left.retain(|record| !worker.pending.contains(record));
            } else {
                worker.pending.clear();
                worker.gradients.clear();
            }
        }
        let mut shares = vec![BTreeSet::new(); ids.len()];
        for record in left {
            let rank = self.rng.random_range(0..ids.len());
            shares[rank].insert(record);
        }
        shares
    }

    fn ids(&self, records: &BTreeSet<u64>) -> Ids {
        let mut ids = Ids::new(self.tables.len());
        for &record in records {
            ids.begin_record();
            for (table, id) in ids_of(record) {
                ids.push(table, id);
            }
        }
        ids
    }

    /// Computes the gradients of the records of `share`, with rows as of the commit `at`.
    fn compute(
        &mut self,
        id: u64,
        at: (u64, u64),
        share: &BTreeSet<u64>,
        lookup: &Ids,
        replies: &[Vec<u8>],
    ) {
        let reference = Rc::clone(&self.references[&at]);
        let worker = self.workers.get_mut(&id).unwrap();
        let mut rows = worker.owned.receive(lookup, replies).unwrap();
        let mut initial = [0.0; 2];
        for (index, table) in self.tables.iter().enumerate() {
            let (values, gradients) = rows.of(index);
            for (&row, values) in lookup.of(index).iter().zip(values.chunks_exact(table.dim)) {
                let expected = reference.get(&(index, row)).map_or_else(
                    || {
                        table.initialize(self.settings.seed, index as u32, row, &mut initial);
                        &initial[..table.dim]
                    },
                    |(_, values)| &values[..table.dim],
                );
                assert_eq!(values, expected, "row {row} of table {index} at {at:?}");
            }
            for &record in share {
                for (of, row) in ids_of(record).filter(|(of, _)| *of == index) {
                    let position = lookup.of(of).iter().position(|id| *id == row).unwrap();
                    let gradient = &mut gradients[position * table.dim..][..table.dim];
                    gradient.iter_mut().for_each(|g| *g += gradient_of(record, row));
                }
            }
        }
        worker.gradients.add(&self.tables, lookup.clone(), rows);
        worker.pending.extend(share);
    }

    /// The reference after a step, whether or not a rank commits it.
    fn remember(&mut self, at: (u64, u64), commit: StepCommit) {
        let mut next = (*self.references[&at]).clone();
        let mut sums: BTreeMap<(usize, u64), (u32, f32)> = BTreeMap::new();
        for record in at.0 * RECORDS..(at.0 + 1) * RECORDS {
            for (table, id) in ids_of(record) {
                let (touches, sum) = sums.entry((table, id)).or_default();
                *touches += 1;
                *sum += gradient_of(record, id);
            }
        }
        for ((index, id), (touches, sum)) in sums {
            let table = &self.tables[index];
            let (count, row) = next.entry((index, id)).or_insert_with(|| {
                let mut row = vec![0.0; table.stored()];
                let values = &mut row[..table.dim];
                table.initialize(self.settings.seed, index as u32, id, values);
                (0, row)
            });
            *count += touches;
            if commit.is_applied {
                let mean = vec![sum / RECORDS as f32; table.dim];
                table.optimizer.apply(at.0 + 1, row, &mean);
            }
        }
        self.references.insert((at.0 + 1, commit.generation), Rc::new(next));
    }

    fn commit(&mut self, id: u64, commit: StepCommit) {
        let worker = self.workers.get_mut(&id).unwrap();
        worker.owned.commit(commit);
        let step = worker.at.unwrap().0 + 1;
        worker.at = Some((step, commit.generation));
        worker.result = Some(commit);
        worker.pending.clear();
        worker.gradients.clear();
        self.newest = self.newest.max((step, commit.generation));
        self.commits += 1;
    }

    // ---- what must hold ----

    /// All ranks are at one state: every copy of every shard is whole.
    fn check(&mut self, members: &[Member], at: (u64, u64)) {
        let reference = &self.references[&at];
        let placement = self.workers[&members[0].worker].owned.placement().unwrap();
        let mut touches = 0;
        for member in members {
            let owned = &self.workers[&member.worker].owned;
            assert_eq!(owned.placement(), Some(placement), "{member:?}");
            owned.assert_equals(reference, &self.tables, self.settings.shards);
            touches += owned.touches();
        }
        let expected: u64 = reference.values().map(|(touches, _)| u64::from(*touches)).sum();
        // A worker that is cut off may own some of them.
        if members.iter().all(|m| self.workers[&m.worker].owned.at_risk() == 0) {
            self.lost_lately = 0;
            self.copies = members.len().min(self.settings.copies as usize);
            assert!(touches <= expected, "{touches} of {expected} touches");
        }
        let is_held = |shard| {
            let holders = placement.holders(shard);
            members.iter().any(|member| holders.contains(&member.worker))
        };
        assert!((0..self.settings.shards).all(is_held));
    }
}

impl Owned {
    /// Each of this worker's shards has the rows of the reference, and no others.
    fn assert_equals(&self, reference: &Reference, tables: &[Table], shards: u32) {
        let mut found = 0;
        for (shard, held) in self.held() {
            for index in 0..tables.len() {
                for (id, counts, row) in held.tables[index].iter() {
                    let expected = reference.get(&(index, id)).map(|(n, row)| (*n, &row[..]));
                    assert_eq!(Some((counts.touches, row)), expected, "shard {shard}");
                    assert_eq!(shard_of(index as u32, id, shards), shard);
                    found += 1;
                }
            }
        }
        let is_held = |(table, id): &(usize, u64)| {
            self.held().any(|(shard, _)| shard == shard_of(*table as u32, *id, shards))
        };
        assert_eq!(found, reference.keys().filter(|key| is_held(key)).count(), "rows are missing");
    }
}

/// What all ranks have for `rank`.
fn transposed(messages: &[Vec<Vec<u8>>], rank: usize) -> Vec<Vec<u8>> {
    messages.iter().map(|of_rank| of_rank[rank].clone()).collect()
}

/// Table and id of each row that a record touches.
fn ids_of(record: u64) -> impl Iterator<Item = (usize, u64)> {
    let first = (0, record.wrapping_mul(0x9e37_79b9) % 23);
    [first, (0, record % 5 + 100), (1, record % 11)].into_iter()
}

/// Sums and means of these are exact, in any order.
fn gradient_of(record: u64, id: u64) -> f32 {
    (record * 7 + id) as f32 % 16.0 - 8.0
}

const SEEDS: u64 = 200;

/// Records of a step: a power of two, so that means are exact.
const RECORDS: u64 = 8;

#[test]
fn no_schedule_of_losses_loses_a_row() {
    let (mut commits, mut losses) = (0, 0);
    for seed in 0..SEEDS {
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            world.run(30);
            (world.commits, world.losses)
        });
        let Ok((of_run, lost)) = run else { panic!("seed {seed}") };
        commits += of_run;
        losses += lost;
    }
    assert!(commits > 10_000 && losses > 10, "{commits} commits, {losses} losses");
}
