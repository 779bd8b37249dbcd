//! The operations of [`ops`](crate::ops), composed of candle's own: for devices that those are not
//! written for.

use candle_core::{D, DType, Result, Tensor};

pub(crate) fn causal_softmax(scores: &Tensor) -> Result<Tensor> {
    let n = scores.dim(D::Minus1)?;
    let place = Tensor::arange(0u32, n as u32, scores.device())?;
    let is_later = place.unsqueeze(0)?.broadcast_gt(&place.unsqueeze(1)?)?;
    // No score comes near it, and what is far below the greatest has the weight 0.
    let masked = scores.broadcast_add(&(is_later.to_dtype(DType::F32)? * -1e9)?)?;
    let exponentials = less_the_greatest(&masked)?.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
}

pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let logits = less_the_greatest(logits)?;
    let of_all = logits.exp()?.sum_keepdim(D::Minus1)?.log()?;
    (of_all - logits.gather(&targets.unsqueeze(1)?, 1)?)?.squeeze(1)
}

pub(crate) fn rms_norm(rows: &Tensor) -> Result<Tensor> {
    let mean = rows.sqr()?.mean_keepdim(D::Minus1)?;
    rows.broadcast_div(&(mean + 1e-6)?.sqrt()?)
}

/// So that exponentials stay finite; their ratios are the same.
fn less_the_greatest(rows: &Tensor) -> Result<Tensor> {
    rows.broadcast_sub(&rows.max_keepdim(D::Minus1)?.detach())
}
