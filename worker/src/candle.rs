//! Adapter for models written with candle.
//!
//! A [`CandleModel`] builds a network from candle's [`VarBuilder`], as any module of candle-nn or
//! candle-transformers does, and defines a loss. [`Candle`] makes a [`Model`] of it: the flat
//! parameters are copied into candle's variables before each loss, and candle's gradients are added
//! to the flat gradient after it.
//!
//! A model on another [device](CandleModel::device) than the CPU has its variables there. On a GPU,
//! the flat slices are there as well.
//!
//! Each process uses `RAYON_NUM_THREADS` threads (environment variable). Unless it is set, a worker
//! gets its share of the machine's cores, and in a cluster the CPUs that it requests.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use elasticdl_data::Predictions;
use elasticdl_data::Reader;
use elasticdl_tables::{BatchRows, Ids, Table};

use crate::buckets::Gradients;
use crate::half_model::HalfModel;
use crate::metrics::{Loss, Metrics, UserError};
use crate::model::{Model, NamedTensor};
use crate::optimizer::AdamW;
use crate::table_model::TableModel;
use crate::update::UpdateRule;

/// A model written with candle.
///
/// ```no_run
/// use elasticdl::candle::{Candle, CandleModel};
/// use elasticdl::candle_core::{Device, Module, Tensor};
/// use elasticdl::candle_nn::{Linear, VarBuilder, linear, loss};
/// use elasticdl::readers::{CsvRows, Row};
/// use elasticdl::{Loss, UserError};
///
/// /// Fits `y = slope · x + intercept` to the rows of CSV files.
/// struct Line;
///
/// impl CandleModel for Line {
///     type Reader = CsvRows;
///     type Network = Linear;
///     type Batch = (Tensor, Tensor);
///
///     fn reader(&self) -> CsvRows {
///         CsvRows::new().f32("x").f32("y")
///     }
///     fn build(&self, parameters: VarBuilder<'static>) -> Result<Linear, UserError> {
///         Ok(linear(1, 1, parameters)?)
///     }
///     fn feed(&mut self, rows: Vec<Row>) -> Result<(Tensor, Tensor), UserError> {
///         let column = |i| Tensor::from_iter(rows.iter().map(|row| row.f32(i)), &Device::Cpu);
///         Ok((column(0)?.unsqueeze(1)?, column(1)?.unsqueeze(1)?))
///     }
///     fn loss(
///         &mut self,
///         line: &Linear,
///         (x, y): (Tensor, Tensor),
///     ) -> Result<Loss<Tensor>, UserError> {
///         Ok(Loss::Mean(loss::mse(&line.forward(&x)?, &y)?))
///     }
/// }
///
/// fn main() -> std::process::ExitCode {
///     elasticdl::run(Candle::new(Line))
/// }
/// ```
pub trait CandleModel: 'static {
    /// Reads the training data.
    type Reader: Reader;
    /// The modules or tensors that the loss uses.
    type Network;
    /// Result of [`feed`](Self::feed).
    type Batch;

    /// Creates the reader of the training data.
    fn reader(&self) -> Self::Reader;

    /// Builds the network. The tensors that it asks `parameters` for, always in the same order, are
    /// the parameters of the job.
    ///
    /// Called once, when the worker starts. Keep the tensors and use them in the loss: their values
    /// are set later, and change at each step. They are f32, or bf16 with `--param-dtype bf16`, for
    /// which it is called a second time; a module may convert them.
    ///
    /// # Errors
    /// An error ends the job.
    fn build(&self, parameters: VarBuilder<'static>) -> Result<Self::Network, UserError>;

    /// The device of the parameters and of the batches that `feed` makes. Default: the CPU.
    ///
    /// Called once, before [`build`](Self::build).
    ///
    /// # Errors
    /// An error ends the job.
    fn device(&mut self) -> Result<Device, UserError> {
        Ok(Device::Cpu)
    }

    /// Builds a batch from records.
    ///
    /// # Errors
    /// See [`Model::feed`].
    fn feed(
        &mut self,
        records: Vec<<Self::Reader as Reader>::Record>,
    ) -> Result<Self::Batch, UserError>;

    /// The embedding tables. Default: none.
    fn tables(&self) -> Vec<Table> {
        Vec::new()
    }

    /// Adds the ids of the batch's records, whose positions the batch keeps: see
    /// [`TableModel::ids`].
    ///
    /// # Errors
    /// See [`TableModel::ids`].
    fn ids(&mut self, _batch: &mut Self::Batch, _ids: &mut Ids) -> Result<(), UserError> {
        Err("this model has tables; implement its method `ids`".into())
    }

    /// Takes the rows of the batch's ids, as tensors, into the batch: before its loss is computed,
    /// and before it is evaluated or predicted.
    ///
    /// # Errors
    /// See [`Model::gradients`].
    fn take_rows(&mut self, _batch: &mut Self::Batch, _rows: &Rows<'_>) -> Result<(), UserError> {
        Err("this model has tables; implement its method `take_rows`".into())
    }

    /// Computes the batch's loss: one `f32`, a mean over its records or their sum. Metrics of the
    /// batch are reported with [`report_mean`](crate::report_mean).
    ///
    /// # Errors
    /// See [`Model::gradients`].
    fn loss(
        &mut self,
        network: &Self::Network,
        batch: Self::Batch,
    ) -> Result<Loss<Tensor>, UserError>;

    /// Like [`loss`](Self::loss), with [cuts](Cuts::cut) between the layers, if there are
    /// [buckets](Self::bucket_len). Default: without cuts.
    ///
    /// # Errors
    /// See [`Model::gradients`].
    fn loss_in_parts(
        &mut self,
        network: &Self::Network,
        batch: Self::Batch,
        _cuts: &mut Cuts,
    ) -> Result<Loss<Tensor>, UserError> {
        self.loss(network, batch)
    }

    /// See [`Model::bucket_len`]. Useful if parameters are declared in the order in which the loss
    /// uses them.
    fn bucket_len(&self) -> Option<usize> {
        None
    }

    /// Whether some parameters have no influence on the loss of some batches. Default: no; a
    /// parameter without a gradient in the first batch is then an error, because a function without
    /// a backward pass cuts the gradients of all that lies before it, and says nothing.
    fn has_unused_parameters(&self) -> bool {
        false
    }

    /// See [`Model::optimizer`]. Default: AdamW with a learning rate of 0.001.
    fn optimizer(&self) -> impl UpdateRule {
        AdamW::new(0.001)
    }

    /// See [`Model::max_micro_batch`].
    fn max_micro_batch(&self) -> Option<usize> {
        None
    }

    /// See [`Model::evaluate`]. Default: the metric `loss`, computed by [`loss`](Self::loss).
    ///
    /// # Errors
    /// See [`Model::evaluate`].
    fn evaluate(
        &mut self,
        network: &Self::Network,
        batch: Self::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let sum = Summed::of(self.loss(network, batch)?, metrics.records())?.value()?;
        metrics.add_sum("loss", sum);
        Ok(())
    }

    /// See [`Model::predict`].
    ///
    /// # Errors
    /// See [`Model::predict`].
    fn predict(
        &mut self,
        _network: &Self::Network,
        _batch: Self::Batch,
    ) -> Result<Predictions, UserError> {
        Err("this model makes no predictions; implement its method `predict`".into())
    }

    /// See [`Model::summary`].
    ///
    /// # Errors
    /// See [`Model::summary`].
    fn summary(&mut self, _network: &Self::Network) -> Result<Option<String>, UserError> {
        Ok(None)
    }
}

