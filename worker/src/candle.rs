//! Adapter for models written with candle.
//!
//! [`CandleModel`] asks for parameters by name and shape and for a loss; [`Candle`] makes a [`Model`] of it:
//! the flat slices are copied into candle's variables before each loss, and its gradients are added to the
//! flat gradient after.
//!
//! candle uses as many threads as the environment variable `RAYON_NUM_THREADS` says, or one per core, in
//! every process. Several workers on one machine are best given one thread each.

use std::collections::BTreeSet;
use std::f64::consts::TAU;
use std::ops::Range;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Tensor, Var};
use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};

use crate::model::{Metrics, Model, NamedTensor, UserError};
use crate::optimizer::Optimizer;
use crate::predictions::Predictions;
use crate::reader::Reader;

/// A model written with candle: what is left to fill in of [`Model`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use elasticdl_worker::UserError;
/// use elasticdl_worker::candle::{CandleModel, Init, Parameters};
/// use elasticdl_worker::readers::{CsvRows, Row};
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
///         let column = |index| Tensor::from_iter(rows.iter().map(|row| row.f32(index)), &Device::Cpu);
///         Ok((column(0)?, column(1)?))
///     }
///
///     fn loss(&mut self, network: &Self::Network, (x, y): Self::Batch) -> Result<Tensor, UserError> {
///         let (slope, intercept) = network;
///         let residual = (x.broadcast_mul(slope)?.broadcast_add(intercept)? - y)?;
///         Ok(residual.sqr()?.sum_all()?)
///     }
/// }
/// ```
pub trait CandleModel: 'static {
    /// Reads the training data.
    type Reader: Reader;
    /// The parameters' tensors, arranged as the loss needs them.
    type Network;
    /// What [`feed`](Self::feed) makes of records.
    type Batch;

    /// The reader of the training data.
    fn reader(&self) -> Self::Reader;

    /// Declares the parameters, always the same in the same order, and arranges their tensors.
    ///
    /// Called once, when the worker starts. The tensors are candle variables: keep them, and use them in the
    /// loss; their values change from step to step.
    ///
    /// # Errors
    /// Ends the job.
    fn build(&self, parameters: &mut Parameters) -> Result<Self::Network, UserError>;

    /// Makes a batch of records.
    ///
    /// # Errors
    /// As [`Model::feed`].
    fn feed(&mut self, records: Vec<<Self::Reader as Reader>::Record>) -> Result<Self::Batch, UserError>;

    /// The batch's loss, **summed over its records**: one `f32`.
    ///
    /// # Errors
    /// As [`Model::gradients`].
    fn loss(&mut self, network: &Self::Network, batch: Self::Batch) -> Result<Tensor, UserError>;

    /// The optimizer. Default: AdamW at a rate of 0.001.
    fn optimizer(&self) -> Optimizer {
        Optimizer::adam_w(0.001)
    }

    /// As [`Model::micro_batch`].
    fn micro_batch(&self) -> Option<usize> {
        None
    }

    /// As [`Model::evaluate`]. Default: `loss`, by [`loss`](Self::loss).
    ///
    /// # Errors
    /// As [`Model::evaluate`].
    fn evaluate(
        &mut self,
        network: &Self::Network,
        batch: Self::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let loss = self.loss(network, batch)?;
        metrics.add("loss", value_of(&loss)?);
        Ok(())
    }

    /// As [`Model::predict`].
    ///
    /// # Errors
    /// As [`Model::predict`].
    fn predict(&mut self, _network: &Self::Network, _batch: Self::Batch) -> Result<Predictions, UserError> {
        Err("this model makes no predictions; fill in its method `predict`".into())
    }

    /// As [`Model::summary`].
    ///
    /// # Errors
    /// As [`Model::summary`].
    fn summary(&mut self, _network: &Self::Network) -> Result<Option<String>, UserError> {
        Ok(None)
    }
}

/// A [`Model`] made of a [`CandleModel`].
#[derive(Debug)]
pub struct Candle<M: CandleModel> {
    model: M,
    parameters: Parameters,
    /// Or why it could not be built, which is told by the first method that can.
    network: Result<M::Network, String>,
}

