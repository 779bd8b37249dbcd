//! One worker's part of the tables, and how it changes with the steps of its group.
//!
//! ```text
//!           requests            replies                        pushes
//!  ids ───────────────▶ owners ─────────▶ rows ── gradients ─────────────▶ owners and copies
//!                        + shards to be copied                          staged
//!                                                  all-reduce, headers ──▶ commit
//! ```
//!
//! A rank takes part in a step's all-reduce only after it has staged the gradients of all ranks.
//! So if any rank has committed the step, every holder of a shard, and every worker that receives a
//! copy, can commit it, even if it learns of the commit only in a later group.
//!
//! **Invariant:** rows and touches change in [`Owned::commit`] alone, together with the placement.
//! **Invariant:** staged gradients are kept until a commit, because a later group can bring back a
//! rank that has committed them.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::lookup::{BatchRows, Ids, RowGradients, TableGradients};
use crate::placement::{Member, Placement, ShardCopy, shard_of};
use crate::shard::Shard;
use crate::table::Table;
use crate::wire::{InvalidRows, Message, put, put_u32};

mod saved;

pub use self::saved::{SavedShard, SavedShards};

/// A worker's shards.
#[derive(Clone, Debug)]
pub struct Owned {
    me: u64,
    settings: Settings,
    tables: Arc<[Table]>,
    committed: Option<Committed>,
    staged: Vec<Staged>,
    group: Option<Group>,
}

/// What all workers of a job agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Seed of the initial rows.
    pub seed: u64,
    /// Number of shards.
    pub shards: u32,
    /// Number of copies of each shard.
    pub copies: u32,
    /// About how many bytes a worker sends, and receives, between two steps to copy shards; at
    /// least one shard.
    pub copy_bytes: u64,
}

/// Shards as of a step.
#[derive(Clone, Debug)]
struct Committed {
    step: u64,
    /// Generation of the group that committed it, or began with it.
    generation: u64,
    placement: Placement,
    /// Shared with snapshots that are being written; a commit copies those that it changes.
    shards: BTreeMap<u32, Arc<Shard>>,
}

/// Gradients of all ranks for the next step, and what their commit brings along.
#[derive(Clone, Debug)]
struct Staged {
    generation: u64,
    placement: Placement,
    copied: BTreeMap<u32, Shard>,
    gradients: Vec<TableGradients>,
}

/// The group that this worker is in.
#[derive(Clone, Debug)]
struct Group {
    generation: u64,
    members: Vec<Member>,
    /// Holders as of the last commit, as far as they are in the group.
    placement: Placement,
    /// Copies that are made before the next commit.
    copies: Vec<ShardCopy>,
    /// What this worker has received of them.
    copied: BTreeMap<u32, Shard>,
    /// Whether all shards lie where they should.
    is_settled: bool,
}

/// What a worker tells a new group about its shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedHeader {
    /// Step of the rows, or of the parameters of a worker that holds no rows.
    step: u64,
    /// Generation of the group that committed it.
    generation: u64,
    /// Generations in which the gradients of the next step are staged; `None`: the worker holds no
    /// rows, as it joins.
    staged: Option<Vec<u64>>,
}

impl OwnedHeader {
    /// Header of a joining worker, whose parameters are those of `step`, which the group of
    /// `generation` committed.
    pub fn of_joiner(step: u64, generation: u64) -> Self {
        Self { step, generation, staged: None }
    }

    /// Generation of the group that committed `step`, as the members of a new group know it.
    pub fn generation_of(step: u64, headers: &[Option<Self>]) -> Option<u64> {
        let at_step = headers.iter().flatten().filter(|header| header.step == step);
        // A joiner knows the generation in which it received the state.
        at_step.max_by_key(|header| header.staged.is_some()).map(|header| header.generation)
    }
}

/// How the ranks of a new group come to one state of the tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// Generation of the group that committed the common step.
    pub generation: u64,
    /// Whether the rank's shards are part of the state, by rank.
    pub holds: Vec<bool>,
    /// The rank that tells the others who holds what.
    pub root: usize,
}

impl Recovery {
    /// Derives from the headers of all ranks how they reach `step`, which the group of `generation`
    /// committed. `None` if no rank holds that state, or can reach it.
    pub fn plan(step: u64, generation: u64, headers: &[Option<OwnedHeader>]) -> Option<Self> {
        let holds = |header: &Option<OwnedHeader>| {
            let Some(OwnedHeader { step: at, generation: of, staged: Some(staged) }) = header
            else {
                return false;
            };
            (*at == step && *of == generation) || (at + 1 == step && staged.contains(&generation))
        };
        let holds: Vec<bool> = headers.iter().map(holds).collect();
        let root = holds.iter().position(|&holds| holds)?;
        Some(Self { generation, holds, root })
    }
}

