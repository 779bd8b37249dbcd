//! Shards that are written to a checkpoint, or have been read from one.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Committed, Content, Group, Owned, Ownership, Settings};
use crate::placement::{Member, Placement};
use crate::shard::Shard;
use crate::wire::{InvalidRows, Message};

/// What a worker owns as of a step.
#[derive(Clone, Debug)]
pub struct SavedShards {
    /// Numbers of the shards that each rank of the group owns, by rank.
    pub of_ranks: Vec<Vec<u32>>,
    /// This rank's, in the order of their numbers.
    pub owned: Vec<SavedShard>,
}

/// One shard as of a step.
#[derive(Clone, Debug)]
pub struct SavedShard<S = Shard> {
    pub(crate) number: u32,
    pub(crate) shard: Arc<S>,
}

/// The shards of a worker of which there are copies, as of a step: holders of a shard compare them.
#[derive(Clone, Debug)]
pub struct ComparedShards<S = Shard>(Vec<(SavedShard<S>, u64)>);

impl<C: Content> Ownership<C> {
    /// The shards that this worker holds when a group of these members starts, whether anew or from
    /// a checkpoint.
    pub fn shards_at_start(&self, members: &[Member]) -> Vec<u32> {
        let Settings { shards, copies, .. } = self.settings;
        Placement::new(shards, copies, members).held_by(self.me).collect()
    }

    /// The group of these members, in the order of their ranks, starts from a checkpoint of `step`.
    /// `saved`: the shards of [`shards_at_start`](Self::shards_at_start).
    pub fn restore(
        &mut self,
        step: u64,
        (generation, members): (u64, Vec<Member>),
        saved: Vec<SavedShard<C::Shard>>,
    ) {
        let Settings { shards, copies, .. } = self.settings;
        let placement = Placement::new(shards, copies, &members);
        let shards: BTreeMap<_, _> =
            saved.into_iter().map(|saved| (saved.number, saved.shard)).collect();
        assert!(placement.held_by(self.me).eq(shards.keys().copied()), "all shards are there");
        self.committed = Some(Committed { step, generation, placement: placement.clone(), shards });
        self.staged.clear();
        self.group = Some(Group::new(generation, members, placement));
    }

    /// Numbers of the shards that each rank of the group owns, by rank.
    pub(super) fn of_ranks(&self) -> Vec<Vec<u32>> {
        let group = self.group();
        let mut of_ranks = vec![Vec::new(); group.members.len()];
        for shard in 0..self.settings.shards {
            of_ranks[group.owner(shard)].push(shard);
        }
        of_ranks
    }

    /// The shards that this worker owns, as of the last commit.
    pub(super) fn saved(&self) -> Vec<SavedShard<C::Shard>> {
        let saved = |(number, shard): (u32, &Arc<C::Shard>)| {
            let shard = Arc::clone(shard);
            SavedShard { number, shard }
        };
        self.owned_shards().map(saved).collect()
    }

    /// What this worker and the other holders of its shards compare, as of the last commit. Later
    /// commits do not change it.
    ///
    /// # Panics
    /// The worker is in no group.
    pub fn compared(&self) -> ComparedShards<C::Shard> {
        let placement = &self.group().placement;
        let weighed = |(number, shard): (u32, &Arc<C::Shard>)| {
            let shard = SavedShard { number, shard: Arc::clone(shard) };
            match placement.holders(number) {
                [owner, copies @ ..] if *owner == self.me => Some((shard, copies.len() as u64)),
                [_, copies @ ..] if copies.contains(&self.me) => Some((shard, u64::MAX)),
                _ => None,
            }
        };
        ComparedShards(self.held().filter_map(weighed).filter(|(_, weight)| *weight > 0).collect())
    }
}

impl<S> ComparedShards<S> {
    /// `digest`: of a shard, by its number. A shard is free as soon as it is counted.
    pub(super) fn balance_of(self, digest: impl Fn(u32, &S) -> u64) -> u64 {
        let of_shard = |(SavedShard { number, shard }, weight): (SavedShard<S>, u64)| {
            digest(number, &shard).wrapping_mul(weight)
        };
        self.0.into_iter().map(of_shard).fold(0, u64::wrapping_add)
    }
}

impl<S> Default for ComparedShards<S> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl ComparedShards {
    /// The sum, modulo 2^64, of the digests of the shards that a worker owns, once for each copy of
    /// another worker, less those of its own copies: 0 over all workers, if all are equal.
    pub fn balance(self) -> u64 {
        // Equal rows in another shard have another digest.
        self.balance_of(|number, rows| rows.digest().wrapping_mul(2 * u64::from(number) + 1))
    }
}

impl Owned {
    /// What this worker owns as of the last commit. Later commits do not change it.
    ///
    /// # Panics
    /// The worker is in no group.
    pub fn save(&self) -> SavedShards {
        SavedShards { of_ranks: self.of_ranks(), owned: self.saved() }
    }

    /// Reads what [`SavedShard::encode`] has written.
    ///
    /// # Errors
    /// The bytes are no shard of these tables, or not the one of this number.
    pub fn decode(&self, number: u32, bytes: &[u8]) -> Result<SavedShard, InvalidRows> {
        let mut message = Message(bytes);
        let shard = Shard::decode(&mut message, &self.content)?;
        if !message.is_empty() {
            return Err(InvalidRows(format!("{} bytes after a shard", message.0.len())));
        }
        for (index, (rows, waiting)) in shard.tables.iter().zip(&shard.waiting).enumerate() {
            let mut ids = rows.iter().chain(waiting.iter()).map(|(id, ..)| id);
            if let Some(id) = ids.find(|&id| self.shard_of(index, id) != number) {
                return Err(InvalidRows(format!("row {id} in shard {number}")));
            }
        }
        Ok(SavedShard::new(number, shard))
    }
}

impl<S> SavedShard<S> {
    pub(crate) fn new(number: u32, shard: S) -> Self {
        Self { number, shard: Arc::new(shard) }
    }
}

impl SavedShard {
    /// Its bytes. The memory of the shard is free as soon as they are there.
    pub fn encode(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.shard.encode(&mut bytes);
        bytes
    }

    /// As [`encode`](Self::encode), for [`changed_shard`](crate::changed_shard): only what steps
    /// after this one have changed, unless that is not less.
    pub fn encode_changes(self, step: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.shard.encode_changes(u32::try_from(step).unwrap_or(u32::MAX), &mut bytes);
        bytes
    }

    /// Sum of the touches of its rows.
    pub fn touches(&self) -> u64 {
        self.shard.touches()
    }

    /// Whether all of its numbers are finite.
    pub fn is_finite(&self) -> bool {
        self.shard.is_finite()
    }
}
