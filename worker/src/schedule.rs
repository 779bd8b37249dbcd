//! Learning rate schedules.
//!
//! **Invariant:** a schedule is a pure function of the step, computed only with operations that
//! IEEE 754 defines exactly (`+ − × ÷`). The system's `cos` and `pow` differ in the last bit
//! between processors, which would make replicas diverge.

use crate::setting_error::SettingError;

/// Factor of the learning rate at each step.
///
/// A step is one update of the parameters, counted from 0, whatever the number of workers. So a
/// schedule means the same at any world size, as long as the global batch is the same.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Schedule {
    /// Number of warm-up steps: the factor of step `s < warmup` is `(s + 1) / warmup`.
    warmup: u64,
    /// What follows the warm-up.
    decay: Decay,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Decay {
    #[default]
    Constant,
    Cosine {
        total: u64,
        floor: f64,
    },
    Step {
        every: u64,
        factor: f64,
    },
}

impl Schedule {
    /// Always 1.
    #[must_use]
    pub const fn constant() -> Self {
        Self { warmup: 0, decay: Decay::Constant }
    }

    /// Follows half a cosine from 1 down to `floor`, from 0 to 1, at step `total`, and stays there.
    /// `total` includes the warm-up; if it is not above it, the factor drops to the floor directly.
    ///
    /// Loshchilov & Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts (2017), without
    /// the restarts.
    #[must_use]
    pub const fn cosine(total: u64, floor: f64) -> Self {
        Self { warmup: 0, decay: Decay::Cosine { total, floor } }
    }

    /// Multiplies by `factor`, at least 0, after each `every` steps
    /// (`torch.optim.lr_scheduler.StepLR`); 0 steps mean 1.
    #[must_use]
    pub const fn step(every: u64, factor: f64) -> Self {
        Self { warmup: 0, decay: Decay::Step { every, factor } }
    }

    /// Rises linearly to 1 during the first `steps` steps, and is as before from there on.
    #[must_use]
    pub const fn warmup(self, steps: u64) -> Self {
        Self { warmup: steps, ..self }
    }

    /// Factor of the learning rate at `step`.
    pub fn factor(&self, step: u64) -> f64 {
        let Self { warmup, decay } = *self;
        if step < warmup {
            return (step as f64 + 1.0) / warmup as f64;
        }
        match decay {
            Decay::Constant => 1.0,
            Decay::Cosine { total, floor } if step < total => {
                let done = (step - warmup) as f64 / (total - warmup) as f64;
                floor + (1.0 - floor) * 0.5 * (1.0 + cosine_of_half_turns(done))
            }
            Decay::Cosine { floor, .. } => floor,
            Decay::Step { every, factor } => power(factor, step / every.max(1)),
        }
    }

    pub(crate) fn check(&self) -> Result<(), SettingError> {
        match self.decay {
            Decay::Constant => Ok(()),
            Decay::Cosine { floor, .. } => {
                let is_valid = (0.0..=1.0).contains(&floor);
                SettingError::unless(is_valid, "floor", floor, "from 0 to 1")
            }
            Decay::Step { factor, .. } => SettingError::unless_finite("factor", factor),
        }
    }
}

/// `base` to the power of `exponent`, by squaring.
pub(crate) fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut rest) = (1.0, base, exponent);
    while rest > 0 {
        if rest & 1 == 1 {
            result *= square;
        }
        square *= square;
        rest >>= 1;
    }
    result
}

/// cos(π·x) for x in [0, 1], within 1e-15: the power series around 0 for x ≤ 0.5, and by symmetry
/// beyond that.
fn cosine_of_half_turns(x: f64) -> f64 {
    use std::f64::consts::PI;
    if x > 0.5 {
        return -cosine_of_half_turns(1.0 - x);
    }
    let square = (PI * x) * (PI * x);
    let (mut term, mut sum) = (1.0, 1.0);
    for k in 1..=12 {
        term *= -square / f64::from((2 * k - 1) * (2 * k));
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-14, "{found} is not {expected}");
    }

    #[test]
    fn a_cosine_schedule_warms_up_linearly_and_ends_at_its_floor() {
        let schedule = Schedule::cosine(12, 0.2).warmup(4);
        for (step, expected) in
            [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (8, 0.6), (12, 0.2), (13, 0.2)]
        {
            near(schedule.factor(step), expected);
        }
        // A quarter of the way down: (1 + cos 45°) / 2 of the distance is left.
        near(schedule.factor(6), 0.2 + 0.8 * (1.0 + 0.5f64.sqrt()) / 2.0);
        near(schedule.factor(10), 0.2 + 0.8 * (1.0 - 0.5f64.sqrt()) / 2.0);
        near(schedule.factor(u64::MAX), 0.2);
    }

    #[test]
    fn a_cosine_schedule_shorter_than_its_warm_up_drops_to_the_floor() {
        for total in [0, 3, 4] {
            let schedule = Schedule::cosine(total, 0.5).warmup(4);
            assert_eq!(
                [0, 3, 4, 5].map(|step| schedule.factor(step)),
                [0.25, 1.0, 0.5, 0.5],
                "total {total}"
            );
        }
        assert_eq!(Schedule::cosine(0, 0.5).factor(0), 0.5);
        assert_eq!(Schedule::cosine(1, 0.5).factor(0), 1.0);
    }

    #[test]
    fn step_schedules_multiply_and_warm_ups_end() {
        let step = Schedule::step(3, 0.5);
        assert_eq!([0, 2, 3, 5, 6, 9].map(|at| step.factor(at)), [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]);
        assert_eq!(Schedule::step(0, 0.5).factor(2), 0.25);
        assert_eq!(step.factor(u64::MAX), 0.0);
        let warmup = Schedule::constant().warmup(2);
        assert_eq!([0, 1, 2, u64::MAX].map(|at| warmup.factor(at)), [0.5, 1.0, 1.0, 1.0]);
        assert_eq!(Schedule::constant().factor(0), 1.0);
        let both = step.warmup(4);
        assert_eq!([0, 3, 4, 6].map(|at| both.factor(at)), [0.25, 1.0, 0.5, 0.25]);
        assert_eq!([0, u64::MAX].map(|at| Schedule::constant().factor(at)), [1.0, 1.0]);
    }

    #[test]
    fn exact_functions_agree_with_the_system_library() {
        for k in 0..=1000 {
            let x = f64::from(k) / 1000.0;
            near(cosine_of_half_turns(x), (std::f64::consts::PI * x).cos());
        }
        for exponent in [0, 1, 2, 3, 10, 777] {
            near(power(0.999, exponent), 0.999f64.powi(exponent as i32));
        }
    }
}