/// Shards of which no worker of the group has a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostShards(pub Vec<u32>);

/// A committed step, for the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepCommit {
    /// Generation of the group that committed it.
    pub generation: u64,
    /// Number of records of the step.
    pub records: u64,
    /// Whether rows change. If not, their touches alone do.
    pub is_applied: bool,
}

impl Owned {
    /// The part of worker `me`, without any state.
    pub fn new(me: u64, settings: Settings, tables: impl Into<Arc<[Table]>>) -> Self {
        let tables = tables.into();
        Self { me, settings, tables, committed: None, staged: Vec::new(), group: None }
    }

    // ---- a new group ----

    /// What this worker tells a new group.
    pub fn header(&self) -> Option<OwnedHeader> {
        let committed = self.committed.as_ref()?;
        let staged = Some(self.staged.iter().map(|staged| staged.generation).collect());
        Some(OwnedHeader { step: committed.step, generation: committed.generation, staged })
    }

    /// The group of these members, in the order of their ranks, starts anew, at step 0: no row
    /// exists yet.
    pub fn create(&mut self, generation: u64, members: Vec<Member>) {
        let empty = |number| SavedShard::new(number, Shard::new(&self.tables));
        let shards = self.shards_at_start(&members).into_iter().map(empty).collect();
        self.restore(0, (generation, members), shards);
    }

    /// The placement, for ranks that do not know it.
    pub fn placement(&self) -> Option<&Placement> {
        Some(&self.committed.as_ref()?.placement)
    }

    /// The group of these members, in the order of their ranks, goes on from `step`, of which
    /// `placement` says who holds what. A worker whose shards are of another state gives them up.
    ///
    /// # Errors
    /// Shards are lost: their rows are nowhere in the group.
    pub fn regroup(
        &mut self,
        (step, placement): (u64, Placement),
        recovery: &Recovery,
        (generation, members): (u64, Vec<Member>),
    ) -> Result<(), LostShards> {
        let held = members.iter().zip(&recovery.holds).filter(|(_, holds)| **holds);
        let held: Vec<u64> = held.map(|(member, _)| member.worker).collect();
        let left = placement.within(|worker| held.contains(&worker));
        let lost: Vec<u32> = left.lost().collect();
        if !lost.is_empty() {
            return Err(LostShards(lost));
        }
        if held.contains(&self.me) {
            assert_eq!(self.step(), Some(step), "this worker has committed what the group has");
            // Another rank may have learned of the end of a hand-over that this one took part in.
            self.committed.iter_mut().for_each(|own| own.placement = placement.clone());
        } else {
            self.staged.clear();
            let (generation, shards) = (recovery.generation, BTreeMap::new());
            self.committed = Some(Committed { step, generation, placement, shards });
        }
        self.group = Some(Group::new(generation, members, left));
        Ok(())
    }

    /// Gives up the whole state.
    pub fn clear(&mut self) {
        (self.committed, self.group) = (None, None);
        self.staged.clear();
    }

    // ---- a round ----

    /// What to ask each rank for: the rows of these ids.
    ///
    /// # Panics
    /// The worker is in no group, as below.
    pub fn requests(&self, ids: &Ids) -> Vec<Vec<u8>> {
        let group = self.group();
        let mut requests = vec![Vec::new(); group.members.len()];
        for table in 0..self.tables.len() {
            let mut of_ranks = vec![Vec::new(); group.members.len()];
            for &id in ids.of(table) {
                of_ranks[self.owner(group, table, id)].push(id);
            }
            for (request, ids) in requests.iter_mut().zip(of_ranks) {
                if !ids.is_empty() {
                    put_u32(request, table);
                    put_u32(request, ids.len());
                    put(request, &ids);
                }
            }
        }
        requests
    }

