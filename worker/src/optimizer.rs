//! Optimizers: how a step's gradient changes the parameters.
//!
//! **Invariant:** [`Optimizer::apply`] is a pure function of its arguments: the same input bits
//! give the same output bits on any processor. It allocates nothing and reads the gradient once
//! (twice if it is clipped).

use crate::schedule::{Schedule, power};
use crate::setting_error::SettingError;
use crate::update::Update;

mod arithmetic;

pub(crate) use self::arithmetic::{AdamWStep, Arithmetic, SgdStep, norm_from, squares};

/// An update rule ([`Sgd`], [`Adam`] or [`AdamW`]), with a learning rate schedule and gradient
/// clipping if they are set.
///
/// ```
/// use elasticdl::{AdamW, Optimizer, Schedule, Sgd};
///
/// let sgd: Optimizer = Sgd::new(0.1).momentum(0.9).nesterov().into();
/// let adam_w = Optimizer::from(AdamW::new(3e-4).betas(0.9, 0.95).weight_decay(0.1))
///     .clip_norm(1.0)
///     .schedule(Schedule::cosine(10_000, 0.1).warmup(100));
/// assert_eq!((sgd.slots(), adam_w.slots()), (1, 2));
/// ```
///
/// A setting out of range is an error that ends the job when its workers start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    rule: Rule,
    clip_norm: Option<f64>,
    schedule: Schedule,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Rule {
    AdamW(AdamW),
    Sgd(Sgd),
}

impl Optimizer {
    /// Clips the mean gradient to this Euclidean norm, above 0
    /// (`torch.nn.utils.clip_grad_norm_`).
    #[must_use]
    pub fn clip_norm(mut self, norm: f64) -> Self {
        self.clip_norm = Some(norm);
        self
    }

    /// Sets the learning rate schedule.
    #[must_use]
    pub fn schedule(mut self, schedule: Schedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// Checks that all settings are in their ranges. Each worker of a job does so when it starts.
    ///
    /// # Errors
    /// The first setting that is not.
    pub fn check(&self) -> Result<(), SettingError> {
        match &self.rule {
            Rule::AdamW(rule) => rule.check()?,
            Rule::Sgd(rule) => rule.check()?,
        }
        if let Some(norm) = self.clip_norm {
            SettingError::unless(norm > 0.0, "clip_norm", norm, "above 0")?;
        }
        self.schedule.check()
    }

    /// Number of `f32`s of optimizer state per parameter: 0, 1 or 2.
    pub fn slots(&self) -> usize {
        match self.rule {
            Rule::AdamW(_) => 2,
            Rule::Sgd(Sgd { momentum, .. }) => usize::from(momentum > 0.0),
        }
    }

    /// The learning rate at `step`, from 0.
    pub fn learning_rate(&self, step: u64) -> f64 {
        let (Rule::AdamW(AdamW { learning_rate, .. }) | Rule::Sgd(Sgd { learning_rate, .. })) =
            self.rule;
        learning_rate * self.schedule.factor(step)
    }

    /// Applies the mean gradient, `sum / records`, to the parameters and the slots. If the gradient
    /// is to be clipped and its norm is not finite, nothing is changed.
    ///
    /// # Panics
    /// If `records` is 0, or the lengths of `parameters` and `slots` do not match `sum` and
    /// [`slots`](Self::slots).
    pub fn apply(&self, update: Update<'_>) {
        let Update { step, records, sum, parameters, slots, norm } = update;
        assert!(records > 0, "a step has at least one record");
        assert_eq!(parameters.len(), sum.len(), "one gradient per parameter");
        assert_eq!(slots.len(), self.slots() * sum.len(), "`slots` state values per parameter");
        let norm = || norm.unwrap_or_else(|| arithmetic::norm(sum));
        let Some(factor) = self.clip_factor(norm, records) else { return };
        let scale = (factor / records as f64) as f32;
        self.arithmetic(step).apply(scale, sum, parameters, slots);
    }

    /// Constants of the update at `step`.
    pub(crate) fn arithmetic(&self, step: u64) -> Arithmetic {
        let rate = self.learning_rate(step);
        match &self.rule {
            Rule::AdamW(rule) => rule.arithmetic(step, rate),
            Rule::Sgd(rule) => rule.arithmetic(rate),
        }
    }

    /// Maximum norm of the mean gradient.
    pub(crate) fn norm_limit(&self) -> Option<f64> {
        self.clip_norm
    }

    /// Clipping factor of the mean gradient; `None` if its norm is not finite.
    fn clip_factor(&self, norm: impl FnOnce() -> f64, records: u64) -> Option<f64> {
        let Some(limit) = self.clip_norm else { return Some(1.0) };
        let norm = norm();
        // PyTorch adds 1e-6 too.
        norm.is_finite().then(|| (limit / (norm / records as f64 + 1e-6)).min(1.0))
    }
}

/// Stochastic gradient descent as `torch.optim.SGD` defines it, by default without momentum or
/// weight decay.
///
/// With g the mean gradient: `g ← g + decay·p`, `b ← momentum·b + g`, `p ← p − rate·b`, or `p −
/// rate·(g + momentum·b)` with [`nesterov`](Self::nesterov). One slot, b, if there is momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    learning_rate: f64,
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
}