impl<M: CandleModel> Candle<M> {
    /// Builds the model's network, with all parameters 0. An error of [`CandleModel::build`] ends the job
    /// that it is for.
    pub fn new(model: M) -> Self {
        let mut parameters = Parameters::default();
        let network = model.build(&mut parameters).map_err(|error| format!("building the network: {error}"));
        Self { model, parameters, network }
    }

    /// The parameters, in the order in which they lie in the flat slice.
    pub fn tensors(&self) -> &[Declared] {
        &self.parameters.declared
    }
}

impl<M: CandleModel> Model for Candle<M> {
    type Reader = M::Reader;
    type Batch = M::Batch;

    fn reader(&self) -> M::Reader {
        self.model.reader()
    }

    fn parameters(&self) -> usize {
        self.parameters.len
    }

    fn layout(&self) -> Vec<NamedTensor> {
        let tensor = |d: &Declared| NamedTensor { name: d.name.clone(), shape: d.shape.clone() };
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
        gradients: &mut [f32],
    ) -> Result<f64, UserError> {
        let network = built(&self.network)?;
        self.parameters.set(parameters)?;
        let loss = self.model.loss(network, batch)?;
        let value = value_of(&loss)?;
        let found = loss.backward()?;
        for (declared, variable) in self.parameters.declared.iter().zip(&self.parameters.variables) {
            // A parameter that the loss does not depend on has no gradient.
            if let Some(gradient) = found.get(variable) {
                add(gradient, &mut gradients[declared.range.clone()])?;
            }
        }
        Ok(value)
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

    fn micro_batch(&self) -> Option<usize> {
        self.model.micro_batch()
    }

    fn summary(&mut self, parameters: &[f32]) -> Result<Option<String>, UserError> {
        let network = built(&self.network)?;
        self.parameters.set(parameters)?;
        self.model.summary(network)
    }
}

/// Takes the declarations of a model's parameters.
#[derive(Debug, Default)]
pub struct Parameters {
    declared: Vec<Declared>,
    variables: Vec<Var>,
    names: BTreeSet<String>,
    len: usize,
}

impl Parameters {
    /// Declares an `f32` parameter tensor on the CPU and returns it; its values are set later.
    ///
    /// # Errors
    /// If the name is taken, or candle refuses.
    pub fn declare(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> Result<Tensor, UserError> {
        if !self.names.insert(name.to_owned()) {
            return Err(format!("two parameters named {name:?}: each needs a name of its own").into());
        }
        let variable = Var::zeros(shape, DType::F32, &Device::Cpu)?;
        let range = self.len..self.len + variable.elem_count();
        self.len = range.end;
        let declared = Declared { name: name.to_owned(), shape: variable.dims().to_vec(), init, range };
        self.declared.push(declared);
        self.variables.push(variable.clone());
        Ok(variable.into_inner())
    }

    /// Copies `values`, `[parameters()]`, into the variables.
    fn set(&self, values: &[f32]) -> Result<(), UserError> {
        if values.len() != self.len {
            let (given, declared) = (values.len(), self.len);
            return Err(format!("{given} parameters where {declared} were declared").into());
        }
        for (declared, variable) in self.declared.iter().zip(&self.variables) {
            variable.inplace_op1(&Overwrite(&values[declared.range.clone()]))?;
        }
        Ok(())
    }
}

/// One tensor among the parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Declared {
    /// Its name, of its own.
    pub name: String,
    /// Its shape; the elements lie row by row.
    pub shape: Vec<usize>,
    /// Its initial values.
    pub init: Init,
    /// Where it lies in the flat slice of all parameters.
    pub range: Range<usize>,
}

/// Initial values of a parameter.
///
/// What is drawn depends on the job's seed, the parameter's place among the declared and its size, and
/// nothing else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// The same everywhere.
    Constant(f32),
    /// Normally distributed around 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Evenly distributed around 0.
    Uniform {
        /// Values are at least `-bound` and below `bound`.
        bound: f64,
    },
}

