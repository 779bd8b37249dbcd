//! The rows of one table in one shard.

use std::mem;
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::block::{self, Block};
use crate::index::IdIndex;
use crate::wire::{put, put_u32};

/// Rows by id.
///
/// A row takes 16 bytes, its numbers, and 5 to 10 bytes of index. All of a row lies together, as a
/// row of a large table is in no cache. A copy shares all full blocks until their rows change.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    index: IdIndex,
    words: Words,
}

/// What is known of a row besides its numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Counts {
    /// Records that touched the row, in committed steps.
    pub(crate) touches: u32,
    /// The last of these steps.
    pub(crate) last_step: u32,
}

/// The words of the rows, `[rows, HEAD + stored]`: id (two words, the lower one first), touches,
/// last step, numbers.
#[derive(Clone, Debug)]
struct Words {
    /// Full blocks.
    blocks: Vec<Arc<Block>>,
    /// The rows after them. Memory grows by a quarter at a time.
    tail: Vec<u32>,
    /// Words per row.
    stride: usize,
    /// Rows per block.
    per_block: usize,
}

impl Rows {
    /// No rows, which will have so many numbers each.
    pub(crate) fn new(stored: usize) -> Self {
        Self { index: IdIndex::default(), words: Words::new(Self::stride(stored)) }
    }

    /// Words per row of so many numbers.
    pub(crate) fn stride(stored: usize) -> usize {
        HEAD + stored
    }

    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    /// Position of the row of `id`, if it exists.
    pub(crate) fn position(&self, id: u64) -> Option<usize> {
        self.index.find(id, |row| self.words.id(row))
    }

    /// Positions of the rows of these ids, if they exist.
    ///
    /// Most of the time goes into waiting for memory: of the index, and of the rows. Each loop
    /// waits for one of them, for many ids at once.
    pub(crate) fn positions(wanted: &[(&Self, u64)]) -> Vec<Option<usize>> {
        let candidates = wanted.iter().map(|(rows, id)| rows.index.candidate(*id));
        let mut found: Vec<Option<usize>> = candidates.collect();
        let ids = wanted.iter().zip(&found).map(|((rows, _), at)| at.map(|at| rows.words.id(at)));
        let ids: Vec<Option<u64>> = ids.collect();
        for ((found, of_candidate), (rows, id)) in found.iter_mut().zip(ids).zip(wanted) {
            if of_candidate.is_some_and(|other| other != *id) {
                *found = rows.position(*id);
            }
        }
        found
    }

    /// The id of a row.
    pub(crate) fn id(&self, row: usize) -> u64 {
        self.words.id(row)
    }

    /// The numbers of a row.
    pub(crate) fn numbers(&self, row: usize) -> &[f32] {
        bytemuck::cast_slice(&self.words.row(row)[HEAD..])
    }

    /// Removes a row, if it exists. Returns its touches.
    pub(crate) fn remove(&mut self, id: u64) -> Option<u32> {
        self.position(id).map(|row| self.swap_remove(row))
    }

    /// Positions of the rows that `is_expired` says are, in ascending order.
    pub(crate) fn expired(&self, is_expired: impl Fn(Counts, &[f32]) -> bool) -> Vec<usize> {
        let rows = self.iter().enumerate();
        rows.filter(|(_, (_, counts, row))| is_expired(*counts, row)).map(|(at, _)| at).collect()
    }

    /// Removes the rows at these positions, in ascending order. Returns the sum of their touches.
    pub(crate) fn remove_all(&mut self, positions: &[usize]) -> u64 {
        let before = self.len();
        let touches = positions.iter().rev().map(|&row| u64::from(self.swap_remove(row))).sum();
        if before > 2 * self.len() {
            let Self { index, words } = self;
            words.tail.shrink_to_fit();
            index.shrink(|row| words.id(row));
        }
        touches
    }

    /// Removes a row, whose place the last one takes. Returns its touches.
    fn swap_remove(&mut self, row: usize) -> u32 {
        let Self { index, words } = self;
        index.swap_remove(row, words.len(), |row| words.id(row));
        let touches = words.row(row)[2];
        words.swap_remove(row);
        touches
    }

    /// The row of an id, whose [position](Self::positions) is this one. It is created if it does
    /// not exist; `initialize` writes its values, `[dim]`.
    pub(crate) fn touch(
        &mut self,
        (id, found): (u64, Option<usize>),
        dim: usize,
        initialize: impl FnOnce(&mut [f32]),
    ) -> (&mut Counts, &mut [f32]) {
        let Self { index, words } = self;
        let row = found.unwrap_or_else(|| {
            let row = words.push(id);
            index.insert(row, |row| words.id(row));
            row
        });
        let (head, numbers) = words.row_mut(row).split_at_mut(HEAD);
        let numbers = bytemuck::cast_slice_mut(numbers);
        if found.is_none() {
            initialize(&mut numbers[..dim]);
        }
        (&mut bytemuck::cast_slice_mut(&mut head[2..])[0], numbers)
    }

