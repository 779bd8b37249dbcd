//! Distinct ids of one table, and the shards that they lie in.

use std::mem;
use std::ops::Deref;
use std::sync::OnceLock;

use crate::index::IdIndex;
use crate::placement::shard_of;

/// Ids in the order of their first appearance.
#[derive(Clone, Debug, Default)]
pub(crate) struct DistinctIds {
    ids: Vec<u64>,
    index: IdIndex,
    /// Known once it was asked for: rows are asked for, received and changed in this order.
    in_shards: OnceLock<Vec<(u32, usize)>>,
}

impl DistinctIds {
    /// No ids, with memory for so many.
    pub(crate) fn with_capacity(len: usize) -> Self {
        let (ids, index) = (Vec::with_capacity(len), IdIndex::with_capacity(len));
        Self { ids, index, in_shards: OnceLock::new() }
    }

    /// The position of `id`.
    pub(crate) fn position(&self, id: u64) -> Option<usize> {
        self.index.find(id, |at| self.ids[at])
    }

    /// The position of `id`, and whether it is new.
    pub(crate) fn push(&mut self, id: u64) -> (usize, bool) {
        if let Some(position) = self.position(id) {
            return (position, false);
        }
        self.ids.push(id);
        self.index.insert(self.ids.len() - 1, |at| self.ids[at]);
        self.in_shards = OnceLock::new();
        (self.ids.len() - 1, true)
    }

    /// The shards, of so many, of these ids of a table, and the ids' positions, in the order of the
    /// shards. The rows of a shard lie near each other in memory, so they are visited one after the
    /// other.
    pub(crate) fn in_shards(&self, table: usize, shards: u32) -> &[(u32, usize)] {
        self.in_shards.get_or_init(|| {
            let of_ids: Vec<u32> =
                self.ids.iter().map(|&id| shard_of(table as u32, id, shards)).collect();
            // Counting sort: where the next id of each shard goes.
            let mut next = vec![0; shards as usize];
            of_ids.iter().for_each(|&shard| next[shard as usize] += 1);
            let mut start = 0;
            for count in &mut next {
                start += mem::replace(count, start);
            }
            let mut places = vec![(0, 0); of_ids.len()];
            for (at, shard) in of_ids.into_iter().enumerate() {
                places[next[shard as usize]] = (shard, at);
                next[shard as usize] += 1;
            }
            places
        })
    }
}

impl Deref for DistinctIds {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_in_the_order_of_their_shards_also_when_more_have_come() {
        let mut ids = DistinctIds::default();
        for (from, to) in [(0, 50), (40, 90)] {
            for id in from..to {
                let is_new = ids.position(id * 7).is_none();
                assert_eq!(ids.push(id * 7), (id as usize, is_new));
            }
            let in_shards = ids.in_shards(3, 8);
            assert!(in_shards.is_sorted() && in_shards.len() == ids.len());
            assert!(in_shards.iter().all(|&(shard, at)| shard == shard_of(3, ids[at], 8)));
        }
        assert_eq!((ids.len(), ids.position(3)), (90, None));
    }
}
