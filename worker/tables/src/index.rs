//! Positions of ids in a list.

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_64;

/// Finds ids in a list of distinct ids, which the owner of the index keeps.
#[derive(Clone, Debug, Default)]
pub(crate) struct IdIndex(HashTable<u32>);

impl IdIndex {
    /// The index of `ids`; `None` if an id is there twice.
    pub(crate) fn of(ids: &[u64]) -> Option<Self> {
        let mut index = Self(HashTable::with_capacity(ids.len()));
        for position in 0..ids.len() {
            let (before, now) = (&ids[..position], &ids[..=position]);
            if index.find(before, ids[position]).is_some() {
                return None;
            }
            index.push(now);
        }
        Some(index)
    }

    /// The position of `id` in `ids`.
    pub(crate) fn find(&self, ids: &[u64], id: u64) -> Option<usize> {
        self.0.find(hash(id), |&at| ids[at as usize] == id).map(|&at| at as usize)
    }

    /// The last of `ids` is new.
    pub(crate) fn push(&mut self, ids: &[u64]) {
        let position = ids.len() - 1;
        let number = u32::try_from(position).expect("a list holds fewer than 2^32 ids");
        self.0.insert_unique(hash(ids[position]), number, |&at| hash(ids[at as usize]));
    }

    /// Memory, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.0.allocation_size()
    }
}

/// Hash of an id. The shard of a row is derived from other hashes, so the rows of one shard are
/// spread over their index.
fn hash(id: u64) -> u64 {
    xxh3_64(&id.to_le_bytes())
}
