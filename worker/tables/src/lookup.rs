//! What a rank asks for and gives back: the ids of a batch, their rows, their gradients.

use std::mem;

use xxhash_rust::xxh3::xxh3_64;

use crate::index::IdIndex;
use crate::table::Table;

/// Ids of a batch's records, by table.
///
/// Each id stands once in its table's list, in the order of its first appearance; rows and
/// gradients are in the same order.
#[derive(Clone, Debug, Default)]
pub struct Ids {
    tables: Vec<TableIds>,
    records: u32,
}

#[derive(Clone, Debug, Default)]
struct TableIds {
    ids: Vec<u64>,
    /// Records that contain the id.
    touches: Vec<u32>,
    /// The last record that contains the id.
    last: Vec<u32>,
    index: IdIndex,
}

impl Ids {
    /// No ids of this number of tables.
    pub fn new(tables: usize) -> Self {
        Self { tables: vec![TableIds::default(); tables], records: 0 }
    }

    /// Number of tables.
    pub fn tables(&self) -> usize {
        self.tables.len()
    }

    /// The ids that follow are those of the next record.
    pub fn begin_record(&mut self) {
        self.records += 1;
    }

    /// The record contains `id`, of the table with this index. Returns the position of its row
    /// among the batch's rows of the table. A record that contains an id twice touches it once.
    ///
    /// # Panics
    /// There is no such table.
    pub fn push(&mut self, table: usize, id: u64) -> usize {
        let TableIds { ids, touches, last, index } = &mut self.tables[table];
        match index.find(id, |at| ids[at]) {
            Some(position) => {
                if mem::replace(&mut last[position], self.records) != self.records {
                    touches[position] += 1;
                }
                position
            }
            None => {
                ids.push(id);
                touches.push(1);
                last.push(self.records);
                index.insert(ids.len() - 1, |at| ids[at]);
                ids.len() - 1
            }
        }
    }

    /// The position of the row of `id` in a table; `None` if no record contains it.
    pub fn position(&self, table: usize, id: u64) -> Option<usize> {
        let TableIds { ids, index, .. } = self.tables.get(table)?;
        index.find(id, |at| ids[at])
    }

    /// The distinct ids of a table.
    pub fn of(&self, table: usize) -> &[u64] {
        self.tables.get(table).map_or(&[], |ids| &ids.ids)
    }

    /// Number of (record, id) pairs.
    pub fn touches(&self) -> u64 {
        self.tables.iter().flat_map(|table| &table.touches).map(|&n| u64::from(n)).sum()
    }
}

/// Rows of the ids of a batch, and the sum of their gradients over its records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchRows {
    /// `[ids, dim]` by table.
    values: Vec<Vec<f32>>,
    /// The same.
    gradients: Vec<Vec<f32>>,
}

impl BatchRows {
    /// Rows of `values`, `[ids, dim]` by table, and gradients of zero.
    pub(crate) fn new(values: Vec<Vec<f32>>) -> Self {
        let gradients = values.iter().map(|values| vec![0.0; values.len()]).collect();
        Self { values, gradients }
    }

    /// The initial rows of these ids, for a loop or a test of your own.
    pub fn initial(tables: &[Table], seed: u64, ids: &Ids) -> Self {
        let mut values = Vec::with_capacity(tables.len());
        for (index, table) in tables.iter().enumerate() {
            let ids = ids.of(index);
            let mut rows = vec![0.0; ids.len() * table.dim];
            for (&id, row) in ids.iter().zip(rows.chunks_exact_mut(table.dim)) {
                table.initialize(seed, index as u32, id, row);
            }
            values.push(rows);
        }
        Self::new(values)
    }

    /// Rows of a table, `[ids, dim]`, for a loop or a test of your own.
    pub fn values_mut(&mut self, table: usize) -> &mut [f32] {
        &mut self.values[table]
    }

    /// Adds the rows of a table at these positions, each times `factor`, to `to`, `[dim]`.
    ///
    /// # Panics
    /// There is no such table or position, as below.
    pub fn add_rows(&self, table: usize, positions: &[usize], factor: f32, to: &mut [f32]) {
        for position in positions {
            let row = &self.values[table][position * to.len()..][..to.len()];
            to.iter_mut().zip(row).for_each(|(to, value)| *to += factor * value);
        }
    }

    /// Adds `gradient`, `[dim]`, times `factor`, to the gradients of the rows of a table at these
    /// positions.
    pub fn add_gradient(
        &mut self,
        table: usize,
        positions: &[usize],
        factor: f32,
        gradient: &[f32],
    ) {
        for position in positions {
            let sum = &mut self.gradients[table][position * gradient.len()..][..gradient.len()];
            sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += factor * g);
        }
    }

    /// Rows of a table, `[ids, dim]`, and the sum of their gradients over the batch's records, to
    /// which a model adds.
    pub fn of(&mut self, table: usize) -> (&[f32], &mut [f32]) {
        (&self.values[table], &mut self.gradients[table])
    }
}

