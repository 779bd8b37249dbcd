//! The rows of one table in one shard.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::index::IdIndex;

/// Rows by id, in one block of memory.
///
/// A row takes 16 bytes, its numbers, and 5 to 10 bytes of index. All of a row lies together, as a
/// row of a large table is in no cache. Memory grows by an eighth at a time.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    index: IdIndex,
    /// `[rows, HEAD + stored]`: id (two words, the lower one first), touches, last step, numbers.
    words: Vec<u32>,
    /// Words per row.
    stride: usize,
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

impl Rows {
    /// No rows, which will have so many numbers each.
    pub(crate) fn new(stored: usize) -> Self {
        let (index, words) = (IdIndex::default(), Vec::new());
        Self { index, words, stride: Self::stride(stored) }
    }

    /// Words per row of so many numbers.
    pub(crate) fn stride(stored: usize) -> usize {
        HEAD + stored
    }

    pub(crate) fn len(&self) -> usize {
        self.words.len() / self.stride
    }

    /// The numbers of the row, `[stored]`, if it exists.
    pub(crate) fn find(&self, id: u64) -> Option<&[f32]> {
        let row = self.position(id)?;
        let row = &self.words[row * self.stride..(row + 1) * self.stride];
        Some(bytemuck::cast_slice(&row[HEAD..]))
    }

    fn position(&self, id: u64) -> Option<usize> {
        self.index.find(id, |row| id_at(&self.words, self.stride, row))
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
        let touches = positions.iter().rev().map(|&row| u64::from(self.swap_remove(row))).sum();
        if self.words.capacity() > 2 * self.words.len() {
            self.words.shrink_to_fit();
            self.index.shrink(|row| id_at(&self.words, self.stride, row));
        }
        touches
    }

    /// Removes a row, whose place the last one takes. Returns its touches.
    fn swap_remove(&mut self, row: usize) -> u32 {
        let (len, stride) = (self.len(), self.stride);
        self.index.swap_remove(row, len, |row| id_at(&self.words, stride, row));
        let touches = self.words[row * stride + 2];
        self.words.copy_within((len - 1) * stride.., row * stride);
        self.words.truncate((len - 1) * stride);
        touches
    }

    /// The row, which is created if it does not exist. `initialize` writes its values, `[dim]`.
    pub(crate) fn touch(
        &mut self,
        id: u64,
        dim: usize,
        initialize: impl FnOnce(&mut [f32]),
    ) -> (&mut Counts, &mut [f32]) {
        let stride = self.stride;
        let found = self.index.find(id, |row| id_at(&self.words, stride, row));
        let row = found.unwrap_or_else(|| self.push(id));
        let (head, numbers) = self.words[row * stride..(row + 1) * stride].split_at_mut(HEAD);
        let numbers = bytemuck::cast_slice_mut(numbers);
        if found.is_none() {
            initialize(&mut numbers[..dim]);
        }
        (&mut bytemuck::cast_slice_mut(&mut head[2..])[0], numbers)
    }

    /// Adds a row of zeros, which must not exist yet, and returns its position.
    fn push(&mut self, id: u64) -> usize {
        let (row, stride) = (self.len(), self.stride);
        if self.words.len() + stride > self.words.capacity() {
            self.words.reserve_exact((row / 8).max(8) * stride);
        }
        self.words.extend([id as u32, (id >> 32) as u32]);
        self.words.resize((row + 1) * stride, 0);
        self.index.insert(row, |row| id_at(&self.words, stride, row));
        row
    }

    /// All rows: id, counts and numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, Counts, &[f32])> {
        self.words.chunks_exact(self.stride).map(|row| {
            let counts = Counts { touches: row[2], last_step: row[3] };
            (id_at(row, 0, 0), counts, bytemuck::cast_slice(&row[HEAD..]))
        })
    }

    /// Sum of the touches of the rows.
    pub(crate) fn touches(&self) -> u64 {
        self.iter().map(|(_, counts, _)| u64::from(counts.touches)).sum()
    }

    /// Sum of the digests of the rows, modulo 2^64: it does not depend on their order.
    pub(crate) fn digest(&self, seed: u64) -> u64 {
        let rows = self.words.chunks_exact(self.stride);
        let digests = rows.map(|row| xxh3_64_with_seed(bytemuck::cast_slice(row), seed));
        digests.fold(0, u64::wrapping_add)
    }

    /// The rows as they are stored.
    pub(crate) fn words(&self) -> &[u32] {
        &self.words
    }

    /// Rows of so many numbers from what [`words`](Self::words) returned; `None` if an id is there
    /// twice.
    pub(crate) fn from_words(stored: usize, words: Vec<u32>) -> Option<Self> {
        let stride = Self::stride(stored);
        let index = IdIndex::new(words.len() / stride, |row| id_at(&words, stride, row))?;
        Some(Self { index, words, stride })
    }

    /// Memory of the rows, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.words.capacity() * size_of::<u32>() + self.index.bytes()
    }
}

/// The id of a row.
fn id_at(words: &[u32], stride: usize, row: usize) -> u64 {
    let at = row * stride;
    u64::from(words[at]) | u64::from(words[at + 1]) << 32
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
            let (counts, numbers) = rows.touch(id, table.dim, |row| row.fill(id as f32));
            counts.touches += 1;
            numbers[0] += 1.0;
        }
        rows
    }

    #[test]
    fn rows_are_created_once_and_found() {
        let table = Table::new("user", 2).optimized(RowOptimizer::adagrad(0.1));
        let rows = rows(&table, (0..1000).map(|i| i % 300 * 7));
        assert_eq!(rows.len(), 300);
        assert_eq!(rows.find(7), Some(&[11.0, 7.0, 0.0][..]));
        assert_eq!(rows.find(8), None);
        assert_eq!(rows.iter().map(|(_, counts, _)| counts.touches).sum::<u32>(), 1000);
        let copy = Rows::from_words(table.stored(), rows.words().to_vec()).unwrap();
        assert_eq!(copy.find(7), rows.find(7));
        let twice = [rows.words(), &rows.words()[..Rows::stride(table.stored())]].concat();
        assert!(Rows::from_words(table.stored(), twice).is_none());
    }

    #[test]
    fn rows_that_are_removed_leave_the_others() {
        let table = Table::new("user", 2);
        let mut rows = rows(&table, 0..300);
        let touches = rows.remove_all(&rows.expired(|_, numbers| numbers[1] % 3.0 > 0.0));
        assert_eq!(
            (touches, rows.len(), rows.remove(6), rows.remove(7)),
            (200, 100, Some(1), None)
        );
        for id in 0..300 {
            let expected = [id as f32 + 1.0, id as f32];
            let is_left = id % 3 == 0 && id != 6;
            assert_eq!(rows.find(id), is_left.then_some(&expected[..]), "{id}");
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
