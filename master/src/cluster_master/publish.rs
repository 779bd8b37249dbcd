//! Publication of the status and the summary of a job in its anchor.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use crate::dashboard::{self, History};
use crate::event_loop::JobResult;
use crate::exit::Failure;
use crate::job::{Snapshot, Status};
use crate::kube::anchor::{
    AnchorWriter, Data, HISTORY, RECORD, STATUS, STATUS_AT, SUMMARY, WriteError, WriteThrottle,
};
use crate::kube::persisted_job;

/// Writes the status of a job of this age to the anchor at throttled intervals, until the job ends.
pub(super) async fn publish(
    writer: &AnchorWriter,
    mut published: watch::Receiver<Option<Snapshot>>,
    age: Duration,
    times: &RefCell<EventTimes>,
    history: &RefCell<History>,
) {
    let mut pace = WriteThrottle::default();
    let mut history_written: Option<Instant> = None;
    let start = Instant::now();
    loop {
        let snapshot = published.borrow_and_update().clone();
        if let Some(snapshot) = &snapshot {
            history.borrow_mut().observe(snapshot);
        }
        let Some(Snapshot { status, .. }) = snapshot else {
            if published.changed().await.is_err() {
                return std::future::pending().await;
            }
            continue;
        };
        times.borrow_mut().note(age + start.elapsed(), status.events_emitted);
        let news = status_digest(&status);
        let due = pace.due(Instant::now(), news);
        if due > Instant::now() {
            tokio::select! {
                () = tokio::time::sleep_until(due) => {}
                changed = published.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
            }
            continue;
        }
        let mut data = Data::from([
            (STATUS.into(), status_json(status, &times.borrow())),
            (STATUS_AT.into(), now_ms().to_string()),
        ]);
        // In the same call as the status.
        if history_written.is_none_or(|at| at.elapsed() >= HISTORY_INTERVAL) {
            history_written = Some(Instant::now());
            data.extend(packed(&history.borrow(), HISTORY_BYTES_MAX));
        }
        if let Err(error) = writer.write(&data).await {
            // Training does not depend on it.
            warn!(%error, "the status was not written to the anchor");
        }
        pace.on_written(Instant::now(), news);
    }
}

fn status_json(mut status: Status, times: &EventTimes) -> String {
    status.events_at_s = times.of_last(status.events.len());
    status.into_json_within(STATUS_BYTES_MAX)
}

fn now_ms() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis()
}

/// The history as an entry of the anchor.
fn packed(history: &History, bytes: usize) -> Option<(String, String)> {
    match dashboard::pack(history, bytes) {
        Ok(text) => Some((HISTORY.into(), text)),
        Err(error) => {
            // The dashboard shows the status without it.
            warn!(%error, "the history was not written to the anchor");
            None
        }
    }
}

/// Age of the job at each of its newest event lines.
#[derive(Debug, Default)]
pub(super) struct EventTimes {
    emitted: u64,
    /// Ages at the newest lines.
    at: VecDeque<Duration>,
}

impl EventTimes {
    /// Records that at this age of the job, `emitted` lines had been emitted.
    pub(super) fn note(&mut self, age: Duration, emitted: u64) {
        let new = emitted.saturating_sub(self.emitted).min(LINES_MAX as u64);
        self.emitted = emitted;
        self.at.extend((0..new).map(|_| age));
        self.at.drain(..self.at.len().saturating_sub(LINES_MAX));
    }

    /// Ages at the last `count` lines, in seconds.
    fn of_last(&self, count: usize) -> Vec<f64> {
        let skipped = self.at.len().saturating_sub(count);
        self.at
            .iter()
            .skip(skipped)
            .map(|at| (at.as_secs_f64() * 1000.0).round() / 1000.0)
            .collect()
    }
}

/// Digest of the parts of a status whose change is written at once.
fn status_digest(status: &Status) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&status.state, status.generation.0, status.workers_desired, &status.events).hash(&mut hasher);
    // A command waits for the checkpoint that it has requested.
    status
        .checkpoints
        .as_ref()
        .map(|known| (&known.error, known.newest.is_some()))
        .hash(&mut hasher);
    for worker in &status.workers {
        (worker.worker.0, worker.rank, &worker.state).hash(&mut hasher);
    }
    hasher.finish()
}

pub(super) async fn write_end(
    writer: &AnchorWriter,
    ended: &JobResult,
    status: Option<Status>,
    times: &EventTimes,
    history: &History,
) -> Result<(), Failure> {
    let mut summary = ended.summary.clone();
    // An anchor holds 1 MiB. The newest changes are retained.
    let surplus = summary.memberships.len().saturating_sub(MEMBERSHIPS_MAX);
    summary.memberships.drain(..surplus);
    let text = summary.into_json_within(SUMMARY_BYTES_MAX);
    // No master resumes a job that has ended. `elasticdl lineage` reads what is left of it.
    let record = persisted_job::pack(&ended.record.clone().of_ended());
    let mut data = Data::from([(SUMMARY.into(), text), (RECORD.into(), record)]);
    data.extend(packed(history, HISTORY_BYTES_MAX_AT_END));
    data.extend(status.map(|status| (STATUS.into(), status_json(status, times))));
    writer.write_within(&data, END_TIMEOUT).await.map_err(not_written)
}

pub(super) fn not_written(error: WriteError) -> Failure {
    match error {
        WriteError::Retryable(error) => error.into(),
        error => Failure::failed(error.to_string()),
    }
}

/// Shares of the anchor, before and after the persisted job is removed from it.
const HISTORY_BYTES_MAX: usize = 12 << 10;
const HISTORY_BYTES_MAX_AT_END: usize = 128 << 10;
/// Minimum time between two writes of the history.
const HISTORY_INTERVAL: Duration = Duration::from_secs(30);
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of event lines in a status.
const LINES_MAX: usize = 20;
const MEMBERSHIPS_MAX: usize = 200;
/// Shares of the 1 MiB of an anchor.
const STATUS_BYTES_MAX: usize = 224 << 10;
const SUMMARY_BYTES_MAX: usize = 256 << 10;
