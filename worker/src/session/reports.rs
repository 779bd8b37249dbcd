//! Reports to the master about the group's commits.

use std::collections::VecDeque;
use std::time::Duration;

use elasticdl_proto::{Committed, Generation, RankStep, StepTimes, TablesStatus, WorkerMessage};

use super::State;
use crate::session::header::{StepHeader, add_sums};

/// Messages to the master, and the commits since the last report of them.
#[derive(Clone, Debug, Default)]
pub struct Reports {
    queue: VecDeque<WorkerMessage>,
    progress: Committed,
    reported_at: Duration,
    /// Time of the last commit in this group.
    committed_at: Option<Duration>,
    /// Time in the all-reduce since then.
    reduced: Duration,
}

impl Reports {
    /// The next message to the master.
    pub fn poll(&mut self) -> Option<WorkerMessage> {
        self.queue.pop_front()
    }

    pub(super) fn push(&mut self, message: WorkerMessage) {
        self.queue.push_back(message);
    }

    /// Forgets the messages that a master may not have received.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }

    /// A new group has begun: its first step has no one before it.
    pub(super) fn regrouped(&mut self) {
        self.progress = Committed::default();
        (self.committed_at, self.reduced) = (None, Duration::ZERO);
    }

    /// Notes that the group made no step for this time, since its last commit: it is no time of the
    /// next one.
    pub(super) fn pass_over(&mut self, paused: Duration) {
        self.committed_at.iter_mut().for_each(|at| *at += paused);
    }

    /// Duration of the all-reduce of the step that is committed next.
    pub fn reduced(&mut self, took: Duration) {
        if self.committed_at.is_some() {
            self.reduced += took;
        }
    }

    /// Notes the learning rate of the step that is committed next.
    pub fn note_learning_rate(&mut self, rate: Option<f64>) {
        self.progress.learning_rate = rate;
    }

    /// Notes the number of the step that has led to `state`.
    pub(super) fn note_step(&mut self, state: &State) {
        self.progress.step = state.step;
        self.progress.steps_skipped = state.steps_skipped;
    }

    /// Notes that the last step has completed an epoch.
    pub(super) fn note_epoch(&mut self) {
        self.progress.epoch_step = Some(self.progress.step);
    }

    /// Notes whether the last step was audited.
    pub(super) fn note_audit(&mut self, is_audited: bool) {
        self.progress.steps_audited += u64::from(is_audited);
    }

    /// Notes what the ranks did in the last step, and reports it if the last report is old.
    pub(super) fn note_progress(
        &mut self,
        generation: Generation,
        headers: &[StepHeader],
        row_touches: u64,
        now: Duration,
    ) {
        self.progress.generation = generation;
        self.progress.tables = headers.first().and_then(|first| first.tables).map(|first| {
            let rows = headers.iter().filter_map(|header| header.tables).map(|held| held.rows);
            let shards_at_risk = first.at_risk;
            Box::new(TablesStatus { rows: rows.sum(), touches: row_touches, shards_at_risk })
        });
        self.progress.ranges.extend(headers.iter().flat_map(|h| &h.ranges));
        let loss_sum = headers.iter().map(|h| h.loss_sum).sum::<f64>();
        let records = headers.iter().map(StepHeader::records).sum::<u64>();
        self.progress.loss_sum += loss_sum;
        self.progress.records += records;
        headers.iter().for_each(|header| add_sums(&mut self.progress.metrics, &header.metrics));
        let loss = loss_sum / records as f64;
        if loss.is_finite() {
            self.progress.first_loss.get_or_insert(loss);
            self.progress.last_loss = Some(loss);
        }
        let step_of = |h: &StepHeader| RankStep {
            records: h.records(),
            compute_us: h.compute_us,
            input_us: h.input_us,
            checkpoint_us: h.checkpoint.copy_us,
            table_bytes: h.tables.map_or(0, |held| held.bytes),
        };
        self.progress.ranks = headers.iter().map(step_of).collect();
        self.progress.last = None;
        if let Some(before) = self.committed_at.replace(now) {
            let (step_us, reduce_us) = (micros(now.saturating_sub(before)), micros(self.reduced));
            self.progress.last = Some(Box::new(StepTimes { steps: 1, step_us, reduce_us }));
            self.progress.times.steps += 1;
            self.progress.times.step_us += step_us;
            self.progress.times.reduce_us += reduce_us;
            self.reduced = Duration::ZERO;
        }
        if now.saturating_sub(self.reported_at) >= REPORT_INTERVAL {
            self.reported_at = now;
            self.flush();
        }
    }

    /// Reports the commits so far.
    pub fn flush(&mut self) {
        if self.progress.records > 0 {
            let progress = std::mem::take(&mut self.progress);
            self.queue.push_back(WorkerMessage::Committed(progress));
        }
    }
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Minimum interval between reports of commits.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
