//! Stragglers: workers that are markedly slower than their peers.
//!
//! A straggler delays all members at every step. It is shown in the status, without any other
//! effect: it stays a member, and its work counts.
//!
//! **Invariant:** one slow step marks no worker. Medians of the last reported steps are compared,
//! so most of these must be slow.

/// Compute times of a worker's last reported steps.
#[derive(Debug, Default)]
pub(crate) struct StepPace {
    /// Microseconds in the model's code in the last reported step; 0 where it had no records.
    pub(crate) last_us: u64,
    recent_us: [u64; STEPS],
    /// Number of noted steps.
    noted: usize,
}

impl StepPace {
    /// Notes a reported step.
    pub(crate) fn note(&mut self, compute_us: u64) {
        self.last_us = compute_us;
        // A step without records says nothing about the worker's speed.
        if compute_us > 0 {
            self.recent_us[self.noted % STEPS] = compute_us;
            self.noted += 1;
        }
    }

    /// Median compute time, once there are enough steps.
    pub(crate) fn usual_us(&self) -> Option<u64> {
        let mut known = self.recent_us;
        let known = &mut known[..self.noted.min(STEPS)];
        (known.len() >= STEPS_MIN).then(|| median(known)).flatten()
    }
}

/// Limit above which a median marks a straggler: 1.5 times the median of `usual_us` (the medians of
/// all members), and at least 5 ms more.
pub(crate) fn straggler_limit_us(mut usual_us: Vec<u64>) -> Option<u64> {
    let median = median(&mut usual_us)?;
    Some(median.saturating_add(median / 2).max(median.saturating_add(MARGIN_US)))
}

/// The median; of an even number of values the lower one, so that of two workers the slower one is
/// the straggler.
fn median(values: &mut [u64]) -> Option<u64> {
    let middle = values.len().checked_sub(1)? / 2;
    Some(*values.select_nth_unstable(middle).1)
}

/// Number of steps that are compared.
const STEPS: usize = 7;
/// Minimum number of steps for a median.
const STEPS_MIN: usize = 3;
const MARGIN_US: u64 = 5000;

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(steps: &[u64]) -> StepPace {
        let mut pace = StepPace::default();
        steps.iter().for_each(|&us| pace.note(us));
        pace
    }

    #[test]
    fn a_slow_step_now_and_then_changes_no_usual_step() {
        assert_eq!(pace(&[10, 10]).usual_us(), None);
        assert_eq!(pace(&[10, 10, 900]).usual_us(), Some(10));
        let noisy = [10, 900, 10, 10, 800, 10, 12, 700, 10, 11, 10, 10, 900, 900];
        for until in 3..noisy.len() {
            assert!(pace(&noisy[..until]).usual_us().unwrap() <= 12, "after {until} steps");
        }
        assert_eq!(pace(&[&noisy[..], &[900, 900]].concat()).usual_us(), Some(900));
    }

    #[test]
    fn a_worker_without_records_was_not_fast() {
        let idle = pace(&[10, 0, 10, 0, 0, 0, 10, 0]);
        assert_eq!((idle.usual_us(), idle.last_us), (Some(10), 0));
    }

    #[test]
    fn a_straggler_is_half_again_as_slow_and_by_more_than_noise() {
        assert_eq!(straggler_limit_us(vec![]), None);
        assert_eq!(straggler_limit_us(vec![20_000, 90_000, 20_000]), Some(30_000));
        assert_eq!(straggler_limit_us(vec![90_000, 20_000]), Some(30_000));
        // 2 ms against 1 ms is a matter of the scheduler.
        assert_eq!(straggler_limit_us(vec![1000, 1000, 2000]), Some(6000));
        assert_eq!(straggler_limit_us(vec![u64::MAX]), Some(u64::MAX));
    }
}
