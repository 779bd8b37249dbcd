//! The history of a job, for its status and its summary.
//!
//! **Invariant:** nothing here grows without limit, and nothing here decides anything. What it
//! knows of the beginning, of checkpoints and of tables is evidence for others.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use elasticdl_proto::{
    AuditSummary, CheckpointsSummary, Evaluated, EvaluationsSummary, FailedShard, Generation,
    LossSummary, MembershipChange, RowsLoss, SavedCheckpoint, SkippedRecords, StateLoss,
    TablesStatus, ThroughputSummary, WorkerId,
};
use serde::{Deserialize, Serialize};

use super::changes::{Changes, Recovered, recovery_line};
use super::counters::{Counters, End};
use super::epochs::EpochLines;
use super::late_checkpoints::LateCheckpoints;
use super::lifetimes::Lifetimes;
use super::smoothed::Smoothed;
use super::speed::Speed;
use super::storage_waits::StorageWaits;
use super::traced::{Intervals, Traced};
use crate::job::event::{Committed, Finished, Phases};
use crate::job::text::clip;
use crate::job::time::Time;

/// The history of a job.
#[derive(Debug, Default)]
pub(crate) struct JobHistory {
    events: VecDeque<String>,
    events_emitted: u64,
    pub(crate) changes: Changes,
    failed_shards: Vec<FailedShard>,
    pub(crate) totals: Totals,
    pub(super) smoothed: Smoothed,
    pub(super) learning_rate: Option<f64>,
    pub(super) tables: Option<TablesStatus>,
    pub(crate) epochs: EpochLines,
    pub(super) speed: Speed,
    /// Number of workers of an inference job.
    inference_workers: u32,
    /// Why the job failed or was refused.
    error: Option<String>,
    /// Transport of the gradient all-reduce.
    pub(super) allreduce_transport: Option<String>,
    /// Counters since this master started.
    pub(super) counters: Counters,
    /// Total time for which the job's clock has stood still since this master started.
    pub(super) away: Duration,
    /// Lifetimes of workers since this master started.
    pub(crate) lifetimes: Lifetimes,
    pub(super) storage_waits: StorageWaits,
    pub(super) evaluations: EvaluationsSummary,
    /// Evaluations since this master started, numbered from 1; the newest.
    pub(super) evaluated: Arc<Vec<(u64, Evaluated)>>,
    pub(crate) intervals: Intervals,
    /// Why the tracking server does not have all metrics.
    pub(super) tracking_error: Option<String>,
    /// Description of the last counted worker failure.
    last_failure: Option<String>,
    /// Whether the user has requested a checkpoint that has not been written yet.
    pub(super) wants_checkpoint: bool,
    /// Step of the checkpoint that could not be written, if none has been written since.
    pub(crate) unwritten_checkpoint: Option<u64>,
    pub(crate) late_checkpoints: LateCheckpoints,
    /// The group's final report.
    final_report: Option<Finished>,
    /// Whether a worker whose program failed has exported the model of its last step.
    exported_by_failed: bool,
    /// Touches of the state that a group gives up because rows are lost.
    pub(super) lost_touches: Option<u64>,
}

/// The part of the history that outlives a master.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct PersistedHistory {
    /// The newest membership changes.
    pub(crate) memberships: Vec<MembershipChange>,
    pub(crate) failed_shards: Vec<FailedShard>,
    pub(crate) evaluations: EvaluationsSummary,
    #[serde(flatten)]
    pub(crate) totals: Totals,
}

/// The part of the history that is persisted as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Totals {
    /// The largest group that formed.
    pub(super) peak: u32,
    /// Launches that replaced an ended one.
    pub(super) restarts: u64,
    /// How often a spare has taken the place of a member.
    #[serde(default)]
    pub(crate) spares_promoted: u64,
    pub(crate) formed_first: Option<Time>,
    /// Records and steps of the first group's state when it formed.
    pub(crate) begun_with: (u64, u64),
    /// Time of the last report; as of the write.
    pub(crate) reported_last: Time,
    pub(crate) loss: LossSummary,
    pub(crate) checkpoints: CheckpointsSummary,
    /// Steps without an update, of those that the state contains.
    pub(super) steps_skipped: u64,
    #[serde(default)]
    pub(super) audit: AuditSummary,
    pub(super) state_lost: Option<StateLoss>,
    pub(super) rows_lost: Option<RowsLoss>,
    /// Records that the data set does not contain.
    pub(super) records_skipped: Option<SkippedRecords>,
}

impl JobHistory {
    pub(crate) fn restore(record: PersistedHistory) -> Self {
        let PersistedHistory { memberships, failed_shards, evaluations, totals } = record;
        Self {
            changes: Changes::restore(memberships),
            failed_shards,
            evaluations,
            totals,
            ..Self::default()
        }
    }

