//! The trait that a user implements to train a model.

use elasticdl_data::Predictions;
use elasticdl_data::Reader;
use elasticdl_tables::Table;

use crate::buckets::Gradients;
#[cfg(feature = "gpu")]
use crate::device::DeviceModel;
use crate::external::Bridge;
use crate::failure::call_user;
use crate::half_model::HalfModel;
use crate::metrics::{Loss, Metrics, UserError};
use crate::optimizer::Sgd;
use crate::table_model::TableModel;
use crate::update::UpdateRule;
use crate::weights;

/// A model to train.
///
/// Parameters and gradients are flat `f32` slices: the elements of the model's
/// [tensors](Self::tensors), one after the other. The same program runs on every worker, so results
/// must depend on a method's arguments alone. Otherwise replicas diverge; they are compared, and
/// divergence is an error.
///
/// An error or panic in a method ends this worker and is reported with the records that it was
/// processing.
pub trait Model: 'static {
    /// Reads the training data.
    type Reader: Reader;
    /// Result of [`feed`](Self::feed).
    type Batch;

    /// Creates the reader of the training data. Called once or twice per worker process.
    fn reader(&self) -> Self::Reader;

    /// The tensors that make up the parameters, in the order in which they lie in the flat slice;
    /// identical on every worker. An exported model has their names and shapes.
    fn tensors(&self) -> Vec<NamedTensor>;

    /// Writes the initial parameters, `[parameters]`, drawn from `seed`.
    ///
    /// Called on one worker, whose result the others receive, and before that on the worker that
    /// tries the evaluation, if there is one.
    ///
    /// # Errors
    /// An error ends the job.
    fn initialize(&mut self, seed: u64, parameters: &mut [f32]) -> Result<(), UserError>;

    /// Builds a batch from records (`collate` in PyTorch).
    ///
    /// # Errors
    /// An error is reported with the range of records, which another worker then processes.
    #[doc(alias = "collate")]
    fn feed(
        &mut self,
        records: Vec<<Self::Reader as Reader>::Record>,
    ) -> Result<Self::Batch, UserError>;

    /// Adds the gradient of the batch's loss to `gradients`, which takes a
    /// [sum](Gradients::sum) over the records or their [mean](Gradients::add_mean), and returns the
    /// loss as either.
    ///
    /// `parameters`: `[parameters]`. `gradients` already contains the gradients of the
    /// step's earlier micro-batches. If there are [buckets](Self::bucket_len), the parts that the
    /// model [completes](Gradients::complete_from) are all-reduced while it computes the rest.
    /// [`report_mean`](crate::report_mean) reports metrics of the batch.
    ///
    /// # Errors
    /// An error is reported with the range of records, which another worker then processes.
    fn gradients(
        &mut self,
        parameters: &[f32],
        batch: Self::Batch,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError>;

    /// The rule by which a step's gradient changes the parameters: [`Sgd`],
    /// [`Adam`](crate::Adam), [`AdamW`](crate::AdamW), one of these with a schedule or clipping as
    /// an [`Optimizer`](crate::Optimizer), or one of your own. Default: SGD with a learning rate of
    /// 0.01.
    ///
    /// Called when a worker starts, which then keeps the rule.
    fn optimizer(&self) -> impl UpdateRule {
        Sgd::new(0.01)
    }

    /// Maximum number of records that fit into memory at once: a larger share is computed in
    /// micro-batches. Default: no limit.
    fn max_micro_batch(&self) -> Option<usize> {
        None
    }

    /// Number of elements per gradient bucket, identical on every worker. The gradient is then
    /// all-reduced in buckets, starting from its end, as [`gradients`](Self::gradients)
    /// [completes](Gradients::complete_from) them. A model whose parameters lie in the order of its
    /// layers, which the backward pass visits from the last to the first, spends less time waiting
    /// for the network. Default: none; the gradient is all-reduced as a whole once it is complete.
    fn bucket_len(&self) -> Option<usize> {
        None
    }

    /// The GPU side of the model, if it computes on a GPU. It is then called in place of
    /// [`gradients`](Self::gradients) and, during training, [`evaluate`](Self::evaluate), and
    /// applies the update rule. Default: none, for a model that computes on the CPU.
    ///
    /// Every call must return the same variant.
    #[cfg(feature = "gpu")]
    fn as_device_model(&mut self) -> Option<&mut dyn DeviceModel<Batch = Self::Batch>> {
        None
    }

    /// The parameters in bf16, if the model can compute with such.
    #[doc(hidden)]
    fn as_half_model(&mut self) -> Option<&mut dyn HalfModel> {
        None
    }

    /// The tables of the model, if it has any. Default: none. Every call must return the same
    /// variant.
    fn as_table_model(&mut self) -> Option<&mut dyn TableModel<Batch = Self::Batch>> {
        None
    }

    /// Evaluates the model on a batch of validation data: adds its metrics to `metrics`.
    ///
    /// Default: the metric `loss`, computed by [`gradients`](Self::gradients), whose gradient is
    /// discarded. Override this to avoid that work or to report other metrics.
    ///
    /// # Errors
    /// See [`gradients`](Self::gradients).
    fn evaluate(
        &mut self,
        parameters: &[f32],
        batch: Self::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let mut discarded = vec![0.0; parameters.len()];
        let records = metrics.records();
        let gradients = Gradients::new(&mut discarded, records);
        let mut gradients = gradients.with_rows(metrics.rows.as_deref_mut());
        let loss = self.gradients(parameters, batch, &mut gradients)?;
        metrics.add_sum("loss", loss.sum_over(records));
        Ok(())
    }

    /// Predicts for the batch's records: one row per record, in the records' order.
    ///
    /// Default: an error.
    ///
    /// # Errors
    /// An error is reported with the range of records, which another worker then processes.
    fn predict(
        &mut self,
        _parameters: &[f32],
        _batch: Self::Batch,
    ) -> Result<Predictions, UserError> {
        Err("this model makes no predictions; implement its method `predict`".into())
    }

    /// A final text about the model, such as a sample or a score, which is shown with the job's
    /// summary. Called on one worker, after training.
    ///
    /// # Errors
    /// An error is shown in place of the text. The job counts as completed nevertheless.
    fn summary(&mut self, _parameters: &[f32]) -> Result<Option<String>, UserError> {
        Ok(None)
    }

    /// The hooks of a model whose code is in another language, if it is one.
    #[doc(hidden)]
    fn as_bridge(&mut self) -> Option<&mut dyn Bridge> {
        None
    }
}