impl Init {
    fn draw(&self, seed: u64, stream: u64, values: &mut [f32]) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        // One stream for each tensor: what one draws does not depend on the sizes of those before it.
        random.set_stream(stream);
        let mut uniform = || (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        match *self {
            Self::Constant(value) => values.fill(value),
            Self::Normal { std } => {
                // Box & Muller, A Note on the Generation of Random Normal Deviates (1958); ln of (0, 1], not
                // of 0.
                for pair in values.chunks_mut(2) {
                    let radius = std * (-2.0 * (1.0 - uniform()).ln()).sqrt();
                    let (sin, cos) = (TAU * uniform()).sin_cos();
                    for (value, part) in pair.iter_mut().zip([cos, sin]) {
                        *value = (radius * part) as f32;
                    }
                }
            }
            Self::Uniform { bound } => values.fill_with(|| (bound * (2.0 * uniform() - 1.0)) as f32),
        }
    }
}

/// A loss, which must be one number.
fn value_of(loss: &Tensor) -> Result<f64, UserError> {
    if loss.elem_count() != 1 || loss.dtype() != DType::F32 {
        let (shape, dtype) = (loss.dims(), loss.dtype().as_str());
        return Err(format!("the loss has the shape {shape:?} of {dtype} where one f32 should be").into());
    }
    Ok(f64::from(loss.flatten_all()?.get(0)?.to_scalar::<f32>()?))
}

fn built<N>(network: &Result<N, String>) -> Result<&N, UserError> {
    network.as_ref().map_err(|error| error.clone().into())
}

/// Writes values over a variable's, in place.
struct Overwrite<'a>(&'a [f32]);

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        match (storage, layout.contiguous_offsets()) {
            (CpuStorage::F32(values), Some((start, end))) => values[start..end].copy_from_slice(self.0),
            _ => candle_core::bail!("a parameter is a contiguous tensor of f32"),
        }
        Ok(())
    }
}