    /// Answers the requests of all ranks: with rows as of the last commit, and the shards that the
    /// ranks are to hold.
    ///
    /// # Errors
    /// A request is invalid.
    pub fn replies(&self, requests: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, InvalidRows> {
        let group = self.group();
        let mut replies = Vec::with_capacity(requests.len());
        for (request, member) in requests.iter().zip(&group.members) {
            let mut reply = Vec::new();
            self.answer(request, &mut reply)?;
            for copy in group.copies.iter().filter(|c| c.from == self.me && c.to == member.worker) {
                put_u32(&mut reply, copy.shard as usize);
                self.committed().shards[&copy.shard].encode(&mut reply);
            }
            replies.push(reply);
        }
        Ok(replies)
    }

    fn answer(&self, request: &[u8], reply: &mut Vec<u8>) -> Result<(), InvalidRows> {
        let mut request = Message(request);
        let mut initial = Vec::new();
        while !request.is_empty() {
            let (index, table) = self.table(request.u32()?)?;
            let len = request.u32()? as usize;
            for id in request.column::<u64>(len)? {
                let number = self.shard_of(index, id);
                let shard = self.committed().shards.get(&number);
                let shard = shard.ok_or_else(|| not_held(number))?;
                match shard.tables[index].find(id) {
                    Some(numbers) => put(reply, &numbers[..table.dim]),
                    None => {
                        initial.resize(table.dim, 0.0);
                        table.initialize(self.settings.seed, index as u32, id, &mut initial);
                        put(reply, &initial);
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes in the answers of all ranks to the requests for `ids`.
    ///
    /// # Errors
    /// An answer is invalid.
    pub fn receive(&mut self, ids: &Ids, replies: &[Vec<u8>]) -> Result<BatchRows, InvalidRows> {
        let mut replies: Vec<Message<'_>> = replies.iter().map(|reply| Message(reply)).collect();
        let group = self.group();
        let mut values = Vec::with_capacity(self.tables.len());
        for (index, table) in self.tables.iter().enumerate() {
            let mut rows = Vec::with_capacity(ids.of(index).len() * table.dim);
            for &id in ids.of(index) {
                replies[self.owner(group, index, id)].column_to(table.dim, &mut rows)?;
            }
            values.push(rows);
        }
        let mut copied = BTreeMap::new();
        for copy in group.copies.iter().filter(|copy| copy.to == self.me) {
            let from = group.members.iter().position(|member| member.worker == copy.from);
            let from = from.expect("a copy comes from a member of the group");
            let shard = replies[from].u32()?;
            if shard != copy.shard {
                return Err(InvalidRows(format!("shard {shard} in place of {}", copy.shard)));
            }
            copied.insert(shard, Shard::decode(&mut replies[from], &self.tables)?);
        }
        if let Some(rest) = replies.iter().find(|reply| !reply.is_empty()) {
            return Err(InvalidRows(format!("{} bytes more than asked for", rest.0.len())));
        }
        self.group_mut().copied = copied;
        Ok(BatchRows::new(values))
    }

    /// What to give each rank: the gradients of the rows that it holds, or will hold.
    pub fn pushes(&self, gradients: &RowGradients) -> Vec<Vec<u8>> {
        let group = self.group();
        // All ranks derive from these numbers how many shards are copied at a time.
        let shards = &self.committed().shards;
        let bytes: u64 = shards.values().map(|shard| shard.encoded_bytes()).sum();
        let mut head = Vec::new();
        put(&mut head, &[shards.len() as u64, bytes]);
        let mut pushes = vec![head; group.members.len()];
        let mut receivers = vec![Vec::new(); self.settings.shards as usize];
        for (index, gradients) in gradients.tables() {
            let dim = self.tables[index].dim;
            let mut of_ranks = vec![Vec::new(); group.members.len()];
            for (at, &id) in gradients.ids.iter().enumerate() {
                let shard = self.shard_of(index, id);
                let receivers: &mut Vec<usize> = &mut receivers[shard as usize];
                if receivers.is_empty() {
                    *receivers = group.receivers(shard);
                }
                receivers.iter().for_each(|&rank| of_ranks[rank].push(at));
            }
            for (push, rows) in pushes.iter_mut().zip(of_ranks).filter(|(_, r)| !r.is_empty()) {
                put_u32(push, index);
                put_u32(push, rows.len());
                rows.iter().for_each(|&at| put(push, &gradients.ids[at..=at]));
                rows.iter().for_each(|&at| put(push, &gradients.touches[at..=at]));
                rows.iter().for_each(|&at| put(push, &gradients.sums[at * dim..(at + 1) * dim]));
            }
        }
        pushes
    }

    /// Keeps the gradients of all ranks until the step is committed.
    ///
    /// # Errors
    /// A rank's gradients are invalid.
    pub fn stage(&mut self, pushes: &[Vec<u8>]) -> Result<(), InvalidRows> {
        let group = self.group();
        let mut gradients = vec![TableGradients::default(); self.tables.len()];
        let (mut shards, mut bytes) = (0_u64, 0_u64);
        for push in pushes {
            let mut push = Message(push);
            let of_rank = push.column::<u64>(2)?;
            (shards, bytes) = (shards.saturating_add(of_rank[0]), bytes.saturating_add(of_rank[1]));
            while !push.is_empty() {
                let (index, table) = self.table(push.u32()?)?;
                let len = push.u32()? as usize;
                let ids = push.column::<u64>(len)?;
                let touches = push.column::<u32>(len)?;
                let sums = push.column::<f32>(len.saturating_mul(table.dim))?;
                let rows = ids.iter().zip(touches).zip(sums.chunks_exact(table.dim));
                for ((&id, touches), gradient) in rows {
                    let shard = self.shard_of(index, id);
                    let holds = self.committed().shards.contains_key(&shard)
                        || group.copied.contains_key(&shard);
                    if !holds {
                        return Err(not_held(shard));
                    }
                    gradients[index].add(id, touches, gradient);
                }
            }
        }
        let placement = match group.is_settled {
            true => group.placement.clone(),
            false => group.placement.after(&group.copies, &group.members),
        };
        let per_shard = bytes.div_ceil(shards.max(1)).max(1);
        let placement = placement.copied_per_step(self.settings.copy_bytes / per_shard);
        let generation = group.generation;
        let copied = mem::take(&mut self.group_mut().copied);
        self.staged.retain(|staged| staged.generation != generation);
        self.staged.push(Staged { generation, placement, copied, gradients });
        Ok(())
    }

    /// The step after this worker's is committed: applies what is staged of it. Returns `false` if
    /// nothing is, so that this worker holds no rows of it.
    pub fn commit(&mut self, commit: StepCommit) -> bool {
        let StepCommit { generation, records, is_applied } = commit;
        let Some(committed) = &mut self.committed else { return false };
        let Some(at) = self.staged.iter().position(|staged| staged.generation == generation) else {
            return false;
        };
        let Staged { placement, copied, gradients, .. } = self.staged.swap_remove(at);
        self.staged.clear();
        let step = committed.step + 1;
        let shards = &mut committed.shards;
        shards.extend(copied.into_iter().map(|(number, shard)| (number, Arc::new(shard))));
        for (index, (table, gradients)) in self.tables.iter().zip(gradients).enumerate() {
            let scale = 1.0 / records.max(1) as f32;
            let mut mean = vec![0.0; table.dim];
            let rows = gradients.ids.iter().zip(&gradients.touches);
            for ((&id, &touches), sum) in rows.zip(gradients.sums.chunks_exact(table.dim)) {
                let shard = shard_of(index as u32, id, self.settings.shards);
                let shard = Arc::make_mut(shards.get_mut(&shard).expect("staged rows are held"));
                let seed = self.settings.seed;
                let initialize = |row: &mut [f32]| table.initialize(seed, index as u32, id, row);
                let (counts, row) = shard.tables[index].touch(id, table.dim, initialize);
                counts.touches = counts.touches.saturating_add(touches);
                counts.last_step = step as u32;
                if is_applied {
                    mean.iter_mut().zip(sum).for_each(|(mean, sum)| *mean = sum * scale);
                    table.optimizer.apply(step, row, &mean);
                }
            }
        }
        let me = self.me;
        shards.retain(|&shard, _| placement.holders(shard).contains(&me));
        (committed.step, committed.generation) = (step, generation);
        if let Some(group) = self.group.as_mut().filter(|group| group.generation == generation) {
            if !group.is_settled {
                group.is_settled = group.copies.is_empty() && placement.is_as(&group.placement);
                group.copies = placement.copies(&group.members);
            }
            group.placement = placement.clone();
            group.copied.clear();
        }
        committed.placement = placement;
        true
    }

    // ---- what there is ----

    /// Step of this worker's rows, if it has a state.
    pub fn step(&self) -> Option<u64> {
        self.committed.as_ref().map(|committed| committed.step)
    }

    /// Number of shards of the group with fewer copies than there could be.
    pub fn at_risk(&self) -> usize {
        self.group.as_ref().map_or(0, |group| group.placement.at_risk(&group.members))
    }

    /// What this worker owns: the rows for which it answers, not those that it keeps for others.
    pub fn owned(&self) -> OwnedSize {
        let owned = || self.owned_shards().map(|(_, shard)| &**shard);
        OwnedSize {
            rows: owned().map(Shard::rows).sum(),
            touches: owned().map(Shard::touches).sum(),
            bytes: self.held().map(|(_, shard)| shard.bytes()).sum(),
        }
    }

    /// The rows of a table that this worker owns: id, touches and values, `[dim]`.
    pub fn rows(&self, table: usize) -> impl Iterator<Item = (u64, u32, &[f32])> {
        let spec = &self.tables[table];
        self.owned_shards().flat_map(move |(_, shard)| {
            let rows = shard.tables[table].iter();
            rows.map(|(id, counts, row)| (id, counts.touches, &row[..spec.dim]))
        })
    }

    /// All rows that this worker holds, those that it keeps for others too.
    pub fn held_rows(&self) -> impl Iterator<Item = HeldRow<'_>> {
        self.held().flat_map(|(shard, held)| {
            held.tables.iter().enumerate().flat_map(move |(table, rows)| {
                rows.iter().map(move |(id, counts, numbers)| {
                    let touches = counts.touches;
                    HeldRow { shard, table, id, touches, numbers }
                })
            })
        })
    }

    /// The shards that this worker holds.
    pub(crate) fn held(&self) -> impl Iterator<Item = (u32, &Arc<Shard>)> {
        self.committed.iter().flat_map(|committed| &committed.shards).map(|(&s, shard)| (s, shard))
    }

    /// The shards that this worker owns in its group.
    fn owned_shards(&self) -> impl Iterator<Item = (u32, &Arc<Shard>)> {
        let committed = self.committed.as_ref().map(|committed| &committed.placement);
        let placement = self.group.as_ref().map(|group| &group.placement).or(committed);
        let owner = move |shard| placement.and_then(|placement| placement.holders(shard).first());
        self.held().filter(move |&(shard, _)| owner(shard) == Some(&self.me))
    }

    // ---- helpers ----

    fn table(&self, index: u32) -> Result<(usize, &Table), InvalidRows> {
        let index = index as usize;
        let table = self.tables.get(index);
        Ok((index, table.ok_or_else(|| InvalidRows(format!("there is no table {index}")))?))
    }

    fn shard_of(&self, table: usize, id: u64) -> u32 {
        shard_of(table as u32, id, self.settings.shards)
    }

    /// The rank that owns a row.
    fn owner(&self, group: &Group, table: usize, id: u64) -> usize {
        let owner = group.placement.holders(self.shard_of(table, id))[0];
        group.rank(owner)
    }

    fn group(&self) -> &Group {
        self.group.as_ref().expect("rows are exchanged in a group")
    }

    fn group_mut(&mut self) -> &mut Group {
        self.group.as_mut().expect("rows are exchanged in a group")
    }

    fn committed(&self) -> &Committed {
        self.committed.as_ref().expect("a worker of a group has a state")
    }
}

impl Group {
    fn new(generation: u64, members: Vec<Member>, placement: Placement) -> Self {
        let (copies, copied) = (placement.copies(&members), BTreeMap::new());
        Self { generation, members, placement, copies, copied, is_settled: false }
    }

    fn rank(&self, worker: u64) -> usize {
        let rank = self.members.iter().position(|member| member.worker == worker);
        rank.expect("holders are members of the group")
    }

    /// The ranks that hold `shard` after the next commit, or before it.
    fn receivers(&self, shard: u32) -> Vec<usize> {
        let holders = self.placement.holders(shard).iter().copied();
        let copies = self.copies.iter().filter(|copy| copy.shard == shard).map(|copy| copy.to);
        holders.chain(copies).map(|worker| self.rank(worker)).collect()
    }
}

/// Size of what a worker owns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnedSize {
    /// Rows that it owns.
    pub rows: u64,
    /// Their touches.
    pub touches: u64,
    /// Memory of all its shards, those that it keeps for others too.
    pub bytes: usize,
}

/// A row of one of the shards that a worker holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeldRow<'a> {
    /// The shard.
    pub shard: u32,
    /// Index of its table.
    pub table: usize,
    /// Its id.
    pub id: u64,
    /// Records that touched it.
    pub touches: u32,
    /// Its values and the state of its optimizer.
    pub numbers: &'a [f32],
}

/// Number of shards of a job's tables.
pub const SHARDS: u32 = 1024;

fn not_held(shard: u32) -> InvalidRows {
    InvalidRows(format!("a row of shard {shard}, which this worker does not hold"))
}

mod hand_over;