/// A named part of the parameters, as it appears in exported models.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NamedTensor {
    /// Name, unique within the model.
    pub name: String,
    /// Shape; the elements are in row-major order.
    pub shape: Vec<usize>,
}

impl NamedTensor {
    /// A tensor of this name and shape. A scalar has the shape `[]`.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), shape: shape.into() }
    }

    /// Number of elements of all these tensors: the length of the flat slice.
    #[must_use]
    pub fn count(tensors: &[Self]) -> usize {
        let elements = |tensor: &Self| tensor.shape.iter().copied().fold(1, usize::saturating_mul);
        tensors.iter().map(elements).fold(0, usize::saturating_add)
    }
}

/// The tables of the model.
///
/// # Errors
/// A table is impossible.
pub(crate) fn tables_of<M: Model>(model: &mut M) -> Result<Vec<Table>, String> {
    let tables = call_user("tables()", || {
        Ok(model.as_table_model().map(|model| model.tables()).unwrap_or_default())
    })?;
    elasticdl_tables::check(&tables)?;
    Ok(tables)
}

/// The model's tensors: at least one element, with names and shapes that can be exported.
///
/// # Errors
/// The fault. A model that failed to build reports the reason in the first method that returns an
/// error.
pub(crate) fn tensors_of<M: Model>(model: &mut M) -> Result<Vec<NamedTensor>, String> {
    let tensors = call_user("tensors()", || Ok(model.tensors()))?;
    weights::check(&tensors).map_err(|error| error.to_string())?;
    if NamedTensor::count(&tensors) == 0 {
        call_user("initialize()", || model.initialize(0, &mut []))?;
        return Err("tensors() has no elements; a model has at least one parameter".into());
    }
    Ok(tensors)
}
