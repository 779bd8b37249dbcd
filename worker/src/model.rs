//! What a user fills in to train a model.

use std::collections::BTreeMap;

use crate::buckets::Gradients;
use crate::device::DeviceModel;
use crate::optimizer::Optimizer;
use crate::predictions::Predictions;
use crate::reader::Reader;

/// Any error of the user's code. Its text reaches the summary, with the worker and the records it
/// was working on.
pub type UserError = Box<dyn std::error::Error + Send + Sync>;

/// A model to train: the blanks that a user fills in.
///
/// Parameters and gradients are flat `f32` slices of the same length, `parameters()` elements, in
/// an order that the model chooses; what they mean is the model's business. The same program runs
/// on every worker, so what a method returns must depend on its arguments alone, or replicas drift
/// apart (they are compared, and drift is an error).
///
/// Any error or panic in a method ends this worker and is reported with the records it was working
/// on.
pub trait Model: 'static {
    /// Reads the training data.
    type Reader: Reader;
    /// What [`feed`](Self::feed) makes of records.
    type Batch;

    /// The reader of the training data. Called once or twice in a worker's life.
    fn reader(&self) -> Self::Reader;

    /// Number of parameters, the same on every worker.
    fn parameters(&self) -> usize;

    /// The tensors that the parameters consist of, in the order in which they lie in the flat
    /// slice: how they are called where the model is exported, and where it is loaded again.
    /// Default: one, `parameters`, of one dimension.
    fn layout(&self) -> Vec<NamedTensor> {
        vec![NamedTensor { name: "parameters".into(), shape: vec![self.parameters()] }]
    }

    /// Writes the initial parameters, `[parameters()]`, drawn from `seed`.
    ///
    /// Called on one worker; the others receive its result.
    ///
    /// # Errors
    /// Ends the job.
    fn initialize(&mut self, seed: u64, parameters: &mut [f32]) -> Result<(), UserError>;

    /// Makes a batch of records.
    ///
    /// # Errors
    /// Reported with the records' range; the records go to another worker.
    fn feed(
        &mut self,
        records: Vec<<Self::Reader as Reader>::Record>,
    ) -> Result<Self::Batch, UserError>;

    /// Adds the gradient of the batch's loss, **summed over its records**, to `gradients`; returns
    /// the loss summed over its records.
    ///
    /// `parameters`, `gradients`: `[parameters()]`. `gradients` already holds what other
    /// micro-batches of this step added.
    ///
    /// # Errors
    /// Reported with the records' range; the records go to another worker.
    fn gradients(
        &mut self,
        parameters: &[f32],
        batch: Self::Batch,
        gradients: &mut [f32],
    ) -> Result<f64, UserError>;

    /// The optimizer that [`update`](Self::update) uses. Default: plain SGD at a rate of 0.01.
    fn optimizer(&self) -> Optimizer {
        Optimizer::sgd(0.01)
    }

    /// How many `f32`s of state per parameter `update` keeps in [`Update::slots`]. Default: what
    /// the optimizer needs.
    fn slots(&self) -> usize {
        self.optimizer().slots()
    }

    /// Applies one step's gradient. Default: the optimizer, on the mean over the step's records.
    ///
    /// A model that wants the sum and the count themselves overrides this, and
    /// [`slots`](Self::slots) with it.
    ///
    /// # Errors
    /// Ends this worker.
    fn update(&mut self, update: Update<'_>) -> Result<(), UserError> {
        self.optimizer().apply(update);
        Ok(())
    }

    /// Records that fit into memory at once: a larger share is computed in micro-batches. Default:
    /// any number.
    fn micro_batch(&self) -> Option<usize> {
        None
    }

    /// Elements of a bucket, for a model that knows when parts of its gradient are complete: then
    /// the gradient is summed over the workers in buckets, from its end on, and
    /// [`gradients_in_buckets`](Self::gradients_in_buckets) says how early. The same on every
    /// worker. Default: none, for a gradient that is summed as a whole, when it is complete.
    fn bucket(&self) -> Option<usize> {
        None
    }

    /// As [`gradients`](Self::gradients), called in its place for the last records of a step where
    /// there are [buckets](Self::bucket) and other workers: what is said to be complete is summed
    /// while the rest is computed. So a model whose parameters lie in the order of its layers,
    /// which a backward pass takes from the last one on, spends less time waiting for the network.
    ///
    /// # Errors
    /// As for [`gradients`](Self::gradients).
    fn gradients_in_buckets(
        &mut self,
        parameters: &[f32],
        batch: Self::Batch,
        gradients: &mut Gradients<'_>,
    ) -> Result<f64, UserError> {
        self.gradients(parameters, batch, gradients.rest())
    }

    /// The model on a GPU, if it computes there: then this is called in place of
    /// [`gradients`](Self::gradients), [`update`](Self::update) and, while it trains, of
    /// [`evaluate`](Self::evaluate). Default: none, for a model that computes on the CPU.
    ///
    /// It may not change its mind.
    fn device(&mut self) -> Option<&mut dyn DeviceModel<Batch = Self::Batch>> {
        None
    }

    /// Judges the model on a batch of validation data: adds metrics to `metrics`, **summed over its
    /// records**.
    ///
    /// Default: `loss`, by [`gradients`](Self::gradients), whose gradient is thrown away; a model
    /// that knows how to do without, or has other metrics, fills this in.
    ///
    /// # Errors
    /// As for [`gradients`](Self::gradients).
    fn evaluate(
        &mut self,
        parameters: &[f32],
        batch: Self::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let mut thrown_away = vec![0.0; parameters.len()];
        let loss = self.gradients(parameters, batch, &mut thrown_away)?;
        metrics.add("loss", loss);
        Ok(())
    }

    /// What the model makes of the batch's records: one row for each, in their order.
    ///
    /// Default: an error, for a model that predicts nothing.
    ///
    /// # Errors
    /// Reported with the records' range; the records go to another worker.
    fn predict(
        &mut self,
        _parameters: &[f32],
        _batch: Self::Batch,
    ) -> Result<Predictions, UserError> {
        Err("this model makes no predictions; fill in its method `predict`".into())
    }

    /// The model's closing words, shown with the job's summary: a sample, a score. Called on one
    /// worker, at the end.
    ///
    /// # Errors
    /// Shown in place of the words; the job has completed all the same.
    fn summary(&mut self, _parameters: &[f32]) -> Result<Option<String>, UserError> {
        Ok(None)
    }
}

