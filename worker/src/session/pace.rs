//! How fast a rank computes, and what that means for its share of a step.
//!
//! A rank publishes a smoothed time per record in its headers. What it publishes changes only when
//! the smoothed value has moved by an eighth, and ranks whose times differ by less than an eighth
//! count as equal. So the shares of equal ranks are equal, and what a rank reads ahead stays valid.

/// Measures the time per record of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pace {
    /// Whether a step has been measured. The first one, which warms caches up, does not count.
    is_warm: bool,
    /// Time per record, in nanoseconds, smoothed over steps; 0: not known.
    smoothed: u64,
    /// That of the last step alone.
    last: u64,
    published: u64,
}

impl Pace {
    /// Takes in a committed step: this rank's records in it, and its time in the model's code, in
    /// microseconds.
    pub(super) fn note(&mut self, records: u64, compute_us: u64) {
        if records == 0 {
            // A rank too slow for any share is measured again from time to time.
            self.smoothed -= self.smoothed / FORGETTING;
        } else if !std::mem::replace(&mut self.is_warm, true) {
            return;
        } else {
            let cost = (compute_us.saturating_mul(1000) / records).clamp(1, COST_MAX);
            let last = std::mem::replace(&mut self.last, cost);
            self.smoothed = match self.smoothed {
                0 => cost,
                before => changed(before, last.min(cost), last.max(cost))
                    .unwrap_or_else(|| (before * (SMOOTHING - 1) + cost).div_ceil(SMOOTHING)),
            };
        }
        if self.smoothed.abs_diff(self.published) > self.published / TOLERANCE {
            self.published = self.smoothed;
        }
    }

    /// Time per record that this rank publishes, in nanoseconds; 0: not known.
    pub(super) fn cost(&self) -> u64 {
        self.published
    }
}

/// What has become of a time if the least and the most of the last two steps are on the same side
/// of it, and not near: a host has got or lost a part of its cores. Of the two the nearer one.
fn changed(before: u64, least: u64, most: u64) -> Option<u64> {
    let margin = before / JUMP;
    if least > before + margin { Some(least) } else { (most < before - margin).then_some(most) }
}

/// Times per record, from nanoseconds to a unit in which they are small: [`EQUAL`] for the fastest
/// rank and all that are about as fast, at most 64 times that. A rank whose time is not known is
/// an average one.
pub(super) fn relative_costs(costs: &[u64]) -> Vec<u64> {
    let known = || costs.iter().copied().filter(|cost| *cost > 0).map(|cost| cost.min(COST_MAX));
    let Some(fastest) = known().min() else { return vec![EQUAL; costs.len()] };
    let mean = known().sum::<u64>() / known().count() as u64;
    let relative = |cost: &u64| {
        let cost = if *cost == 0 { mean } else { (*cost).min(COST_MAX) };
        let relative = (cost * EQUAL + fastest / 2) / fastest;
        if relative <= EQUAL + EQUAL / TOLERANCE { EQUAL } else { relative.min(SLOWEST) }
    };
    costs.iter().map(relative).collect()
}

/// Relative time per record of the fastest rank.
const EQUAL: u64 = 16;

/// Relative time per record of a rank that is slower by any factor above this.
const SLOWEST: u64 = 64 * EQUAL;

/// Part by which a time must change to have an effect.
const TOLERANCE: u64 = 8;

/// Number of steps over which times are smoothed.
const SMOOTHING: u64 = 4;

/// A time that is off by more than this part in two steps, one after the other, is no chance.
const JUMP: u64 = 4;

/// A rank without records forgets this part of its time per step.
const FORGETTING: u64 = 16;

/// Longest time per record that makes a difference to others: an hour.
const COST_MAX: u64 = 3_600_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn pace_of(costs_us: &[u64]) -> Pace {
        let mut pace = Pace::default();
        costs_us.iter().for_each(|us| pace.note(1, *us));
        pace
    }

    #[test]
    fn the_first_step_does_not_count_and_small_changes_are_not_published() {
        assert_eq!(pace_of(&[900]).cost(), 0);
        assert_eq!(pace_of(&[900, 100]).cost(), 100_000);
        assert_eq!(pace_of(&[900, 100, 110, 90, 110, 90]).cost(), 100_000);
        let slower = pace_of(&[[900, 100].as_slice(), &[200; 20]].concat()).cost();
        assert!((175_000..=200_000).contains(&slower), "{slower}");
    }

    #[test]
    fn a_time_that_has_changed_is_known_after_two_steps_and_a_slow_step_changes_little() {
        let before = [900, 100, 100, 100];
        for (after, expected) in [(200, 200_000), (400, 400_000), (50, 50_000), (90, 100_000)] {
            let changed = pace_of(&[before.as_slice(), &[after; 2]].concat());
            assert_eq!(changed.cost(), expected, "{changed:?}");
        }
        let outlier = pace_of(&[before.as_slice(), &[300, 100, 100, 100]].concat());
        assert!(outlier.smoothed < 125_000, "{outlier:?}");
        // Of two steps that differ, the nearer one counts.
        assert_eq!(pace_of(&[before.as_slice(), &[900, 500]].concat()).cost(), 500_000);
    }

    #[test]
    fn a_rank_without_records_is_measured_again_at_some_time() {
        let mut pace = pace_of(&[1, 64_000]);
        assert_eq!(relative_costs(&[pace.cost(), 1_000_000])[0], SLOWEST);
        (0..100).for_each(|_| pace.note(0, 0));
        assert!(pace.cost() < 1_000_000, "{pace:?}");
    }

    #[test]
    fn similar_ranks_are_equal_and_others_are_in_proportion() {
        assert_eq!(relative_costs(&[0, 0]), [16, 16]);
        assert_eq!(relative_costs(&[1000, 1100, 0]), [16, 16, 16]);
        assert_eq!(relative_costs(&[1000, 2000, 1000]), [16, 32, 16]);
        assert_eq!(relative_costs(&[1, u64::MAX]), [16, SLOWEST]);
    }
}
