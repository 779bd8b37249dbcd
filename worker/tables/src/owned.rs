//! One worker's part of what is divided into shards, and how it changes with the steps of its
//! group. What the shards contain is a [`Content`]: the rows of tables, above all.
//!
//! **Invariant:** shards change in a commit alone, together with the placement.
//! **Invariant:** staged gradients are kept until a commit, because a later group can bring back a
//! rank that has committed them.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use crate::lookup::TableGradients;
use crate::placement::{Member, Placement, ShardCopy, shard_of};
use crate::shard::Shard;
use crate::table::Table;

pub(crate) mod chunks;
pub(crate) mod contents;
mod hand_over;
pub(crate) mod look_ahead;
pub(crate) mod recovery;
pub(crate) mod round;
pub(crate) mod saved;

/// What is divided into shards.
pub trait Content: Clone + Debug {
    /// What one shard contains.
    type Shard: Clone + Debug;
    /// Gradients of the shards that a worker holds, or is about to hold, over all ranks.
    type Gradients: Clone + Debug;
}

/// A worker's shards.
#[derive(Clone, Debug)]
pub struct Ownership<C: Content> {
    me: u64,
    settings: Settings,
    content: C,
    committed: Option<Committed<C::Shard>>,
    staged: Vec<Staged<C>>,
    group: Option<Group<C::Shard>>,
}

/// A worker's shards of tables.
pub type Owned = Ownership<Arc<[Table]>>;

impl Content for Arc<[Table]> {
    type Shard = Shard;
    type Gradients = Vec<TableGradients>;
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
    /// Number of commits by which the rows that a step reads are older than the last one.
    pub lag: u32,
    /// About how many bytes a worker sends, and receives, between two steps to copy shards; at
    /// least one shard.
    pub copy_bytes: u64,
    /// How many more for each microsecond in which a worker computed the step before.
    pub copy_rate: u64,
}

/// Shards as of a step.
#[derive(Clone, Debug)]
struct Committed<S> {
    step: u64,
    /// Generation of the group that committed it, or began with it.
    generation: u64,
    placement: Placement,
    /// Shared with snapshots that are being written; a commit copies those that it changes.
    shards: BTreeMap<u32, Arc<S>>,
}

/// Gradients of all ranks for the next step, and what their commit brings along.
#[derive(Clone, Debug)]
struct Staged<C: Content> {
    generation: u64,
    placement: Placement,
    copied: BTreeMap<u32, Arc<C::Shard>>,
    gradients: C::Gradients,
}

/// The group that this worker is in.
#[derive(Clone, Debug)]
struct Group<S> {
    generation: u64,
    members: Vec<Member>,
    /// Holders as of the last commit, as far as they are in the group.
    placement: Placement,
    /// Copies that are made before the next commit.
    copies: Vec<ShardCopy>,
    /// What this worker has received of them.
    copied: BTreeMap<u32, Arc<S>>,
    /// Shards of a checkpoint that take the place of lost ones with the next commit.
    older: BTreeMap<u32, Arc<S>>,
    /// Whether all shards lie where they should.
    is_settled: bool,
}

impl Owned {
    /// The part of worker `me`, without any state.
    pub fn new(me: u64, settings: Settings, tables: impl Into<Arc<[Table]>>) -> Self {
        Self::of(me, settings, tables.into())
    }

    fn shard_of(&self, table: usize, id: u64) -> u32 {
        shard_of(table as u32, id, self.settings.shards)
    }

    /// The rank that this worker asks for rows of a shard: itself, if it has a copy.
    fn source(&self, shard: u32) -> usize {
        let group = self.group();
        let holders = group.placement.holders(shard);
        group.rank(if holders.contains(&self.me) { self.me } else { holders[0] })
    }
}

impl<C: Content> Ownership<C> {
    /// Worker `me`, without any state.
    fn of(me: u64, settings: Settings, content: C) -> Self {
        Self { me, settings, content, committed: None, staged: Vec::new(), group: None }
    }

    fn group(&self) -> &Group<C::Shard> {
        self.group.as_ref().expect("shards are exchanged in a group")
    }

    fn group_mut(&mut self) -> &mut Group<C::Shard> {
        self.group.as_mut().expect("shards are exchanged in a group")
    }

    fn committed(&self) -> &Committed<C::Shard> {
        self.committed.as_ref().expect("a worker of a group has a state")
    }
}

impl<S> Group<S> {
    fn new(generation: u64, members: Vec<Member>, placement: Placement) -> Self {
        let copies = placement.copies(&members);
        let (copied, older) = (BTreeMap::new(), BTreeMap::new());
        Self { generation, members, placement, copies, copied, older, is_settled: false }
    }

    /// The rank that owns a shard.
    fn owner(&self, shard: u32) -> usize {
        self.rank(self.placement.holders(shard)[0])
    }

    fn rank(&self, worker: u64) -> usize {
        let rank = self.members.iter().position(|member| member.worker == worker);
        rank.expect("holders are members of the group")
    }

    /// The ranks that hold a shard as of the last commit, first its owner.
    fn holders(&self, shard: u32) -> impl Iterator<Item = usize> {
        self.placement.holders(shard).iter().map(|&worker| self.rank(worker))
    }

    /// The ranks that hold `shard` after the next commit, or before it.
    fn receivers(&self, shard: u32) -> Vec<usize> {
        let copies = self.copies.iter().filter(|copy| copy.shard == shard).map(|copy| copy.to);
        let holders = self.holders(shard);
        holders.chain(copies.map(|worker| self.rank(worker))).collect()
    }
}

/// Number of shards of a job's tables.
pub const SHARDS: u32 = 1024;

#[cfg(test)]
mod tests;
