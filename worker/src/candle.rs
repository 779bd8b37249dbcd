//! Adapter for models written with candle.
//!
//! [`CandleModel`] declares parameters by name and shape and defines a loss. [`Candle`] makes a
//! [`Model`] of it: the flat parameters are copied into candle's variables before each loss, and
//! candle's gradients are added to the flat gradient after it.
//!
//! A model on another [device](CandleModel::device) than the CPU has its variables there. On a GPU,
//! the flat slices are there as well.
//!
//! Each process uses `RAYON_NUM_THREADS` threads (environment variable). Unless it is set, a worker
//! gets its share of the machine's cores, and in a cluster the CPUs that it requests.

use std::collections::BTreeSet;
use std::f64::consts::TAU;
use std::ops::Range;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Tensor, Var};
use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};

use crate::buckets::Gradients;
use crate::metrics::{Loss, Metrics, UserError};
use crate::model::{Model, NamedTensor};
use crate::optimizer::{AdamW, Optimizer};
use crate::predictions::Predictions;
use crate::reader::Reader;

/// A model written with candle.
///
/// ```
/// use elasticdl::candle_core::{Device, Tensor};
/// use elasticdl::{Loss, UserError};
/// use elasticdl::candle::{CandleModel, Init, Parameters};
/// use elasticdl::readers::{CsvRows, Row};
///
/// /// y = x·slope + intercept
/// struct Line;
///
/// impl CandleModel for Line {
///     type Reader = CsvRows;
///     type Network = (Tensor, Tensor);
///     type Batch = (Tensor, Tensor);
///
///     fn reader(&self) -> CsvRows {
///         CsvRows::new().f32("x").f32("y")
///     }
///
///     fn build(&self, parameters: &mut Parameters) -> Result<Self::Network, UserError> {
///         let slope = parameters.declare("slope", (), Init::Normal { std: 1.0 })?;
///         let intercept = parameters.declare("intercept", (), Init::Constant(0.0))?;
///         Ok((slope, intercept))
///     }
///
///     fn feed(&mut self, rows: Vec<Row>) -> Result<Self::Batch, UserError> {
///         let column = |i| Tensor::from_iter(rows.iter().map(|row| row.f32(i)), &Device::Cpu);
///         Ok((column(0)?, column(1)?))
///     }
///
///     fn loss(
///         &mut self,
///         (slope, intercept): &Self::Network,
///         (x, y): Self::Batch,
///     ) -> Result<Loss<Tensor>, UserError> {
///         let residual = (x.broadcast_mul(slope)?.broadcast_add(intercept)? - y)?;
///         Ok(Loss::Mean(residual.sqr()?.mean_all()?))
///     }
/// }
/// ```
pub trait CandleModel: 'static {
    /// Reads the training data.
    type Reader: Reader;
    /// The parameters' tensors, as the loss uses them.
    type Network;
    /// Result of [`feed`](Self::feed).
    type Batch;

    /// Creates the reader of the training data.
    fn reader(&self) -> Self::Reader;

    /// Declares the parameters, always in the same order, and returns their tensors.
    ///
    /// Called once, when the worker starts. The tensors are candle variables: keep them and use
    /// them in the loss. Their values change at each step.
    ///
    /// # Errors
    /// An error ends the job.
    fn build(&self, parameters: &mut Parameters) -> Result<Self::Network, UserError>;

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

    /// Computes the batch's loss: one `f32`, a mean over its records or their sum.
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

    /// The optimizer. Default: AdamW with a learning rate of 0.001.
    fn optimizer(&self) -> Optimizer {
        AdamW::new(0.001).into()
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
    parameters: Parameters,
    /// Or why it could not be built; the first method that can fail returns this error.
    network: Result<M::Network, String>,
    uses: Uses,
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
        let mut parameters = Parameters::on(device.as_ref().unwrap_or(&Device::Cpu).clone());
        #[cfg(feature = "cuda")]
        let gpu = device.and_then(|device| Ok((cuda::gpu_of(&device)?, device)));
        #[cfg(feature = "cuda")]
        let (gpu, device) = match gpu {
            Ok((gpu, device)) => (gpu, Ok(device)),
            Err(error) => (None, Err(error)),
        };
        let network = device.and_then(|_| model.build(&mut parameters));
        let network = network.map_err(|error| format!("building the network: {error}"));
        Self {
            model,
            parameters,
            network,
            uses: Uses::default(),
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
        batch: M::Batch,
        (records, is_overlapped): (usize, bool),
        gradients: &mut impl Accumulate,
    ) -> Result<Loss, UserError> {
        let network = built(&self.network)?;
        let loss = if is_overlapped {
            let mut cuts = Cuts::some();
            let loss = Summed::of(self.model.loss_in_parts(network, batch, &mut cuts)?, records)?;
            self.uses.backward(&self.parameters, &loss.sum, cuts, gradients)?;
            loss
        } else {
            let loss = Summed::of(self.model.loss(network, batch)?, records)?;
            add_all(&self.parameters, &loss.sum.backward()?, gradients, |_| {})?;
            loss
        };
        // Read when the backward pass is enqueued: on a GPU, this waits for it.
        Ok(Loss::Sum(loss.value()?))
    }
}

impl<M: CandleModel> Model for Candle<M> {
    type Reader = M::Reader;
    type Batch = M::Batch;

    fn reader(&self) -> M::Reader {
        self.model.reader()
    }

    fn parameter_count(&self) -> usize {
        self.parameters.len
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        let tensor = |d: &Declared| NamedTensor::new(&d.name, d.shape.as_slice());
        self.parameters.declared.iter().map(tensor).collect()
    }

