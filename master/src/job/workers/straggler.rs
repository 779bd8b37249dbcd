//! Stragglers: workers that are markedly slower than their peers.
//!
//! A straggler gets fewer records than its peers, and delays them nevertheless if its share can't
//! get small enough. It is shown in the status, without any other effect: it stays a member, and
//! its work counts.
//!
//! **Invariant:** one slow step marks no worker. Medians of the last reported steps are compared,
//! so most of these must be slow, and for a while.

use std::time::Duration;

use elasticdl_proto::{Committed, RankStep};

use crate::job::time::Time;

/// What a worker did in its last reported steps.
#[derive(Debug, Default)]
pub(crate) struct StepPace {
    /// The last of them.
    last: Option<LastStep>,
    /// Microseconds in the model's code.
    recent_us: [u64; STEPS],
    /// Microseconds that an equal part of the step would have taken.
    recent_even_us: [u64; STEPS],
    /// Number of noted steps.
    noted: usize,
    /// Since when it has been slower than the limit.
    slow_since: Option<Time>,
}

/// A worker's part of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastStep {
    pub(crate) rank: RankStep,
    /// Records of all ranks.
    records: u64,
    /// Mean duration of the reported steps, in microseconds; 0: not known.
    step_us: u64,
}

impl LastStep {
    /// The worker's part of the records, 0 to 1.
    pub(crate) fn share(&self) -> f64 {
        if self.records == 0 { 0.0 } else { self.rank.records as f64 / self.records as f64 }
    }

    /// Whether a good part of the step's time was spent neither in the model's code nor with
    /// reading: waiting for others, and for the transfer.
    pub(crate) fn awaits_network(&self) -> bool {
        self.network_us() > self.step_us / 4
    }

    fn network_us(&self) -> u64 {
        let RankStep { compute_us, input_us, .. } = self.rank;
        self.step_us.saturating_sub(compute_us.saturating_add(input_us))
    }

    /// What most of the step's time went to.
    pub(crate) fn limited_by(&self) -> &'static str {
        let RankStep { compute_us, input_us, .. } = self.rank;
        let network_us = self.network_us();
        let by_time = [(network_us, "network"), (input_us, "input"), (compute_us, "compute")];
        by_time.into_iter().max_by_key(|(us, _)| *us).map_or("compute", |(_, name)| name)
    }
}

impl StepPace {
    /// Notes the last step of a report, in which this worker was `rank`.
    pub(crate) fn note(&mut self, report: &Committed, rank: usize) {
        let Some(&step) = report.ranks.get(rank) else { return };
        let records = report.ranks.iter().map(|rank| rank.records).sum::<u64>();
        let step_us = report.times.step_us.checked_div(report.times.steps).unwrap_or(0);
        self.last = Some(LastStep { rank: step, records, step_us });
        // A step without records says nothing about the worker's speed.
        if step.compute_us > 0 {
            let even = records / report.ranks.len() as u64;
            let even_us = step.compute_us.saturating_mul(even).checked_div(step.records);
            self.recent_us[self.noted % STEPS] = step.compute_us;
            self.recent_even_us[self.noted % STEPS] = even_us.unwrap_or(step.compute_us);
            self.noted += 1;
        }
    }

    pub(crate) fn last(&self) -> Option<&LastStep> {
        self.last.as_ref()
    }

    /// Compares the worker with the members' limit.
    pub(crate) fn compare(&mut self, now: Time, limit_us: u64) {
        let is_slow = self.usual_even_us().is_some_and(|us| us > limit_us);
        self.slow_since = if is_slow { self.slow_since.or(Some(now)) } else { None };
    }

    /// Whether the worker is a straggler.
    pub(crate) fn is_straggler(&self, now: Time) -> bool {
        self.slow_since.is_some_and(|since| now.since(since) >= PATIENCE)
    }

    /// Median compute time, once there are enough steps.
    pub(crate) fn usual_us(&self) -> Option<u64> {
        self.median(self.recent_us)
    }

    /// Like [`usual_us`](Self::usual_us), of equal parts of the steps.
    pub(crate) fn usual_even_us(&self) -> Option<u64> {
        self.median(self.recent_even_us)
    }

    fn median(&self, mut known: [u64; STEPS]) -> Option<u64> {
        let known = &mut known[..self.noted.min(STEPS)];
        (known.len() >= STEPS_MIN).then(|| median(known)).flatten()
    }
}

/// Limit above which a median marks a straggler: 1.5 times the median of `usual_us` (the medians of
/// all members for equal parts), and at least 5 ms more.
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
/// How long a worker must have been slow: busy machines slow down each worker now and then.
const PATIENCE: Duration = Duration::from_secs(10);
const MARGIN_US: u64 = 5000;

#[cfg(test)]
mod tests {
    use super::*;

    fn report(ranks: &[(u64, u64)]) -> Committed {
        let rank = |(records, compute_us): &(u64, u64)| RankStep {
            records: *records,
            compute_us: *compute_us,
            ..RankStep::default()
        };
        Committed { ranks: ranks.iter().map(rank).collect(), ..Committed::default() }
    }

    fn pace(steps: &[u64]) -> StepPace {
        let mut pace = StepPace::default();
        steps.iter().for_each(|&us| pace.note(&report(&[(1, us)]), 0));
        pace
    }

    #[test]
    fn a_slow_worker_with_few_records_is_compared_as_if_it_had_an_equal_part() {
        let mut pace = StepPace::default();
        (0..STEPS).for_each(|_| pace.note(&report(&[(80, 10_000), (40, 10_000)]), 1));
        assert_eq!((pace.usual_us(), pace.usual_even_us()), (Some(10_000), Some(15_000)));
        assert_eq!(pace.last().unwrap().share(), 40.0 / 120.0);
    }

    #[test]
    fn a_step_is_limited_by_what_takes_longest() {
        let limit = |compute_us: u64, input_us: u64, step_us: u64| {
            let mut report = report(&[(1, compute_us)]);
            report.ranks[0].input_us = input_us;
            report.times =
                elasticdl_proto::StepTimes { steps: 2, step_us: 2 * step_us, reduce_us: 0 };
            let mut pace = StepPace::default();
            pace.note(&report, 0);
            let last = pace.last().unwrap();
            (last.limited_by(), last.awaits_network())
        };
        assert_eq!(limit(500, 100, 900), ("compute", true));
        assert_eq!(limit(100, 500, 900), ("input", true));
        assert_eq!(limit(100, 100, 900), ("network", true));
        assert_eq!(limit(600, 80, 900), ("compute", false));
        assert_eq!(limit(0, 0, 0), ("compute", false));
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
        assert_eq!((idle.usual_us(), idle.last().unwrap().rank.compute_us), (Some(10), 0));
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
