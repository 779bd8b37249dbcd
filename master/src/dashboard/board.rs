//! What the page shows now: written by the recorder, read by the server.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use elasticdl_proto::Status;
use tokio::sync::watch;
use tokio::time::Instant;

use super::history::{History, JobOptions};
use super::page::Page;
use super::request::ScaleLimits;
use crate::job::Snapshot;

/// The state of a job and its history.
#[derive(Debug)]
pub(crate) struct Board {
    contents: Mutex<Contents>,
    /// Whether the job has ended.
    ended: watch::Sender<bool>,
    /// When the page was last read, and whether since the job's end.
    read: watch::Sender<Option<(Instant, bool)>>,
    scale: Option<ScaleLimits>,
}

#[derive(Debug, Default)]
struct Contents {
    /// Number of changes.
    version: u64,
    at_s: f64,
    /// `None` before the first snapshot.
    status: Option<Status>,
    history: History,
}

impl Board {
    pub(crate) fn new(scale: Option<ScaleLimits>) -> Self {
        Self {
            contents: Mutex::default(),
            ended: watch::Sender::new(false),
            read: watch::Sender::new(None),
            scale,
        }
    }

    /// Continues the history of a former master.
    pub(super) fn resume(&self, history: History) {
        self.lock().history = history.resumed();
    }

    /// Adds when the job began, and its options.
    pub(super) fn describe(&self, job: JobOptions) {
        self.lock().history.of_job(job);
    }

    /// Adds a snapshot.
    pub(super) fn observe(&self, snapshot: Snapshot) {
        let mut contents = self.lock();
        contents.history.observe(&snapshot);
        contents.version += 1;
        contents.at_s = snapshot.at.0.as_secs_f64();
        contents.status = Some(snapshot.status);
    }

    /// Replaces what is shown.
    pub(super) fn show(&self, at_s: f64, status: Status, mut history: History) {
        history.observe_status(at_s, &status);
        let mut contents = self.lock();
        let version = contents.version + 1;
        *contents = Contents { version, at_s, status: Some(status), history };
    }

    /// Notes that the job has ended.
    pub(super) fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Reads status and history; `None` before the first snapshot.
    pub(super) fn with<T>(&self, read: impl FnOnce(&Page<'_>) -> T) -> Option<T> {
        let contents = self.lock();
        let live = !*self.ended.borrow();
        let status = contents.status.as_ref()?;
        Some(read(&Page {
            version: contents.version,
            live,
            at_s: contents.at_s,
            status,
            summary: None,
            history: &contents.history,
            scale: self.scale.filter(|_| live).map(|limits| limits.of_status(status)),
        }))
    }

    /// The page's data as JSON; `None` before the first snapshot.
    pub(super) fn to_json(&self) -> Option<String> {
        let json = self.with(|page| page.to_json())?;
        self.read.send_replace(Some((Instant::now(), *self.ended.borrow())));
        Some(json)
    }

    /// Waits for the end of the job, for at most `limit`.
    pub(super) async fn await_end(&self, limit: Duration) {
        let mut ended = self.ended.subscribe();
        let has_ended = async { drop(ended.wait_for(|ended| *ended).await) };
        let _ = tokio::time::timeout(limit, has_ended).await;
    }

    /// Waits until an open page has read the end of the job. Without an open page, returns at once.
    pub(super) async fn await_readers(&self) {
        let mut read = self.read.subscribe();
        let is_open = read.borrow().is_some_and(|(at, _)| at.elapsed() < READER_OPEN);
        if is_open {
            let has_read = async { drop(read.wait_for(|read| read.is_some_and(|r| r.1)).await) };
            let _ = tokio::time::timeout(READER_TIMEOUT, has_read).await;
            // The answer is on its way.
            tokio::time::sleep(READER_PAUSE).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A page that was read in this time is open.
const READER_OPEN: Duration = Duration::from_secs(3);
const READER_PAUSE: Duration = Duration::from_millis(50);
/// Longest delay of the end of a job whose page is open.
const READER_TIMEOUT: Duration = Duration::from_secs(1);
