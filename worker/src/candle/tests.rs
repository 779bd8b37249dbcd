use std::ops::Range;

use candle_core::Module as _;
use candle_nn::Init;
use elasticdl_data::readers::FixedRecords;

use super::*;

/// A network of two layers with tanh between them, one unused parameter, and squared loss.
#[derive(Default)]
struct TwoLayers {
    is_mean: bool,
}

impl CandleModel for TwoLayers {
    type Reader = FixedRecords;
    type Network = [Tensor; 3];
    type Batch = (Tensor, Tensor);

    fn reader(&self) -> FixedRecords {
        FixedRecords::new(4)
    }

    fn build(&self, parameters: VarBuilder<'static>) -> Result<[Tensor; 3], UserError> {
        let normal = Init::Randn { mean: 0.0, stdev: 0.5 };
        let first = parameters.get_with_hints((3, 5), "first", normal)?;
        parameters.get_with_hints(7, "unused", Init::Const(2.0))?;
        let uniform = Init::Uniform { lo: -0.5, up: 0.5 };
        let second = parameters.get_with_hints((1, 5), "second", uniform)?;
        let shift = parameters.get_with_hints((), "shift", Init::Const(0.25))?;
        Ok([first, second, shift])
    }

    fn has_unused_parameters(&self) -> bool {
        true
    }

    fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<(Tensor, Tensor), UserError> {
        let number = |&byte: &u8| f32::from(byte) / 128.0 - 1.0;
        let inputs = records.iter().flat_map(|record| record[..3].iter().map(number));
        let targets = records.iter().map(|record| number(&record[3]));
        let inputs = Tensor::from_iter(inputs, &Device::Cpu)?.reshape(((), 3))?;
        Ok((inputs, Tensor::from_iter(targets, &Device::Cpu)?))
    }

    fn loss(
        &mut self,
        network: &[Tensor; 3],
        batch: (Tensor, Tensor),
    ) -> Result<Loss<Tensor>, UserError> {
        self.loss_in_parts(network, batch, &mut Cuts::none())
    }

    fn loss_in_parts(
        &mut self,
        network: &[Tensor; 3],
        batch: (Tensor, Tensor),
        cuts: &mut Cuts,
    ) -> Result<Loss<Tensor>, UserError> {
        let [first, second, shift] = network;
        let (inputs, targets) = batch;
        let hidden = cuts.cut(&inputs.to_dtype(first.dtype())?.matmul(first)?.tanh()?)?;
        // With the transpose, the second layer's gradient is not in the layout of the parameter.
        let outputs = hidden.matmul(&second.t()?)?.squeeze(1)?.to_dtype(DType::F32)?;
        let shift = shift.to_dtype(DType::F32)?;
        let squares = (outputs.broadcast_add(&shift)? - targets)?.sqr()?;
        Ok(match self.is_mean {
            true => Loss::Mean(squares.mean_all()?),
            false => Loss::Sum(squares.sum_all()?),
        })
    }
}

fn records() -> Vec<Vec<u8>> {
    (0..6).map(|i| (0..4).map(|j| ((i * 41 + j * 97) % 256) as u8).collect()).collect()
}

fn start(seed: u64) -> (Candle<TwoLayers>, Vec<f32>) {
    let mut model = Candle::new(TwoLayers::default());
    let mut parameters = vec![f32::NAN; NamedTensor::count(&model.tensors())];
    model.initialize(seed, &mut parameters).unwrap();
    (model, parameters)
}

fn gradients(
    model: &mut Candle<TwoLayers>,
    parameters: &[f32],
    records: Vec<Vec<u8>>,
) -> (f64, Vec<f32>) {
    let mut gradients = vec![0.0; parameters.len()];
    let loss = add_gradients(model, parameters, records, &mut gradients);
    (loss, gradients)
}

/// Returns the loss, summed over the records.
fn add_gradients(
    model: &mut Candle<TwoLayers>,
    parameters: &[f32],
    records: Vec<Vec<u8>>,
    sum: &mut [f32],
) -> f64 {
    let count = records.len();
    let batch = model.feed(records).unwrap();
    let loss = model.gradients(parameters, batch, &mut Gradients::new(sum, count)).unwrap();
    loss.sum_over(count)
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
        assert!(
            (f64::from(found) - expected).abs() < 2e-3,
            "parameter {i}: {found} is not {expected}"
        );
    }
    assert!(
        found[15..22].iter().all(|&unused| unused == 0.0)
            && found[22..].iter().all(|&used| used != 0.0)
    );
}

