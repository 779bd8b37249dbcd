//! Optimizers: how a step's gradient changes the parameters.
//!
//! **Invariant:** [`Optimizer::apply`] is a pure function of its arguments: the same input bits
//! give the same output bits on any processor. It allocates nothing and reads the gradient once
//! (twice if it is clipped).

use crate::model::Update;
use crate::schedule::{Schedule, power};

/// An optimizer and its settings.
///
/// ```
/// use elasticdl::{Optimizer, Schedule};
///
/// let momentum = Optimizer::sgd(0.1).momentum(0.9).nesterov();
/// let schedule = Schedule::Cosine { warm_up: 100, total: 10_000, floor: 0.1 };
/// let adam_w = Optimizer::adam_w(3e-4)
///     .betas(0.9, 0.95)
///     .weight_decay(0.1)
///     .clip_norm(1.0)
///     .schedule(schedule);
/// assert_eq!((momentum.slots(), adam_w.slots()), (1, 2));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    rule: Rule,
    rate: f64,
    weight_decay: f64,
    clip_norm: Option<f64>,
    schedule: Schedule,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    AdamW { beta1: f64, beta2: f64, epsilon: f64 },
    Sgd { momentum: f64, nesterov: bool },
}

impl Optimizer {
    /// AdamW as `torch.optim.AdamW` defines it, with its defaults: betas 0.9 and 0.999, epsilon
    /// 1e-8, weight decay 0.01.
    ///
    /// With g the mean gradient and t the step from 1:
    /// `p ← p·(1 − rate·decay)`, `m ← β₁m + (1−β₁)g`, `v ← β₂v + (1−β₂)g²`,
    /// `p ← p − rate · (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε)`. Two slots: m, then v.
    ///
    /// Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019).
    ///
    /// # Panics
    /// If `rate` is negative or not finite.
    pub fn adam_w(rate: f64) -> Self {
        let rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
        Self::new(rule, rate, 0.01)
    }

    /// Stochastic gradient descent as `torch.optim.SGD` defines it, without momentum or weight
    /// decay.
    ///
    /// With g the mean gradient: `g ← g + decay·p`, `b ← momentum·b + g`, `p ← p − rate·b`, or `p −
    /// rate·(g + momentum·b)` with [`nesterov`](Self::nesterov). One slot, b, if there is momentum.
    ///
    /// # Panics
    /// If `rate` is negative or not finite.
    pub fn sgd(rate: f64) -> Self {
        Self::new(Rule::Sgd { momentum: 0.0, nesterov: false }, rate, 0.0)
    }

    /// Sets AdamW's decay rates of the first and second moment.
    ///
    /// # Panics
    /// If this is not AdamW, or one of them is not in [0, 1).
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Self {
        for beta in [beta1, beta2] {
            assert!((0.0..1.0).contains(&beta), "betas are at least 0 and below 1, not {beta}");
        }
        let Rule::AdamW { epsilon, .. } = self.rule else {
            panic!("betas belong to AdamW, not SGD")
        };
        self.rule = Rule::AdamW { beta1, beta2, epsilon };
        self
    }

    /// Clips the mean gradient to this Euclidean norm (`torch.nn.utils.clip_grad_norm_`).
    ///
    /// # Panics
    /// If `norm` is not above 0.
    pub fn clip_norm(mut self, norm: f64) -> Self {
        assert!(norm > 0.0, "the norm to clip at is above 0, not {norm}");
        self.clip_norm = Some(norm);
        self
    }

    /// Sets AdamW's ε, which prevents a division by zero.
    ///
    /// # Panics
    /// If this is not AdamW, or `epsilon` is not above 0.
    pub fn epsilon(mut self, epsilon: f64) -> Self {
        assert!(epsilon > 0.0, "epsilon is above 0, not {epsilon}");
        let Rule::AdamW { beta1, beta2, .. } = self.rule else {
            panic!("epsilon belongs to AdamW, not SGD")
        };
        self.rule = Rule::AdamW { beta1, beta2, epsilon };
        self
    }

    /// Sets SGD's momentum. It takes one slot if it is above 0.
    ///
    /// # Panics
    /// If this is not SGD, or `momentum` is not in [0, 1).
    pub fn momentum(mut self, momentum: f64) -> Self {
        assert!(
            (0.0..1.0).contains(&momentum),
            "momentum is at least 0 and below 1, not {momentum}"
        );
        let Rule::Sgd { nesterov, .. } = self.rule else {
            panic!("momentum belongs to SGD, not AdamW")
        };
        self.rule = Rule::Sgd { momentum, nesterov };
        self
    }