/// A [`Model`] made of a [`CandleModel`].
#[derive(Debug)]
pub struct Candle<M: CandleModel> {
    model: M,
    tables: Vec<Table>,
    parameters: Parameters,
    /// Or why it could not be built; the first method that can fail returns this error.
    network: Result<M::Network, String>,
    uses: Uses,
    /// Whether a gradient has reached all parameters that need one.
    is_checked: bool,
    /// The GPU of the variables, if they are on one.
    #[cfg(feature = "cuda")]
    gpu: Option<crate::device::Device>,
    /// The version of the flat parameters that the variables have.
    #[cfg(feature = "cuda")]
    copied: Option<u64>,
}

impl<M: CandleModel> Candle<M> {
    /// Builds the model's network, with all parameters 0. An error of [`CandleModel::build`] is
    /// returned by the methods of [`Model`], and ends the job.
    pub fn new(mut model: M) -> Self {
        let device = model.device();
        #[cfg(feature = "cuda")]
        let gpu = device.and_then(|device| Ok((cuda::gpu_of(&device)?, device)));
        #[cfg(feature = "cuda")]
        let (gpu, device) = match gpu {
            Ok((gpu, device)) => (gpu, Ok(device)),
            Err(error) => (None, Err(error)),
        };
        let (parameters, network) = match device {
            Ok(device) => Parameters::of((&device, DType::F32), |p| model.build(p)),
            Err(error) => (Parameters::default(), Err(error)),
        };
        let network = network.map_err(|error| format!("building the network: {error}"));
        Self {
            tables: model.tables(),
            model,
            parameters,
            network,
            uses: Uses::default(),
            is_checked: false,
            #[cfg(feature = "cuda")]
            gpu,
            #[cfg(feature = "cuda")]
            copied: None,
        }
    }

