//! The operations of [`ops`](super), composed of candle's operations, for devices without
//! custom implementations.

use candle_core::{D, DType, Result, Tensor};

pub(crate) fn causal_softmax(scores: &Tensor) -> Result<Tensor> {
    let n = scores.dim(D::Minus1)?;
    let place = Tensor::arange(0u32, n as u32, scores.device())?;
    let is_later = place.unsqueeze(0)?.broadcast_gt(&place.unsqueeze(1)?)?;
    // Far below any score, so that the exponential of a masked score is 0.
    let masked = scores.broadcast_add(&(is_later.to_dtype(DType::F32)? * -1e9)?)?;
    let exponentials = subtract_max(&masked)?.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
}

pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let logits = subtract_max(logits)?;
    let log_sum = logits.exp()?.sum_keepdim(D::Minus1)?.log()?;
    (log_sum - logits.gather(&targets.unsqueeze(1)?, 1)?)?.squeeze(1)
}

pub(crate) fn rms_norm(rows: &Tensor) -> Result<Tensor> {
    let mean = rows.sqr()?.mean_keepdim(D::Minus1)?;
    rows.broadcast_div(&(mean + 1e-6)?.sqrt()?)
}

/// Subtracts each row's maximum: exponentials stay finite, and their ratios do not change.
fn subtract_max(rows: &Tensor) -> Result<Tensor> {
    rows.broadcast_sub(&rows.max_keepdim(D::Minus1)?.detach())
}