    pub(crate) fn record(&self) -> PersistedHistory {
        let newest = self.changes.all().rev().take(MEMBERSHIPS_RECORDED_MAX);
        let mut memberships = first_within(newest, MEMBERSHIPS_RECORDED_BYTES_MAX);
        memberships.reverse();
        let mut all =
            first_within(self.evaluations.all.iter().rev(), EVALUATIONS_RECORDED_BYTES_MAX);
        all.reverse();
        PersistedHistory {
            memberships,
            failed_shards: first_within(self.failed_shards.iter(), FAILED_RECORDED_BYTES_MAX),
            evaluations: EvaluationsSummary { all, ..self.evaluations.clone() },
            totals: self.totals.clone(),
        }
    }

    /// Whether a group has ever formed.
    pub(crate) fn has_formed(&self) -> bool {
        self.totals.formed_first.is_some()
    }

    /// When the first group formed.
    pub(crate) fn formed_first(&self) -> Option<Time> {
        self.totals.formed_first
    }

    /// Step of the last evaluation; 0 before the first.
    pub(crate) fn last_evaluated(&self) -> u64 {
        self.evaluations.all.last().map_or(0, |evaluated| evaluated.step)
    }

    /// Whether a worker waits for storage that does not answer.
    pub(crate) fn waits_for_storage(&self) -> bool {
        !self.storage_waits.waiting.is_empty()
    }

    /// The storage that does not answer, and its error, while a worker waits for it.
    pub(crate) fn storage_awaited(&self) -> Option<&str> {
        self.waits_for_storage().then_some(&*self.storage_waits.storage)
    }

    /// When the group last reported commits.
    pub(crate) fn reported_last(&self) -> Time {
        self.totals.reported_last
    }

    pub(crate) fn log_event(&mut self, line: &str) {
        self.events_emitted += 1;
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(line.to_owned());
    }

    /// Appends to the job's error, if it has one, the last output of the process whose end caused
    /// it.
    pub(crate) fn explain_error(&mut self, printed: Option<&str>) {
        if let (Some(error), Some(lines)) = (&mut self.error, printed) {
            error.push_str("; its log ends with:");
            for line in clip(lines).lines() {
                error.push_str("\n    ");
                error.push_str(line);
            }
        }
    }

    pub(crate) fn events(&self) -> Vec<String> {
        self.events.iter().cloned().collect()
    }

    /// Lines said so far.
    pub(crate) fn events_emitted(&self) -> u64 {
        self.events_emitted
    }

    /// Adds a published generation; `survivors` continue in it.
    pub(crate) fn publish(
        &mut self,
        now: Time,
        record: MembershipChange,
        survivors: BTreeSet<WorkerId>,
    ) {
        let before = self.changes.publish(now, record, survivors);
        self.count_recovery(before.as_ref());
    }

    /// Notes that the newest generation formed at `step`. `begun`: records and steps of the state
    /// that the job began with, if this is the first group to form.
    pub(crate) fn form(&mut self, now: Time, step: u64, begun: (u64, u64)) {
        if self.totals.formed_first.is_none() {
            (self.totals.formed_first, self.totals.begun_with) = (Some(now), begun);
            self.speed.begin(now);
        }
        let Some((record, published)) = self.changes.form(step) else { return };
        self.totals.peak = self.totals.peak.max(record.world_size);
        if let Some(published) = published {
            let (generation, what) = (record.generation, Traced::Membership(record.clone()));
            self.intervals.note(now, now.since(published), generation, what);
        }
    }

    /// Notes `worker`'s first commit in `generation`; the longest pause of all members counts.
    /// Returns whether all survivors have reported.
    pub(crate) fn resume(
        &mut self,
        now: Time,
        worker: WorkerId,
        generation: Generation,
        phases: Phases,
    ) -> bool {
        let (are_all, late) = self.changes.resume(now, worker, generation, phases);
        self.count_recovery(late.as_ref());
        are_all
    }

    /// The log line about the newest change's pause; given once, and only if a member has reported.
    pub(crate) fn recovery_line(&mut self) -> Option<String> {
        let recovered = self.changes.take_recovered();
        self.count_recovery(recovered.as_ref());
        recovery_line(&recovered?.1)
    }

    fn count_recovery(&mut self, recovered: Option<&Recovered>) {
        let Some((resumed, record)) = recovered else { return };
        self.counters.recover(record);
        let gap = Duration::from_secs_f64(record.gap_ms.unwrap_or_default() / 1000.0);
        let what = Traced::Membership(record.clone());
        self.intervals.note(*resumed, gap, record.generation, what);
    }