/// An id for a text or other bytes. Two texts have one id with a probability of 2^-64.
pub fn id_of(text: impl AsRef<[u8]>) -> u64 {
    xxh3_64(text.as_ref())
}

/// Gradients of rows that no committed step has absorbed: the sum over records.
#[derive(Clone, Debug, Default)]
pub struct RowGradients {
    tables: Vec<TableGradients>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct TableGradients {
    pub(crate) ids: Vec<u64>,
    pub(crate) touches: Vec<u32>,
    /// `[ids, dim]`.
    pub(crate) sums: Vec<f32>,
    index: IdIndex,
}

impl RowGradients {
    /// Adds the gradients of a batch.
    pub fn add(&mut self, tables: &[Table], ids: Ids, rows: BatchRows) {
        let batch = ids.tables.into_iter().zip(rows.gradients);
        let of_batch = |(ids, sums)| {
            let TableIds { ids, touches, index, .. } = ids;
            TableGradients { ids, touches, sums, index }
        };
        if self.tables.is_empty() {
            self.tables = batch.map(of_batch).collect();
            return;
        }
        for ((table, into), batch) in tables.iter().zip(&mut self.tables).zip(batch) {
            let TableGradients { ids, touches, sums, .. } = of_batch(batch);
            for ((&id, &touches), sum) in ids.iter().zip(&touches).zip(sums.chunks_exact(table.dim))
            {
                into.add(id, touches, sum);
            }
        }
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.tables.clear();
    }

    /// Whether all gradients are finite.
    pub fn are_finite(&self) -> bool {
        self.tables.iter().all(|table| table.sums.iter().all(|sum| sum.is_finite()))
    }

    pub(crate) fn tables(&self) -> impl Iterator<Item = (usize, &TableGradients)> {
        self.tables.iter().enumerate()
    }
}

impl TableGradients {
    pub(crate) fn add(&mut self, id: u64, touches: u32, gradient: &[f32]) {
        let dim = gradient.len();
        match self.index.find(id, |at| self.ids[at]) {
            Some(at) => {
                self.touches[at] = self.touches[at].saturating_add(touches);
                let sums = &mut self.sums[at * dim..(at + 1) * dim];
                sums.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
            }
            None => {
                self.ids.push(id);
                self.touches.push(touches);
                self.sums.extend_from_slice(gradient);
                self.index.insert(self.ids.len() - 1, |at| self.ids[at]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_a_record_contains_twice_is_touched_once() {
        let mut ids = Ids::new(2);
        ids.begin_record();
        assert_eq!([7, 9, 7].map(|id| ids.push(0, id)), [0, 1, 0]);
        assert_eq!(ids.push(1, 7), 0);
        ids.begin_record();
        assert_eq!(ids.push(0, 7), 0);
        assert_eq!((ids.of(0), ids.of(1), ids.touches()), (&[7, 9][..], &[7][..], 4));
        let found = [(0, 9), (1, 9), (2, 9)].map(|(table, id)| ids.position(table, id));
        assert_eq!(found, [Some(1), None, None]);
    }

    #[test]
    fn rows_are_pooled_and_gradients_spread() {
        let mut rows = BatchRows::new(vec![vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]);
        let mut mean = [0.0; 2];
        rows.add_rows(0, &[0, 2], 0.5, &mut mean);
        assert_eq!(mean, [3.0, 4.0]);
        rows.add_gradient(0, &[0, 2, 2], 0.5, &[2.0, 4.0]);
        assert_eq!(rows.of(0).1, [1.0, 2.0, 0.0, 0.0, 2.0, 4.0]);
        assert_ne!(id_of("user"), id_of("User"));
    }

    #[test]
    fn gradients_of_batches_add_up_by_id() {
        let tables = [Table::new("user", 2)];
        let mut sum = RowGradients::default();
        for (pushed, gradient) in [([3, 4], 1.0), ([4, 5], 2.0)] {
            let mut ids = Ids::new(1);
            for id in pushed {
                ids.begin_record();
                ids.push(0, id);
            }
            let mut rows = BatchRows::new(vec![vec![0.0; 4]]);
            rows.of(0).1.fill(gradient);
            sum.add(&tables, ids, rows);
        }
        let (_, table) = sum.tables().next().unwrap();
        assert_eq!((&table.ids[..], &table.touches[..]), (&[3, 4, 5][..], &[1, 2, 1][..]));
        assert_eq!(table.sums, [1.0, 1.0, 3.0, 3.0, 2.0, 2.0]);
    }
}
