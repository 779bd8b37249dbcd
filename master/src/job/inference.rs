//! Jobs whose workers work apart: they evaluate a model, or predict with it.
//!
//! There is no group: each shard is one worker's, from its lease to the word that it is done. So
//! there are no generations and no steps either; what counts as a step is a shard. All else, from
//! the first launch to the last word, is as in training.
//!
//! A shard's result depends on the shard alone, not on who computes it, and results are added in
//! the order of the shards. So the whole is the same, bit for bit, for any number of workers,
//! whoever is killed. A shard whose worker is lost is done again from its beginning; where its
//! result had been written, the same is written once more.
//!
//! **Invariant:** a shard counts once: for the worker that holds its lease, when it says so.
//! **Invariant:** what is kept of results does not grow with the job, but for those that wait for a
//! slower one before them.

use std::collections::BTreeMap;

use elasticdl_proto::{RecordRange, WorkerId};
use serde::{Deserialize, Serialize};

use super::action::{Outcome, ToWorker};
use super::job::{Job, Phase};
use super::time::Time;
use super::workers::Stage;

/// Sums of metrics over records, by name.
pub(super) type Sums = BTreeMap<String, f64>;

/// What has come of the shards so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ShardResults {
    /// All records before this one are in `sums`.
    before: u64,
    sums: Sums,
    /// Results of later shards, by their first record: where each ends, and its sums.
    later: BTreeMap<u64, (u64, Sums)>,
    /// When these were last worth keeping.
    #[serde(skip)]
    kept: Time,
}

impl ShardResults {
    /// Takes in one shard's sums. A metric that a shard lacks is 0 there.
    ///
    /// # Errors
    /// More metrics than can be kept.
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
                // Not from 0: adding to it would turn -0 around.
                self.sums.entry(name).and_modify(|all| *all += sum).or_insert(sum);
            }
            self.before = end;
        }
        Ok(())
    }

    /// The records that are done, as far as a record of the job has room for them. Others are done
    /// again by the next master.
    pub(super) fn kept(&self) -> Self {
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

    pub(super) fn ranges(&self) -> impl Iterator<Item = RecordRange> + '_ {
        let later =
            self.later.iter().map(|(&start, &(end, _))| RecordRange { epoch: 0, start, end });
        let before = RecordRange { epoch: 0, start: 0, end: self.before };
        std::iter::once(before).filter(|range| !range.is_empty()).chain(later)
    }

    /// Means over `records`, which are all there are; `None` for what is no number.
    pub(super) fn means(&self, records: u64) -> Option<BTreeMap<String, Option<f64>>> {
        let done = records > 0 && self.before == records && !self.sums.is_empty();
        let finite = |mean: f64| mean.is_finite().then_some(mean);
        let mean = |(name, sum): (&String, &f64)| (name.clone(), finite(sum / records as f64));
        done.then(|| self.sums.iter().map(mean).collect())
    }
}

impl Job {
    /// As [`Job::reconcile`], without a group.
    pub(super) fn reconcile_inference(&mut self, now: Time) {
        if self.phase == Phase::Stopping {
            return self.end_stopped();
        }
        let Some(leases) = &mut self.leases else { return };
        let counted = leases.ledger().counted();
        if counted == leases.expected() {
            return self.end(now, Outcome::Completed, None);
        }
        // What lost workers had leased is free at once: nobody has put it into anything.
        self.group.lost.clear();
        self.group.left.clear();
        leases.requeue();
        let ready = |w: &&mut super::workers::Worker| {
            w.stage == Stage::Ready && w.rank.is_none() && !w.released
        };
        for w in self.workers.connected.values_mut().filter(ready) {
            // What it takes a member for a group, a worker has here from the start.
            w.rank = self.workers.launches.get(&w.launch).map(|l| l.slot);
            w.holds_state = true;
            self.history.form(now, self.step, counted);
        }
        self.history.inference_workers = self.workers.members().count() as u32;
        self.history.peak = self.history.peak.max(self.history.inference_workers);
        self.count_eligible();
        self.fill_all();
    }

    /// Leases as many whole shards as `worker` has asked for and there are.
    pub(super) fn fill_inference(&mut self, worker: WorkerId) {
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

    /// A worker has done a shard that it holds.
    pub(super) fn on_done(&mut self, now: Time, worker: WorkerId, range: RecordRange, sums: Sums) {
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
            self.mark_dirty();
        }
        let Some(leases) = &self.leases else { return };
        if leases.ledger().counted() == leases.expected() {
            self.mark_dirty_urgent();
            return self.reconcile_inference(now);
        }
        self.fill_inference(worker);
    }

    /// Takes in what a master before this one knew to be done.
    ///
    /// # Errors
    /// What can't be.
    pub(super) fn restore_results(&mut self, results: ShardResults) -> Result<(), String> {
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

/// A worker needs one to work on, and one to read.
const SHARDS_AHEAD_MAX: u64 = 4;
const LATER_KEPT_MAX: usize = 1024;
const LATER_KEPT_BYTES_MAX: usize = 96 << 10;
/// What a shard's result takes in a record, besides its sums; and what a sum takes besides its
/// name.
const RESULT_BYTES: usize = 48;
const SUM_BYTES: usize = 32;
const METRICS_MAX: usize = 1024;
/// A master that dies has the work of so much time repeated, where keeping costs something.
const KEEP_EVERY: std::time::Duration = std::time::Duration::from_secs(10);
