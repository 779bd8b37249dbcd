//! Who is slow.
//!
//! A worker that computes markedly longer than its peers holds all of them up at every step. It is
//! shown, and nothing else: it lives, and its work counts.
//!
//! **Invariant:** one slow step marks nobody. What is compared is the median of a worker's last
//! reported steps, and most of these must be slow.

/// How long a worker's last reported steps took it.
#[derive(Debug, Default)]
pub(super) struct StepPace {
    /// Microseconds in the model's code in the last reported step; 0 where it had no records.
    pub(super) last_us: u64,
    recent_us: [u64; STEPS],
    /// As many steps as a job has fit.
    noted: usize,
}

impl StepPace {
    /// Takes in a reported step.
    pub(super) fn note(&mut self, compute_us: u64) {
        self.last_us = compute_us;
        // Who had nothing to compute was not fast.
        if compute_us > 0 {
            self.recent_us[self.noted % STEPS] = compute_us;
            self.noted += 1;
        }
    }

    /// Its usual step, once there are enough to tell.
    pub(super) fn usual_us(&self) -> Option<u64> {
        let mut known = self.recent_us;
        let known = &mut known[..self.noted.min(STEPS)];
        (known.len() >= STEPS_MIN).then(|| median(known)).flatten()
    }
}

/// Above this, a usual step is a straggler's, where `usual_us` are those of all members: 1.5 times
/// their median, and 5 ms more than it.
pub(super) fn straggler_limit_us(mut usual_us: Vec<u64>) -> Option<u64> {
    let median = median(&mut usual_us)?;
    Some(median.saturating_add(median / 2).max(median.saturating_add(MARGIN_US)))
}

/// Of an even number the lower one: of two workers the slower one is the straggler.
fn median(values: &mut [u64]) -> Option<u64> {
    let middle = values.len().checked_sub(1)? / 2;
    Some(*values.select_nth_unstable(middle).1)
}

/// Steps that are looked at.
const STEPS: usize = 7;
/// Fewer tell nothing.
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
