//! When a group evaluates its model, how the validation data is split, and how the scores are
//! combined.
//!
//! Records are evaluated in blocks of [`BLOCK_RECORDS`], and the scores of the blocks are added in
//! block order. So the result is bit-identical for any number of ranks.
//!
//! **Invariant:** the evaluation results ([`Evaluation`]) are part of the training state: they
//! travel with it to joining workers and into checkpoints. The ranks of a group hold the same
//! results once they have exchanged headers.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Evaluation settings of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Number of records of the validation data.
    pub records: u64,
    /// Steps between two evaluations; `None`: only at the end of the job.
    pub every: Option<u64>,
    /// Name of the metric that decides which model is best.
    pub metric: String,
    /// Whether the highest value is best, instead of the lowest.
    pub highest: bool,
    /// Number of evaluations without improvement after which the job ends; `None`: unlimited.
    pub patience: Option<u32>,
}

/// Results of the evaluations so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Step of the last evaluation; 0 before the first.
    pub at: u64,
    /// Step and value of the best evaluation.
    pub best: Option<(u64, f64)>,
    /// Number of evaluations since the best one.
    pub stale: u32,
    /// Whether the state is to be evaluated before the next step: it was restored from a checkpoint
    /// of another job, whose last evaluation it may lack.
    #[serde(default)]
    pub is_due: bool,
}

/// Scores of one rank for consecutive blocks: sums over their records, by metric.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// Number of records of the validation data that this rank sees.
    pub records: u64,
    pub first_block: u64,
    pub blocks: Vec<BTreeMap<String, f64>>,
    /// Whether this rank's evaluation failed. Its next header says why.
    pub failed: bool,
}

impl Plan {
    /// Whether to evaluate the state of `step`. `ends`: whether it is the last one.
    pub fn is_due(&self, known: &Evaluation, step: u64, ends: bool) -> bool {
        let passed = self.every.is_some_and(|every| step / every > known.at / every);
        step > known.at && (passed || ends || known.is_due)
    }

    /// Whether the patience is exhausted.
    pub fn stops_early(&self, known: &Evaluation) -> bool {
        self.patience.is_some_and(|patience| known.stale >= patience)
    }

    /// Takes in the means of `step`.
    pub fn note(&self, known: &mut Evaluation, step: u64, means: &BTreeMap<String, f64>) {
        (known.at, known.is_due) = (step, false);
        known.stale = known.stale.saturating_add(1);
        let Some(&value) = means.get(&self.metric) else { return };
        let is_better = |best: f64| if self.highest { value > best } else { value < best };
        if value.is_finite() && known.best.is_none_or(|(_, best)| is_better(best)) {
            (known.best, known.stale) = (Some((step, value)), 0);
        }
    }

    /// Blocks that each rank evaluates. `serve_tables`: the ranks that evaluate none, unless all
    /// are such.
    pub fn shares(&self, serve_tables: &[bool]) -> Vec<Range<u64>> {
        let blocks = u128::from(self.records.div_ceil(BLOCK_RECORDS));
        let all_serve = !serve_tables.contains(&false);
        let evaluates = |rank: &usize| all_serve || !serve_tables[*rank];
        let of = (0..serve_tables.len()).filter(evaluates).count() as u128;
        let (mut before, mut start) = (0, 0);
        let share = |rank: usize| {
            before += u128::from(evaluates(&rank));
            let end = (blocks * before / of) as u64;
            std::mem::replace(&mut start, end)..end
        };
        (0..serve_tables.len()).map(share).collect()
    }

    /// Records of a block.
    pub fn block(&self, block: u64) -> Range<u64> {
        let start = block * BLOCK_RECORDS;
        start..self.records.min(start + BLOCK_RECORDS)
    }

    /// Combines the scores of all ranks into means over all records, by metric.
    ///
    /// # Errors
    /// The ranks have different validation data, or none of the metrics has the configured name.
    pub fn combine(&self, ranks: &[Scores]) -> Result<BTreeMap<String, f64>, String> {
        let mut sums: BTreeMap<String, f64> = BTreeMap::new();
        let mut next = 0;
        for (rank, scores) in ranks.iter().enumerate() {
            if scores.records != self.records || scores.first_block != next {
                return Err(format!(
                    "rank {rank} evaluates blocks from {} on of {} records where {next} of {} was \
                     expected; all workers must see the same validation data",
                    scores.first_block, scores.records, self.records
                ));
            }
            next += scores.blocks.len() as u64;
            for (name, sum) in scores.blocks.iter().flatten() {
                *sums.entry(name.clone()).or_default() += sum;
            }
        }
        self.check_metric(&sums)?;
        Ok(sums.into_iter().map(|(name, sum)| (name, sum / self.records as f64)).collect())
    }
}

