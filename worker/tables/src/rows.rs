//! The rows of one table in one shard.

use crate::index::IdIndex;
use crate::table::Table;

/// Rows by id, in one block of memory.
///
/// A row takes 16 bytes, its numbers, and 5 to 10 bytes of index. Memory grows by an eighth at a
/// time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rows {
    /// Positions of the rows below.
    index: IdIndex,
    ids: Vec<u64>,
    counts: Vec<Counts>,
    /// Values and optimizer state, `[rows, stored]`.
    numbers: Vec<f32>,
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
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// The numbers of the row, `[stored]`, if it exists.
    pub(crate) fn find(&self, id: u64, stored: usize) -> Option<&[f32]> {
        let row = self.index.find(&self.ids, id)?;
        Some(&self.numbers[row * stored..(row + 1) * stored])
    }

    /// The row, which is created if it does not exist.
    pub(crate) fn touch(
        &mut self,
        id: u64,
        table: &Table,
        initialize: impl FnOnce(&mut [f32]),
    ) -> (&mut Counts, &mut [f32]) {
        let stored = table.stored();
        let row = match self.index.find(&self.ids, id) {
            Some(row) => row,
            None => {
                let row = self.push(id, Counts::default(), stored);
                initialize(&mut self.numbers[row * stored..row * stored + table.dim]);
                row
            }
        };
        (&mut self.counts[row], &mut self.numbers[row * stored..(row + 1) * stored])
    }

    /// Adds a row of zeros, which must not exist yet, and returns its position.
    fn push(&mut self, id: u64, counts: Counts, stored: usize) -> usize {
        let row = self.ids.len();
        if row == self.ids.capacity() {
            let more = (row / 8).max(8);
            self.ids.reserve_exact(more);
            self.counts.reserve_exact(more);
            self.numbers.reserve_exact(more * stored);
        }
        self.ids.push(id);
        self.counts.push(counts);
        self.numbers.resize((row + 1) * stored, 0.0);
        self.index.push(&self.ids);
        row
    }

    /// All rows: id, counts and numbers.
    pub(crate) fn iter(&self, stored: usize) -> impl Iterator<Item = (u64, Counts, &[f32])> {
        let numbers = self.numbers.chunks_exact(stored);
        self.ids
            .iter()
            .zip(&self.counts)
            .zip(numbers)
            .map(|((&id, &counts), row)| (id, counts, row))
    }

    /// The rows as they are stored: ids, counts, numbers.
    pub(crate) fn columns(&self) -> (&[u64], &[Counts], &[f32]) {
        (&self.ids, &self.counts, &self.numbers)
    }

    /// Rows from columns; `None` if an id is there twice.
    pub(crate) fn from_columns(
        ids: Vec<u64>,
        counts: Vec<Counts>,
        numbers: Vec<f32>,
    ) -> Option<Self> {
        Some(Self { index: IdIndex::of(&ids)?, ids, counts, numbers })
    }

    /// Memory of the rows, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let row = size_of::<u64>() + size_of::<Counts>();
        self.ids.capacity() * row
            + self.numbers.capacity() * size_of::<f32>()
            + self.index.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::RowOptimizer;

    fn rows(table: &Table, ids: impl Iterator<Item = u64>) -> Rows {
        let mut rows = Rows::default();
        for id in ids {
            let (counts, numbers) = rows.touch(id, table, |row| row.fill(id as f32));
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
        assert_eq!(rows.find(7, 3), Some(&[11.0, 7.0, 0.0][..]));
        assert_eq!(rows.find(8, 3), None);
        assert_eq!(rows.iter(3).map(|(_, counts, _)| counts.touches).sum::<u32>(), 1000);
        let (ids, counts, numbers) = rows.columns();
        let copy = Rows::from_columns(ids.to_vec(), counts.to_vec(), numbers.to_vec()).unwrap();
        assert_eq!(copy.find(7, 3), rows.find(7, 3));
        assert!(Rows::from_columns(vec![1, 1], vec![Counts::default(); 2], vec![0.0; 2]).is_none());
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
