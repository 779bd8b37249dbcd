//! Persists a job in its anchor, for the job's next master.
//!
//! A write takes some milliseconds, and does not end while the API server is unreachable. So the
//! master does not wait for it, except for state that no other process could reconstruct
//! ([`Job::durable_before`](crate::job::Job::durable_before)). Only the newest submitted state is
//! written; older ones that arrived during a write are skipped.
//!
//! The persisted job is JSON, whose versions [`persisted_format`](crate::persisted_format)
//! describes. One that is longer than 64 KiB is compressed: `{"version": 3, "release": "0.1.0",
//! "packed": "<base64 of zstd>"}`.
//!
//! A write that the server refuses permanently (400, 413, 422) fails the job, because its next
//! master would not know what this one does next. Any other failure (no answer, a missing
//! permission) is reported and retried.

use std::io::Read as _;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tracing::{error, warn};

use super::anchor::{AnchorWriter, Data, RECORD, WriteError};
use super::client::ClusterError;
use super::events::EventRecorder;
use super::file_list;
use super::leader_lease::LeaseGuard;
use super::watch::backoff;
use crate::job::{DatasetFingerprint, PersistedJob};
use crate::persisted_format::{Head, RELEASE, VERSION};

/// Writes the state of one master's job, in a task of its own.
#[derive(Debug)]
pub(crate) struct PersistedJobWriter {
    submitted: watch::Sender<PendingWrite>,
    persisted: watch::Receiver<u64>,
    errors: mpsc::UnboundedReceiver<PersistError>,
    /// Whether the server has refused a write permanently; nothing more is written then.
    is_refused: bool,
    task: JoinHandle<()>,
}

/// Why the job is not persisted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PersistError {
    /// The server will never accept it.
    Refused(String),
    /// The write is retried.
    Retrying(String),
}

/// Waits until the submitted state is persisted.
#[derive(Clone, Debug)]
pub(crate) struct PersistedWatch {
    submitted: watch::Receiver<PendingWrite>,
    persisted: watch::Receiver<u64>,
}

#[derive(Clone, Debug, Default)]
struct PendingWrite {
    job: Option<PersistedJob>,
    revision: u64,
    /// The newest revision that the master waits for.
    awaited: u64,
}

/// The form in which the job is persisted.
#[derive(Serialize)]
struct Versioned<'a> {
    version: u32,
    release: &'a str,
    #[serde(flatten)]
    content: &'a PersistedJob,
}

/// As [`Versioned`], compressed.
#[derive(Serialize)]
struct Packed<'a> {
    version: u32,
    release: &'a str,
    packed: String,
}

impl PersistedJobWriter {
    /// Starts the task, which writes through `writer` while the guard is valid. `stored`: the list
    /// of files that is stored already. A permanent refusal is recorded as an Event. Must be called
    /// within a runtime.
    pub(crate) fn new(
        writer: AnchorWriter,
        guard: LeaseGuard,
        recorder: EventRecorder,
        stored: Option<DatasetFingerprint>,
    ) -> Self {
        let (submitted, submissions) = watch::channel(PendingWrite::default());
        let (persisted_sender, persisted) = watch::channel(0);
        let (error_sender, errors) = mpsc::unbounded_channel();
        let writer_task = WriterTask { writer, guard, recorder, stored, errors: error_sender };
        let task = tokio::spawn(writer_task.run(submissions, persisted_sender));
        Self { submitted, persisted, errors, is_refused: false, task }
    }

    /// Submits the state of `revision`. It is written without delay if `awaited` is not persisted
    /// yet.
    pub(crate) fn submit(&self, revision: u64, awaited: u64, job: PersistedJob) {
        self.submitted.send_replace(PendingWrite { job: Some(job), revision, awaited });
    }

    /// Returns the newest revision that need not be waited for: it is persisted, or writes have
    /// ended.
    pub(crate) fn persisted(&self) -> u64 {
        if self.is_refused { u64::MAX } else { *self.persisted.borrow() }
    }

