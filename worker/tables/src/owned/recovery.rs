//! How the ranks of a new group come to one state of the tables.
//!
//! If all holders of a shard are lost, the group gives its state up, or goes on with older rows
//! from a checkpoint:
//!
//! ```text
//!   regroup ──▶ lost ──▶ shards are read by those that should hold them ──▶ barrier ──▶ commit
//! ```
//!
//! **Invariant:** older rows count when a step is committed with them, as copies do. If the group
//! breaks before, the next one finds the same shards lost.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::saved::SavedShard;
use super::{Committed, Content, Group, Owned, Ownership, Settings};
use crate::placement::{Member, Placement};
use crate::shard::Shard;

/// What a worker tells a new group about its shards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedHeader {
    /// Step of the rows, or of the parameters of a worker that holds no rows.
    pub(super) step: u64,
    /// Generation of the group that committed it.
    pub(super) generation: u64,
    /// Generations in which the gradients of the next step are staged; `None`: the worker holds no
    /// rows, as it joins.
    pub(super) staged: Option<Vec<u64>>,
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

    /// The recovery of the group of `generation`, of which none of its `world_size` ranks holds any
    /// shard.
    pub fn of_nothing(generation: u64, world_size: usize) -> Self {
        Self { generation, holds: vec![false; world_size], root: 0 }
    }

    /// The members whose shards are part of the state.
    fn held_by(&self, members: &[Member]) -> impl Iterator<Item = u64> {
        let held = members.iter().zip(&self.holds).filter(|(_, holds)| **holds);
        held.map(|(member, _)| member.worker)
    }

    /// What is left of a placement: with the workers that may come back, and on the members alone.
    fn placements(&self, placement: &Placement, members: &[Member]) -> (Placement, Placement) {
        let held: Vec<u64> = self.held_by(members).collect();
        // A member that is named and does not hold its shards has given them up, or was lost to its
        // group before it had read them.
        let is_member = |worker| members.iter().any(|member| member.worker == worker);
        let placement = placement.within(|worker| held.contains(&worker) || !is_member(worker));
        let left = placement.within(|worker| held.contains(&worker));
        (placement, left)
    }
}

/// Shards of which no worker of the group has a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostShards(pub Vec<u32>);

impl<C: Content> Ownership<C> {
    /// What this worker tells a new group.
    pub fn header(&self) -> Option<OwnedHeader> {
        let committed = self.committed.as_ref()?;
        let staged = Some(self.staged.iter().map(|staged| staged.generation).collect());
        Some(OwnedHeader { step: committed.step, generation: committed.generation, staged })
    }

    /// The placement of shards that no worker holds.
    pub fn held_by_none(&self) -> Placement {
        Placement::new(self.settings.shards, self.settings.copies, &[])
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
        let (placement, left) = recovery.placements(&placement, &members);
        let lost: Vec<u32> = left.lost().collect();
        if !lost.is_empty() {
            return Err(LostShards(lost));
        }
        self.enter((step, placement), recovery, Group::new(generation, members, left));
        Ok(())
    }

    /// The shards, of those that are lost, that this worker is to read from a checkpoint if the
    /// group of these members goes on with older rows.
    pub fn to_be_read(&self, lost: &LostShards, members: &[Member]) -> Vec<u32> {
        let Settings { shards, copies, .. } = self.settings;
        let placement = Placement::new(shards, copies, members);
        lost.0.iter().copied().filter(|&s| placement.holders(s).contains(&self.me)).collect()
    }

    /// As [`regroup`](Self::regroup), with `older` rows, those of
    /// [`to_be_read`](Self::to_be_read), in place of the lost ones.
    pub fn regroup_with_older(
        &mut self,
        (step, placement): (u64, Placement),
        recovery: &Recovery,
        (generation, members): (u64, Vec<Member>),
        older: Vec<SavedShard<C::Shard>>,
    ) {
        let (placement, left) = recovery.placements(&placement, &members);
        let left = left.filled(&members);
        let mut group = Group::new(generation, members, left);
        group.older.extend(older.into_iter().map(|saved| (saved.number, saved.shard)));
        let older = group.older.clone();
        self.enter((step, placement), recovery, group);
        self.committed.as_mut().expect("the group has a state").shards.extend(older);
    }

    fn enter(
        &mut self,
        (step, placement): (u64, Placement),
        recovery: &Recovery,
        group: Group<C::Shard>,
    ) {
        if recovery.held_by(&group.members).any(|worker| worker == self.me) {
            assert_eq!(self.step(), Some(step), "this worker has committed what the group has");
            // Another rank may have learned of the end of a hand-over that this one took part in.
            self.committed.iter_mut().for_each(|own| own.placement = placement.clone());
        } else {
            self.staged.clear();
            let (generation, shards) = (recovery.generation, BTreeMap::new());
            self.committed = Some(Committed { step, generation, placement, shards });
        }
        self.group = Some(group);
    }

    /// Gives up the whole state.
    pub fn clear(&mut self) {
        (self.committed, self.group) = (None, None);
        self.staged.clear();
    }
}

impl Owned {
    /// The group of these members, in the order of their ranks, starts anew, at step 0: no row
    /// exists yet.
    pub fn create(&mut self, generation: u64, members: Vec<Member>) {
        let shards = self.empty(&self.shards_at_start(&members));
        self.restore(0, (generation, members), shards);
    }

    /// Shards of these numbers, without rows.
    pub fn empty(&self, shards: &[u32]) -> Vec<SavedShard> {
        let empty = |&number: &u32| SavedShard::new(number, Shard::new(&self.content));
        shards.iter().map(empty).collect()
    }
}
