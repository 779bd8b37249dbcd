//! Reports to the master: the group's commits and the requested leases.

use std::time::Duration;

use elasticdl_proto::{Generation, WorkerMessage};

use super::Session;
use crate::core::header::StepHeader;

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

    /// Requests leases ahead of need: a few steps' worth, and of the next epoch when this one ends
    /// soon.
    pub(super) fn request_leases(&mut self, world_size: usize) {
        let least = self.job.batch.share(world_size).saturating_mul(STEPS_AHEAD);
        let Some(state) = &self.state else { return };
        let epoch = state.ledger.epoch();
        for epoch in epoch..=epoch + u32::from(self.epoch_ends_soon(world_size)) {
            if epoch < self.job.epochs
                && let Some(records) = self.leases.request(epoch, least)
            {
                self.reports.push_back(WorkerMessage::LeaseRequest { epoch, records });
            }
        }
    }

    /// Whether the rest of the epoch is no more than what the group keeps leased.
    fn epoch_ends_soon(&self, world_size: usize) -> bool {
        let leased =
            self.job.batch.share(world_size).saturating_mul(2 * STEPS_AHEAD * world_size as u64);
        self.state.as_ref().is_some_and(|s| s.ledger.remaining(s.ledger.epoch()) <= leased)
    }

    pub(super) fn note_progress(
        &mut self,
        generation: Generation,
        headers: &[StepHeader],
        now: Duration,
    ) {
        self.progress.generation = generation;
        self.progress.ranges.extend(headers.iter().flat_map(|h| &h.ranges));
        self.progress.loss_sum += headers.iter().map(|h| h.loss_sum).sum::<f64>();
        self.progress.records += headers.iter().map(StepHeader::records).sum::<u64>();
        self.progress.compute_us = headers.iter().map(|h| h.compute_us).collect();
        if let Some(before) = self.committed_at.replace(now) {
            self.progress.times.steps += 1;
            self.progress.times.step_us += micros(now.saturating_sub(before));
        }
        // Towards the end of an epoch the master leases by the commits that it knows of, so each
        // step is reported.
        let due = now.saturating_sub(self.reported_at) >= REPORT_INTERVAL;
        if due || self.epoch_ends_soon(headers.len()) {
            self.reported_at = now;
            self.flush_progress();
        }
    }

    pub(super) fn flush_progress(&mut self) {
        if self.progress.records > 0 {
            let progress = std::mem::take(&mut self.progress);
            self.reports.push_back(WorkerMessage::Committed(progress));
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Number of steps whose shares a rank keeps leased ahead, at least, so that the round trip to the
/// master delays no step.
const STEPS_AHEAD: u64 = 4;

/// Minimum interval between reports of commits.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