impl Sgd {
    /// `learning_rate`: at least 0.
    #[must_use]
    pub fn new(learning_rate: f64) -> Self {
        Self { learning_rate, momentum: 0.0, nesterov: false, weight_decay: 0.0 }
    }

    /// Sets the momentum: at least 0 and below 1. It takes one slot if it is above 0.
    #[must_use]
    pub fn momentum(self, momentum: f64) -> Self {
        Self { momentum, ..self }
    }

    /// Uses Nesterov momentum, which needs [`momentum`](Self::momentum) above 0.
    #[must_use]
    pub fn nesterov(self) -> Self {
        Self { nesterov: true, ..self }
    }

    /// Sets the weight decay, at least 0, which is added to the gradient.
    #[must_use]
    pub fn weight_decay(self, decay: f64) -> Self {
        Self { weight_decay: decay, ..self }
    }

    fn check(&self) -> Result<(), SettingError> {
        let Self { learning_rate, momentum, nesterov, weight_decay } = *self;
        SettingError::unless_finite("learning_rate", learning_rate)?;
        SettingError::unless_fraction("momentum", momentum)?;
        let has_momentum = !nesterov || momentum > 0.0;
        SettingError::unless(has_momentum, "momentum", momentum, "above 0 with nesterov")?;
        SettingError::unless_finite("weight_decay", weight_decay)
    }

    fn arithmetic(&self, rate: f64) -> Arithmetic {
        let constants = SgdStep {
            rate: rate as f32,
            decay: self.weight_decay as f32,
            momentum: self.momentum as f32,
        };
        match (self.momentum > 0.0, self.nesterov) {
            (false, _) => Arithmetic::Plain(constants),
            (true, false) => Arithmetic::Momentum(constants),
            (true, true) => Arithmetic::Nesterov(constants),
        }
    }
}

impl From<Sgd> for Optimizer {
    fn from(rule: Sgd) -> Self {
        Self { rule: Rule::Sgd(rule), clip_norm: None, schedule: Schedule::constant() }
    }
}

/// AdamW as `torch.optim.AdamW` defines it, with its defaults: betas 0.9 and 0.999, epsilon 1e-8,
/// weight decay 0.01.
///
/// With g the mean gradient and t the step from 1:
/// `p ← p·(1 − rate·decay)`, `m ← β₁m + (1−β₁)g`, `v ← β₂v + (1−β₂)g²`,
/// `p ← p − rate · (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + ε)`. Two slots: m, then v.
///
/// Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    weight_decay: f64,
}

impl AdamW {
    /// `learning_rate`: at least 0.
    #[must_use]
    pub fn new(learning_rate: f64) -> Self {
        Self { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 }
    }