    fn initialize(&mut self, seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        built(&self.network)?;
        for (stream, declared) in (0..).zip(&self.parameters.declared) {
            declared.init.draw(seed, stream, &mut parameters[declared.range.clone()]);
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

    #[cfg(feature = "cuda")]
    fn as_device_model(&mut self) -> Option<&mut dyn crate::device::DeviceModel<Batch = M::Batch>> {
        self.gpu.is_some().then_some(self as _)
    }

    fn evaluate(
        &mut self,
        parameters: &[f32],
        batch: M::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let network = built(&self.network)?;
        self.parameters.set(parameters)?;
        self.model.evaluate(network, batch, metrics)
    }

    fn predict(&mut self, parameters: &[f32], batch: M::Batch) -> Result<Predictions, UserError> {
        let network = built(&self.network)?;
        self.parameters.set(parameters)?;
        self.model.predict(network, batch)
    }

    fn optimizer(&self) -> Optimizer {
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

/// Collects the declarations of a model's parameters.
#[derive(Debug)]
pub struct Parameters {
    device: Device,
    declared: Vec<Declared>,
    variables: Vec<Var>,
    names: BTreeSet<String>,
    len: usize,
}

impl Parameters {
    /// Creates an empty collection, whose parameters will be on `device`.
    pub fn on(device: Device) -> Self {
        Self { device, declared: Vec::new(), variables: Vec::new(), names: BTreeSet::new(), len: 0 }
    }

    /// Declares an `f32` parameter tensor on the model's [device](CandleModel::device) and returns
    /// it. Its values are set later.
    ///
    /// # Errors
    /// If the name is not unique, or an error of candle.
    pub fn declare(
        &mut self,
        name: &str,
        shape: impl Into<Shape>,
        init: Init,
    ) -> Result<Tensor, UserError> {
        if !self.names.insert(name.to_owned()) {
            return Err(format!("two parameters named {name:?}: each needs a unique name").into());
        }
        let variable = Var::zeros(shape, DType::F32, &self.device)?;
        let range = self.len..self.len + variable.elem_count();
        self.len = range.end;
        let declared =
            Declared { name: name.to_owned(), shape: variable.dims().to_vec(), init, range };
        self.declared.push(declared);
        self.variables.push(variable.clone());
        Ok(variable.into_inner())
    }

    /// Copies `values`, `[parameter_count()]`, into the variables.
    fn set(&self, values: &[f32]) -> Result<(), UserError> {
        if values.len() != self.len {
            let (given, declared) = (values.len(), self.len);
            return Err(format!("got {given} parameters, but {declared} were declared").into());
        }
        for (declared, variable) in self.declared.iter().zip(&self.variables) {
            variable.inplace_op1(&Overwrite(&values[declared.range.clone()]))?;
        }
        Ok(())
    }
}

/// A declared parameter tensor.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Declared {
    /// Name, unique within the model.
    pub name: String,
    /// Shape; the elements are in row-major order.
    pub shape: Vec<usize>,
    /// Distribution of the initial values.
    pub init: Init,
    /// Range in the flat slice of all parameters.
    pub range: Range<usize>,
}

/// Initial values of a parameter.
///
/// The drawn values depend only on the job's seed, the index of the parameter in the order of
/// declaration, and its size.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// One constant.
    Constant(f32),
    /// Normal distribution with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform distribution with mean 0.
    Uniform {
        /// Values are at least `-bound` and below `bound`.
        bound: f64,
    },
}

impl Init {
    fn draw(&self, seed: u64, stream: u64, values: &mut [f32]) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        // One random stream per tensor, so its values do not depend on the sizes of earlier
        // tensors.
        random.set_stream(stream);
        let mut uniform = || (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        match *self {
            Self::Constant(value) => values.fill(value),
            Self::Normal { std } => {
                // Box & Muller, A Note on the Generation of Random Normal Deviates (1958); ln of
                // (0, 1], not of 0.
                for pair in values.chunks_mut(2) {
                    let radius = std * (-2.0 * (1.0 - uniform()).ln()).sqrt();
                    let (sin, cos) = (TAU * uniform()).sin_cos();
                    for (value, part) in pair.iter_mut().zip([cos, sin]) {
                        *value = (radius * part) as f32;
                    }
                }
            }
            Self::Uniform { bound } => {
                values.fill_with(|| (bound * (2.0 * uniform() - 1.0)) as f32)
            }
        }
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

/// Overwrites a variable's values in place.
struct Overwrite<'a>(&'a [f32]);

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        match (storage, layout.contiguous_offsets()) {
            (CpuStorage::F32(values), Some((start, end))) => {
                values[start..end].copy_from_slice(self.0)
            }
            _ => candle_core::bail!("a parameter must be a contiguous tensor of f32"),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &mut candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<()> {
        cuda::overwrite(storage, layout, self.0)
    }
}

/// Adds a gradient to its range of the flat gradient.
fn add(gradient: &Tensor, sum: &mut [f32]) -> candle_core::Result<()> {
    let gradient = gradient.contiguous()?;
    let (storage, layout) = gradient.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (candle_core::Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) => {
            for (sum, &value) in sum.iter_mut().zip(&values[start..end]) {
                *sum += value;
            }
        }
        _ => candle_core::bail!(
            "a parameter's gradient must be a contiguous tensor of f32 on the CPU"
        ),
    }
    Ok(())
}

#[cfg(feature = "cuda")]
mod cuda;
mod cuts;
pub mod ops;
mod place;

pub use self::cuts::Cuts;
use self::cuts::{Accumulate, Uses, add_all};
pub use self::place::{ParsePlaceError, Place};

#[cfg(test)]
mod tests;
