//! How the gradient of a row changes it.

use serde::{Deserialize, Serialize};

/// Optimizer of rows. Only the rows that a step touches change in it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RowOptimizer {
    /// Adagrad with one accumulator per row, of the mean of the gradient's squares:
    /// `a += mean(g²)`, `w -= learning_rate · g / (√a + epsilon)`. Four bytes per row. It is
    /// `EXACT_ROWWISE_ADAGRAD` in FBGEMM.
    Adagrad {
        /// Learning rate.
        learning_rate: f32,
        /// Keeps the division finite.
        epsilon: f32,
    },
    /// Adam whose moments change only when the row is touched; the bias correction counts the steps
    /// of the job. It is `SparseAdam` in PyTorch. Eight bytes per number.
    LazyAdam {
        /// Learning rate.
        learning_rate: f32,
        /// Decay of the mean of gradients.
        beta1: f32,
        /// Decay of the mean of their squares.
        beta2: f32,
        /// Keeps the division finite.
        epsilon: f32,
    },
    /// `w -= learning_rate · g`.
    Sgd {
        /// Learning rate.
        learning_rate: f32,
    },
}

impl RowOptimizer {
    /// Row-wise Adagrad with an epsilon of 1e-8.
    pub fn adagrad(learning_rate: f32) -> Self {
        Self::Adagrad { learning_rate, epsilon: 1e-8 }
    }

    /// Lazy Adam with betas of 0.9 and 0.999 and an epsilon of 1e-8.
    pub fn lazy_adam(learning_rate: f32) -> Self {
        Self::LazyAdam { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }
    }

    /// SGD.
    pub fn sgd(learning_rate: f32) -> Self {
        Self::Sgd { learning_rate }
    }

    /// Numbers of state per row of `dim` numbers.
    pub(crate) fn slots(&self, dim: usize) -> usize {
        match self {
            Self::Adagrad { .. } => 1,
            Self::LazyAdam { .. } => 2 * dim,
            Self::Sgd { .. } => 0,
        }
    }

    /// Applies `gradient`, `[dim]`, to `row`: its values, `[dim]`, and its state, `[slots(dim)]`.
    /// `step`: number of this step, from 1.
    pub(crate) fn apply(&self, step: u64, row: &mut [f32], gradient: &[f32]) {
        let (values, state) = row.split_at_mut(gradient.len());
        match *self {
            Self::Adagrad { learning_rate, epsilon } => {
                let squares: f32 = gradient.iter().map(|g| g * g).sum();
                state[0] += squares / gradient.len() as f32;
                let rate = learning_rate / (state[0].sqrt() + epsilon);
                values.iter_mut().zip(gradient).for_each(|(value, g)| *value -= rate * g);
            }
            Self::LazyAdam { learning_rate, beta1, beta2, epsilon } => {
                let (means, squares) = state.split_at_mut(gradient.len());
                let exponent = i32::try_from(step).unwrap_or(i32::MAX);
                let (first, second) = (1.0 - beta1.powi(exponent), 1.0 - beta2.powi(exponent));
                let moments = means.iter_mut().zip(squares);
                for ((value, g), (mean, square)) in values.iter_mut().zip(gradient).zip(moments) {
                    *mean = beta1 * *mean + (1.0 - beta1) * g;
                    *square = beta2 * *square + (1.0 - beta2) * g * g;
                    let denominator = (*square / second).sqrt() + epsilon;
                    *value -= learning_rate * (*mean / first) / denominator;
                }
            }
            Self::Sgd { learning_rate } => {
                values.iter_mut().zip(gradient).for_each(|(value, g)| *value -= learning_rate * g);
            }
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Adagrad { .. } => "Adagrad",
            Self::LazyAdam { .. } => "lazy Adam",
            Self::Sgd { .. } => "SGD",
        }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let (learning_rate, betas, epsilon) = match *self {
            Self::Adagrad { learning_rate, epsilon } => (learning_rate, [0.0; 2], epsilon),
            Self::LazyAdam { learning_rate, beta1, beta2, epsilon } => {
                (learning_rate, [beta1, beta2], epsilon)
            }
            Self::Sgd { learning_rate } => (learning_rate, [0.0; 2], 0.0),
        };
        if !(learning_rate.is_finite() && learning_rate >= 0.0) {
            return Err(format!("a learning rate of {learning_rate}; 0 or more is possible"));
        }
        if let Some(beta) = betas.iter().find(|beta| !(0.0..1.0).contains(*beta)) {
            return Err(format!("a beta of {beta}; 0 to less than 1 is possible"));
        }
        if !(epsilon.is_finite() && epsilon >= 0.0) {
            return Err(format!("an epsilon of {epsilon}; 0 or more is possible"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row that begins at 1 and 2 after these gradients, with its state.
    fn trained(optimizer: RowOptimizer, gradients: &[[f32; 2]]) -> Vec<f32> {
        let mut row = vec![1.0, 2.0];
        row.resize(2 + optimizer.slots(2), 0.0);
        for (step, gradient) in (1..).zip(gradients) {
            optimizer.apply(step, &mut row, gradient);
        }
        row
    }

    #[test]
    fn rows_change_as_the_formulas_say() {
        assert_eq!(trained(RowOptimizer::sgd(0.5), &[[1.0, -2.0], [2.0, 0.0]]), [-0.5, 3.0]);
        // a = (9 + 16) / 2 = 12.5, then + 12.5 = 25.
        let adagrad = RowOptimizer::Adagrad { learning_rate: 0.5, epsilon: 0.0 };
        let row = trained(adagrad, &[[3.0, 4.0], [3.0, 4.0]]);
        let factor = 0.5 / 12.5_f32.sqrt() + 0.5 / 5.0;
        assert_eq!(row[2], 25.0);
        assert!((row[0] - (1.0 - factor * 3.0)).abs() < 1e-6, "{row:?}");
        assert!((row[1] - (2.0 - factor * 4.0)).abs() < 1e-6, "{row:?}");
        // The first step of Adam changes each number by the learning rate.
        let row = trained(RowOptimizer::lazy_adam(0.1), &[[3.0, -4.0]]);
        assert!((row[0] - 0.9).abs() < 1e-6 && (row[1] - 2.1).abs() < 1e-6, "{row:?}");
        assert!((row[2] - 0.3).abs() < 1e-6 && (row[5] - 0.016).abs() < 1e-6, "{row:?}");
    }
}