    /// All rows: id, counts and numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, Counts, &[f32])> {
        self.words.rows().map(|row| {
            let counts = Counts { touches: row[2], last_step: row[3] };
            (id_of(row), counts, bytemuck::cast_slice(&row[HEAD..]))
        })
    }

    /// Sum of the digests of the rows, modulo 2^64: it does not depend on their order.
    pub(crate) fn digest(&self, seed: u64) -> u64 {
        let digest = |row: &[u32]| xxh3_64_with_seed(bytemuck::cast_slice(row), seed);
        self.words.rows().map(digest).fold(0, u64::wrapping_add)
    }

    /// Sum of the touches of the rows.
    pub(crate) fn touches(&self) -> u64 {
        self.iter().map(|(_, counts, _)| u64::from(counts.touches)).sum()
    }

    /// The rows as they are stored, in parts.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &[u32]> {
        self.words.parts()
    }

    /// Bytes of the rows that a step after this one has touched.
    pub(crate) fn changed_bytes(&self, step: u32) -> u64 {
        self.words.changed(step).map(|row| size_of_val(row) as u64).sum()
    }

    /// Writes the number of these rows, and the rows as they are stored.
    pub(crate) fn encode_changed(&self, step: u32, to: &mut Vec<u8>) {
        put_u32(to, self.words.changed(step).count());
        self.words.changed(step).for_each(|row| put(to, row));
    }

    /// Rows of so many numbers from what [`parts`](Self::parts) returned; `None` if an id is there
    /// twice.
    pub(crate) fn from_words(stored: usize, words: &[u32]) -> Option<Self> {
        let words = Words::from_rows(Self::stride(stored), words);
        let index = IdIndex::new(words.len(), |row| words.id(row))?;
        Some(Self { index, words })
    }

    /// Bytes of [`parts`](Self::parts).
    pub(crate) fn stored_bytes(&self) -> usize {
        self.len() * self.words.stride * size_of::<u32>()
    }

    /// Memory of the rows, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let Words { blocks, tail, .. } = &self.words;
        blocks.len() * block::BYTES + tail.capacity() * size_of::<u32>() + self.index.bytes()
    }
}

impl Words {
    fn new(stride: usize) -> Self {
        // Rows that are larger than a block stay in the tail.
        let per_block = match block::WORDS / stride {
            0 => usize::MAX,
            rows => rows,
        };
        Self { blocks: Vec::new(), tail: Vec::new(), stride, per_block }
    }

    fn from_rows(stride: usize, rows: &[u32]) -> Self {
        let mut words = Self::new(stride);
        let full = rows.chunks_exact(words.block_len());
        words.tail = full.remainder().to_vec();
        words.blocks = full.map(|block| Arc::new(Block::new(block))).collect();
        words
    }

    /// Words of a full block that rows take.
    fn block_len(&self) -> usize {
        self.per_block.saturating_mul(self.stride)
    }

    fn len(&self) -> usize {
        let in_tail = self.tail.len() / self.stride;
        self.blocks.len() * self.per_block + in_tail
    }

    fn row(&self, row: usize) -> &[u32] {
        let at = row % self.per_block * self.stride;
        let block = self.blocks.get(row / self.per_block);
        &block.map_or(&*self.tail, |block| &**block)[at..at + self.stride]
    }

    fn row_mut(&mut self, row: usize) -> &mut [u32] {
        let at = row % self.per_block * self.stride;
        let block = self.blocks.get_mut(row / self.per_block);
        let words = block.map_or(&mut *self.tail, |block| &mut **Arc::make_mut(block));
        &mut words[at..at + self.stride]
    }

    fn id(&self, row: usize) -> u64 {
        id_of(self.row(row))
    }

    /// Adds a row of zeros, and returns its position.
    fn push(&mut self, id: u64) -> usize {
        if self.tail.len() == self.block_len() {
            let full = mem::take(&mut self.tail);
            self.blocks.push(Arc::new(Block::new(&full)));
        }
        let (row, stride) = (self.len(), self.stride);
        if self.tail.len() + stride > self.tail.capacity() {
            self.tail.reserve_exact((self.tail.len() / stride / 4).max(8) * stride);
        }
        self.tail.extend([id as u32, (id >> 32) as u32]);
        self.tail.resize(self.tail.len() - 2 + stride, 0);
        row
    }

    /// Removes a row; the last one takes its place.
    fn swap_remove(&mut self, row: usize) {
        if self.tail.is_empty() {
            let last = self.blocks.pop().expect("there is a row");
            self.tail = last[..self.block_len()].to_vec();
        }
        let last = self.tail.split_off(self.tail.len() - self.stride);
        if row < self.len() {
            self.row_mut(row).copy_from_slice(&last);
        }
    }

    fn parts(&self) -> impl Iterator<Item = &[u32]> {
        let full = self.block_len();
        let blocks = self.blocks.iter().map(move |block| &block[..full]);
        blocks.chain([&*self.tail])
    }

