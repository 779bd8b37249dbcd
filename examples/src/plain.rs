//! A training loop in candle alone: the baseline that a job of one worker is compared with.

use elasticdl::UserError;
use elasticdl::candle_core::{Tensor, Var};

/// AdamW with gradient clipping, composed of candle's operations.
#[derive(Debug)]
pub struct AdamW {
    options: Options,
    parameters: Vec<Parameter>,
    steps: i32,
}

/// Settings of [`AdamW`].
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Prevents a division by zero.
    pub epsilon: f64,
    /// Weight decay, decoupled from the gradient.
    pub weight_decay: f64,
    /// Maximum norm of the mean gradient.
    pub clip_norm: f64,
}

#[derive(Debug)]
struct Parameter {
    variable: Var,
    mean: Tensor,
    square: Tensor,
}

impl AdamW {
    /// `variables`: the variables to train, as a network holds them.
    ///
    /// # Errors
    /// An error of candle.
    pub fn new(variables: &[&Tensor], options: Options) -> Result<Self, UserError> {
        let parameter = |tensor: &&Tensor| {
            let (mean, square) = (tensor.zeros_like()?, tensor.zeros_like()?);
            Ok(Parameter { variable: Var::from_tensor(tensor)?, mean, square })
        };
        let parameters = variables.iter().map(parameter).collect::<Result<_, UserError>>()?;
        Ok(Self { options, parameters, steps: 0 })
    }

    /// Makes one step with the mean gradient of `losses`: one loss for each part of the batch,
    /// summed over its records; `records` in total. Returns the sum of the losses.
    ///
    /// # Errors
    /// An error of candle, or of a loss.
    pub fn step(
        &mut self,
        rate: f64,
        records: usize,
        losses: impl Iterator<Item = Result<Tensor, UserError>>,
    ) -> Result<f64, UserError> {
        let mut sum = 0.0;
        let mut gradients: Vec<Option<Tensor>> = vec![None; self.parameters.len()];
        for loss in losses {
            let loss = loss?;
            sum += f64::from(loss.to_scalar::<f32>()?);
            let found = loss.backward()?;
            for (gradient, parameter) in gradients.iter_mut().zip(&self.parameters) {
                // Not the graph that computes it: the moments would keep that of each step.
                let more = found.get(&parameter.variable).map(Tensor::detach);
                *gradient = match (gradient.take(), more) {
                    (Some(before), Some(more)) => Some((before + more)?),
                    (before, more) => before.or(more),
                };
            }
        }
        let squares = gradients.iter().flatten().map(|gradient| gradient.sqr()?.sum_all());
        let squares = squares.collect::<Result<Vec<_>, _>>()?;
        let norm = f64::from(Tensor::stack(&squares, 0)?.sum_all()?.to_scalar::<f32>()?).sqrt()
            / records as f64;
        let scale = (self.options.clip_norm / (norm + 1e-6)).min(1.0) / records as f64;
        self.steps += 1;
        for (parameter, gradient) in self.parameters.iter_mut().zip(gradients) {
            let Some(gradient) = gradient else { continue };
            parameter.apply(&self.options, rate, self.steps, &(gradient * scale)?)?;
        }
        Ok(sum)
    }
}

impl Parameter {
    fn apply(
        &mut self,
        options: &Options,
        rate: f64,
        step: i32,
        gradient: &Tensor,
    ) -> Result<(), UserError> {
        let Options { beta1, beta2, epsilon, weight_decay, .. } = *options;
        self.mean = ((&self.mean * beta1)? + (gradient * (1.0 - beta1))?)?;
        self.square = ((&self.square * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
        let root = (self.square.sqrt()? / (1.0 - beta2.powi(step)).sqrt())?;
        let change = ((&self.mean * (rate / (1.0 - beta1.powi(step))))? / (root + epsilon)?)?;
        let decayed = (self.variable.as_tensor() * (1.0 - rate * weight_decay))?;
        self.variable.set(&(decayed - change)?.detach())?;
        Ok(())
    }
}
