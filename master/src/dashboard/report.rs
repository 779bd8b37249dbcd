//! The page of a job that has ended, from what it has stored.

use elasticdl_proto::{RecordsSummary, Status, Summary};

use super::history::History;
use super::page::{self, Page};
use super::stored::StoredHistory;

/// The page of a job with this summary. Without a stored history it has no curves and no times.
#[must_use]
pub fn report_of(mut summary: Summary, stored: Option<StoredHistory>) -> String {
    let memberships = std::mem::take(&mut summary.memberships);
    let (last, history) = match stored {
        Some(stored) => (stored.status, stored.history),
        None => (Status::default(), History::of_memberships(memberships)),
    };
    let generation = history.memberships.back().map_or(last.generation, |at| at.change.generation);
    let status = Status {
        job: summary.job.clone(),
        run_id: summary.run_id.clone(),
        state: summary.state.clone(),
        progress: match summary.records {
            _ if summary.state == "completed" => 1.0,
            RecordsSummary { expected: 0, .. } => last.progress,
            RecordsSummary { expected, counted, .. } => counted as f64 / expected as f64,
        },
        generation,
        step: summary.steps,
        epoch: summary.epochs,
        epochs: last.epochs.max(summary.epochs),
        records_counted: summary.records.counted,
        records_expected: summary.records.expected,
        records_repeated: summary.records.repeated,
        records_per_s: summary.throughput.records_per_s,
        eta_s: None,
        allreduce_transport: summary.allreduce_transport.clone(),
        checkpoints: summary.checkpoints.clone(),
        audit: summary.audit,
        limiting_link: None,
        workers: Vec::new(),
        workers_disconnected: Vec::new(),
        workers_pending: Vec::new(),
        ..last
    };
    page::report(&Page {
        version: 1,
        live: false,
        at_s: summary.wall_s,
        status: &status,
        summary: Some(&summary),
        history: &history,
        scale: None,
    })
}