    /// The rows that a step after this one has touched.
    fn changed(&self, step: u32) -> impl Iterator<Item = &[u32]> {
        self.rows().filter(move |row| row[3] > step)
    }

    fn rows(&self) -> impl Iterator<Item = &[u32]> {
        self.parts().flat_map(|part| part.chunks_exact(self.stride))
    }
}

fn id_of(row: &[u32]) -> u64 {
    u64::from(row[0]) | u64::from(row[1]) << 32
}

/// Words of a row before its numbers.
const HEAD: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::RowOptimizer;
    use crate::table::Table;

    fn rows(table: &Table, ids: impl Iterator<Item = u64>) -> Rows {
        let mut rows = Rows::new(table.stored());
        for id in ids {
            let found = Rows::positions(&[(&rows, id)])[0];
            let (counts, numbers) = rows.touch((id, found), table.dim, |row| row.fill(id as f32));
            counts.touches += 1;
            numbers[0] += 1.0;
        }
        rows
    }

    fn numbers(rows: &Rows, id: u64) -> Option<&[f32]> {
        rows.position(id).map(|row| rows.numbers(row))
    }

    fn words(rows: &Rows) -> Vec<u32> {
        rows.parts().flatten().copied().collect()
    }

    #[test]
    fn rows_are_created_once_and_found() {
        // In a tail, in several blocks, and larger than a block.
        for (dim, count) in [(2, 300), (1000, 300), (20_000, 3)] {
            let table = Table::new("user", dim).optimized(RowOptimizer::adagrad(0.1));
            let rows = rows(&table, (0..1000).map(|i| i % count * 7));
            assert_eq!(rows.len(), count as usize);
            let (row, touches) = (numbers(&rows, 7).unwrap(), (1000 - 2) / count + 1);
            assert_eq!(row[..3], [7.0 + touches as f32, 7.0, [0.0, 7.0][usize::from(dim > 2)]]);
            assert_eq!(numbers(&rows, 8), None);
            assert_eq!(rows.iter().map(|(_, counts, _)| counts.touches).sum::<u32>(), 1000);
            let stored = words(&rows);
            assert_eq!(stored.len() * size_of::<u32>(), rows.stored_bytes());
            let copy = Rows::from_words(table.stored(), &stored).unwrap();
            assert_eq!((numbers(&copy, 7), copy.digest(3)), (numbers(&rows, 7), rows.digest(3)));
            assert_eq!(words(&copy), stored);
            let twice = [&stored, &stored[..Rows::stride(table.stored())]].concat();
            assert!(Rows::from_words(table.stored(), &twice).is_none());
        }
    }

    #[test]
    fn a_copy_does_not_change_with_its_original() {
        let table = Table::new("user", 100);
        let mut original = rows(&table, 0..1000);
        let (copy, before) = (original.clone(), words(&original));
        let ids = (0..2000).step_by(7);
        for id in ids {
            let found = original.position(id);
            original.touch((id, found), 100, |row| row.fill(-1.0)).1[99] = 5.0;
        }
        assert_eq!(words(&copy), before);
        let own = original.words.blocks.iter().zip(&copy.words.blocks);
        assert!(own.clone().count() > 5 && own.clone().all(|(a, b)| !Arc::ptr_eq(a, b)));
        assert_eq!(
            (numbers(&original, 7).unwrap()[99], numbers(&copy, 7).unwrap()[99]),
            (5.0, 7.0)
        );
    }

    #[test]
    fn rows_that_are_removed_leave_the_others() {
        let table = Table::new("user", 2);
        let mut rows = rows(&table, 0..9000);
        let touches = rows.remove_all(&rows.expired(|_, numbers| numbers[1] % 3.0 > 0.0));
        assert_eq!(
            (touches, rows.len(), rows.remove(6), rows.remove(7)),
            (6000, 3000, Some(1), None)
        );
        for id in 0..9000 {
            let expected = [id as f32 + 1.0, id as f32];
            let is_left = id % 3 == 0 && id != 6;
            assert_eq!(numbers(&rows, id), is_left.then_some(&expected[..]), "{id}");
        }
        let bytes = rows.bytes();
        rows.remove_all(&rows.expired(|_, _| true));
        assert!(rows.len() == 0 && rows.bytes() < bytes / 2, "{} of {bytes} bytes", rows.bytes());
    }

    #[test]
    fn a_row_of_16_numbers_with_adagrad_takes_less_than_100_bytes() {
        let table = Table::new("user", 16).optimized(RowOptimizer::adagrad(0.1));
        let bytes = |count| rows(&table, 0..count).bytes() as f64 / count as f64;
        let sizes = (0..8_u32).map(|i| 1_500 + u64::from(i) * 200).collect::<Vec<_>>();
        let mean = sizes.iter().map(|&count| bytes(count)).sum::<f64>() / sizes.len() as f64;
        assert!(mean <= 100.0, "{mean} bytes");
    }
}
