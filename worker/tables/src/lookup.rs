//! What a rank asks for and gives back: the ids of a batch, their rows, their gradients.

use std::mem;

use xxhash_rust::xxh3::xxh3_64;

use crate::distinct_ids::DistinctIds;
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
    ids: DistinctIds,
    /// Records that contain the id.
    touches: Vec<u32>,
    /// The last record that contains the id.
    last: Vec<u32>,
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
        let TableIds { ids, touches, last } = &mut self.tables[table];
        let (position, is_new) = ids.push(id);
        if is_new {
            touches.push(1);
            last.push(self.records);
        } else if mem::replace(&mut last[position], self.records) != self.records {
            touches[position] += 1;
        }
        position
    }

    /// The position of the row of `id` in a table; `None` if no record contains it.
    pub fn position(&self, table: usize, id: u64) -> Option<usize> {
        self.tables.get(table)?.ids.position(id)
    }

    /// The distinct ids of several batches, whose rows are looked up at once.
    pub fn union<'a>(tables: usize, batches: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut union = Self::new(tables);
        for ids in batches {
            for (table, ids) in ids.tables.iter().enumerate() {
                for &id in &*ids.ids {
                    union.push(table, id);
                }
            }
        }
        union
    }

    /// The distinct ids of a table.
    pub fn of(&self, table: usize) -> &[u64] {
        self.tables.get(table).map_or(&[], |of_table| &of_table.ids)
    }

    /// As [`DistinctIds::in_shards`], of a table.
    pub(crate) fn in_shards(&self, table: usize, shards: u32) -> &[(u32, usize)] {
        self.tables.get(table).map_or(&[], |of_table| of_table.ids.in_shards(table, shards))
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

    /// The rows of `batch`, whose ids are among those of this one, `union`; gradients of zero.
    pub fn of_batch(&self, union: &Ids, batch: &Ids) -> Self {
        let rows_of = |(table, values): (usize, &Vec<f32>)| {
            let dim = values.len() / union.of(table).len().max(1);
            let place = |&id| union.position(table, id).expect("the union has the batch's ids");
            let rows = batch.of(table).iter().map(place);
            rows.flat_map(|row| &values[row * dim..(row + 1) * dim]).copied().collect()
        };
        Self::new(self.values.iter().enumerate().map(rows_of).collect())
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

/// Gradients of rows that no committed step has absorbed: sums over records, in parts.
#[derive(Clone, Debug, Default)]
pub struct RowGradients {
    parts: Vec<Part>,
}

/// Sum over some of a step's records.
#[derive(Clone, Debug)]
struct Part {
    position: u64,
    tables: Vec<TableGradients>,
}

/// Gradients of the rows of one table.
#[derive(Clone, Debug, Default)]
pub struct TableGradients {
    pub(crate) ids: DistinctIds,
    pub(crate) touches: Vec<u32>,
    /// `[ids, dim]`.
    pub(crate) sums: Vec<f32>,
}

impl RowGradients {
    /// Adds the gradients of a batch to the sum, which is one part.
    pub fn add(&mut self, tables: &[Table], ids: Ids, rows: BatchRows) {
        let Some(sum) = self.parts.first_mut() else { return self.add_part(0, ids, rows) };
        for ((table, into), batch) in tables.iter().zip(&mut sum.tables).zip(of_batch(ids, rows)) {
            let TableGradients { ids, touches, sums } = batch;
            for ((&id, &touches), sum) in ids.iter().zip(&touches).zip(sums.chunks_exact(table.dim))
            {
                into.add(id, touches, sum);
            }
        }
    }

    /// Adds the gradients of the batch at this position of the step as a part of their own. The
    /// holders of a row add the parts of all ranks in the order of their positions.
    pub fn add_part(&mut self, position: u64, ids: Ids, rows: BatchRows) {
        self.parts.push(Part { position, tables: of_batch(ids, rows).collect() });
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.parts.clear();
    }

    /// Whether all gradients are finite.
    pub fn are_finite(&self) -> bool {
        self.tables().all(|(.., table)| table.sums.iter().all(|sum| sum.is_finite()))
    }

    /// Position of the part, index of the table, gradients.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (u64, usize, &TableGradients)> {
        self.parts.iter().flat_map(|part| {
            let tables = part.tables.iter().enumerate();
            tables.map(|(index, gradients)| (part.position, index, gradients))
        })
    }
}

fn of_batch(ids: Ids, rows: BatchRows) -> impl Iterator<Item = TableGradients> {
    ids.tables.into_iter().zip(rows.gradients).map(|(ids, sums)| {
        let TableIds { ids, touches, .. } = ids;
        TableGradients { ids, touches, sums }
    })
}

impl TableGradients {
    /// No gradients, with memory for those of so many rows of `dim` numbers.
    pub(crate) fn with_capacity(rows: usize, dim: usize) -> Self {
        let (ids, touches) = (DistinctIds::with_capacity(rows), Vec::with_capacity(rows));
        Self { ids, touches, sums: Vec::with_capacity(rows * dim) }
    }

    /// Bytes of a row of `dim` numbers in a message.
    pub(crate) fn bytes(dim: usize) -> usize {
        size_of::<u64>() + size_of::<u32>() + dim * size_of::<f32>()
    }

    pub(crate) fn add(&mut self, id: u64, touches: u32, gradient: &[f32]) {
        let dim = gradient.len();
        let (at, is_new) = self.ids.push(id);
        if is_new {
            self.touches.push(touches);
            self.sums.extend_from_slice(gradient);
            return;
        }
        self.touches[at] = self.touches[at].saturating_add(touches);
        let sums = &mut self.sums[at * dim..(at + 1) * dim];
        sums.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
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
    fn batches_have_their_rows_of_a_common_look_up() {
        let batch = |pushed: [[u64; 2]; 2]| {
            let mut ids = Ids::new(2);
            ids.begin_record();
            for (table, pushed) in pushed.into_iter().enumerate() {
                for &id in &pushed {
                    ids.push(table, id);
                }
            }
            ids
        };
        let batches = [batch([[3, 5], [7, 7]]), batch([[5, 4], [7, 8]])];
        let union = Ids::union(2, &batches);
        assert_eq!((union.of(0), union.of(1)), (&[3, 5, 4][..], &[7, 8][..]));
        let rows = BatchRows::new(vec![vec![3.0, 3.5, 5.0, 5.5, 4.0, 4.5], vec![7.0, 8.0]]);
        let mut second = rows.of_batch(&union, &batches[1]);
        assert_eq!(second.of(0).0, [5.0, 5.5, 4.0, 4.5]);
        assert_eq!(second.of(1), (&[7.0, 8.0][..], &mut [0.0, 0.0][..]));
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
        let (.., table) = sum.tables().next().unwrap();
        assert_eq!((&table.ids[..], &table.touches[..]), (&[3, 4, 5][..], &[1, 2, 1][..]));
        assert_eq!(table.sums, [1.0, 1.0, 3.0, 3.0, 2.0, 2.0]);
    }
}
