//! The trait that a user implements to train a model.

use std::collections::BTreeMap;

use crate::buckets::Gradients;
use crate::device::DeviceModel;
use crate::optimizer::{Optimizer, Sgd};
use crate::predictions::Predictions;
use crate::reader::Reader;

/// Any error of the user's code. Its text is reported in the summary, with the worker and the
/// records that it was processing.
pub type UserError = Box<dyn std::error::Error + Send + Sync>;

/// A model to train.
///
/// Parameters and gradients are flat `f32` slices of `parameter_count()` elements, in an order
/// that the model chooses. Their meaning is up to the model. The same program runs on
/// every worker, so results must depend on a method's arguments alone. Otherwise replicas diverge;
/// they are compared, and divergence is an error.
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

    /// Number of parameters, identical on every worker.
    fn parameter_count(&self) -> usize;

    /// The tensors that the flat slice of parameters consists of, in order: their names and shapes
    /// when the model is exported and loaded. Default: one tensor, `parameters`, of one dimension.
    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.parameter_count()])]
    }

    /// Writes the initial parameters, `[parameter_count()]`, drawn from `seed`.
    ///
    /// Called on one worker. The others receive its result.
    ///
    /// # Errors
    /// An error ends the job.
    fn initialize(&mut self, seed: u64, parameters: &mut [f32]) -> Result<(), UserError>;

    /// Builds a batch from records (`collate` in PyTorch).
    ///
    /// # Errors
    /// An error is reported with the range of records, which are then leased to another worker.
    #[doc(alias = "collate")]
    fn feed(
        &mut self,
        records: Vec<<Self::Reader as Reader>::Record>,
    ) -> Result<Self::Batch, UserError>;

    /// Adds the gradient of the batch's loss to `gradients`, which takes a
    /// [sum](Gradients::sum) over the records or their [mean](Gradients::add_mean), and returns the
    /// loss as either.
    ///
    /// `parameters`: `[parameter_count()]`. `gradients` already contains the gradients of the
    /// step's earlier micro-batches. If there are [buckets](Self::bucket_len), the parts that the
    /// model [completes](Gradients::complete_from) are all-reduced while it computes the rest.
    ///
    /// # Errors
    /// An error is reported with the range of records, which are then leased to another worker.
    fn gradients(
        &mut self,
        parameters: &[f32],
        batch: Self::Batch,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError>;

    /// The optimizer that [`update`](Self::update) uses. Default: SGD with a learning rate of 0.01.
    fn optimizer(&self) -> Optimizer {
        Sgd::new(0.01).into()
    }

    /// Number of `f32`s of optimizer state per parameter that `update` keeps in [`Update::slots`].
    /// Default: what the optimizer needs.
    fn slots(&self) -> usize {
        self.optimizer().slots()
    }

    /// Applies one step's gradient. Default: the optimizer, applied to the mean over the step's
    /// records.
    ///
    /// Override this, together with [`slots`](Self::slots), for an update rule that needs the sum
    /// and the count themselves.
    ///
    /// # Errors
    /// An error ends this worker.
    fn update(&mut self, update: Update<'_>) -> Result<(), UserError> {
        self.optimizer().apply(update);
        Ok(())
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
    /// [`gradients`](Self::gradients), [`update`](Self::update) and, during training,
    /// [`evaluate`](Self::evaluate). Default: none, for a model that computes on the CPU.
    ///
    /// Every call must return the same variant.
    fn as_device_model(&mut self) -> Option<&mut dyn DeviceModel<Batch = Self::Batch>> {
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
        let loss =
            self.gradients(parameters, batch, &mut Gradients::new(&mut discarded, records))?;
        metrics.add_sum("loss", loss.sum_over(records));
        Ok(())
    }

    /// Predicts for the batch's records: one row per record, in the records' order.
    ///
    /// Default: an error.
    ///
    /// # Errors
    /// An error is reported with the range of records, which are then leased to another worker.
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
}

/// A loss of a batch, and how it depends on the number of records: a mean does not, a sum grows
/// with it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Loss<T = f64> {
    /// Mean over the records.
    Mean(T),
    /// Sum over the records.
    Sum(T),
}

impl Loss {
    /// The sum over `records` records.
    #[must_use]
    pub fn sum_over(self, records: usize) -> f64 {
        match self {
            Self::Mean(mean) => mean * records as f64,
            Self::Sum(sum) => sum,
        }
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
    /// A tensor of this name and shape.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), shape: shape.into() }
    }
}

/// The metrics that [`Model::evaluate`] reports. Users see their means over all records of the
/// validation data.
#[derive(Debug)]
pub struct Metrics<'a> {
    sums: &'a mut BTreeMap<String, f64>,
    records: usize,
}

impl<'a> Metrics<'a> {
    pub(crate) fn new(sums: &'a mut BTreeMap<String, f64>, records: usize) -> Self {
        Self { sums, records }
    }

    /// Number of records in the batch.
    pub fn records(&self) -> usize {
        self.records
    }

    /// Adds `mean`, a mean over the batch's records, to the metric `name`.
    pub fn add_mean(&mut self, name: &str, mean: f64) {
        self.add_sum(name, mean * self.records as f64);
    }

    /// Adds `sum`, a sum over the batch's records, to the metric `name`.
    pub fn add_sum(&mut self, name: &str, sum: f64) {
        match self.sums.get_mut(name) {
            Some(before) => *before += sum,
            None => drop(self.sums.insert(name.to_owned(), sum)),
        }
    }
}

/// One step's gradient and the state it is applied to.
#[derive(Debug)]
#[non_exhaustive]
pub struct Update<'a> {
    /// Number of the step, from 0.
    pub step: u64,
    /// Number of records in `sum`, over all ranks; at least 1.
    pub records: u64,
    /// Gradient, summed over these records: `[parameter_count()]`.
    pub sum: &'a [f32],
    /// Parameters: `[parameter_count()]`.
    pub parameters: &'a mut [f32],
    /// Optimizer state: `[slots() · parameter_count()]`, initially zero.
    pub slots: &'a mut [f32],
}

impl<'a> Update<'a> {
    /// An update for a loop or a test of your own; each argument as the field of its name.
    pub fn new(
        step: u64,
        records: u64,
        sum: &'a [f32],
        parameters: &'a mut [f32],
        slots: &'a mut [f32],
    ) -> Self {
        Self { step, records, sum, parameters, slots }
    }
}