    /// Notes a commit of `steps` new steps.
    pub(crate) fn commit(&mut self, now: Time, steps: u64, report: &Committed) {
        let known = self.totals.loss.first;
        self.note_loss(report.records, report.loss_sum);
        let loss = &mut self.totals.loss;
        if let (Some(first), Some(last)) = (report.first_loss, report.last_loss) {
            // Those of single steps compare between jobs; that of a report depends on the time.
            *loss = LossSummary { first: Some(first), last: Some(last) };
        }
        // The report of the first step may have reached an earlier master, which has not noted it.
        let is_of_first = report.step - steps == self.totals.begun_with.1;
        loss.first = if is_of_first { known.or(loss.first) } else { known };
        self.smoothed.note_metrics(report.records, &report.metrics);
        self.learning_rate = report.learning_rate;
        self.tables = report.tables.as_deref().copied();
        self.count(now, report.records);
        self.counters.commit(steps, report);
        self.count_audited(report.steps_audited);
    }

    /// Notes a shard of an inference job, with the sum of losses over its records.
    pub(crate) fn finish_shard(&mut self, now: Time, records: u64, loss: Option<f64>) {
        self.count(now, records);
        if let Some(loss) = loss {
            self.note_loss(records, loss);
        }
        self.counters.shard(records);
    }

    /// Notes the number of workers of an inference job.
    pub(crate) fn note_inference_workers(&mut self, workers: u32) {
        self.inference_workers = workers;
        self.totals.peak = self.totals.peak.max(workers);
    }

    /// Number of workers of an inference job.
    pub(super) fn inference_workers(&self) -> u32 {
        self.inference_workers
    }

    /// Notes the transport of the gradient all-reduce. Returns whether it is news.
    pub(crate) fn note_transport(&mut self, what: &str) -> bool {
        let is_news = self.allreduce_transport.as_deref() != Some(what);
        self.allreduce_transport = Some(what.to_owned());
        is_news
    }

    /// Notes a counted failure of a worker.
    pub(crate) fn note_failure(&mut self, what: &str) {
        self.counters.failures += 1;
        self.last_failure = Some(what.to_owned());
    }

    /// The last counted failure of a worker.
    pub(crate) fn last_failure(&self) -> Option<&str> {
        self.last_failure.as_deref()
    }

    pub(crate) fn count_end(&mut self, end: End) {
        self.counters.end(end);
    }

    /// Counts a launch that replaces an ended one.
    pub(crate) fn count_restart(&mut self) {
        self.totals.restarts += 1;
        self.counters.restarts += 1;
    }

    /// Counts a group whose members all waited for each other.
    pub(crate) fn count_stall(&mut self) {
        self.counters.stalls += 1;
    }

    /// Counts the loss of a state of so many steps and records without a checkpoint.
    pub(crate) fn lose_state(&mut self, step: u64, records: u64) {
        let lost = self.totals.state_lost.get_or_insert_default();
        lost.count += 1;
        lost.at_step = step;
        lost.steps += step;
        lost.records += records;
        self.counters.state_losses += 1;
    }

    /// Whether there is a complete checkpoint.
    pub(crate) fn has_checkpoint(&self) -> bool {
        self.newest_checkpoint().is_some()
    }

    /// The newest complete checkpoint.
    pub(crate) fn newest_checkpoint(&self) -> Option<&SavedCheckpoint> {
        self.totals.checkpoints.newest.as_ref()
    }

    /// Notes why the last checkpoint is not written, unless a worker has told.
    pub(crate) fn explain_unsaved(&mut self, why: String) {
        self.totals.checkpoints.error.get_or_insert(why);
    }

    /// Notes that a checkpoint is requested. Returns whether none was.
    pub(crate) fn want_checkpoint(&mut self) -> bool {
        !std::mem::replace(&mut self.wants_checkpoint, true)
    }

    /// Notes the group's final report.
    pub(crate) fn finish(&mut self, report: Finished) {
        self.totals.steps_skipped = report.steps_skipped;
        self.final_report = Some(report);
    }

    /// A worker has failed and, before, may have `exported` the model of its last step.
    pub(crate) fn note_export_of_failed(&mut self, exported: bool) {
        self.exported_by_failed |= exported;
    }

    /// Whether a worker that failed has exported the model of its last step.
    pub(crate) fn is_exported_by_failed(&self) -> bool {
        self.exported_by_failed
    }

    /// The group's final report.
    pub(crate) fn final_report(&self) -> Option<&Finished> {
        self.final_report.as_ref()
    }

    /// Sets why the job failed or was refused.
    pub(crate) fn set_error(&mut self, error: Option<String>) {
        self.error = error;
    }

