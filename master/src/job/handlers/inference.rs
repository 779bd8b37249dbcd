//! Inference jobs: workers evaluate a model, or predict with it, without a group.
//!
//! Each shard belongs to one worker, from its lease to the report that it is done. So there are no
//! generations and no steps; a shard counts as a step. Everything else, from the first launch to
//! the end, is as in training.
//!
//! A shard's result depends on the shard alone, not on its worker, and results are added in the
//! order of the shards. So the total is bit-identical for any number of workers and any failures. A
//! shard whose worker is lost is processed again from its beginning; a result that had been written
//! is overwritten with the same content.
//!
//! **Invariant:** a shard counts once: when the worker that holds its lease reports it.
//! **Invariant:** stored results do not grow with the job, except for results that wait for a
//! slower shard before them.

use std::collections::BTreeMap;

use elasticdl_proto::{RecordRange, WorkerId};
use serde::{Deserialize, Serialize};

use crate::job::action::{Outcome, ToWorker};
use crate::job::job::{Job, Phase};
use crate::job::time::Time;
use crate::job::workers::table::Stage;

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
    kept: Time,
}

impl ShardResults {
    /// Adds the sums of a shard. A metric that a shard lacks counts as 0 there.
    ///
    /// # Errors
    /// There are too many metrics.
    fn add(&mut self, range: RecordRange, sums: Sums) -> Result<(), String> {
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
        Self { before: self.before, sums: self.sums.clone(), later, kept: self.kept }
    }

    pub(crate) fn ranges(&self) -> impl Iterator<Item = RecordRange> + '_ {
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

impl Job {
    /// As [`Job::reconcile`], without a group.
    pub(crate) fn reconcile_inference(&mut self, now: Time) {
        if self.phase == Phase::Stopping {
            return self.end_stopped();
        }
        let Some(leases) = &mut self.leases else { return };
        let counted = leases.ledger().counted();
        if counted == leases.expected() {
            return self.end(now, Outcome::Completed, None);
        }
        // Leases of lost workers are free at once: no parameters have absorbed them.
        self.group.lost.clear();
        self.group.left.clear();
        leases.requeue();
        let ready = |w: &&mut crate::job::workers::table::Worker| {
            w.stage == Stage::Ready && w.rank.is_none() && !w.released
        };
        for w in self.workers.connected.values_mut().filter(ready) {
            // Every ready worker counts as a member that holds the state.
            w.rank = self.workers.launches.get(&w.launch).map(|l| l.slot);
            w.holds_state = true;
            self.history.form(now, self.step, counted);
        }
        self.history.inference_workers = self.workers.members().count() as u32;
        self.history.totals.peak = self.history.totals.peak.max(self.history.inference_workers);
        self.count_eligible();
        self.fill_all();
    }

    /// Leases whole shards, up to the number that `worker` has requested.
    pub(crate) fn fill_inference(&mut self, worker: WorkerId) {
        let Self { leases: Some(leases), workers, .. } = self else { return };
        let Some(w) = workers.connected.get_mut(&worker).filter(|w| w.is_eligible() && !w.leaving)
        else {
            return;
        };
        let Some(credit) = w.requested_records.get_mut(&0) else { return };
        *credit = (*credit).min(SHARDS_AHEAD_MAX);
        let mut granted = Vec::new();
        while *credit > 0
            && let Some(shard) = leases.lease_shard(worker)
        {
            *credit -= 1;
            granted.push(shard);
        }
        if *credit == 0 {
            w.requested_records.clear();
        }
        if !granted.is_empty() {
            self.send(worker, ToWorker::Lease(granted));
        }
    }

    /// Handles a worker's report of a finished shard.
    pub(crate) fn on_done(&mut self, now: Time, worker: WorkerId, range: RecordRange, sums: Sums) {
        let Some(leases) = self.leases.as_mut().filter(|_| !self.spec.work.trains()) else {
            return;
        };
        if !leases.is_leased(worker, range) {
            return self.fail_worker(
                now,
                worker,
                &format!("it has done {range}, which it does not hold"),
            );
        }
        let loss = sums.get("loss").copied();
        if let Err(reason) = self.results.add(range, sums) {
            return self.end(now, Outcome::Failed, Some(format!("worker {worker}: {reason}")));
        }
        self.step += 1;
        leases.commit(self.step, &[range]).expect("what is leased lies in the data set");
        self.history.count(now, range.len());
        if let Some(loss) = loss {
            self.history.note_loss(range.len(), loss);
        }
        self.history.counters.shard(range.len());
        if now.since(self.results.kept) >= KEEP_EVERY {
            self.results.kept = now;
            self.out.mark_dirty();
        }
        let Some(leases) = &self.leases else { return };
        if leases.ledger().counted() == leases.expected() {
            self.out.mark_dirty_urgent();
            return self.reconcile_inference(now);
        }
        self.fill_inference(worker);
    }

    /// Restores the results that a previous master persisted.
    ///
    /// # Errors
    /// The first inconsistency.
    pub(crate) fn restore_results(&mut self, results: ShardResults) -> Result<(), String> {
        let ranges: Vec<RecordRange> = results.ranges().collect();
        if ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
            return Err("results of shards overlap".into());
        }
        if ranges.is_empty() {
            return Ok(());
        }
        let Some(leases) = &mut self.leases else {
            return Err("there are results, but no data set".into());
        };
        leases
            .commit(self.step, &ranges)
            .map_err(|wrong| format!("there are results of {wrong}"))?;
        self.results = results;
        Ok(())
    }
}

/// Shards leased ahead: a worker needs one to process and one to read.
const SHARDS_AHEAD_MAX: u64 = 4;
const LATER_KEPT_MAX: usize = 1024;
const LATER_KEPT_BYTES_MAX: usize = 96 << 10;
/// Persisted bytes of a shard's result without its sums, and of a sum without its name.
const RESULT_BYTES: usize = 48;
const SUM_BYTES: usize = 32;
const METRICS_MAX: usize = 1024;
/// Interval of writes, which is also the work that the loss of a master repeats.
const KEEP_EVERY: std::time::Duration = std::time::Duration::from_secs(10);
