//! Positions of ids in a list.

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_64;

/// Finds ids in a list of distinct ids. The owner of the index keeps the list: `id_at` returns the
/// id at a position.
#[derive(Clone, Debug, Default)]
pub(crate) struct IdIndex(HashTable<u32>);

impl IdIndex {
    /// The index of an empty list, with memory for `len` ids.
    pub(crate) fn with_capacity(len: usize) -> Self {
        Self(HashTable::with_capacity(len))
    }

    /// The index of a list of `len` ids; `None` if an id is there twice.
    pub(crate) fn new(len: usize, id_at: impl Fn(usize) -> u64) -> Option<Self> {
        let mut index = Self::with_capacity(len);
        for position in 0..len {
            if index.find(id_at(position), &id_at).is_some() {
                return None;
            }
            index.insert(position, &id_at);
        }
        Some(index)
    }

    /// The position of `id`.
    pub(crate) fn find(&self, id: u64, id_at: impl Fn(usize) -> u64) -> Option<usize> {
        self.0.find(hash(id), |&at| id_at(at as usize) == id).map(|&at| at as usize)
    }

    /// A position that may be that of `id`; `None` if the list does not have it.
    pub(crate) fn candidate(&self, id: u64) -> Option<usize> {
        self.0.find(hash(id), |_| true).map(|&at| at as usize)
    }

    /// The id at `position` is new.
    pub(crate) fn insert(&mut self, position: usize, id_at: impl Fn(usize) -> u64) {
        let number = u32::try_from(position).expect("a list holds fewer than 2^32 ids");
        self.0.insert_unique(hash(id_at(position)), number, |&at| hash(id_at(at as usize)));
    }

    /// The id at `position` is removed from a list of `len` ids, and the last one takes its place.
    /// The list has not changed yet.
    pub(crate) fn swap_remove(
        &mut self,
        position: usize,
        len: usize,
        id_at: impl Fn(usize) -> u64,
    ) {
        let found = self.0.find_entry(hash(id_at(position)), |&at| at as usize == position);
        found.expect("the id is in the list").remove();
        if position + 1 < len {
            let last = self.0.find_mut(hash(id_at(len - 1)), |&at| at as usize == len - 1);
            *last.expect("the id is in the list") = position as u32;
        }
    }

    /// Gives memory back if most of it is unused.
    pub(crate) fn shrink(&mut self, id_at: impl Fn(usize) -> u64) {
        self.0.shrink_to_fit(|&at| hash(id_at(at as usize)));
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