#[test]
fn a_backward_pass_in_segments_computes_the_same_gradient() {
    let (mut model, parameters) = start(1);
    let (loss, whole) = gradients(&mut model, &parameters, records());
    let mut ring = elasticdl_collective::testing::LocalRank::group(1, 1).remove(0);
    // The segments that use each parameter are known from the second pass on.
    for early in [0, 6] {
        let (mut gradient, mut sums) = (vec![0.0; whole.len()], vec![0.0; whole.len()]);
        let batch = model.feed(records()).unwrap();
        let (found, summed) = crate::buckets::overlap(
            &mut ring,
            &mut gradient,
            &mut sums,
            (6, Default::default()),
            4,
            |gradients| model.gradients(&parameters, batch, gradients).unwrap(),
        );
        assert_eq!((found, summed.unwrap()), (Loss::Sum(loss), early));
        assert!(
            gradient.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-6),
            "{gradient:?} is not {whole:?}"
        );
        assert_eq!(gradient[28 - 4 * early..], sums[28 - 4 * early..]);
    }
    let complete = |part| model.uses.complete_from(&model.parameters, part);
    assert_eq!(
        [complete(1), complete(0)],
        [15, 0],
        "the end of the first layer, once the second is complete"
    );
}

#[test]
fn variables_in_bf16_are_read_and_written_across_their_bounds_and_have_the_gradient() {
    let (mut model, parameters) = start(1);
    let (loss, expected) = gradients(&mut model, &parameters, records());
    let rounded: Vec<u16> = parameters.iter().map(|p| half::bf16::from_f32(*p).to_bits()).collect();
    let half = model.as_half_model().unwrap();
    half.begin().unwrap();
    half.write(0, &rounded[..20]).unwrap();
    half.write(20, &rounded[20..]).unwrap();
    for range in [0..28, 3..5, 14..27] {
        let mut bits = vec![0; range.len()];
        half.read(range.start, &mut bits).unwrap();
        assert_eq!(bits, rounded[range]);
    }
    // The slice of parameters is empty.
    let mut found = vec![0.0; 28];
    let sum = add_gradients(&mut model, &[], records(), &mut found);
    assert!((sum / loss - 1.0).abs() < 0.02, "{sum} is not {loss}");
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() < 0.02 * expected.abs() + 0.1, "{found}, not {expected}");
    }
    let names = |model: &Candle<TwoLayers>| model.tensors();
    assert_eq!(names(&model), names(&start(1).0));
}

#[test]
fn gradients_and_losses_of_micro_batches_add_up() {
    let (mut model, parameters) = start(1);
    let (loss, whole) = gradients(&mut model, &parameters, records());
    let mut sum = vec![0.0; parameters.len()];
    let mut losses = 0.0;
    for part in [&records()[..1], &records()[1..]] {
        losses += add_gradients(&mut model, &parameters, part.to_vec(), &mut sum);
    }
    assert!((losses - loss).abs() < 1e-5, "{losses} is not {loss}");
    for (sum, whole) in sum.iter().zip(&whole) {
        assert!((sum - whole).abs() < 1e-5, "{sum} is not {whole}");
    }
}

#[test]
fn a_mean_loss_has_the_gradient_of_the_sum() {
    let (mut model, parameters) = start(1);
    let expected = gradients(&mut model, &parameters, records());
    model.model.is_mean = true;
    let found = gradients(&mut model, &parameters, records());
    assert!((found.0 - expected.0).abs() < 1e-5, "{} is not {}", found.0, expected.0);
    for (found, expected) in found.1.iter().zip(&expected.1) {
        assert!((found - expected).abs() < 1e-5, "{found} is not {expected}");
    }
    let mut sums = Default::default();
    let batch = model.feed(records()).unwrap();
    model.evaluate(&parameters, batch, &mut Metrics::new(&mut sums, records().len())).unwrap();
    assert!((sums["loss"] - expected.0).abs() < 1e-5, "{sums:?} is not {}", expected.0);
}

#[test]
fn tensors_lie_one_after_the_other_in_the_order_of_their_declaration() {
    let model = Candle::new(TwoLayers::default());
    let found: Vec<_> = model
        .declared()
        .iter()
        .map(|t| (t.name.as_str(), t.shape.as_slice(), t.range.clone()))
        .collect();
    let expected: [(&str, &[usize], Range<usize>); 4] = [
        ("first", &[3, 5], 0..15),
        ("unused", &[7], 15..22),
        ("second", &[1, 5], 22..27),
        ("shift", &[], 27..28),
    ];
    assert_eq!(found, expected);
    assert_eq!(NamedTensor::count(&model.tensors()), 28);
}