    /// The parameters' tensors, in the order in which they lie in the flat slice.
    pub fn declared(&self) -> &[Declared] {
        &self.parameters.declared
    }

    /// Computes the loss of a batch with this number of records, and adds its gradient.
    fn accumulate(
        &mut self,
        mut batch: M::Batch,
        (records, is_overlapped): (usize, bool),
        gradients: &mut impl Accumulate,
    ) -> Result<Loss, UserError> {
        let taken = self.take_rows(&mut batch, gradients.rows().as_deref())?;
        let network = built(&self.network)?;
        let mut reached = vec![false; self.parameters.declared.len()];
        let mut unreached = None;
        let loss = if is_overlapped {
            let mut cuts = Cuts::some();
            let loss = Summed::of(self.model.loss_in_parts(network, batch, &mut cuts)?, records)?;
            self.uses.backward(&self.parameters, &loss.sum, cuts, gradients)?;
            reached = self.uses.reached();
            loss
        } else {
            let loss = Summed::of(self.model.loss(network, batch)?, records)?;
            let found = loss.sum.backward()?;
            add_all(&self.parameters, &found, gradients, |index| reached[index] = true)?;
            for taken in taken {
                let rows = gradients.rows().expect("rows were taken from there");
                if !taken.add_gradient(&found, rows)? {
                    unreached = Some(taken.table);
                }
            }
            loss
        };
        if !self.is_checked {
            self.check(&reached, unreached)?;
        }
        // Read when the backward pass is enqueued: on a GPU, this waits for it.
        Ok(Loss::Sum(loss.value()?))
    }

    /// Lets the model take the rows of a batch, if it has tables.
    fn take_rows(
        &mut self,
        batch: &mut M::Batch,
        rows: Option<&BatchRows>,
    ) -> Result<Vec<Taken>, UserError> {
        let Some(rows) = rows.filter(|_| !self.tables.is_empty()) else { return Ok(Vec::new()) };
        let device = self.parameters.variables.first().map_or(&Device::Cpu, |v| v.device());
        let rows = Rows::new(rows, &self.tables, device);
        self.model.take_rows(batch, &rows)?;
        Ok(rows.into_taken())
    }

    /// Checks that gradients have `reached` all parameters, and rows of all tables but one that is
    /// `unreached`, in the first batch.
    fn check(&mut self, reached: &[bool], unreached: Option<usize>) -> Result<(), UserError> {
        let missed = self.parameters.declared.iter().zip(reached).filter(|(_, reached)| !**reached);
        let missed = missed.map(|(declared, _)| declared.name.clone());
        let table = unreached.map(|table| format!("table {:?}", self.tables[table].name));
        let missed: Vec<String> = missed.chain(table).collect();
        if missed.is_empty() || self.model.has_unused_parameters() {
            self.is_checked = true;
            return Ok(());
        }
        let (count, first) = (missed.len(), missed[..missed.len().min(5)].join(", "));
        Err(format!(
            "the loss has no gradient for {count} parameters ({first}): a function without a \
             backward pass lies between them and the loss, such as candle_nn::ops::layer_norm, \
             rms_norm and softmax_last_dim (use layer_norm_slow, rms_norm_slow and softmax), or \
             the loss does not use them (implement has_unused_parameters)"
        )
        .into())
    }
}

impl<M: CandleModel> Model for Candle<M> {
    type Reader = M::Reader;
    type Batch = M::Batch;

    fn reader(&self) -> M::Reader {
        self.model.reader()
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        let tensor = |d: &Declared| NamedTensor::new(&d.name, d.shape.as_slice());
        self.parameters.declared.iter().map(tensor).collect()
    }

    fn initialize(&mut self, seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        built(&self.network)?;
        for (stream, declared) in (0..).zip(&self.parameters.declared) {
            declared.draw(seed, stream, &mut parameters[declared.range.clone()]);
        }
        Ok(())
    }

    fn feed(&mut self, records: Vec<<M::Reader as Reader>::Record>) -> Result<M::Batch, UserError> {
        built(&self.network)?;
        self.model.feed(records)
    }

    fn gradients(
        &mut self,
        parameters: &[f32],
        batch: M::Batch,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        self.parameters.set(parameters)?;
        self.accumulate(batch, (gradients.records(), gradients.is_overlapped()), gradients)
    }

    fn bucket_len(&self) -> Option<usize> {
        self.model.bucket_len()
    }

    fn as_half_model(&mut self) -> Option<&mut dyn HalfModel> {
        Some(self)
    }

    fn as_table_model(&mut self) -> Option<&mut dyn TableModel<Batch = M::Batch>> {
        (!self.tables.is_empty()).then_some(self as _)
    }