    /// Waits until a newer revision is persisted, or a write fails. Cancel-safe.
    pub(crate) async fn changed(&mut self) -> Option<PersistError> {
        tokio::select! {
            Some(error) = self.errors.recv() => {
                self.is_refused |= matches!(error, PersistError::Refused(_));
                Some(error)
            }
            Ok(()) = self.persisted.changed() => None,
            // Only a panic ends the task while `self` exists.
            else => std::future::pending().await,
        }
    }

    /// Returns a handle with which to wait until all is persisted.
    pub(crate) fn watch(&self) -> PersistedWatch {
        PersistedWatch { submitted: self.submitted.subscribe(), persisted: self.persisted.clone() }
    }
}

impl Drop for PersistedJobWriter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PersistedWatch {
    /// Waits until all submitted state is persisted, for at most `limit`.
    pub(crate) async fn flush(&mut self, limit: Duration) {
        let wanted = self.submitted.borrow().revision;
        // An error means that the writer was dropped: nothing more is persisted.
        let _ = timeout(limit, self.persisted.wait_for(|&persisted| persisted >= wanted)).await;
    }
}

/// Parses a job that a [`PersistedJobWriter`] has persisted.
///
/// # Errors
/// What is wrong with it; for a job of another release, what to do.
pub(crate) fn read(text: &str) -> Result<PersistedJob, String> {
    #[derive(Deserialize)]
    struct Stored {
        #[serde(flatten)]
        head: Head,
        packed: Option<String>,
    }
    let wrong = |error: serde_json::Error| error.to_string();
    let Stored { head, packed } = serde_json::from_str(text).map_err(wrong)?;
    head.check().map_err(|format| format.to_string())?;
    let plain = match packed {
        None => text.to_owned(),
        Some(packed) => unpack(&packed)?,
    };
    serde_json::from_str(&plain).map_err(wrong)
}

fn unpack(packed: &str) -> Result<String, String> {
    let packed = BASE64.decode(packed).map_err(|error| error.to_string())?;
    let decoder = zstd::Decoder::new(&*packed).map_err(|error| error.to_string())?;
    let mut plain = String::new();
    let read = decoder.take(UNPACKED_BYTES_MAX + 1).read_to_string(&mut plain);
    read.map_err(|error| error.to_string())?;
    if plain.len() as u64 > UNPACKED_BYTES_MAX {
        return Err(format!("it is damaged: no job takes {} MiB", UNPACKED_BYTES_MAX >> 20));
    }
    Ok(plain)
}

/// Serializes a job for the anchor.
///
/// # Errors
/// It is too long.
fn write(mut job: PersistedJob) -> Result<String, String> {
    let text = pack(&job);
    if text.len() <= JOB_BYTES_MAX {
        return Ok(text);
    }
    warn!(
        bytes = text.len(),
        "the persisted job is shortened: the next master will not know all of its history"
    );
    job.shorten();
    let text = pack(&job);
    match text.len() {
        0..=JOB_BYTES_MAX => Ok(text),
        bytes => Err(format!(
            "it takes {} KiB, and at most {} are possible",
            bytes >> 10,
            JOB_BYTES_MAX >> 10
        )),
    }
}

/// Serializes a job of any length.
pub(crate) fn pack(job: &PersistedJob) -> String {
    let versioned = Versioned { version: VERSION, release: RELEASE, content: job };
    let plain = serde_json::to_string(&versioned).expect("the keys of a job are strings");
    if plain.len() <= PLAIN_BYTES_MAX {
        return plain;
    }
    let packed = zstd::encode_all(plain.as_bytes(), LEVEL).expect("memory takes what is written");
    let packed = Packed { version: VERSION, release: RELEASE, packed: BASE64.encode(packed) };
    let text = serde_json::to_string(&packed).expect("the keys are strings");
    if text.len() < plain.len() { text } else { plain }
}

/// State of the writer's task.
struct WriterTask {
    writer: AnchorWriter,
    guard: LeaseGuard,
    recorder: EventRecorder,
    /// The list of files that is stored.
    stored: Option<DatasetFingerprint>,
    errors: mpsc::UnboundedSender<PersistError>,
}

