//! A backward pass in parts.
//!
//! ```text
//! forward    part 0 ── state ─✂─ state' ── part 1 ── state ─✂─ state' ── part 2 ── loss
//! backward   part 2 first, from the loss; then each part from the gradient of what was cut out behind it
//! ```

use candle_core::Tensor;
use candle_core::Var;
use candle_core::backprop::GradStore;

use super::{Parameters, add};
use crate::buckets::Gradients;
use crate::model::UserError;

/// Where a model's backward pass pauses, so that what is complete of its gradient can be summed
/// over the workers while the rest is computed.
#[derive(Debug)]
pub struct Cuts {
    /// What was cut off, and what took its place; none where the pass is one.
    made: Option<Vec<(Tensor, Var)>>,
}

impl Cuts {
    /// For a pass that never pauses.
    #[must_use]
    pub fn none() -> Self {
        Self { made: None }
    }

    pub(super) fn some() -> Self {
        Self { made: Some(Vec::new()) }
    }

    /// Cuts here: what follows has to use the returned tensor, which equals `state`, and nothing
    /// else that stands for what came before, but parameters.
    ///
    /// # Errors
    /// Candle's.
    pub fn cut(&mut self, state: &Tensor) -> Result<Tensor, UserError> {
        let Some(made) = &mut self.made else { return Ok(state.clone()) };
        let copy = Var::from_tensor(&state.detach())?;
        made.push((state.clone(), copy.clone()));
        Ok(copy.as_tensor().clone())
    }
}

/// In which part of the pass each parameter is used first; what is learned from one pass is used in
/// the next. How early a gradient is said to be complete depends on it, and never what it is.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// By parameter, with the number of cuts; empty until it is known.
    first: Vec<usize>,
    cuts: usize,
}

impl Uses {
    /// Goes back from the loss, and adds what it finds to `gradients`.
    pub(super) fn backward(
        &mut self,
        parameters: &Parameters,
        loss: &Tensor,
        cuts: Cuts,
        gradients: &mut Gradients<'_>,
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
            // What the loss does not depend on has no gradient, and so has nothing before it. The
            // gradient itself depends on what came behind the cut, which is done with.
            let Some(gradient) = found.get(&copy).map(Tensor::detach) else { break };
            found = (state * gradient)?.sum_all()?.backward()?;
        }
        (self.first, self.cuts) = (first, cut_count);
        Ok(())
    }

    /// After this part: behind the last parameter that an earlier part uses.
    pub(super) fn complete_from(&self, parameters: &Parameters, part: usize) -> usize {
        let pairs = parameters.declared.iter().zip(&self.first);
        pairs
            .filter(|(_, first)| **first < part)
            .map(|(declared, _)| declared.range.end)
            .max()
            .unwrap_or(0)
    }
}

/// Adds the gradients of all parameters in `found`, and says of which.
fn add_all(
    parameters: &Parameters,
    found: &GradStore,
    gradients: &mut Gradients<'_>,
    mut on_found: impl FnMut(usize),
) -> Result<(), UserError> {
    for (index, (declared, variable)) in
        parameters.declared.iter().zip(&parameters.variables).enumerate()
    {
        let Some(gradient) = found.get(variable) else { continue };
        let Some(place) = gradients.rest().get_mut(declared.range.clone()) else {
            let name = &declared.name;
            return Err(
                format!("{name:?} is used before a cut, and was not in the pass before").into()
            );
        };
        add(gradient, place)?;
        on_found(index);
    }
    Ok(())
}
