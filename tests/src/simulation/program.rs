//! The user's program of the simulation: it trains the counting [`model`](super::model).

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

use elasticdl::{
    BatchRows, DataError, Dataset, File, Gradients, Ids, Loss, Metrics, Model, NamedTensor, Reader,
    Table, TableModel, Update, UpdateRule, UserError,
};

use super::coroutine::{act, act_and_wait};
use super::rows::{self, Rows};

/// The model as the user's program of a worker.
pub(super) struct Counting {
    pub(super) parameters: usize,
    /// The sum of the last update, if there was one since the last look.
    pub(super) updated: Rc<Cell<Option<Vec<f32>>>>,
    pub(super) has_tables: bool,
    /// Whether the optimizer has a state, from which it makes the parameters.
    pub(super) has_slots: bool,
}

/// Records of a step, and the places of the rows that they touch.
#[derive(Debug)]
pub(super) struct Batch {
    /// The parameters that belong to the records.
    records: Vec<usize>,
    /// Record, table, id, and place among the rows of the table.
    rows: Vec<(usize, usize, u64, usize)>,
}

/// The update adds the sum: to the slots if it has some, of which the parameters are a copy.
struct Adding {
    updated: Rc<Cell<Option<Vec<f32>>>>,
    has_slots: bool,
}

impl UpdateRule for Adding {
    fn slots(&self) -> usize {
        usize::from(self.has_slots)
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
        if self.has_slots {
            update.slots.iter_mut().zip(update.sum).for_each(|(count, sum)| *count += sum);
            update.parameters.copy_from_slice(update.slots);
            return Ok(());
        }
        update.parameters.iter_mut().zip(update.sum).for_each(|(count, sum)| *count += sum);
        self.updated.set(Some(update.sum.to_vec()));
        Ok(())
    }
}

impl Model for Counting {
    type Reader = NoReader;
    type Batch = Batch;

    fn reader(&self) -> NoReader {
        NoReader
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.parameters])]
    }

    fn initialize(&mut self, _seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        parameters.fill(0.0);
        Ok(())
    }

    fn feed(&mut self, records: Vec<usize>) -> Result<Batch, UserError> {
        Ok(Batch { records, rows: Vec::new() })
    }

    fn as_table_model(&mut self) -> Option<&mut dyn TableModel<Batch = Batch>> {
        if self.has_tables { Some(self) } else { None }
    }

    fn gradients(
        &mut self,
        _parameters: &[f32],
        batch: Batch,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        let Batch { records, rows } = batch;
        let count = records.len() as u64;
        act_and_wait(move |world, thread| world.compute(thread, count));
        if self.has_tables {
            add_row_gradients(rows, gradients.rows_and_sum().0);
        }
        let sum = gradients.sum();
        sum[records[0]] += act(|world, thread| world.miscounts(thread.p));
        records.into_iter().for_each(|record| sum[record] += 1.0);
        Ok(Loss::Sum(0.0))
    }

    fn evaluate(
        &mut self,
        parameters: &[f32],
        batch: Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let count = batch.records.len();
        act_and_wait(move |world, thread| world.compute(thread, count as u64 / 64));
        if self.has_tables {
            let read = rows_of(&batch.rows, metrics.rows());
            act(move |world, thread| world.check_read(thread.p, &read, |rows, _| rows));
        }
        let absorbed: f32 = parameters.iter().sum();
        metrics.add_mean("loss", -f64::from(absorbed));
        Ok(())
    }

    fn optimizer(&self) -> impl UpdateRule {
        Adding { updated: Rc::clone(&self.updated), has_slots: self.has_slots }
    }

    fn summary(&mut self, _parameters: &[f32]) -> Result<Option<String>, UserError> {
        Ok(Some("counted".into()))
    }
}

impl TableModel for Counting {
    type Batch = Batch;

    fn tables(&self) -> Vec<Table> {
        rows::tables()
    }

    fn ids(&mut self, batch: &mut Batch, ids: &mut Ids) -> Result<(), UserError> {
        for &record in &batch.records {
            ids.begin_record();
            for (table, id) in rows::ids_of(record) {
                batch.rows.push((record, table, id, ids.push(table, id)));
            }
        }
        Ok(())
    }
}

/// Adds the gradients of rows.
fn add_row_gradients(touched: Vec<(usize, usize, u64, usize)>, rows: &mut BatchRows) {
    let read = rows_of(&touched, rows);
    act(move |world, thread| world.check_read(thread.p, &read, Rows::of_step));
    let dims: Vec<usize> = rows::tables().iter().map(|table| table.dim).collect();
    for (record, table, id, place) in touched {
        let gradient = rows::gradient_of(record, id);
        let sums = &mut rows.of(table).1[place * dims[table]..(place + 1) * dims[table]];
        sums.iter_mut().for_each(|sum| *sum += gradient);
    }
}

/// Values of the rows that records touch, each once, by table and id.
fn rows_of(
    touched: &[(usize, usize, u64, usize)],
    rows: &mut BatchRows,
) -> Vec<((usize, u64), Vec<f32>)> {
    let dims: Vec<usize> = rows::tables().iter().map(|table| table.dim).collect();
    let places: BTreeSet<_> =
        touched.iter().map(|&(_, table, id, place)| (table, id, place)).collect();
    let values = |(table, id, place)| {
        let values = rows.of(table).0;
        ((table, id), values[place * dims[table]..(place + 1) * dims[table]].to_vec())
    };
    places.into_iter().map(values).collect()
}

/// Training data comes from the world.
#[derive(Debug)]
pub(super) struct NoReader;

impl Reader for NoReader {
    type Record = usize;

    fn describe(&mut self, _source: &str) -> Result<Dataset, DataError> {
        unreachable!("the world describes the data")
    }

    fn read(&mut self, _file: &File, range: Range<u64>) -> Result<Vec<usize>, DataError> {
        Ok(range.map(|record| record as usize).collect())
    }
}