    /// Sets the decay rates of the first and second moment: at least 0 and below 1.
    #[must_use]
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        Self { beta1, beta2, ..self }
    }

    /// Sets ε, above 0, which prevents a division by zero.
    #[must_use]
    pub fn epsilon(self, epsilon: f64) -> Self {
        Self { epsilon, ..self }
    }

    /// Sets the weight decay, at least 0, which is decoupled from the gradient.
    #[must_use]
    pub fn weight_decay(self, decay: f64) -> Self {
        Self { weight_decay: decay, ..self }
    }

    fn check(&self) -> Result<(), SettingError> {
        let Self { learning_rate, beta1, beta2, epsilon, weight_decay } = *self;
        SettingError::unless_finite("learning_rate", learning_rate)?;
        SettingError::unless_fraction("beta1", beta1)?;
        SettingError::unless_fraction("beta2", beta2)?;
        SettingError::unless(epsilon > 0.0, "epsilon", epsilon, "above 0")?;
        SettingError::unless_finite("weight_decay", weight_decay)
    }

    fn arithmetic(&self, step: u64, rate: f64) -> Arithmetic {
        let Self { beta1, beta2, .. } = *self;
        let t = step.saturating_add(1);
        Arithmetic::AdamW(AdamWStep {
            keep: (1.0 - rate * self.weight_decay) as f32,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            rest1: (1.0 - beta1) as f32,
            rest2: (1.0 - beta2) as f32,
            rate: (rate / (1.0 - power(beta1, t))) as f32,
            correction: (1.0 / (1.0 - power(beta2, t)).sqrt()) as f32,
            epsilon: self.epsilon as f32,
        })
    }
}

impl From<AdamW> for Optimizer {
    fn from(rule: AdamW) -> Self {
        Self { rule: Rule::AdamW(rule), clip_norm: None, schedule: Schedule::constant() }
    }
}

/// Adam as `torch.optim.Adam` defines it, with its defaults: [`AdamW`] without weight decay.
///
/// Kingma & Ba, Adam: A Method for Stochastic Optimization (2015).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam(AdamW);

impl Adam {
    /// `learning_rate`: at least 0.
    #[must_use]
    pub fn new(learning_rate: f64) -> Self {
        Self(AdamW::new(learning_rate).weight_decay(0.0))
    }

    /// See [`AdamW::betas`].
    #[must_use]
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        Self(self.0.betas(beta1, beta2))
    }

    /// See [`AdamW::epsilon`].
    #[must_use]
    pub fn epsilon(self, epsilon: f64) -> Self {
        Self(self.0.epsilon(epsilon))
    }
}

