//! Learning rate schedules.
//!
//! **Invariant:** a schedule is a pure function of the step, computed only with operations that
//! IEEE 754 defines exactly (`+ − × ÷`). The system's `cos` and `pow` differ in the last bit
//! between processors, which would make replicas diverge.

/// Factor of the learning rate at each step.
///
/// A step is one update of the parameters, counted from 0, whatever the number of workers. So a
/// schedule means the same at any world size, as long as the global batch is the same.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Schedule {
    /// Always 1.
    #[default]
    Constant,
    /// Rises linearly to 1 during `warm_up` steps, then follows half a cosine down to `floor` at
    /// step `total`, and stays there.
    ///
    /// Loshchilov & Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts (2017), without
    /// the restarts.
    Cosine {
        /// Number of warm-up steps: the factor of step `s < warm_up` is `(s + 1) / warm_up`.
        warm_up: u64,
        /// Step at which the floor is reached, warm-up included. If it is not above `warm_up`, the
        /// factor drops to the floor directly.
        total: u64,
        /// Final factor, from 0 to 1.
        floor: f64,
    },
    /// Multiplied by `factor` after each `every` steps (`torch.optim.lr_scheduler.StepLR`).
    Step {
        /// Steps between two changes; 0 means 1.
        every: u64,
        /// Factor of each change.
        factor: f64,
    },
    /// Rises linearly to 1 during `steps` steps and stays there.
    WarmUp {
        /// Number of warm-up steps: the factor of step `s < steps` is `(s + 1) / steps`.
        steps: u64,
    },
}

impl Schedule {
    /// A constant learning rate.
    pub const fn constant() -> Self {
        Self::Constant
    }

    /// Factor of the learning rate at `step`.
    pub fn factor(&self, step: u64) -> f64 {
        match *self {
            Self::Constant => 1.0,
            Self::Cosine { warm_up, .. } | Self::WarmUp { steps: warm_up } if step < warm_up => {
                (step as f64 + 1.0) / warm_up as f64
            }
            Self::WarmUp { .. } => 1.0,
            Self::Cosine { warm_up, total, floor } if step < total => {
                let done = (step - warm_up) as f64 / (total - warm_up) as f64;
                floor + (1.0 - floor) * 0.5 * (1.0 + cosine_of_half_turns(done))
            }
            Self::Cosine { floor, .. } => floor,
            Self::Step { every, factor } => power(factor, step / every.max(1)),
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
        let schedule = Schedule::Cosine { warm_up: 4, total: 12, floor: 0.2 };
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
            let schedule = Schedule::Cosine { warm_up: 4, total, floor: 0.5 };
            assert_eq!(
                [0, 3, 4, 5].map(|step| schedule.factor(step)),
                [0.25, 1.0, 0.5, 0.5],
                "total {total}"
            );
        }
        assert_eq!(Schedule::Cosine { warm_up: 0, total: 0, floor: 0.5 }.factor(0), 0.5);
        assert_eq!(Schedule::Cosine { warm_up: 0, total: 1, floor: 0.5 }.factor(0), 1.0);
    }

    #[test]
    fn step_schedules_multiply_and_warm_ups_end() {
        let step = Schedule::Step { every: 3, factor: 0.5 };
        assert_eq!([0, 2, 3, 5, 6, 9].map(|at| step.factor(at)), [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]);
        assert_eq!(Schedule::Step { every: 0, factor: 0.5 }.factor(2), 0.25);
        assert_eq!(step.factor(u64::MAX), 0.0);
        let warm_up = Schedule::WarmUp { steps: 2 };
        assert_eq!([0, 1, 2, u64::MAX].map(|at| warm_up.factor(at)), [0.5, 1.0, 1.0, 1.0]);
        assert_eq!(Schedule::WarmUp { steps: 0 }.factor(0), 1.0);
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
