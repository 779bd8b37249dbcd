//! What the next master of a job needs, persisted in its anchor.
//!
//! A write takes some milliseconds, and for ever where the API server is away, so the master does
//! not wait for it, but for what nobody else could tell
//! ([`Job::awaited`](crate::job::Job::awaited)). The newest record is the one that is written;
//! those that came while another was on its way are not.
//!
//! A record is JSON. One that is longer than 64 KiB is compressed: `{"version": 2, "packed":
//! "<base64 of zstd>"}`.
//!
//! **Versions.** A field that older programs may pass over is added with a serde default, and the
//! version stays. Another version is for what they would read wrong: they refuse it before they do
//! anything. Version 1 had the list of files in the record; it is read, too, and replaced by the
//! first write.
//!
//! What the server refuses for good (400, 413, 422) fails the job: its next master would know
//! nothing of what is done next. Anything else (no answer, a right that is missing) is told and
//! tried again.

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
use crate::job::{DataMark, JobRecord};

/// Keeps the records of one master.
#[derive(Debug)]
pub(crate) struct PersistedJobWriter {
    submitted: watch::Sender<PendingWrite>,
    persisted: watch::Receiver<u64>,
    errors: mpsc::UnboundedReceiver<PersistError>,
    /// Nothing more is written.
    is_refused: bool,
    task: JoinHandle<()>,
}

/// What stands in the way of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PersistError {
    /// The server will never take it.
    Refused(String),
    /// It is tried again.
    Retrying(String),
}

/// Waits until what was submitted is persisted.
#[derive(Clone, Debug)]
pub(crate) struct PersistedWatch {
    submitted: watch::Receiver<PendingWrite>,
    persisted: watch::Receiver<u64>,
}

#[derive(Clone, Debug, Default)]
struct PendingWrite {
    record: Option<JobRecord>,
    revision: u64,
    /// Somebody waits until this one is persisted.
    awaited: u64,
}

/// A record that is written.
#[derive(Serialize)]
struct Versioned<'a> {
    version: u32,
    #[serde(flatten)]
    content: &'a JobRecord,
}

impl PersistedJobWriter {
    /// Keeps by `writer` while the guard holds; the list of files of `stored` is there already.
    /// What is refused is told to `recorder`. Must be called within a runtime.
    pub(crate) fn new(
        writer: AnchorWriter,
        guard: LeaseGuard,
        recorder: EventRecorder,
        stored: Option<DataMark>,
    ) -> Self {
        let (submitted, submissions) = watch::channel(PendingWrite::default());
        let (persisted_sender, persisted) = watch::channel(0);
        let (error_sender, errors) = mpsc::unbounded_channel();
        let writer_task = WriterTask { writer, guard, recorder, stored, errors: error_sender };
        let task = tokio::spawn(writer_task.keep(submissions, persisted_sender));
        Self { submitted, persisted, errors, is_refused: false, task }
    }

    /// Has `record` written in time, and at once where its `revision` must be persisted before anything
    /// more is done.
    pub(crate) fn submit(&self, revision: u64, awaited: u64, record: JobRecord) {
        self.submitted.send_replace(PendingWrite { record: Some(record), revision, awaited });
    }

    /// The newest revision that need not be waited for any more: it is persisted, or none ever will be.
    pub(crate) fn persisted(&self) -> u64 {
        if self.is_refused { u64::MAX } else { *self.persisted.borrow() }
    }

    /// Waits until a newer one is persisted, or something stands in the way. Safe to drop at any time.
    pub(crate) async fn changed(&mut self) -> Option<PersistError> {
        tokio::select! {
            Some(error) = self.errors.recv() => {
                self.is_refused |= matches!(error, PersistError::Refused(_));
                Some(error)
            }
            Ok(()) = self.persisted.changed() => None,
            // Only a panic ends the task while this is here.
            else => std::future::pending().await,
        }
    }

    /// For who wants to wait until all is persisted.
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
    /// Waits until what has been submitted is persisted, or the time is up.
    pub(crate) async fn flush(&mut self, limit: Duration) {
        let wanted = self.submitted.borrow().revision;
        // A writer that is gone keeps nothing more.
        let _ = timeout(limit, self.persisted.wait_for(|&persisted| persisted >= wanted)).await;
    }
}

/// A record as [`PersistedJobWriter`] has written it, or an older release's.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn read(text: &str) -> Result<JobRecord, String> {
    #[derive(Deserialize)]
    struct Head {
        version: u32,
        #[serde(default)]
        packed: Option<String>,
    }
    let wrong = |error: serde_json::Error| error.to_string();
    // The rest of another version may be anything.
    let Head { version, packed } = serde_json::from_str(text).map_err(wrong)?;
    if !(VERSION_OLDEST..=VERSION).contains(&version) {
        return Err(format!(
            "it is of version {version}, and this program (elasticdl {}) reads versions {VERSION_OLDEST} to {VERSION}; its \
             master must be of the release that wrote it, or a newer one",
            env!("CARGO_PKG_VERSION")
        ));
    }
    match packed {
        None => serde_json::from_str(text).map_err(wrong),
        Some(packed) => {
            let packed = BASE64.decode(packed).map_err(|error| error.to_string())?;
            let reader = zstd::Decoder::new(&*packed).map_err(|error| error.to_string())?;
            serde_json::from_reader(reader).map_err(wrong)
        }
    }
}

