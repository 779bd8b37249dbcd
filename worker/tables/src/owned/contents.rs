//! Read access to a worker's shards: rows, sizes, touches and digests, for the status, exports,
//! checkpoints and the proof at a job's end. Nothing here changes a shard.
//!
//! A worker *holds* a shard that it has a copy of, and *owns* it if it answers for it: the first of
//! the shard's holders. **Invariant:** what is summed over a group, touches and digests, is of
//! owned shards, so that no copy counts twice.

use std::sync::Arc;

use super::{Content, Owned, Ownership};
use crate::placement::Member;
use crate::rows::Counts;

/// Size of what a worker owns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnedSize {
    /// Rows that it owns.
    pub rows: u64,
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
    /// The last step with one.
    pub last_step: u32,
    /// Its values and the state of its optimizer; nothing if it is not admitted yet.
    pub numbers: &'a [f32],
}

impl Owned {
    /// Seed of the rows that no record has touched.
    pub fn seed(&self) -> u64 {
        self.settings.seed
    }

    /// What this worker owns: the rows for which it answers, not those that it keeps for others.
    pub fn owned(&self) -> OwnedSize {
        let owned = || self.owned_shards().map(|(_, shard)| shard);
        OwnedSize {
            rows: owned().map(|shard| shard.rows()).sum(),
            bytes: self.held().map(|(_, shard)| shard.bytes()).sum(),
        }
    }

    /// Rows and memory of each table on this worker, with those that it keeps for others.
    pub fn held_by_table(&self) -> Vec<OwnedSize> {
        let of_table = |table: usize| {
            let sizes = self.held().map(|(_, shard)| shard.size_of(table));
            sizes.fold(OwnedSize::default(), |sum, (rows, bytes)| OwnedSize {
                rows: sum.rows + rows,
                bytes: sum.bytes + bytes,
            })
        };
        (0..self.content.len()).map(of_table).collect()
    }

    /// Sum of the touches in the shards that this worker owns.
    pub fn touches(&self) -> u64 {
        self.owned_shards().map(|(_, shard)| shard.touches()).sum()
    }

    /// Digest of the rows that this worker owns, with their touches and the state of their
    /// optimizers. The sum over all ranks, modulo 2^64, does not depend on who owns what.
    pub fn digest(&self) -> u64 {
        let shards = self.owned_shards().map(|(_, shard)| shard.digest());
        shards.fold(0, u64::wrapping_add)
    }

    /// The rows of a table that this worker owns: id, touches and values, `[dim]`.
    pub fn rows(&self, table: usize) -> impl Iterator<Item = (u64, u32, &[f32])> {
        let spec = &self.content[table];
        self.owned_shards().flat_map(move |(_, shard)| {
            let rows = shard.tables[table].iter();
            rows.map(|(id, counts, row)| (id, counts.touches, &row[..spec.dim]))
        })
    }

    /// All rows that this worker holds, those that it keeps for others and those that are not
    /// admitted yet, too.
    pub fn held_rows(&self) -> impl Iterator<Item = HeldRow<'_>> {
        self.held().flat_map(|(shard, held)| {
            let all = held.tables.iter().enumerate().chain(held.waiting.iter().enumerate());
            all.flat_map(move |(table, rows)| {
                rows.iter().map(move |(id, counts, numbers)| {
                    let Counts { touches, last_step } = counts;
                    HeldRow { shard, table, id, touches, last_step, numbers }
                })
            })
        })
    }

    /// Touches of the rows that were evicted, by shard and table, of all shards that this worker
    /// holds.
    pub fn evicted(&self) -> impl Iterator<Item = (u32, usize, u64)> {
        self.held().flat_map(|(shard, held)| {
            let evicted = held.evicted.iter().enumerate();
            evicted.map(move |(table, &touches)| (shard, table, touches))
        })
    }
}

impl<C: Content> Ownership<C> {
    /// Step of this worker's shards, if it has a state.
    pub fn step(&self) -> Option<u64> {
        self.committed.as_ref().map(|committed| committed.step)
    }

    /// Number of workers of the group on the host of this one that hold shards, about as many
    /// each; 1 as long as some shards do not lie where they should.
    pub fn workers_of_host(&self) -> u64 {
        let Some(group) = self.group.as_ref().filter(|group| group.is_settled) else { return 1 };
        let host = |worker| group.members[group.rank(worker)].host;
        let holds = |worker| group.placement.held_by(worker).next().is_some();
        let is_here = |member: &&Member| member.host == host(self.me) && holds(member.worker);
        (group.members.iter().filter(is_here).count() as u64).max(1)
    }

    /// Number of shards of the group with fewer copies than there could be.
    pub fn at_risk(&self) -> usize {
        self.group.as_ref().map_or(0, |group| group.placement.at_risk(&group.members))
    }

    /// The shards that this worker holds.
    pub(crate) fn held(&self) -> impl Iterator<Item = (u32, &Arc<C::Shard>)> {
        self.committed.iter().flat_map(|committed| &committed.shards).map(|(&s, shard)| (s, shard))
    }

    /// The shards that this worker owns in its group.
    pub(super) fn owned_shards(&self) -> impl Iterator<Item = (u32, &Arc<C::Shard>)> {
        let committed = self.committed.as_ref().map(|committed| &committed.placement);
        let placement = self.group.as_ref().map(|group| &group.placement).or(committed);
        let owner = move |shard| placement.and_then(|placement| placement.holders(shard).first());
        self.held().filter(move |&(shard, _)| owner(shard) == Some(&self.me))
    }
}
