//! How the ranks of a new group come to one state of the tables.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::saved::SavedShard;
use super::{Committed, Group, Owned};
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
}

/// Shards of which no worker of the group has a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostShards(pub Vec<u32>);

impl Owned {
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
        // A member that is named and does not hold its shards has given them up, or was lost to its
        // group before it had read them.
        let is_member = |worker| members.iter().any(|member| member.worker == worker);
        let placement = placement.within(|worker| held.contains(&worker) || !is_member(worker));
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
}