/// The text of a record in an anchor.
///
/// # Errors
/// Why it can't be persisted: it is too long.
fn write(mut record: JobRecord) -> Result<String, String> {
    let text = pack(&record);
    if text.len() <= RECORD_BYTES_MAX {
        return Ok(text);
    }
    warn!(
        bytes = text.len(),
        "the job's record is shortened: the next master will not know all of the job's course"
    );
    record.shorten();
    let text = pack(&record);
    match text.len() {
        0..=RECORD_BYTES_MAX => Ok(text),
        bytes => Err(format!(
            "it takes {} KiB, and at most {} are possible",
            bytes >> 10,
            RECORD_BYTES_MAX >> 10
        )),
    }
}

fn pack(record: &JobRecord) -> String {
    let versioned = Versioned { version: VERSION, content: record };
    let plain = serde_json::to_string(&versioned).expect("a record's keys are strings");
    if plain.len() <= PLAIN_BYTES_MAX {
        return plain;
    }
    let packed = zstd::encode_all(plain.as_bytes(), LEVEL).expect("memory takes what is written");
    let text = format!("{{\"version\":{VERSION},\"packed\":\"{}\"}}", BASE64.encode(packed));
    if text.len() < plain.len() { text } else { plain }
}

/// Who writes.
struct WriterTask {
    writer: AnchorWriter,
    guard: LeaseGuard,
    recorder: EventRecorder,
    /// The list of files that is persisted.
    stored: Option<DataMark>,
    errors: mpsc::UnboundedSender<PersistError>,
}

impl WriterTask {
    async fn keep(
        mut self,
        mut submissions: watch::Receiver<PendingWrite>,
        persisted: watch::Sender<u64>,
    ) {
        let mut written: Option<Instant> = None;
        while submissions.changed().await.is_ok() {
            // More may come soon; it goes with the same write, unless somebody waits for it.
            if let Some(written) = written {
                let known = *persisted.borrow();
                let urgent = submissions.wait_for(|submit| submit.awaited > known);
                let _ = tokio::time::timeout_at(written + INTERVAL, urgent).await;
            }
            let mut failures = 0;
            loop {
                let PendingWrite { record: Some(record), revision, .. } =
                    submissions.borrow_and_update().clone()
                else {
                    break;
                };
                let why = match self.try_persist(record).await {
                    None => continue,
                    Some(Ok(())) => {
                        written = Some(Instant::now());
                        persisted.send_replace(revision);
                        break;
                    }
                    Some(Err(WriteError::Fenced)) => {
                        warn!(
                            "another master keeps the job's record: this one's is not written any more"
                        );
                        return std::future::pending().await;
                    }
                    Some(Err(WriteError::Refused(why))) => {
                        self.refuse(why);
                        return std::future::pending().await;
                    }
                    Some(Err(WriteError::Retryable(error))) => error.to_string(),
                };
                if failures == 0 {
                    warn!(why, "the job's record is not persisted yet");
                    // The job may have ended.
                    let _ = self.errors.send(PersistError::Retrying(why));
                }
                tokio::time::sleep(backoff(failures)).await;
                failures += 1;
            }
        }
    }

    /// Writes the list of files, if it is new, and the record; `None`: the guard has run out
    /// first.
    async fn try_persist(&mut self, record: JobRecord) -> Option<Result<(), WriteError>> {
        if let Some(list) = record.file_list()
            && self.stored != Some(DataMark::of(list))
        {
            let stored = self.guard.during(file_list::store(&self.writer, list)).await?;
            match stored {
                Ok(()) => self.stored = Some(DataMark::of(list)),
                Err(error) => return Some(Err(error)),
            }
        }
        let text = match write(record) {
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

    fn refuse(&self, why: String) {
        error!(why, "the job's record can't be persisted: the job fails");
        self.recorder
            .record("RecordRefused", format!("the job's record can't be persisted: {why}"));
        // The job may have ended.
        let _ = self.errors.send(PersistError::Refused(why));
    }
}

/// Between two writes that nobody waits for.
const INTERVAL: Duration = Duration::from_secs(1);
/// A write that takes longer is tried again.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Of what records look like.
const VERSION: u32 = 2;
/// What is still read.
const VERSION_OLDEST: u32 = 1;
/// A longer record is compressed.
const PLAIN_BYTES_MAX: usize = 64 << 10;
/// A record's part of the 1 MiB that an anchor may have.
const RECORD_BYTES_MAX: usize = 416 << 10;
const LEVEL: i32 = 3;

#[cfg(test)]
mod tests;
