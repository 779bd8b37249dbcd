//! When a group evaluates its model, how the validation data is split, and what is made of the
//! scores.
//!
//! Records are evaluated in blocks of [`BLOCK_RECORDS`], whoever does it, and the blocks' scores
//! are added in their order. So the result is the same, bit for bit, for any number of ranks.
//!
//! **Invariant:** what is remembered ([`Evaluation`]) is part of the training state: it goes with
//! it to newcomers and into checkpoints. Ranks of a group hold the same, once they have heard one
//! another.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// What a job wants evaluated.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Records of the validation data.
    pub records: u64,
    /// After so many steps; `None`: at the job's end alone.
    pub every: Option<u64>,
    /// The metric that tells which model is best.
    pub metric: String,
    /// The best is the one with the highest value, not the lowest.
    pub highest: bool,
    /// After so many evaluations without a better one the job ends; `None`: it goes on.
    pub patience: Option<u32>,
}

/// What is remembered of evaluations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The step of the last one; 0 before the first.
    pub at: u64,
    /// The step of the best one, and its value.
    pub best: Option<(u64, f64)>,
    /// Evaluations since the best one.
    pub stale: u32,
}

/// One rank's scores: of blocks one behind the other, sums over their records by metric.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// Records of the validation data, as this rank knows it.
    pub records: u64,
    pub first_block: u64,
    pub blocks: Vec<BTreeMap<String, f64>>,
}

impl Plan {
    /// Whether the state of `step` is to be evaluated. `ends`: there will be no later one.
    pub fn is_due(&self, known: &Evaluation, step: u64, ends: bool) -> bool {
        let passed = self.every.is_some_and(|every| step / every > known.at / every);
        step > known.at && (passed || ends)
    }

    /// Whether nothing better is to be expected.
    pub fn stops_early(&self, known: &Evaluation) -> bool {
        self.patience.is_some_and(|patience| known.stale >= patience)
    }

    /// Takes in the means of `step`.
    pub fn note(&self, known: &mut Evaluation, step: u64, means: &BTreeMap<String, f64>) {
        known.at = step;
        known.stale = known.stale.saturating_add(1);
        let Some(&value) = means.get(&self.metric) else { return };
        let is_better = |best: f64| if self.highest { value > best } else { value < best };
        if value.is_finite() && known.best.is_none_or(|(_, best)| is_better(best)) {
            (known.best, known.stale) = (Some((step, value)), 0);
        }
    }

    /// The blocks that `rank` evaluates.
    pub fn share(&self, rank: usize, world_size: usize) -> Range<u64> {
        let blocks = u128::from(self.records.div_ceil(BLOCK_RECORDS));
        let at = |rank: usize| (blocks * rank as u128 / world_size as u128) as u64;
        at(rank)..at(rank + 1)
    }

    /// The records of a block.
    pub fn block(&self, block: u64) -> Range<u64> {
        let start = block * BLOCK_RECORDS;
        start..self.records.min(start + BLOCK_RECORDS)
    }

    /// Means over all records, by metric, from all ranks' scores.
    ///
    /// # Errors
    /// The ranks have different validation data, or the metric that is wanted is not among them.
    pub fn combine(&self, ranks: &[Scores]) -> Result<BTreeMap<String, f64>, String> {
        let mut sums: BTreeMap<String, f64> = BTreeMap::new();
        let mut next = 0;
        for (rank, scores) in ranks.iter().enumerate() {
            if scores.records != self.records || scores.first_block != next {
                return Err(format!(
                    "rank {rank} evaluates blocks from {} on of {} records where {next} of {} was expected; all workers \
                     must see the same validation data",
                    scores.first_block, scores.records, self.records
                ));
            }
            next += scores.blocks.len() as u64;
            for (name, sum) in scores.blocks.iter().flatten() {
                *sums.entry(name.clone()).or_default() += sum;
            }
        }
        if !sums.contains_key(&self.metric) {
            let known = sums.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(format!(
                "there is no metric `{}`; the model's evaluate() gives: {known}",
                self.metric
            ));
        }
        Ok(sums.into_iter().map(|(name, sum)| (name, sum / self.records as f64)).collect())
    }
}

/// Few enough for any model's memory, as far as it does not want fewer; many enough that a block is
/// worth its overhead.
pub const BLOCK_RECORDS: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            records: 1000,
            every: Some(10),
            metric: "loss".into(),
            highest: false,
            patience: Some(2),
        }
    }

    fn means(loss: f64) -> BTreeMap<String, f64> {
        BTreeMap::from([("loss".into(), loss)])
    }

    #[test]
    fn one_is_due_whenever_an_interval_is_passed_and_at_the_end() {
        let (plan, at) = (plan(), |at| Evaluation { at, ..Evaluation::default() });
        let due = |known, step, ends| plan.is_due(&at(known), step, ends);
        assert!(!due(0, 9, false) && due(0, 10, false) && due(0, 13, false) && !due(10, 19, false));
        assert!(due(10, 12, true) && !due(12, 12, true) && !due(0, 0, true));
        let last = Plan { every: None, ..plan.clone() };
        assert!(!last.is_due(&at(0), 10, false) && last.is_due(&at(0), 10, true));
    }

    #[test]
    fn the_best_one_is_remembered_and_after_some_that_are_not_better_it_is_enough() {
        let plan = plan();
        let mut known = Evaluation::default();
        for (step, loss, best, stops_early) in [
            (10, 3.0, 10, false),
            (20, 2.0, 20, false),
            (30, 2.0, 20, false),
            (40, f64::NEG_INFINITY, 20, true),
        ] {
            plan.note(&mut known, step, &means(loss));
            assert_eq!(
                (known.at, known.best.unwrap().0, plan.stops_early(&known)),
                (step, best, stops_early)
            );
        }
        plan.note(&mut known, 50, &means(1.0));
        assert_eq!(known, Evaluation { at: 50, best: Some((50, 1.0)), stale: 0 });
        let highest = Plan { highest: true, ..plan };
        highest.note(&mut known, 60, &means(1.5));
        assert_eq!(known.best, Some((60, 1.5)));
    }

    #[test]
    fn whoever_evaluates_the_result_is_the_same_to_the_bit() {
        let plan = plan();
        // Sums that depend on their order, if anything does.
        let score = |block: u64| means(0.1 + 1e15 / (block as f64 + 3.0));
        let combined = |world_size: usize| {
            let scores = |rank| {
                let share = plan.share(rank, world_size);
                let first_block = share.start;
                Scores { records: 1000, first_block, blocks: share.map(score).collect() }
            };
            plan.combine(&(0..world_size).map(scores).collect::<Vec<_>>()).unwrap()["loss"]
                .to_bits()
        };
        assert!((1..9).all(|world_size| combined(world_size) == combined(1)));
        let records: Vec<u64> = (0..4).flat_map(|block| plan.block(block)).collect();
        assert_eq!(records, Vec::from_iter(0..1000));
    }

    #[test]
    fn ranks_with_other_data_and_metrics_that_are_missing_are_named() {
        let plan = plan();
        let one = Scores { records: 1000, first_block: 0, blocks: vec![means(1.0); 4] };
        assert_eq!(plan.combine(std::slice::from_ref(&one)), Ok(means(4.0 / 1000.0)));
        let other = Scores { records: 999, first_block: 4, blocks: Vec::new() };
        assert!(plan.combine(&[one.clone(), other]).unwrap_err().contains("rank 1"));
        let accuracy = Plan { metric: "accuracy".into(), ..plan };
        assert!(accuracy.combine(&[one]).unwrap_err().contains("gives: loss"));
    }
}