impl Plan {
    /// Checks that the model gives the metric that decides. `sums`: its metrics.
    ///
    /// # Errors
    /// It does not; the text names those that it gives.
    pub fn check_metric(&self, sums: &BTreeMap<String, f64>) -> Result<(), String> {
        if sums.contains_key(&self.metric) {
            return Ok(());
        }
        let known: Vec<&str> = sums.keys().map(String::as_str).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        Err(format!(
            "there is no metric `{}`; the model's evaluate() gives: {known}; \
             --best-metric names one of them",
            self.metric
        ))
    }
}

/// Few enough records for the memory of most models (a model can ask for fewer), and enough that a
/// block is worth its overhead.
pub const BLOCK_RECORDS: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            records: 1000,
            every: Some(10),
            metric: "loss".into(),
            patience: Some(2),
            ..Plan::default()
        }
    }

    fn means(loss: f64) -> BTreeMap<String, f64> {
        BTreeMap::from([("loss".into(), loss)])
    }

    #[test]
    fn an_evaluation_is_due_after_each_interval_and_at_the_end() {
        let (plan, at) = (plan(), |at| Evaluation { at, ..Evaluation::default() });
        let due = |known, step, ends| plan.is_due(&at(known), step, ends);
        assert!(!due(0, 9, false) && due(0, 10, false) && due(0, 13, false) && !due(10, 19, false));
        assert!(due(10, 12, true) && !due(12, 12, true) && !due(0, 0, true));
        let last = Plan { every: None, ..plan.clone() };
        assert!(!last.is_due(&at(0), 10, false) && last.is_due(&at(0), 10, true));
    }

    #[test]
    fn the_best_evaluation_is_recorded_and_the_job_stops_when_the_patience_is_exhausted() {
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
        assert_eq!(known, Evaluation { at: 50, best: Some((50, 1.0)), stale: 0, is_due: false });
        let highest = Plan { highest: true, ..plan };
        highest.note(&mut known, 60, &means(1.5));
        assert_eq!(known.best, Some((60, 1.5)));
    }

    #[test]
    fn the_result_is_bit_identical_for_any_number_of_ranks() {
        let plan = plan();
        // Sums whose rounding depends on their order.
        let score = |block: u64| means(0.1 + 1e15 / (block as f64 + 3.0));
        let combined = |serve_tables: &[bool]| {
            let scores = |share: Range<u64>| {
                let first_block = share.start;
                let blocks = share.map(score).collect();
                Scores { records: 1000, first_block, blocks, failed: false }
            };
            let all: Vec<Scores> = plan.shares(serve_tables).into_iter().map(scores).collect();
            plan.combine(&all).unwrap()["loss"].to_bits()
        };
        let alone = combined(&[false]);
        assert!((1..9).all(|world_size| combined(&vec![false; world_size]) == alone));
        // Table servers evaluate no blocks, unless they are alone.
        let with_servers = [true, false, true, false, true];
        assert_eq!(plan.shares(&with_servers), [0..0, 0..2, 2..2, 2..4, 4..4]);
        assert_eq!(combined(&with_servers), alone);
        assert_eq!(plan.shares(&[true, true]), [0..2, 2..4]);
        let records: Vec<u64> = (0..4).flat_map(|block| plan.block(block)).collect();
        assert_eq!(records, Vec::from_iter(0..1000));
    }

    #[test]
    fn an_error_names_ranks_with_other_data_and_missing_metrics() {
        let plan = plan();
        let blocks = vec![means(1.0); 4];
        let one = Scores { records: 1000, first_block: 0, blocks, failed: false };
        assert_eq!(plan.combine(std::slice::from_ref(&one)), Ok(means(4.0 / 1000.0)));
        let other = Scores { records: 999, first_block: 4, ..Scores::default() };
        assert!(plan.combine(&[one.clone(), other]).unwrap_err().contains("rank 1"));
        let accuracy = Plan { metric: "accuracy".into(), ..plan };
        assert!(accuracy.combine(&[one]).unwrap_err().contains("gives: loss"));
    }
}