#[test]
fn a_saved_model_can_be_used_with_candle_alone() {
    let (mut model, parameters) = start(5);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let flat = std::sync::Arc::new(parameters.clone());
    crate::weights::save(path.to_str().unwrap(), &model.tensors(), &flat).unwrap();
    let tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let mut names: Vec<(&str, &[usize])> =
        tensors.iter().map(|(n, t)| (n.as_str(), t.dims())).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [("first", &[3, 5][..]), ("second", &[1, 5]), ("shift", &[]), ("unused", &[7])]
    );
    // The same network, without this crate.
    let (inputs, targets) = TwoLayers::default().feed(records()).unwrap();
    let hidden = inputs.matmul(&tensors["first"]).unwrap().tanh().unwrap();
    let outputs = hidden.matmul(&tensors["second"].t().unwrap()).unwrap().squeeze(1).unwrap();
    let residual = (outputs.broadcast_add(&tensors["shift"]).unwrap() - targets).unwrap();
    let loss = residual.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
    assert_eq!(
        f64::from(loss).to_bits(),
        gradients(&mut model, &parameters, records()).0.to_bits()
    );
}

#[test]
fn the_initial_parameters_depend_only_on_the_seed() {
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
        let shape = vec![values.len()];
        Declared { name: "drawn".into(), shape, init, range: 0..0 }.draw(3, 0, &mut values);
        let mean_of = |power: i32| {
            let sum: f64 = values.iter().map(|&value| f64::from(value).powi(power)).sum();
            sum / values.len() as f64
        };
        [mean_of(1), mean_of(2), mean_of(4)]
    };
    // Moments of a normal distribution: 0, σ², 3σ⁴. Of a uniform distribution: 0, b²/3, b⁴/5.
    for (init, expected) in [
        (Init::Randn { mean: 0.0, stdev: 2.0 }, [0.0, 4.0, 48.0]),
        (Init::Uniform { lo: -3.0, up: 3.0 }, [0.0, 3.0, 81.0 / 5.0]),
        // A fan of 1, and a gain of √2.
        (candle_nn::init::DEFAULT_KAIMING_NORMAL, [0.0, 2.0, 12.0]),
        (candle_nn::init::DEFAULT_KAIMING_UNIFORM, [0.0, 2.0, 36.0 / 5.0]),
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

#[test]
fn modules_of_candle_nn_train_with_a_loss_alone_and_share_tensors_by_name() {
    let build = |parameters: VarBuilder<'static>| {
        let encode = candle_nn::linear(3, 4, parameters.pp("encode"))?;
        let norm = candle_nn::layer_norm(4, 1e-5, parameters.pp("norm"))?;
        let same = candle_nn::linear(3, 4, parameters.pp("encode"))?;
        Ok((encode, norm, same))
    };
    let (parameters, network) = Parameters::of((&Device::Cpu, DType::F32), build);
    let (encode, norm, same) = network.unwrap();
    let found: Vec<_> =
        parameters.declared.iter().map(|d| (d.name.as_str(), d.range.clone())).collect();
    let expected = [
        ("encode.weight", 0..12),
        ("encode.bias", 12..16),
        ("norm.weight", 16..20),
        ("norm.bias", 20..24),
    ];
    assert_eq!(found, expected);
    let values: Vec<f32> = (0..24).map(|i| i as f32 / 8.0 - 1.0).collect();
    parameters.set(&values).unwrap();
    let input = Tensor::new(&[[0.5f32, -1.0, 2.0]], &Device::Cpu).unwrap();
    let [both, once] = [&same, &encode].map(|second| {
        let outputs = (encode.forward(&input).unwrap() + second.forward(&input).unwrap()).unwrap();
        norm.forward(&outputs).unwrap().to_vec2::<f32>().unwrap()
    });
    assert_eq!(both, once);
}

#[test]
fn parameters_that_workers_could_not_agree_on_are_refused() {
    let error = |build: fn(VarBuilder<'static>) -> candle_core::Result<Tensor>| {
        let (parameters, built) = Parameters::of((&Device::Cpu, DType::F32), |p| Ok(build(p)?));
        assert!(built.is_err() || parameters.len == 0);
        built.unwrap_err().to_string()
    };
    let half = error(|p| p.to_dtype(DType::F16).get(2, "a"));
    assert!(half.contains("parameter a: F16; parameters are f32"), "{half}");
    let statistics = error(|p| p.pp("bn").get(2, "running_mean"));
    assert!(statistics.contains("use a layer or group normalization"), "{statistics}");
    let unknown = error(|p| p.get_unchecked("a"));
    assert!(unknown.contains("needs a shape"), "{unknown}");
    let (_, kept) = Parameters::of((&Device::Cpu, DType::F32), Ok);
    let late = kept.unwrap().get(2, "late").unwrap_err().to_string();
    assert!(late.contains("before build() returns"), "{late}");
}

