//! The arithmetic of one step of an optimizer, over all parameters.

use elasticdl_tables::ChunkLayout;

/// Update rule of one step, with its constants.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arithmetic {
    AdamW(AdamWStep),
    Momentum(SgdStep),
    Nesterov(SgdStep),
    Plain(SgdStep),
}

impl Arithmetic {
    /// Applies the gradient `sum · scale`: `scale` divides by the number of records and clips.
    pub(super) fn apply(&self, scale: f32, sum: &[f32], parameters: &mut [f32], slots: &mut [f32]) {
        match self {
            Self::AdamW(constants) => {
                let (means, squares) = slots.split_at_mut(sum.len());
                constants.apply(scale, sum, parameters, means, squares);
            }
            Self::Momentum(constants) => constants.apply_momentum(scale, sum, parameters, slots),
            Self::Nesterov(constants) => constants.apply_nesterov(scale, sum, parameters, slots),
            Self::Plain(constants) => constants.apply_plain(scale, sum, parameters),
        }
    }
}

/// Constants of one step of SGD.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SgdStep {
    pub(crate) rate: f32,
    pub(crate) decay: f32,
    pub(crate) momentum: f32,
}

impl SgdStep {
    fn apply_plain(&self, scale: f32, sum: &[f32], parameters: &mut [f32]) {
        for (p, &s) in parameters.iter_mut().zip(sum) {
            *p -= self.rate * (s * scale + self.decay * *p);
        }
    }

    fn apply_momentum(&self, scale: f32, sum: &[f32], parameters: &mut [f32], buffers: &mut [f32]) {
        for ((p, b), &s) in parameters.iter_mut().zip(buffers).zip(sum) {
            let gradient = s * scale + self.decay * *p;
            *b = self.momentum * *b + gradient;
            *p -= self.rate * *b;
        }
    }

    fn apply_nesterov(&self, scale: f32, sum: &[f32], parameters: &mut [f32], buffers: &mut [f32]) {
        for ((p, b), &s) in parameters.iter_mut().zip(buffers).zip(sum) {
            let gradient = s * scale + self.decay * *p;
            *b = self.momentum * *b + gradient;
            *p -= self.rate * (gradient + self.momentum * *b);
        }
    }
}

/// Constants of one step of AdamW. Both bias corrections are folded into `rate` and `correction`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamWStep {
    pub(crate) keep: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) rest1: f32,
    pub(crate) rest2: f32,
    pub(crate) rate: f32,
    pub(crate) correction: f32,
    pub(crate) epsilon: f32,
}

impl AdamWStep {
    fn apply(
        &self,
        scale: f32,
        sum: &[f32],
        parameters: &mut [f32],
        means: &mut [f32],
        squares: &mut [f32],
    ) {
        for (((p, m), v), &s) in parameters.iter_mut().zip(means).zip(squares).zip(sum) {
            let gradient = s * scale;
            *m = self.beta1 * *m + self.rest1 * gradient;
            *v = self.beta2 * *v + self.rest2 * gradient * gradient;
            *p = *p * self.keep - self.rate * *m / (v.sqrt() * self.correction + self.epsilon);
        }
    }
}

/// Euclidean norm, in f64, in one fixed order: the sums of squares of the chunks that an
/// optimizer's state would be divided into, so that the bits do not depend on whether it is.
pub(super) fn norm(values: &[f32]) -> f64 {
    norm_from(values, 0)
}

/// As [`norm`], of the values from `first` on.
pub(crate) fn norm_from(values: &[f32], first: usize) -> f64 {
    let layout = ChunkLayout::new(values.len(), 0);
    let of_chunk = |chunk| {
        let range = layout.range(chunk);
        squares(&values[range.start.max(first).min(range.end)..range.end])
    };
    (0..layout.chunks()).map(of_chunk).sum::<f64>().sqrt()
}

/// Sum of squares, in f64, in one fixed order. The lanes are independent, so the compiler can
/// vectorize them.
pub(crate) fn squares(values: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (chunks, rest) = values.as_chunks::<8>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(value) * f64::from(value);
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_counts_every_element() {
        for len in [0usize, 1, 7, 8, 9, 1000] {
            let values: Vec<f32> = (0..len).map(|i| i as f32 + 1.0).collect();
            let n = len as f64;
            let expected = (n * (n + 1.0) * (2.0 * n + 1.0) / 6.0).sqrt();
            assert!(
                (norm(&values) - expected).abs() <= 1e-9 * expected,
                "{len}: {} is not {expected}",
                norm(&values)
            );
        }
        // In f32 the squares would overflow.
        assert!((norm(&[1e30, 1e30]) / (2f64.sqrt() * 1e30) - 1.0).abs() < 1e-7);
    }
}
