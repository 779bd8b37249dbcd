//! Results of an inference job's shards.
//!
//! A shard's result depends on the shard alone, not on its worker, and results are added in the
//! order of the shards. So the total is bit-identical for any number of workers and any failures.
//!
//! **Invariant:** stored results do not grow with the job, except for results that wait for a
//! slower shard before them.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::RecordRange;
use elasticdl_proto::limits::METRICS_MAX;
use serde::{Deserialize, Serialize};

use crate::job::time::Time;

/// Sums of metrics over records, by name.
pub(crate) type Sums = BTreeMap<String, f64>;

/// The results of the shards so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ShardResults {
    /// The results of all records before this one are in `sums`.
    before: u64,
    sums: Sums,
    /// Results of later shards, by their first record: where each ends, and its sums.
    later: BTreeMap<u64, (u64, Sums)>,
    /// Time of the last write.
    #[serde(skip)]
    written: Time,
}

impl ShardResults {
    /// Adds the sums of a shard. A metric that a shard lacks counts as 0 there.
    ///
    /// # Errors
    /// There are too many metrics.
    pub(super) fn add(&mut self, range: RecordRange, sums: Sums) -> Result<(), String> {
        if sums.keys().filter(|name| !self.sums.contains_key(*name)).count() + self.sums.len()
            > METRICS_MAX
        {
            return Err(format!("with {range} there are more than {METRICS_MAX} metrics"));
        }
        self.later.insert(range.start, (range.end, sums));
        while let Some(first) = self.later.first_entry().filter(|first| *first.key() == self.before)
        {
            let (end, sums) = first.remove();
            for (name, sum) in sums {
                // Not `0.0 + sum`, which would turn -0 into 0.
                self.sums.entry(name).and_modify(|all| *all += sum).or_insert(sum);
            }
            self.before = end;
        }
        Ok(())
    }

    /// The results as far as the persisted job has space for them. After a take-over the others are
    /// computed again.
    pub(crate) fn kept(&self) -> Self {
        let mut bytes_left = LATER_KEPT_BYTES_MAX;
        let later = self.later.iter().take(LATER_KEPT_MAX).take_while(|(_, (_, sums))| {
            let bytes =
                RESULT_BYTES + sums.keys().map(|name| name.len() + SUM_BYTES).sum::<usize>();
            let fits = bytes <= bytes_left;
            bytes_left = bytes_left.saturating_sub(bytes);
            fits
        });
        let later = later.map(|(&start, done)| (start, done.clone())).collect();
        Self { before: self.before, sums: self.sums.clone(), later, written: self.written }
    }

    /// Whether a write is due at `now`; the next one is due a while later.
    pub(crate) fn is_write_due(&mut self, now: Time) -> bool {
        let is_due = now.since(self.written) >= WRITE_EVERY;
        if is_due {
            self.written = now;
        }
        is_due
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = RecordRange> + '_ {
        let later =
            self.later.iter().map(|(&start, &(end, _))| RecordRange { epoch: 0, start, end });
        let before = RecordRange { epoch: 0, start: 0, end: self.before };
        std::iter::once(before).filter(|range| !range.is_empty()).chain(later)
    }

    /// Means over all `records`, once all are done; `None` for a mean that is not finite.
    pub(crate) fn means(&self, records: u64) -> Option<BTreeMap<String, Option<f64>>> {
        let done = records > 0 && self.before == records && !self.sums.is_empty();
        let finite = |mean: f64| mean.is_finite().then_some(mean);
        let mean = |(name, sum): (&String, &f64)| (name.clone(), finite(sum / records as f64));
        done.then(|| self.sums.iter().map(mean).collect())
    }
}

const LATER_KEPT_MAX: usize = 1024;
const LATER_KEPT_BYTES_MAX: usize = 96 << 10;
/// Persisted bytes of a shard's result without its sums, and of a sum without its name.
const RESULT_BYTES: usize = 48;
const SUM_BYTES: usize = 32;
/// Interval of writes, which is also the work that the loss of a master repeats.
const WRITE_EVERY: Duration = Duration::from_secs(10);