    #[cfg(feature = "cuda")]
    fn as_device_model(&mut self) -> Option<&mut dyn crate::device::DeviceModel<Batch = M::Batch>> {
        self.gpu.is_some().then_some(self as _)
    }

    fn evaluate(
        &mut self,
        parameters: &[f32],
        mut batch: M::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        self.take_rows(&mut batch, metrics.rows.as_deref())?;
        let network = built(&self.network)?;
        self.parameters.set(parameters)?;
        self.model.evaluate(network, batch, metrics)
    }

    fn predict(&mut self, parameters: &[f32], batch: M::Batch) -> Result<Predictions, UserError> {
        let network = built(&self.network)?;
        self.parameters.set(parameters)?;
        self.model.predict(network, batch)
    }

    fn optimizer(&self) -> impl UpdateRule {
        self.model.optimizer()
    }

    fn max_micro_batch(&self) -> Option<usize> {
        self.model.max_micro_batch()
    }

    fn summary(&mut self, parameters: &[f32]) -> Result<Option<String>, UserError> {
        let network = built(&self.network)?;
        self.parameters.set(parameters)?;
        self.model.summary(network)
    }
}

impl<M: CandleModel> TableModel for Candle<M> {
    type Batch = M::Batch;

    fn tables(&self) -> Vec<Table> {
        self.tables.clone()
    }

    fn ids(&mut self, batch: &mut M::Batch, ids: &mut Ids) -> Result<(), UserError> {
        self.model.ids(batch, ids)
    }

    fn predict_with_rows(
        &mut self,
        parameters: &[f32],
        mut batch: M::Batch,
        rows: &BatchRows,
    ) -> Result<Predictions, UserError> {
        self.take_rows(&mut batch, Some(rows))?;
        self.predict(parameters, batch)
    }
}

/// With parameters in the network's variables alone.
impl<M: CandleModel> HalfModel for Candle<M> {
    fn begin(&mut self) -> Result<(), UserError> {
        // The variables in f32 are free before the others need memory.
        (self.parameters, self.network) = (Parameters::default(), Err(String::new()));
        let of_cpu = (&Device::Cpu, DType::BF16);
        let (parameters, network) = Parameters::of(of_cpu, |p| self.model.build(p));
        (self.parameters, self.uses) = (parameters, Uses::default());
        self.network = network.map_err(|error| format!("building the network in bf16: {error}"));
        built(&self.network).map(drop)
    }

    fn read(&self, start: usize, bits: &mut [u16]) -> Result<(), UserError> {
        Ok(self.parameters.read(start, bits)?)
    }

    fn write(&mut self, start: usize, bits: &[u16]) -> Result<(), UserError> {
        Ok(self.parameters.write(start, bits)?)
    }
}

/// The sum of a loss over records.
struct Summed {
    /// The sum.
    sum: Tensor,
    /// The loss that the model returned, a single f32.
    loss: Tensor,
    /// Number of such losses in the sum.
    factor: usize,
}

impl Summed {
    /// The sum of a loss over `records` records. The loss must be a single f32.
    fn of(loss: Loss<Tensor>, records: usize) -> Result<Self, UserError> {
        let (loss, factor) = match loss {
            Loss::Mean(mean) => (mean, records),
            Loss::Sum(sum) => (sum, 1),
        };
        if loss.elem_count() != 1 || loss.dtype() != DType::F32 {
            let (shape, dtype) = (loss.dims(), loss.dtype().as_str());
            return Err(format!(
                "the loss must be a single f32, but has the shape {shape:?} of {dtype}"
            )
            .into());
        }
        let sum = if factor == 1 { loss.clone() } else { (&loss * factor as f64)? };
        Ok(Self { sum, loss, factor })
    }

    /// Its value. Waits for a GPU, and so comes after all work that does not need it.
    fn value(&self) -> Result<f64, UserError> {
        let value = f64::from(self.loss.flatten_all()?.get(0)?.to_scalar::<f32>()?);
        Ok(value * self.factor as f64)
    }
}

fn built<N>(network: &Result<N, String>) -> Result<&N, UserError> {
    network.as_ref().map_err(|error| error.clone().into())
}

#[cfg(feature = "cuda")]
mod cuda;
mod cuts;
mod parameters;
mod place;
mod rows;

pub use self::cuts::Cuts;
use self::cuts::{Accumulate, Uses, add_all};
pub use self::parameters::Declared;
use self::parameters::Parameters;
pub use self::place::{ParsePlaceError, Place};
pub use self::rows::Rows;
use self::rows::Taken;

#[cfg(test)]
mod tests;
