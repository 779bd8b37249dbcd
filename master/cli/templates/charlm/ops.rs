//! Fused operations: each is one pass forward and one pass backward, where candle would use many
//! small operations.
//!
//! All operate on contiguous `f32` tensors, along the last dimension. Tensors on a GPU use candle's
//! own operations.

use elasticdl::candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail,
};

/// Causal attention weights: softmax over the first `i + 1` elements of row `i` of each square
/// matrix, and 0 for the other elements.
///
/// `scores`: `[…, n, n]`.
///
/// # Errors
/// If `scores` does not have this shape.
pub(crate) fn causal_softmax(scores: &Tensor) -> Result<Tensor> {
    let dims = scores.dims();
    if dims.len() < 2 || dims[dims.len() - 1] != dims[dims.len() - 2] {
        bail!("causal_softmax: expected square matrices, got {dims:?}");
    }
    if scores.device().is_cpu() {
        scores.apply_op1(CAUSAL_SOFTMAX)
    } else {
        composed::causal_softmax(scores)
    }
}

/// Cross entropy: for each row of `logits`, the negative log probability that their softmax assigns
/// to the row's target.
///
/// `logits`: `[n, classes]`; `targets`: `[n]` of u32, each below `classes`; result: `[n]`.
///
/// # Errors
/// If an argument does not have this shape or type.
pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    if logits.rank() != 2 || targets.dims() != [logits.dims()[0]] {
        bail!("cross_entropy: logits {:?} and targets {:?}", logits.dims(), targets.dims());
    }
    if logits.device().is_cpu() {
        logits.apply_op2(targets, CrossEntropy)
    } else {
        composed::cross_entropy(logits, targets)
    }
}

/// Scales each row to a mean square of 1.
///
/// `rows`: `[…, n]`. Zhang & Sennrich, Root Mean Square Layer Normalization (2019), without the
/// gain.
///
/// # Errors
/// If `rows` does not have this shape.
pub(crate) fn rms_norm(rows: &Tensor) -> Result<Tensor> {
    if rows.device().is_cpu() { rows.apply_op1(RMS_NORM) } else { composed::rms_norm(rows) }
}

/// An operation that makes a row of the same length from each row.
#[derive(Clone, Copy)]
struct RowOp {
    name: &'static str,
    /// Writes the result of a row, which has this index.
    forward: fn(usize, &[f32], &mut [f32]),
    /// Whether the gradient is computed from the results. Otherwise it is computed from the rows.
    uses_results: bool,
    /// Writes the gradient of a row, from this row or result and the gradient of the result.
    backward: fn(usize, &[f32], &[f32], &mut [f32]),
}

const CAUSAL_SOFTMAX: RowOp = RowOp {
    name: "causal-softmax",
    forward: |i, scores, weights| {
        let seen = i % scores.len() + 1;
        softmax(&scores[..seen], &mut weights[..seen]);
    },
    uses_results: true,
    backward: |i, weights, gradients, result| {
        let seen = i % weights.len() + 1;
        let (weights, gradients) = (&weights[..seen], &gradients[..seen]);
        let mean = dot(weights, gradients);
        for ((result, &weight), &gradient) in result.iter_mut().zip(weights).zip(gradients) {
            *result = weight * (gradient - mean);
        }
    },
};

const RMS_NORM: RowOp = RowOp {
    name: "rms-norm",
    forward: |_, row, result| {
        let scale = rms_scale(row);
        for (result, &value) in result.iter_mut().zip(row) {
            *result = value * scale;
        }
    },
    uses_results: false,
    backward: |_, row, gradients, result| {
        let scale = rms_scale(row);
        let along = dot(row, gradients) * scale * scale / row.len() as f32;
        for ((result, &value), &gradient) in result.iter_mut().zip(row).zip(gradients) {
            *result = scale * (gradient - value * along);
        }
    },
};

impl CustomOp1 for RowOp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, n) = (f32s(storage, layout)?, width(layout));
        let mut result = vec![0.0; rows.len()];
        for (i, (row, result)) in rows.chunks_exact(n).zip(result.chunks_exact_mut(n)).enumerate() {
            (self.forward)(i, row, result);
        }
        Ok((CpuStorage::F32(result), layout.shape().clone()))
    }

    fn bwd(&self, rows: &Tensor, results: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let from = if self.uses_results { results } else { rows };
        Ok(Some(from.apply_op2_no_bwd(&gradient.contiguous()?, &Backward(*self))?))
    }
}

struct Backward(RowOp);

impl CustomOp2 for Backward {
    fn name(&self) -> &'static str {
        self.0.name
    }

    fn cpu_fwd(
        &self,
        rows: &CpuStorage,
        layout: &Layout,
        gradients: &CpuStorage,
        gradients_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, gradients) = (f32s(rows, layout)?, f32s(gradients, gradients_layout)?);
        let n = width(layout);
        let mut result = vec![0.0; rows.len()];
        let pairs = rows.chunks_exact(n).zip(gradients.chunks_exact(n));
        for (i, ((row, gradients), result)) in pairs.zip(result.chunks_exact_mut(n)).enumerate() {
            (self.0.backward)(i, row, gradients, result);
        }
        Ok((CpuStorage::F32(result), layout.shape().clone()))
    }
}

