//! A backward pass in segments.
//!
//! ```text
//! forward    part 0 ── state ─✂─ state' ── part 1 ── state ─✂─ state' ── part 2 ── loss
//! backward   part 2 first, from the loss; then part 1 and part 0, each from the gradient of the
//!            copy (state') after it
//! ```

use std::ops::Range;

use candle_core::Var;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, Storage, Tensor};
use elasticdl_tables::BatchRows;

use super::parameters::Parameters;
use crate::buckets::Gradients;
use crate::metrics::UserError;

/// Cuts in a model's forward pass. The backward pass pauses at each, so that the complete parts of
/// the gradient can be all-reduced while the rest is computed.
#[derive(Debug)]
pub struct Cuts {
    /// Each cut's original tensor and the copy that replaces it; `None` for a pass without cuts.
    made: Option<Vec<(Tensor, Var)>>,
}

impl Cuts {
    /// For a backward pass without pauses.
    #[must_use]
    pub fn none() -> Self {
        Self { made: None }
    }

    pub(super) fn some() -> Self {
        Self { made: Some(Vec::new()) }
    }

    /// Cuts the computation graph at `state` and returns a copy of it. The rest of the forward pass
    /// must use the copy in its place, and no other tensors from before the cut except parameters.
    ///
    /// # Errors
    /// An error of candle.
    pub fn cut(&mut self, state: &Tensor) -> Result<Tensor, UserError> {
        let Some(made) = &mut self.made else { return Ok(state.clone()) };
        let copy = Var::from_tensor(&state.detach())?;
        made.push((state.clone(), copy.clone()));
        Ok(copy.as_tensor().clone())
    }
}

/// The first segment of the forward pass in which each parameter is used, as observed in the
/// previous pass. It determines only how early a gradient is reported as complete, not its value.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// First segment by parameter; empty before the first pass.
    first: Vec<usize>,
    cuts: usize,
}

impl Uses {
    /// Runs the backward pass from the loss and adds the gradients to `gradients`.
    pub(super) fn backward(
        &mut self,
        parameters: &Parameters,
        loss: &Tensor,
        cuts: Cuts,
        gradients: &mut impl Accumulate,
    ) -> Result<(), UserError> {
        let mut cuts = cuts.made.unwrap_or_default();
        let known = self.cuts == cuts.len() && !self.first.is_empty();
        let mut first = vec![usize::MAX; parameters.declared.len()];
        let cut_count = cuts.len();
        let mut found = loss.backward()?;
        loop {
            let part = cuts.len();
            add_all(parameters, &found, gradients, |parameter| first[parameter] = part)?;
            if known {
                gradients.complete_from(self.complete_from(parameters, part));
            }
            let Some((state, copy)) = cuts.pop() else { break };
            // A state that does not affect the loss has no gradient, and neither has anything
            // before it. The gradient is detached from the graph of the later segment, which is no
            // longer needed.
            let Some(gradient) = found.get(&copy).map(Tensor::detach) else { break };
            found = (state * gradient)?.sum_all()?.backward()?;
        }
        (self.first, self.cuts) = (first, cut_count);
        Ok(())
    }

    /// Which parameters had a gradient in the last pass.
    pub(super) fn reached(&self) -> Vec<bool> {
        self.first.iter().map(|&part| part != usize::MAX).collect()
    }

    /// Element from which on the gradient is complete after segment `part`: the end of the last
    /// parameter that an earlier segment uses.
    pub(super) fn complete_from(&self, parameters: &Parameters, part: usize) -> usize {
        let pairs = parameters.declared.iter().zip(&self.first);
        pairs
            .filter(|(_, first)| **first < part)
            .map(|(declared, _)| declared.range.end)
            .max()
            .unwrap_or(0)
    }
}

/// The flat gradient, on the host or on a GPU.
pub(super) trait Accumulate {
    /// Number of elements that may still be written.
    fn open_len(&mut self) -> usize;

    /// Adds the gradient of a parameter to the elements of its range.
    fn add(&mut self, range: Range<usize>, gradient: &Tensor) -> Result<(), UserError>;

    /// See [`Gradients::complete_from`].
    fn complete_from(&mut self, start: usize);

    /// The rows of the batch's ids with the sums of their gradients.
    fn rows(&mut self) -> Option<&mut BatchRows>;
}

impl Accumulate for Gradients<'_> {
    fn open_len(&mut self) -> usize {
        self.sum().len()
    }

    fn add(&mut self, range: Range<usize>, gradient: &Tensor) -> Result<(), UserError> {
        Ok(add(gradient, &mut self.sum()[range])?)
    }

    fn complete_from(&mut self, start: usize) {
        Gradients::complete_from(self, start);
    }

    fn rows(&mut self) -> Option<&mut BatchRows> {
        Gradients::rows(self)
    }
}

/// Adds the gradients of all parameters in `found`, and reports the parameters' indices. A
/// parameter that does not affect the loss has no gradient.
pub(super) fn add_all(
    parameters: &Parameters,
    found: &GradStore,
    gradients: &mut impl Accumulate,
    mut on_found: impl FnMut(usize),
) -> Result<(), UserError> {
    for (index, (declared, variable)) in
        parameters.declared.iter().zip(&parameters.variables).enumerate()
    {
        let Some(gradient) = found.get(variable) else { continue };
        if declared.range.end > gradients.open_len() {
            let name = &declared.name;
            return Err(
                format!("{name:?} is used before a cut, but was not in the previous pass").into()
            );
        }
        gradients.add(declared.range.clone(), gradient)?;
        on_found(index);
    }
    Ok(())
}

/// Adds a gradient to its range of the flat gradient.
fn add(gradient: &Tensor, sum: &mut [f32]) -> candle_core::Result<()> {
    let gradient = gradient.contiguous()?;
    let (storage, layout) = gradient.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(values)), Some((start, end))) => {
            for (sum, &value) in sum.iter_mut().zip(&values[start..end]) {
                *sum += value;
            }
        }
        (Storage::Cpu(CpuStorage::BF16(values)), Some((start, end))) => {
            for (sum, value) in sum.iter_mut().zip(&values[start..end]) {
                *sum += value.to_f32();
            }
        }
        _ => candle_core::bail!(
            "a parameter's gradient must be a contiguous tensor of f32 or bf16 on the CPU"
        ),
    }
    Ok(())
}