impl WriterTask {
    async fn run(
        mut self,
        mut submissions: watch::Receiver<PendingWrite>,
        persisted: watch::Sender<u64>,
    ) {
        let mut written: Option<Instant> = None;
        while submissions.changed().await.is_ok() {
            // More changes may follow soon and are combined into one write, unless the master
            // waits for this one.
            if let Some(written) = written {
                let known = *persisted.borrow();
                let urgent = submissions.wait_for(|submit| submit.awaited > known);
                let _ = tokio::time::timeout_at(written + INTERVAL, urgent).await;
            }
            let mut failures = 0;
            loop {
                let PendingWrite { job: Some(job), revision, .. } =
                    submissions.borrow_and_update().clone()
                else {
                    break;
                };
                let why = match self.try_persist(job).await {
                    None => continue,
                    Some(Ok(())) => {
                        written = Some(Instant::now());
                        persisted.send_replace(revision);
                        break;
                    }
                    Some(Err(WriteError::Fenced)) => {
                        self.restore_incarnation().await;
                        continue;
                    }
                    Some(Err(WriteError::Refused(why))) => {
                        self.refuse(why);
                        return std::future::pending().await;
                    }
                    Some(Err(WriteError::Retryable(error))) => error.to_string(),
                };
                if failures == 0 {
                    warn!(why, "the job is not persisted yet");
                    // The receiver may have been dropped, at the job's end.
                    let _ = self.errors.send(PersistError::Retrying(why));
                }
                tokio::time::sleep(backoff(failures)).await;
                failures += 1;
            }
        }
    }

    /// Writes the list of files, if it is new, and the job. `None`: the guard expired before the
    /// answer.
    async fn try_persist(&mut self, job: PersistedJob) -> Option<Result<(), WriteError>> {
        if let Some(list) = job.file_list()
            && self.stored != Some(DatasetFingerprint::of(list))
        {
            let stored = self.guard.during(file_list::store(&self.writer, list)).await?;
            match stored {
                Ok(()) => self.stored = Some(DatasetFingerprint::of(list)),
                Err(error) => return Some(Err(error)),
            }
        }
        let text = match write(job) {
            Ok(text) => text,
            Err(why) => return Some(Err(WriteError::Refused(why))),
        };
        let data = Data::from([(RECORD.into(), text)]);
        let written = self.guard.during(timeout(WRITE_TIMEOUT, self.writer.write(&data))).await?;
        Some(written.unwrap_or_else(|_| {
            let doing = "write to the job's anchor".into();
            Err(WriteError::Retryable(ClusterError::Unreachable {
                doing,
                message: "it took too long".into(),
            }))
        }))
    }

    /// The anchor has another incarnation than this master's. If no other master leads, a user has
    /// edited it. Does not return if another master leads: this one's state is not written.
    async fn restore_incarnation(&mut self) {
        warn!("the job's anchor has another master's incarnation: nothing is written for now");
        // Another master can begin only after it has got the Lease.
        self.guard.renewed().await;
        if let Some(Ok(())) = self.guard.during(self.writer.restore_incarnation()).await {
            let what = "somebody has edited the incarnation in the job's ConfigMap; its master, \
                        which holds the Lease, has written it again";
            warn!("{what}");
            self.recorder.record("IncarnationRestored", what.into());
        }
    }

    fn refuse(&self, why: String) {
        error!(why, "the job can't be persisted: the job fails");
        self.recorder.record("RecordRefused", format!("the job can't be persisted: {why}"));
        // The receiver may have been dropped, at the job's end.
        let _ = self.errors.send(PersistError::Refused(why));
    }
}

/// Minimum time between two writes that the master does not wait for.
const INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of a write, after which it is retried.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// More than any job takes whose packed form the anchor holds.
const UNPACKED_BYTES_MAX: u64 = 64 << 20;
/// Length above which the JSON is compressed.
const PLAIN_BYTES_MAX: usize = 64 << 10;
/// Maximum length; the anchor has 1 MiB in total.
const JOB_BYTES_MAX: usize = 416 << 10;
const LEVEL: i32 = 3;

#[cfg(test)]
mod tests;