struct CrossEntropy;

impl CustomOp2 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        layout: &Layout,
        targets: &CpuStorage,
        targets_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (logits, targets) = (f32s(logits, layout)?, u32s(targets, targets_layout)?);
        let n = width(layout);
        let mut probabilities = vec![0.0; n];
        let mut result = Vec::with_capacity(targets.len());
        for (row, &target) in logits.chunks_exact(n).zip(targets) {
            let Some(&of_target) = row.get(target as usize) else {
                bail!("cross_entropy: target {target} of {n} classes");
            };
            result.push(softmax(row, &mut probabilities) - of_target);
        }
        let shape = Shape::from(result.len());
        Ok((CpuStorage::F32(result), shape))
    }

    fn bwd(
        &self,
        logits: &Tensor,
        targets: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient =
            logits.apply_op3_no_bwd(targets, &gradient.contiguous()?, &CrossEntropyBackward)?;
        Ok((Some(gradient), None))
    }
}

struct CrossEntropyBackward;

impl CustomOp3 for CrossEntropyBackward {
    fn name(&self) -> &'static str {
        "cross-entropy-backward"
    }

    fn cpu_fwd(
        &self,
        logits: &CpuStorage,
        layout: &Layout,
        targets: &CpuStorage,
        targets_layout: &Layout,
        gradients: &CpuStorage,
        gradients_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (logits, targets) = (f32s(logits, layout)?, u32s(targets, targets_layout)?);
        let gradients = f32s(gradients, gradients_layout)?;
        let n = width(layout);
        let mut result = vec![0.0; logits.len()];
        let rows = logits.chunks_exact(n).zip(result.chunks_exact_mut(n));
        for ((row, result), (&target, &gradient)) in rows.zip(targets.iter().zip(gradients)) {
            softmax(row, result);
            result[target as usize] -= 1.0;
            result.iter_mut().for_each(|result| *result *= gradient);
        }
        Ok((CpuStorage::F32(result), layout.shape().clone()))
    }
}

/// Writes the softmax of `row` to `result`. Returns the logarithm of the sum of exponentials.
fn softmax(row: &[f32], result: &mut [f32]) -> f32 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for (result, &value) in result.iter_mut().zip(row) {
        *result = (value - max).exp();
    }
    let sum: f32 = result.iter().sum();
    let scale = 1.0 / sum;
    result.iter_mut().for_each(|result| *result *= scale);
    max + sum.ln()
}

fn rms_scale(row: &[f32]) -> f32 {
    // The addend avoids a division by zero.
    1.0 / (dot(row, row) / row.len() as f32 + 1e-6).sqrt()
}

/// Scalar product, in independent lanes that the compiler can vectorize.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (chunks_a, rest_a) = a.as_chunks::<8>();
    let (chunks_b, rest_b) = b.as_chunks::<8>();
    let mut lanes = [0.0f32; 8];
    for (a, b) in chunks_a.iter().zip(chunks_b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + rest
}

/// Length of the last dimension; at least 1, as an empty tensor has no rows to divide into.
fn width(layout: &Layout) -> usize {
    layout.dims().last().copied().unwrap_or(1).max(1)
}

fn f32s<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    part(storage.as_slice::<f32>()?, layout)
}

fn u32s<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [u32]> {
    part(storage.as_slice::<u32>()?, layout)
}

fn part<'a, T>(values: &'a [T], layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&values[start..end]),
        None => bail!("the tensor is not contiguous: call contiguous() first"),
    }
}

/// The operations of this file, composed of candle's, for devices without custom implementations.
mod composed {
    use elasticdl::candle_core::{D, DType, Result, Tensor};

    pub(super) fn causal_softmax(scores: &Tensor) -> Result<Tensor> {
        let n = scores.dim(D::Minus1)?;
        let place = Tensor::arange(0u32, n as u32, scores.device())?;
        let is_later = place.unsqueeze(0)?.broadcast_gt(&place.unsqueeze(1)?)?;
        // Far below any score, so that the exponential of a masked score is 0.
        let masked = scores.broadcast_add(&(is_later.to_dtype(DType::F32)? * -1e9)?)?;
        let exponentials = subtract_max(&masked)?.exp()?;
        exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
    }

    pub(super) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let logits = subtract_max(logits)?;
        let log_sum = logits.exp()?.sum_keepdim(D::Minus1)?.log()?;
        (log_sum - logits.gather(&targets.unsqueeze(1)?, 1)?)?.squeeze(1)
    }

    pub(super) fn rms_norm(rows: &Tensor) -> Result<Tensor> {
        let mean = rows.sqr()?.mean_keepdim(D::Minus1)?;
        rows.broadcast_div(&(mean + 1e-6)?.sqrt()?)
    }

    /// Subtracts each row's maximum: exponentials stay finite, and their ratios do not change.
    fn subtract_max(rows: &Tensor) -> Result<Tensor> {
        rows.broadcast_sub(&rows.max_keepdim(D::Minus1)?.detach())
    }
}

#[cfg(test)]
#[path = "../../../../examples/src/ops_tests.rs"]
mod tests;
