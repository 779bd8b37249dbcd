//! The network: numbers and embeddings, a hidden layer, and a weight per category beside it.

use elasticdl::BatchRows;

use crate::clicks::{CATEGORIES, DENSE};
use crate::{DEEP, WIDE};

/// Numbers per embedding.
pub(crate) const DIM: usize = 16;
/// Inputs of the hidden layer.
pub(crate) const INPUTS: usize = DENSE + CATEGORIES * DIM;
/// Its outputs.
pub(crate) const HIDDEN: usize = 32;

/// The network with its parameters, for one record after the other.
pub(crate) struct Network<'a> {
    /// `[HIDDEN, INPUTS]`.
    weights: &'a [f32],
    /// `[HIDDEN]`.
    biases: &'a [f32],
    /// `[HIDDEN]`.
    output: &'a [f32],
    output_bias: f32,
    /// Whether the products of all pairs of embeddings count.
    has_products: bool,
    /// Inputs and outputs of the hidden layer for the last record.
    inputs: Vec<f32>,
    hidden: [f32; HIDDEN],
}

impl<'a> Network<'a> {
    pub(crate) fn new(parameters: &'a [f32], has_products: bool) -> Self {
        let (weights, rest) = parameters.split_at(HIDDEN * INPUTS);
        let (biases, rest) = rest.split_at(HIDDEN);
        let (output, output_bias) = rest.split_at(HIDDEN);
        let (inputs, hidden) = (vec![0.0; INPUTS], [0.0; HIDDEN]);
        let output_bias = output_bias[0];
        Self { weights, biases, output, output_bias, has_products, inputs, hidden }
    }

    /// The logit of a click. `rows`: positions of the categories' rows.
    pub(crate) fn forward(&mut self, dense: &[f32], rows: &[usize], tables: &BatchRows) -> f32 {
        self.inputs[..DENSE].copy_from_slice(dense);
        let embeddings = self.inputs[DENSE..].chunks_exact_mut(DIM);
        for (embedding, row) in embeddings.zip(rows.chunks_exact(1)) {
            embedding.fill(0.0);
            tables.add_rows(DEEP, row, 1.0, embedding);
        }
        let mut logit = self.output_bias;
        let layer = self.weights.chunks_exact(INPUTS).zip(self.biases).zip(self.output);
        for (hidden, ((weights, bias), output)) in self.hidden.iter_mut().zip(layer) {
            *hidden = (bias + dot(weights, &self.inputs)).max(0.0);
            logit += output * *hidden;
        }
        if self.has_products {
            // The sum of the products of all pairs, from the square of the sum.
            let squares: f32 = self.inputs[DENSE..].iter().map(|value| value * value).sum();
            logit += 0.5 * (self.sums().iter().map(|sum| sum * sum).sum::<f32>() - squares);
        }
        let mut wide = [logit];
        tables.add_rows(WIDE, rows, 1.0, &mut wide);
        wide[0]
    }

    /// Adds the gradients of the last record, whose loss has this `slope` by the logit, to the
    /// parameters' `sum` and to the rows'.
    pub(crate) fn backward(
        &self,
        slope: f32,
        rows: &[usize],
        tables: &mut BatchRows,
        sum: &mut [f32],
    ) {
        let mut of_inputs = [0.0; INPUTS];
        let (of_weights, rest) = sum.split_at_mut(HIDDEN * INPUTS);
        let (of_biases, rest) = rest.split_at_mut(HIDDEN);
        let (of_output, of_output_bias) = rest.split_at_mut(HIDDEN);
        of_output_bias[0] += slope;
        for unit in (0..HIDDEN).filter(|&unit| self.hidden[unit] > 0.0) {
            of_output[unit] += slope * self.hidden[unit];
            let slope = slope * self.output[unit];
            of_biases[unit] += slope;
            let place = unit * INPUTS..(unit + 1) * INPUTS;
            add(&mut of_weights[place.clone()], slope, &self.inputs);
            add(&mut of_inputs, slope, &self.weights[place]);
        }
        if self.has_products {
            let sums = self.sums();
            let embeddings = self.inputs[DENSE..].chunks_exact(DIM);
            for (to, embedding) in of_inputs[DENSE..].chunks_exact_mut(DIM).zip(embeddings) {
                let others = sums.iter().zip(embedding).map(|(sum, own)| sum - own);
                to.iter_mut().zip(others).for_each(|(to, others)| *to += slope * others);
            }
        }
        let of_embeddings = of_inputs[DENSE..].chunks_exact(DIM);
        for (row, of_embedding) in rows.chunks_exact(1).zip(of_embeddings) {
            tables.add_gradient(DEEP, row, 1.0, of_embedding);
        }
        tables.add_gradient(WIDE, rows, 1.0, &[slope]);
    }
}

impl Network<'_> {
    /// The sum of the last record's embeddings.
    fn sums(&self) -> [f32; DIM] {
        let mut sums = [0.0; DIM];
        for embedding in self.inputs[DENSE..].chunks_exact(DIM) {
            sums.iter_mut().zip(embedding).for_each(|(sum, value)| *sum += value);
        }
        sums
    }
}

/// Writes random weights of the size that suits a layer with rectified inputs.
pub(crate) fn initialize(seed: u64, parameters: &mut [f32]) {
    let mut state = seed;
    let mut uniform = |bound: f32| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bound * ((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    let (weights, rest) = parameters.split_at_mut(HIDDEN * INPUTS);
    let (biases, output) = rest.split_at_mut(HIDDEN);
    weights.iter_mut().for_each(|weight| *weight = uniform((6.0 / INPUTS as f32).sqrt()));
    biases.fill(0.0);
    output.iter_mut().for_each(|weight| *weight = uniform((6.0 / HIDDEN as f32).sqrt()));
    output[HIDDEN] = 0.0;
}

/// Probability of a click.
pub(crate) fn probability(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

/// Cross entropy of a logit, without overflow.
pub(crate) fn loss(logit: f32, label: f32) -> f64 {
    f64::from(logit.max(0.0) - logit * label + (-logit.abs()).exp().ln_1p())
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight sums at a time are one vector instruction.
    let mut sums = [0.0; 8];
    let (a_chunks, b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b);
    let rest = rest.sum::<f32>();
    for (a, b) in a_chunks.zip(b_chunks) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    rest + sums.iter().sum::<f32>()
}

fn add(to: &mut [f32], factor: f32, values: &[f32]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += factor * value);
}