    /// Uses Nesterov momentum.
    ///
    /// # Panics
    /// If this is not SGD with momentum.
    pub fn nesterov(mut self) -> Self {
        match self.rule {
            Rule::Sgd { momentum, .. } if momentum > 0.0 => {
                self.rule = Rule::Sgd { momentum, nesterov: true }
            }
            _ => panic!("nesterov belongs to SGD with momentum: call momentum() first"),
        }
        self
    }

    /// Sets the learning rate schedule.
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Sets the weight decay: decoupled from the gradient in AdamW, added to the gradient in SGD.
    ///
    /// # Panics
    /// If `decay` is negative or not finite.
    pub fn weight_decay(mut self, decay: f64) -> Self {
        assert!(
            decay >= 0.0 && decay.is_finite(),
            "weight decay is at least 0 and finite, not {decay}"
        );
        self.weight_decay = decay;
        self
    }

    /// Number of `f32`s of optimizer state per parameter: 0, 1 or 2.
    pub fn slots(&self) -> usize {
        match self.rule {
            Rule::AdamW { .. } => 2,
            Rule::Sgd { momentum, .. } => usize::from(momentum > 0.0),
        }
    }

    /// The learning rate at `step`, from 0.
    pub fn rate(&self, step: u64) -> f64 {
        self.rate * self.schedule.factor(step)
    }

    /// Applies the mean gradient, `sum / records`, to the parameters and the slots. If the gradient
    /// is to be clipped and its norm is not finite, nothing is changed.
    ///
    /// # Panics
    /// If `records` is 0, or the lengths of `parameters` and `slots` do not match `sum` and
    /// [`slots`](Self::slots).
    pub fn apply(&self, update: Update<'_>) {
        let Update { step, records, sum, parameters, slots } = update;
        assert!(records > 0, "a step has at least one record");
        assert_eq!(parameters.len(), sum.len(), "one gradient per parameter");
        assert_eq!(slots.len(), self.slots() * sum.len(), "`slots` state values per parameter");
        let Some(factor) = self.clip_factor(sum, records) else { return };
        let scale = (factor / records as f64) as f32;
        match self.arithmetic(step) {
            Arithmetic::AdamW(constants) => {
                let (means, squares) = slots.split_at_mut(sum.len());
                constants.apply(scale, sum, parameters, means, squares);
            }
            Arithmetic::Momentum(constants) => {
                constants.apply_momentum(scale, sum, parameters, slots)
            }
            Arithmetic::Nesterov(constants) => {
                constants.apply_nesterov(scale, sum, parameters, slots)
            }
            Arithmetic::Plain(constants) => constants.apply_plain(scale, sum, parameters),
        }
    }

    /// Constants of the update at `step`.
    pub(crate) fn arithmetic(&self, step: u64) -> Arithmetic {
        let rate = self.rate(step);
        match self.rule {
            Rule::AdamW { beta1, beta2, epsilon } => {
                let t = step.saturating_add(1);
                Arithmetic::AdamW(AdamW {
                    keep: (1.0 - rate * self.weight_decay) as f32,
                    beta1: beta1 as f32,
                    beta2: beta2 as f32,
                    rest1: (1.0 - beta1) as f32,
                    rest2: (1.0 - beta2) as f32,
                    rate: (rate / (1.0 - power(beta1, t))) as f32,
                    correction: (1.0 / (1.0 - power(beta2, t)).sqrt()) as f32,
                    epsilon: epsilon as f32,
                })
            }
            Rule::Sgd { momentum, nesterov } => {
                let constants = Sgd {
                    rate: rate as f32,
                    decay: self.weight_decay as f32,
                    momentum: momentum as f32,
                };
                match (momentum > 0.0, nesterov) {
                    (false, _) => Arithmetic::Plain(constants),
                    (true, false) => Arithmetic::Momentum(constants),
                    (true, true) => Arithmetic::Nesterov(constants),
                }
            }
        }
    }

    /// Maximum norm of the mean gradient.
    pub(crate) fn norm_limit(&self) -> Option<f64> {
        self.clip_norm
    }

    fn new(rule: Rule, rate: f64, weight_decay: f64) -> Self {
        assert!(
            rate >= 0.0 && rate.is_finite(),
            "a learning rate is at least 0 and finite, not {rate}"
        );
        Self { rule, rate, weight_decay, clip_norm: None, schedule: Schedule::constant() }
    }