    /// Why the job failed or was refused.
    pub(crate) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Restores how the job ended under a previous master.
    pub(crate) fn restore_ending(&mut self, error: Option<String>, report: Option<Finished>) {
        (self.error, self.final_report) = (error, report);
    }

    /// The sum of losses over `records`.
    fn note_loss(&mut self, records: u64, loss_sum: f64) {
        let loss = loss_sum / records as f64;
        // The loss of a skipped step may be NaN.
        if records > 0 && loss.is_finite() {
            self.totals.loss.first.get_or_insert(loss);
            self.totals.loss.last = Some(loss);
            self.smoothed.note_loss(loss);
        }
    }

    /// Notes that `records` more are done.
    fn count(&mut self, now: Time, records: u64) {
        self.totals.reported_last = now;
        self.speed.count(now, records);
    }

    pub(crate) fn loss(&self) -> LossSummary {
        self.totals.loss
    }

    /// `counted` records and `steps` over the time from the first group's start to the last report.
    pub(crate) fn throughput(&self, counted: u64, steps: u64) -> ThroughputSummary {
        let Some(formed) = self.totals.formed_first else {
            return ThroughputSummary::default();
        };
        let span = self.totals.reported_last.since(formed) + self.away;
        // Records of another job's checkpoint are not this job's work.
        let (counted_before, steps_before) = self.totals.begun_with;
        let (counted, steps) =
            (counted.saturating_sub(counted_before), steps.saturating_sub(steps_before));
        ThroughputSummary {
            records_per_s: per_second(counted, span),
            steps_per_s: per_second(steps, span),
            all_reduce_ms: self.counters.times.all_reduce_ms(),
            storage_wait_s: self.counters.storage_wait.as_secs_f64(),
        }
    }

    /// Notes an evaluation for exporters.
    pub(crate) fn note_evaluated(&mut self, report: Evaluated) {
        let known = Arc::make_mut(&mut self.evaluated);
        let number = known.last().map_or(0, |(number, _)| *number) + 1;
        known.push((number, report));
        let surplus = known.len().saturating_sub(EVALUATED_MAX);
        known.drain(..surplus);
    }

    /// Notes whether the tracking server takes the metrics. Returns the log line that is due.
    pub(crate) fn note_tracking(&mut self, error: Option<String>) -> Option<String> {
        let before = std::mem::replace(&mut self.tracking_error, error);
        match (before, &self.tracking_error) {
            (None, Some(error)) => Some(format!("MLflow does not get the job's metrics: {error}")),
            (Some(_), None) => Some("MLflow gets the job's metrics again".into()),
            _ => None,
        }
    }

    #[cfg(test)]
    pub(crate) fn set_evaluations(&mut self, all: Vec<Evaluated>) {
        self.evaluations.all = all;
    }

    #[cfg(test)]
    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Notes which records the data set does not contain.
    pub(crate) fn note_skipped(&mut self, skipped: SkippedRecords) {
        self.totals.records_skipped = Some(skipped);
    }

    /// How many more failed shards fit.
    pub(crate) fn failures_left(&self) -> usize {
        FAILED_SHARDS_MAX.saturating_sub(self.failed_shards.len())
    }

    /// Notes a shard on which the user's code failed, if it fits.
    pub(crate) fn fail_on(&mut self, shard: FailedShard) {
        if self.failures_left() > 0 {
            self.failed_shards.push(shard);
        }
    }

    pub(crate) fn failed_shards(&self) -> Vec<FailedShard> {
        self.failed_shards.clone()
    }
}

/// The longest prefix of `items` that takes at most `bytes` as JSON.
fn first_within<'a, T: Serialize + Clone + 'a>(
    items: impl Iterator<Item = &'a T>,
    bytes: usize,
) -> Vec<T> {
    let mut left = bytes;
    let fits = |item: &&T| {
        let taken = serde_json::to_string(item).map_or(usize::MAX, |json| json.len() + 1);
        let fits = taken <= left;
        left = left.saturating_sub(taken);
        fits
    };
    items.take_while(fits).cloned().collect()
}

pub(super) fn per_second(count: u64, span: Duration) -> f64 {
    if span.is_zero() { 0.0 } else { count as f64 / span.as_secs_f64() }
}

const EVENTS_MAX: usize = 20;
/// Limits on what is persisted: a write precedes each publication of a membership.
const MEMBERSHIPS_RECORDED_MAX: usize = 256;
const MEMBERSHIPS_RECORDED_BYTES_MAX: usize = 96 << 10;
const EVALUATIONS_RECORDED_BYTES_MAX: usize = 96 << 10;
const FAILED_RECORDED_BYTES_MAX: usize = 64 << 10;
const FAILED_SHARDS_MAX: usize = 100;
/// More than an exporter can miss between two snapshots.
const EVALUATED_MAX: usize = 1000;