/// A part of the parameters, as other programs see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTensor {
    /// Its name, of its own.
    pub name: String,
    /// Its shape; the elements lie row by row.
    pub shape: Vec<usize>,
}

/// What [`Model::evaluate`] finds. What the user sees is the mean over all records of the
/// validation data.
#[derive(Debug)]
pub struct Metrics<'a> {
    sums: &'a mut BTreeMap<String, f64>,
}

impl<'a> Metrics<'a> {
    pub(crate) fn new(sums: &'a mut BTreeMap<String, f64>) -> Self {
        Self { sums }
    }

    /// Adds `sum`, over the batch's records, to the metric of this name.
    pub fn add(&mut self, name: &str, sum: f64) {
        match self.sums.get_mut(name) {
            Some(before) => *before += sum,
            None => drop(self.sums.insert(name.to_owned(), sum)),
        }
    }
}

/// One step's gradient and the state it is applied to.
#[derive(Debug)]
pub struct Update<'a> {
    /// The step, from 0.
    pub step: u64,
    /// Records behind `sum`, over all ranks; at least 1.
    pub records: u64,
    /// Gradient summed over these records, `[parameters]`.
    pub sum: &'a [f32],
    /// The parameters, `[parameters]`.
    pub parameters: &'a mut [f32],
    /// The optimizer's state, `[slots · parameters]`, zero at the start.
    pub slots: &'a mut [f32],
}