    /// Clipping factor of the mean gradient; `None` if its norm is not finite.
    fn clip_factor(&self, sum: &[f32], records: u64) -> Option<f64> {
        let Some(limit) = self.clip_norm else { return Some(1.0) };
        let norm = norm(sum);
        // PyTorch adds 1e-6 too.
        norm.is_finite().then(|| (limit / (norm / records as f64 + 1e-6)).min(1.0))
    }
}

/// Update rule of one step, with its constants. `scale`, where it is used, divides the sum by the
/// number of records and clips it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arithmetic {
    AdamW(AdamW),
    Momentum(Sgd),
    Nesterov(Sgd),
    Plain(Sgd),
}

/// Constants of one step of SGD.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sgd {
    pub(crate) rate: f32,
    pub(crate) decay: f32,
    pub(crate) momentum: f32,
}

impl Sgd {
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
pub(crate) struct AdamW {
    pub(crate) keep: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) rest1: f32,
    pub(crate) rest2: f32,
    pub(crate) rate: f32,
    pub(crate) correction: f32,
    pub(crate) epsilon: f32,
}

impl AdamW {
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

/// Euclidean norm, in f64, in one fixed order. The lanes are independent, so the compiler can
/// vectorize them.
fn norm(values: &[f32]) -> f64 {
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
    lanes.iter().sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: [f32; 3] = [1.0, -2.0, 0.5];
    /// Gradient sums over two records: the means are 0.5, -0.25 and 0 in the first step, and -0.1,
    /// 0.2 and 0.3 in the second.
    const SUMS: [[f32; 3]; 2] = [[1.0, -0.5, 0.0], [-0.2, 0.4, 0.6]];

    /// The parameters after each of two steps.
    fn two_steps(optimizer: Optimizer) -> [[f32; 3]; 2] {
        let mut parameters = START;
        let mut slots = vec![0.0; 3 * optimizer.slots()];
        [0, 1].map(|step| {
            let sum = &SUMS[step as usize];
            optimizer.apply(Update {
                step,
                records: 2,
                sum,
                parameters: &mut parameters,
                slots: &mut slots,
            });
            parameters
        })
    }

    #[track_caller]
    fn near(found: [[f32; 3]; 2], expected: [[f64; 3]; 2]) {
        for (found, expected) in found.as_flattened().iter().zip(expected.as_flattened()) {
            assert!((f64::from(*found) - expected).abs() < 2e-7, "{found} is not {expected}");
        }
    }

    #[test]
    fn sgd_subtracts_the_rate_times_the_mean() {
        near(two_steps(Optimizer::sgd(0.1)), [[0.95, -1.975, 0.5], [0.96, -1.995, 0.47]]);
    }

    #[test]
    fn sgd_with_momentum_matches_torch() {
        // b: 0.5, -0.25, 0, then 0.9b + g: 0.35, -0.025, 0.3.
        let optimizer = Optimizer::sgd(0.1).momentum(0.9);
        near(two_steps(optimizer), [[0.95, -1.975, 0.5], [0.915, -1.9725, 0.47]]);
        // g + 0.9b: 0.95, -0.475, 0, then 0.215, 0.1775, 0.57.
        let optimizer = optimizer.nesterov();
        near(two_steps(optimizer), [[0.905, -1.9525, 0.5], [0.8835, -1.97025, 0.443]]);
    }

    #[test]
    fn a_falling_rate_does_not_shrink_the_accumulated_momentum() {
        // `b` as without a schedule; the second step is half as large.
        let schedule = Schedule::Step { every: 1, factor: 0.5 };
        let optimizer = Optimizer::sgd(0.1).momentum(0.9).schedule(schedule);
        near(two_steps(optimizer), [[0.95, -1.975, 0.5], [0.9325, -1.97375, 0.485]]);
    }

    #[test]
    fn sgds_weight_decay_is_part_of_the_gradient() {
        // g + 0.1p: 0.6, -0.45, 0.05, then -0.1 + 0.094, 0.2 - 0.1955, 0.3 + 0.0495.
        let optimizer = Optimizer::sgd(0.1).weight_decay(0.1);
        near(two_steps(optimizer), [[0.94, -1.955, 0.495], [0.9406, -1.95545, 0.46005]]);
    }

    #[test]
    fn adam_w_matches_torch() {
        // torch.optim.AdamW in f64, written out parameter by parameter and step by step.
        let (beta1, beta2, epsilon, decay, rate) = (0.8, 0.9, 1e-3, 0.1, 0.01);
        let mut expected = [[0.0; 3]; 2];
        for i in 0..3 {
            let (mut p, mut m, mut v) = (f64::from(START[i]), 0.0, 0.0);
            for t in 1..=2 {
                let g = f64::from(SUMS[t - 1][i]) / 2.0;
                p -= rate * decay * p;
                m = beta1 * m + (1.0 - beta1) * g;
                v = beta2 * v + (1.0 - beta2) * g * g;
                let m_hat = m / (1.0 - f64::powi(beta1, t as i32));
                let v_hat = v / (1.0 - f64::powi(beta2, t as i32));
                p -= rate * m_hat / (v_hat.sqrt() + epsilon);
                expected[t - 1][i] = p;
            }
        }
        // By hand, for the first step: 1·0.999 − 0.01·0.5/0.501.
        assert!((expected[0][0] - (0.999 - 0.005 / 0.501)).abs() < 1e-15);
        let optimizer = Optimizer::adam_w(0.01).betas(0.8, 0.9).epsilon(1e-3).weight_decay(0.1);
        near(two_steps(optimizer), expected);
    }

    #[test]
    fn only_gradients_above_the_norm_are_clipped() {
        let apply = |optimizer: Optimizer| {
            let mut parameters = [0.0; 2];
            let sum = &[6.0, -8.0];
            optimizer.apply(Update {
                step: 0,
                records: 2,
                sum,
                parameters: &mut parameters,
                slots: &mut [],
            });
            parameters
        };
        // The mean is (3, -4), of norm 5.
        assert_eq!(apply(Optimizer::sgd(1.0).clip_norm(5.1)), [-3.0, 4.0]);
        for (found, expected) in apply(Optimizer::sgd(1.0).clip_norm(0.5)).iter().zip([-0.3, 0.4]) {
            assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn a_gradient_without_a_finite_norm_is_not_applied() {
        for bad in [f32::NAN, f32::INFINITY] {
            let (mut parameters, mut slots, sum) = ([1.0, 2.0], [0.5; 4], &[0.0, bad]);
            let optimizer = Optimizer::adam_w(0.1).clip_norm(1.0);
            let (parameters_, slots_) = (&mut parameters, &mut slots);
            optimizer.apply(Update {
                step: 0,
                records: 1,
                sum,
                parameters: parameters_,
                slots: slots_,
            });
            assert_eq!((parameters, slots), ([1.0, 2.0], [0.5; 4]), "{bad}");
        }
    }

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

    #[test]
    fn the_schedule_scales_the_rate() {
        let optimizer = Optimizer::sgd(0.1).schedule(Schedule::Step { every: 1, factor: 0.5 });
        assert_eq!((optimizer.rate(0), optimizer.rate(2)), (0.1, 0.025));
        near(two_steps(optimizer), [[0.95, -1.975, 0.5], [0.955, -1.985, 0.485]]);
    }

    #[test]
    fn slots_are_counted_and_their_length_is_checked() {
        let momentum = Optimizer::sgd(0.1).momentum(0.5);
        assert_eq!(
            [Optimizer::sgd(0.1), momentum, Optimizer::adam_w(0.1)].map(|o| o.slots()),
            [0, 1, 2]
        );
        let wrong = || {
            momentum.apply(Update {
                step: 0,
                records: 1,
                sum: &[0.0],
                parameters: &mut [0.0],
                slots: &mut [0.0; 2],
            });
        };
        assert!(std::panic::catch_unwind(wrong).is_err());
    }

    #[test]
    fn settings_out_of_range_or_of_the_other_rule_are_refused() {
        let wrong: [fn() -> Optimizer; 11] = [
            || Optimizer::sgd(f64::NAN),
            || Optimizer::adam_w(-0.1),
            || Optimizer::sgd(0.1).momentum(1.0),
            || Optimizer::sgd(0.1).nesterov(),
            || Optimizer::sgd(0.1).betas(0.9, 0.9),
            || Optimizer::sgd(0.1).epsilon(1e-8),
            || Optimizer::adam_w(0.1).momentum(0.9),
            || Optimizer::adam_w(0.1).betas(0.9, 1.0),
            || Optimizer::adam_w(0.1).epsilon(0.0),
            || Optimizer::sgd(0.1).clip_norm(0.0),
            || Optimizer::sgd(0.1).weight_decay(f64::INFINITY),
        ];
        for (i, wrong) in wrong.into_iter().enumerate() {
            assert!(std::panic::catch_unwind(wrong).is_err(), "case {i} was let through");
        }
    }
}
