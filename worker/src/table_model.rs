//! The trait of a model with embedding tables.

use elasticdl_data::Predictions;
use elasticdl_tables::{BatchRows, Ids, Table};

use crate::metrics::UserError;

/// A model some of whose parameters are rows of tables, too many for each worker to hold all.
///
/// The workers divide the rows among them, each row on two of them. A step brings each worker the
/// rows of its own records, as of the step before, and takes their gradients: see
/// [`Gradients::rows_and_sum`](crate::Gradients::rows_and_sum).
pub trait TableModel {
    /// Result of [`Model::feed`](crate::Model::feed).
    type Batch;

    /// The tables, the same on every worker. Called when a worker starts.
    fn tables(&self) -> Vec<Table>;

    /// Adds the ids of the batch's records to `ids`: for each record, after
    /// [`Ids::begin_record`], every row that it needs. The batch keeps the positions that
    /// [`Ids::push`] returns: they are the places of the rows, and of their gradients. `ids` may
    /// contain those of other batches.
    ///
    /// # Errors
    /// An error is reported with the range of records, which another worker then processes.
    fn ids(&mut self, batch: &mut Self::Batch, ids: &mut Ids) -> Result<(), UserError>;

    /// As [`Model::predict`](crate::Model::predict), with the rows of the batch's ids.
    ///
    /// Default: an error.
    ///
    /// # Errors
    /// An error is reported with the range of records, which another worker then processes.
    fn predict_with_rows(
        &mut self,
        _parameters: &[f32],
        _batch: Self::Batch,
        _rows: &BatchRows,
    ) -> Result<Predictions, UserError> {
        Err("this model makes no predictions; implement `TableModel::predict_with_rows`".into())
    }
}