impl From<Adam> for Optimizer {
    fn from(Adam(rule): Adam) -> Self {
        rule.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: [f32; 3] = [1.0, -2.0, 0.5];
    /// Gradient sums over two records: the means are 0.5, -0.25 and 0 in the first step, and -0.1,
    /// 0.2 and 0.3 in the second.
    const SUMS: [[f32; 3]; 2] = [[1.0, -0.5, 0.0], [-0.2, 0.4, 0.6]];

    /// The parameters after each of two steps.
    fn two_steps(optimizer: impl Into<Optimizer>) -> [[f32; 3]; 2] {
        let optimizer = optimizer.into();
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
                norm: None,
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
        near(two_steps(Sgd::new(0.1)), [[0.95, -1.975, 0.5], [0.96, -1.995, 0.47]]);
    }

    #[test]
    fn sgd_with_momentum_matches_torch() {
        // b: 0.5, -0.25, 0, then 0.9b + g: 0.35, -0.025, 0.3.
        let optimizer = Sgd::new(0.1).momentum(0.9);
        near(two_steps(optimizer), [[0.95, -1.975, 0.5], [0.915, -1.9725, 0.47]]);
        // g + 0.9b: 0.95, -0.475, 0, then 0.215, 0.1775, 0.57.
        let optimizer = optimizer.nesterov();
        near(two_steps(optimizer), [[0.905, -1.9525, 0.5], [0.8835, -1.97025, 0.443]]);
    }

    #[test]
    fn a_falling_rate_does_not_shrink_the_accumulated_momentum() {
        // `b` as without a schedule; the second step is half as large.
        let rule = Sgd::new(0.1).momentum(0.9);
        let optimizer = Optimizer::from(rule).schedule(Schedule::step(1, 0.5));
        near(two_steps(optimizer), [[0.95, -1.975, 0.5], [0.9325, -1.97375, 0.485]]);
    }

    #[test]
    fn sgds_weight_decay_is_part_of_the_gradient() {
        // g + 0.1p: 0.6, -0.45, 0.05, then -0.1 + 0.094, 0.2 - 0.1955, 0.3 + 0.0495.
        let optimizer = Sgd::new(0.1).weight_decay(0.1);
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
        let optimizer = AdamW::new(0.01).betas(0.8, 0.9).epsilon(1e-3).weight_decay(0.1);
        near(two_steps(optimizer), expected);
    }

    #[test]
    fn only_gradients_above_the_norm_are_clipped() {
        let apply = |norm: f64| {
            let mut parameters = [0.0; 2];
            let sum = &[6.0, -8.0];
            Optimizer::from(Sgd::new(1.0)).clip_norm(norm).apply(Update {
                step: 0,
                records: 2,
                sum,
                parameters: &mut parameters,
                slots: &mut [],
                norm: None,
            });
            parameters
        };
        // The mean is (3, -4), of norm 5.
        assert_eq!(apply(5.1), [-3.0, 4.0]);
        for (found, expected) in apply(0.5).iter().zip([-0.3, 0.4]) {
            assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn a_gradient_without_a_finite_norm_is_not_applied() {
        for bad in [f32::NAN, f32::INFINITY] {
            let (mut parameters, mut slots, sum) = ([1.0, 2.0], [0.5; 4], &[0.0, bad]);
            let optimizer = Optimizer::from(AdamW::new(0.1)).clip_norm(1.0);
            let (parameters_, slots_) = (&mut parameters, &mut slots);
            optimizer.apply(Update {
                step: 0,
                records: 1,
                sum,
                parameters: parameters_,
                slots: slots_,
                norm: None,
            });
            assert_eq!((parameters, slots), ([1.0, 2.0], [0.5; 4]), "{bad}");
        }
    }

    #[test]
    fn the_schedule_scales_the_rate() {
        let optimizer = Optimizer::from(Sgd::new(0.1)).schedule(Schedule::step(1, 0.5));
        assert_eq!([0, 2].map(|step| optimizer.learning_rate(step)), [0.1, 0.025]);
        near(two_steps(optimizer), [[0.95, -1.975, 0.5], [0.955, -1.985, 0.485]]);
    }

    #[test]
    fn slots_are_counted_and_their_length_is_checked() {
        let momentum = Optimizer::from(Sgd::new(0.1).momentum(0.5));
        let (plain, adam_w) = (Sgd::new(0.1).into(), AdamW::new(0.1).into());
        assert_eq!([plain, momentum, adam_w].map(|o: Optimizer| o.slots()), [0, 1, 2]);
        let wrong = || {
            momentum.apply(Update {
                step: 0,
                records: 1,
                sum: &[0.0],
                parameters: &mut [0.0],
                slots: &mut [0.0; 2],
                norm: None,
            });
        };
        assert!(std::panic::catch_unwind(wrong).is_err());
    }

    #[test]
    fn adam_is_adam_w_without_weight_decay() {
        let adam_w = AdamW::new(0.01).betas(0.8, 0.9).epsilon(1e-3).weight_decay(0.0);
        let adam = Adam::new(0.01).betas(0.8, 0.9).epsilon(1e-3);
        assert_eq!(two_steps(adam), two_steps(adam_w));
    }

    #[test]
    fn a_setting_out_of_range_is_an_error_that_names_it() {
        let sgd = Sgd::new(0.1);
        let adam_w = AdamW::new(0.1);
        let wrong: [(Optimizer, &str); 12] = [
            (Sgd::new(f64::NAN).into(), "learning_rate is NaN"),
            (AdamW::new(-0.1).into(), "learning_rate is -0.1"),
            (Adam::new(f64::INFINITY).into(), "learning_rate is inf"),
            (sgd.momentum(1.0).into(), "momentum is 1,"),
            (sgd.nesterov().into(), "momentum is 0, but must be above 0 with nesterov"),
            (sgd.weight_decay(f64::INFINITY).into(), "weight_decay is inf"),
            (adam_w.betas(-0.1, 0.9).into(), "beta1 is -0.1"),
            (adam_w.betas(0.9, 1.0).into(), "beta2 is 1, but must be at least 0 and below 1"),
            (adam_w.epsilon(0.0).into(), "epsilon is 0"),
            (Optimizer::from(sgd).clip_norm(0.0), "clip_norm is 0, but must be above 0"),
            (Optimizer::from(sgd).schedule(Schedule::cosine(1, 1.5)), "floor is 1.5"),
            (Optimizer::from(sgd).schedule(Schedule::step(1, -1.0)), "factor is -1"),
        ];
        for (optimizer, expected) in wrong {
            let error = optimizer.check().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        let right = [sgd.momentum(0.9).nesterov().into(), adam_w.betas(0.0, 0.5).into()];
        assert_eq!(right.map(|optimizer: Optimizer| optimizer.check()), [Ok(()), Ok(())]);
    }
}
