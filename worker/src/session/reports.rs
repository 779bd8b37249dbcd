//! Reports to the master about the group's commits.

use std::time::Duration;

use elasticdl_proto::{Generation, RankStep, WorkerMessage};

use super::Session;
use crate::session::header::StepHeader;

impl Session {
    pub fn poll_report(&mut self) -> Option<WorkerMessage> {
        self.reports.pop_front()
    }

    /// Duration of the all-reduce of the step that is committed next.
    pub fn reduced(&mut self, took: Duration) {
        if self.committed_at.is_some() {
            self.progress.times.reduce_us += micros(took);
        }
    }

    /// Notes the learning rate of the step that is committed next.
    pub fn note_learning_rate(&mut self, rate: Option<f64>) {
        self.progress.learning_rate = rate;
    }

    pub(super) fn note_progress(
        &mut self,
        generation: Generation,
        headers: &[StepHeader],
        now: Duration,
    ) {
        self.progress.generation = generation;
        self.progress.ranges.extend(headers.iter().flat_map(|h| &h.ranges));
        let loss_sum = headers.iter().map(|h| h.loss_sum).sum::<f64>();
        let records = headers.iter().map(StepHeader::records).sum::<u64>();
        self.progress.loss_sum += loss_sum;
        self.progress.records += records;
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
        };
        self.progress.ranks = headers.iter().map(step_of).collect();
        if let Some(before) = self.committed_at.replace(now) {
            self.progress.times.steps += 1;
            self.progress.times.step_us += micros(now.saturating_sub(before));
        }
        if now.saturating_sub(self.reported_at) >= REPORT_INTERVAL {
            self.reported_at = now;
            self.flush_progress();
        }
    }

    /// Reports the commits so far.
    pub fn flush_progress(&mut self) {
        if self.progress.records > 0 {
            let progress = std::mem::take(&mut self.progress);
            self.reports.push_back(WorkerMessage::Committed(progress));
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Minimum interval between reports of commits.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