/// A layer, a normalization and a sum. The fast normalization of candle-nn has no backward pass.
struct Normalized {
    is_fast: bool,
}

impl CandleModel for Normalized {
    type Reader = FixedRecords;
    type Network = (candle_nn::Linear, candle_nn::LayerNorm);
    type Batch = Tensor;

    fn reader(&self) -> FixedRecords {
        FixedRecords::new(3)
    }

    fn build(&self, parameters: VarBuilder<'static>) -> Result<Self::Network, UserError> {
        let layer = candle_nn::linear(3, 4, parameters.pp("layer"))?;
        Ok((layer, candle_nn::layer_norm(4, 1e-5, parameters.pp("norm"))?))
    }

    fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<Tensor, UserError> {
        let numbers = records.iter().flatten().map(|&byte| f32::from(byte));
        Ok(Tensor::from_iter(numbers, &Device::Cpu)?.reshape((records.len(), 3))?)
    }

    fn loss(
        &mut self,
        (layer, norm): &Self::Network,
        batch: Tensor,
    ) -> Result<Loss<Tensor>, UserError> {
        let state = layer.forward(&batch)?;
        let (weight, bias) = (norm.weight(), norm.bias().expect("it has one"));
        let normal = match self.is_fast {
            true => norm.forward(&state)?,
            false => candle_nn::ops::layer_norm_slow(&state, weight, bias, 1e-5)?,
        };
        Ok(Loss::Mean(normal.sqr()?.mean_all()?))
    }
}

#[test]
fn a_function_without_a_backward_pass_is_named_and_not_trained_around() {
    let result = |is_fast| {
        let mut model = Candle::new(Normalized { is_fast });
        let mut parameters = vec![0.0; NamedTensor::count(&model.tensors())];
        model.initialize(1, &mut parameters).unwrap();
        let batch = model.feed(vec![vec![1, 2, 3], vec![9, 5, 7]]).unwrap();
        let mut sum = vec![0.0; parameters.len()];
        model.gradients(&parameters, batch, &mut Gradients::new(&mut sum, 2)).map(|_| sum)
    };
    let error = result(true).unwrap_err().to_string();
    assert!(error.contains("for 4 parameters (layer.weight, layer.bias, norm."), "{error}");
    assert!(result(false).unwrap()[..16].iter().any(|&gradient| gradient != 0.0));
}

/// A model that gives a name to two shapes, or whose loss is not one number.
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

    fn build(&self, parameters: VarBuilder<'static>) -> Result<Tensor, UserError> {
        let first = parameters.get(2, self.names[0])?;
        parameters.get((1, 2), self.names[1])?;
        Ok(first)
    }

    fn feed(&mut self, _: Vec<Vec<u8>>) -> Result<(), UserError> {
        Ok(())
    }

    fn loss(&mut self, network: &Tensor, (): ()) -> Result<Loss<Tensor>, UserError> {
        Ok(Loss::Sum(network.sqr()?))
    }
}

#[test]
fn a_network_that_cannot_be_built_is_an_error_of_each_call_that_can_fail() {
    let mut model = Candle::new(Wrong { names: ["a", "a"] });
    let expected = "building the network: two parameters named a, of the shapes [2] and [1, 2]";
    assert_eq!(model.initialize(1, &mut [0.0; 2]).unwrap_err().to_string(), expected);
    assert_eq!(model.feed(vec![]).unwrap_err().to_string(), expected);
    let sum = &mut Gradients::new(&mut [], 1);
    assert_eq!(model.gradients(&[0.0; 2], (), sum).unwrap_err().to_string(), expected);
    assert_eq!(model.summary(&[0.0; 2]).unwrap_err().to_string(), expected);
}

#[test]
fn a_loss_that_is_not_one_number_is_an_error() {
    let mut model = Candle::new(Wrong { names: ["a", "b"] });
    let sum = &mut Gradients::new(&mut [], 1);
    let error = model.gradients(&[0.0; 4], (), sum).unwrap_err().to_string();
    assert_eq!(error, "the loss must be a single f32, but has the shape [2] of f32");
    let error = model.gradients(&[0.0; 3], (), sum).unwrap_err().to_string();
    assert_eq!(error, "got 3 parameters, but the network has 4");
}
