//! The same counts by candle: those of the parameters, and of the rows of a table.

use std::time::Duration;

use elasticdl::candle::{CandleModel, Rows};
use elasticdl::candle_core::{Device, Tensor};
use elasticdl::candle_nn::{Init, VarBuilder};
use elasticdl::{Ids, Loss, Model, Reader as _, Table, TableModel, UpdateRule, UserError};
use elasticdl_tests::{counting_reader, counts_summary, numbers, unless_refused};

use super::Counting;

/// Each record adds its parameter and its row to the loss, so the gradients count records.
pub(super) struct CandleCounting(pub(super) Counting);

pub(super) struct Batch {
    records: Vec<u64>,
    /// `[records, 1]`.
    rows: Option<Tensor>,
}

impl CandleModel for CandleCounting {
    type Reader = <Counting as Model>::Reader;
    type Network = Tensor;
    type Batch = Batch;

    fn reader(&self) -> Self::Reader {
        counting_reader().map(unless_refused)
    }

    fn build(&self, parameters: VarBuilder<'static>) -> Result<Tensor, UserError> {
        let zeros = Init::Const(0.0);
        Ok(parameters.get_with_hints(self.0.parameter_count(), "parameters", zeros)?)
    }

    fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<Batch, UserError> {
        Ok(Batch { records: numbers(records)?, rows: None })
    }

    fn tables(&self) -> Vec<Table> {
        TableModel::tables(&self.0)
    }

    fn ids(&mut self, batch: &mut Batch, ids: &mut Ids) -> Result<(), UserError> {
        TableModel::ids(&mut self.0, &mut batch.records, ids)
    }

    fn take_rows(&mut self, batch: &mut Batch, rows: &Rows<'_>) -> Result<(), UserError> {
        let at: Vec<usize> = batch.records.iter().map(|id| self.0.positions[id]).collect();
        batch.rows = Some(rows.look_up(0, &at)?);
        Ok(())
    }

    fn loss(&mut self, parameters: &Tensor, batch: Batch) -> Result<Loss<Tensor>, UserError> {
        let Batch { records, rows } = batch;
        std::thread::sleep(Duration::from_micros(self.0.micros_per_record * records.len() as u64));
        let at = Tensor::from_iter(records.iter().map(|record| *record as u32), &Device::Cpu)?;
        let counts = parameters.index_select(&at, 0)?.sum_all()?;
        let rows = rows.ok_or("the rows were not taken")?.sum_all()?;
        Ok(Loss::Sum((counts + rows)?))
    }

    fn optimizer(&self) -> impl UpdateRule {
        Model::optimizer(&self.0)
    }

    fn summary(&mut self, parameters: &Tensor) -> Result<Option<String>, UserError> {
        let counts: Vec<f32> = parameters.to_vec1()?;
        Ok(Some(counts_summary(&counts[..self.0.records])))
    }
}