/// Adds a gradient to its part of the flat one.
fn add(gradient: &Tensor, sum: &mut [f32]) -> candle_core::Result<()> {
    let gradient = gradient.contiguous()?;
    let (storage, layout) = gradient.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (candle_core::Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) => {
            for (sum, &value) in sum.iter_mut().zip(&values[start..end]) {
                *sum += value;
            }
        }
        _ => candle_core::bail!("a parameter's gradient is a tensor of f32 on the CPU"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::readers::FixedRecords;

    /// A network of two layers with tanh between them, one unused parameter, and squared loss.
    struct TwoLayers;

    impl CandleModel for TwoLayers {
        type Reader = FixedRecords;
        type Network = [Tensor; 3];
        type Batch = (Tensor, Tensor);

        fn reader(&self) -> FixedRecords {
            FixedRecords::new(4)
        }

        fn build(&self, parameters: &mut Parameters) -> Result<[Tensor; 3], UserError> {
            let first = parameters.declare("first", (3, 5), Init::Normal { std: 0.5 })?;
            parameters.declare("unused", 7, Init::Constant(2.0))?;
            let second = parameters.declare("second", (1, 5), Init::Uniform { bound: 0.5 })?;
            let shift = parameters.declare("shift", (), Init::Constant(0.25))?;
            Ok([first, second, shift])
        }

        fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<(Tensor, Tensor), UserError> {
            let number = |&byte: &u8| f32::from(byte) / 128.0 - 1.0;
            let inputs = records.iter().flat_map(|record| record[..3].iter().map(number));
            let targets = records.iter().map(|record| number(&record[3]));
            let inputs = Tensor::from_iter(inputs, &Device::Cpu)?.reshape(((), 3))?;
            Ok((inputs, Tensor::from_iter(targets, &Device::Cpu)?))
        }

        fn loss(&mut self, network: &[Tensor; 3], batch: (Tensor, Tensor)) -> Result<Tensor, UserError> {
            let [first, second, shift] = network;
            let (inputs, targets) = batch;
            // The transpose makes the second layer's gradient arrive in another order than it is laid out.
            let outputs = inputs.matmul(first)?.tanh()?.matmul(&second.t()?)?.squeeze(1)?;
            Ok((outputs.broadcast_add(shift)? - targets)?.sqr()?.sum_all()?)
        }
    }

    fn records() -> Vec<Vec<u8>> {
        (0..6).map(|i| (0..4).map(|j| ((i * 41 + j * 97) % 256) as u8).collect()).collect()
    }

    fn start(seed: u64) -> (Candle<TwoLayers>, Vec<f32>) {
        let mut model = Candle::new(TwoLayers);
        let mut parameters = vec![f32::NAN; model.parameters()];
        model.initialize(seed, &mut parameters).unwrap();
        (model, parameters)
    }

    fn gradients(
        model: &mut Candle<TwoLayers>,
        parameters: &[f32],
        records: Vec<Vec<u8>>,
    ) -> (f64, Vec<f32>) {
        let mut gradients = vec![0.0; parameters.len()];
        let batch = model.feed(records).unwrap();
        let loss = model.gradients(parameters, batch, &mut gradients).unwrap();
        (loss, gradients)
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let (mut model, parameters) = start(1);
        let (_, found) = gradients(&mut model, &parameters, records());
        let step = 1e-2;
        for (i, &found) in found.iter().enumerate() {
            let mut loss_at = |distance: f32| {
                let mut moved = parameters.clone();
                moved[i] += distance;
                gradients(&mut model, &moved, records()).0
            };
            let expected = (loss_at(step) - loss_at(-step)) / f64::from(2.0 * step);
            assert!((f64::from(found) - expected).abs() < 2e-3, "parameter {i}: {found} is not {expected}");
        }
        assert!(
            found[15..22].iter().all(|&unused| unused == 0.0) && found[22..].iter().all(|&used| used != 0.0)
        );
    }

    #[test]
    fn gradients_and_losses_of_micro_batches_add_up() {
        let (mut model, parameters) = start(1);
        let (loss, whole) = gradients(&mut model, &parameters, records());
        let mut sum = vec![0.0; parameters.len()];
        let mut losses = 0.0;
        for part in [&records()[..1], &records()[1..]] {
            let batch = model.feed(part.to_vec()).unwrap();
            losses += model.gradients(&parameters, batch, &mut sum).unwrap();
        }
        assert!((losses - loss).abs() < 1e-5, "{losses} is not {loss}");
        for (sum, whole) in sum.iter().zip(&whole) {
            assert!((sum - whole).abs() < 1e-5, "{sum} is not {whole}");
        }
    }

    #[test]
    fn tensors_lie_one_after_the_other_in_the_order_of_their_declaration() {
        let model = Candle::new(TwoLayers);
        let found: Vec<_> =
            model.tensors().iter().map(|t| (t.name.as_str(), t.shape.as_slice(), t.range.clone())).collect();
        let expected: [(&str, &[usize], Range<usize>); 4] = [
            ("first", &[3, 5], 0..15),
            ("unused", &[7], 15..22),
            ("second", &[1, 5], 22..27),
            ("shift", &[], 27..28),
        ];
        assert_eq!(found, expected);
        assert_eq!(model.parameters(), 28);
    }

    #[test]
    fn a_saved_model_is_loaded_and_used_by_plain_candle() {
        let (mut model, parameters) = start(5);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let flat = std::sync::Arc::new(parameters.clone());
        crate::weights::save(path.to_str().unwrap(), &model.layout(), &flat).unwrap();
        let tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        let mut names: Vec<(&str, &[usize])> = tensors.iter().map(|(n, t)| (n.as_str(), t.dims())).collect();
        names.sort_unstable();
        assert_eq!(names, [("first", &[3, 5][..]), ("second", &[1, 5]), ("shift", &[]), ("unused", &[7])]);
        // The network again, without a line of this crate's.
        let (inputs, targets) = TwoLayers.feed(records()).unwrap();
        let hidden = inputs.matmul(&tensors["first"]).unwrap().tanh().unwrap();
        let outputs = hidden.matmul(&tensors["second"].t().unwrap()).unwrap().squeeze(1).unwrap();
        let residual = (outputs.broadcast_add(&tensors["shift"]).unwrap() - targets).unwrap();
        let loss = residual.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
        assert_eq!(f64::from(loss).to_bits(), gradients(&mut model, &parameters, records()).0.to_bits());
    }

    #[test]
    fn the_seed_alone_decides_the_initial_parameters() {
        assert_eq!(start(1).1, start(1).1);
        assert_ne!(start(1).1, start(2).1);
        let parameters = start(1).1;
        assert_eq!(parameters[15..22], [2.0; 7]);
        assert_eq!(parameters[27], 0.25);
    }

    #[test]
    fn drawn_values_have_the_moments_of_their_distribution() {
        let moments = |init: Init| {
            let mut values = vec![0.0; 100_001];
            init.draw(3, 0, &mut values);
            let mean_of = |power: i32| {
                let sum: f64 = values.iter().map(|&value| f64::from(value).powi(power)).sum();
                sum / values.len() as f64
            };
            [mean_of(1), mean_of(2), mean_of(4)]
        };
        // Of a normal distribution: 0, σ², 3σ⁴. Of an even one: 0, b²/3, b⁴/5.
        for (init, expected) in [
            (Init::Normal { std: 2.0 }, [0.0, 4.0, 48.0]),
            (Init::Uniform { bound: 3.0 }, [0.0, 3.0, 81.0 / 5.0]),
        ] {
            let found = moments(init);
            assert!(found[0].abs() < 0.02, "{init:?}: mean {}", found[0]);
            for k in [1, 2] {
                assert!(
                    (found[k] / expected[k] - 1.0).abs() < 0.03,
                    "{init:?}: {found:?} is not {expected:?}"
                );
            }
        }
    }

    /// A model that declares a name twice, or whose loss is not one number.
    struct Wrong {
        names: [&'static str; 2],
    }

    impl CandleModel for Wrong {
        type Reader = FixedRecords;
        type Network = Tensor;
        type Batch = ();

        fn reader(&self) -> FixedRecords {
            FixedRecords::new(1)
        }

        fn build(&self, parameters: &mut Parameters) -> Result<Tensor, UserError> {
            let first = parameters.declare(self.names[0], 2, Init::Constant(0.0))?;
            parameters.declare(self.names[1], 2, Init::Constant(0.0))?;
            Ok(first)
        }

        fn feed(&mut self, _: Vec<Vec<u8>>) -> Result<(), UserError> {
            Ok(())
        }

        fn loss(&mut self, network: &Tensor, (): ()) -> Result<Tensor, UserError> {
            Ok(network.sqr()?)
        }
    }

    #[test]
    fn a_network_that_cannot_be_built_is_an_error_of_the_first_call_that_can_fail() {
        let mut model = Candle::new(Wrong { names: ["a", "a"] });
        let expected = "building the network: two parameters named \"a\": each needs a name of its own";
        assert_eq!(model.initialize(1, &mut [0.0; 2]).unwrap_err().to_string(), expected);
        assert_eq!(model.feed(vec![]).unwrap_err().to_string(), expected);
        assert_eq!(model.gradients(&[0.0; 2], (), &mut [0.0; 2]).unwrap_err().to_string(), expected);
        assert_eq!(model.summary(&[0.0; 2]).unwrap_err().to_string(), expected);
    }

    #[test]
    fn a_loss_that_is_not_one_number_is_an_error() {
        let mut model = Candle::new(Wrong { names: ["a", "b"] });
        let error = model.gradients(&[0.0; 4], (), &mut [0.0; 4]).unwrap_err().to_string();
        assert_eq!(error, "the loss has the shape [2] of f32 where one f32 should be");
        let error = model.gradients(&[0.0; 3], (), &mut [0.0; 3]).unwrap_err().to_string();
        assert_eq!(error, "3 parameters where 4 were declared");
    }
}
