//! What the next master of a job needs, kept in its anchor.
//!
//! A write takes some milliseconds, and for ever where the API server is away, so the master does
//! not wait for it, but for what nobody else could tell
//! ([`Job::barrier`](crate::job::Job::barrier)). The newest record is the one that is written;
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

use super::anchor::{Data, RECORD, WriteError, Writer};
use super::client::ClusterError;
use super::events::Recorder;
use super::lease::Warrant;
use super::lists;
use super::watch::pause;
use crate::job::{DataMark, JobRecord};

/// Keeps the records of one master.
#[derive(Debug)]
pub(crate) struct Keeper {
    offered: watch::Sender<Offer>,
    kept: watch::Receiver<u64>,
    troubles: mpsc::UnboundedReceiver<Trouble>,
    /// Nothing more is written.
    is_refused: bool,
    task: JoinHandle<()>,
}

/// What stands in the way of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The server will never take it.
    Refused(String),
    /// It is tried again.
    Waits(String),
}

/// Waits until what was offered is kept.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    offered: watch::Receiver<Offer>,
    kept: watch::Receiver<u64>,
}

#[derive(Clone, Debug, Default)]
struct Offer {
    record: Option<JobRecord>,
    revision: u64,
    /// Somebody waits until this one is kept.
    barrier: u64,
}

/// A record that is written.
#[derive(Serialize)]
struct Versioned<'a> {
    version: u32,
    #[serde(flatten)]
    content: &'a JobRecord,
}

impl Keeper {
    /// Keeps by `writer` while the warrant holds; the list of files of `stored` is there already.
    /// What is refused is told to `recorder`. Must be called within a runtime.
    pub(crate) fn new(
        writer: Writer,
        warrant: Warrant,
        recorder: Recorder,
        stored: Option<DataMark>,
    ) -> Self {
        let (offered, offers) = watch::channel(Offer::default());
        let (tell_kept, kept) = watch::channel(0);
        let (tell_trouble, troubles) = mpsc::unbounded_channel();
        let clerk = Clerk { writer, warrant, recorder, stored, troubles: tell_trouble };
        let task = tokio::spawn(clerk.keep(offers, tell_kept));
        Self { offered, kept, troubles, is_refused: false, task }
    }

    /// Has `record` written in time, and at once where its `revision` must be kept before anything
    /// more is done.
    pub(crate) fn offer(&self, revision: u64, barrier: u64, record: JobRecord) {
        self.offered.send_replace(Offer { record: Some(record), revision, barrier });
    }

    /// The newest revision that need not be waited for any more: it is kept, or none ever will be.
    pub(crate) fn kept(&self) -> u64 {
        if self.is_refused { u64::MAX } else { *self.kept.borrow() }
    }

    /// Waits until a newer one is kept, or something stands in the way. Safe to drop at any time.
    pub(crate) async fn changed(&mut self) -> Option<Trouble> {
        tokio::select! {
            Some(trouble) = self.troubles.recv() => {
                self.is_refused |= matches!(trouble, Trouble::Refused(_));
                Some(trouble)
            }
            Ok(()) = self.kept.changed() => None,
            // Only a panic ends the task while this is here.
            else => std::future::pending().await,
        }
    }

    /// For who wants to wait until all is kept.
    pub(crate) fn watch(&self) -> Kept {
        Kept { offered: self.offered.subscribe(), kept: self.kept.clone() }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Kept {
    /// Waits until what has been offered is kept, or the time is up.
    pub(crate) async fn flush(&mut self, limit: Duration) {
        let wanted = self.offered.borrow().revision;
        // A keeper that is gone keeps nothing more.
        let _ = timeout(limit, self.kept.wait_for(|&kept| kept >= wanted)).await;
    }
}

/// A record as [`Keeper`] has written it, or an older release's.
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
/// Why it can't be kept: it is too long.
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
struct Clerk {
    writer: Writer,
    warrant: Warrant,
    recorder: Recorder,
    /// The list of files that is kept.
    stored: Option<DataMark>,
    troubles: mpsc::UnboundedSender<Trouble>,
}

impl Clerk {
    async fn keep(mut self, mut offers: watch::Receiver<Offer>, kept: watch::Sender<u64>) {
        let mut written: Option<Instant> = None;
        while offers.changed().await.is_ok() {
            // More may come soon; it goes with the same write, unless somebody waits for it.
            if let Some(written) = written {
                let known = *kept.borrow();
                let urgent = offers.wait_for(|offer| offer.barrier > known);
                let _ = tokio::time::timeout_at(written + INTERVAL, urgent).await;
            }
            let mut failures = 0;
            loop {
                let Offer { record: Some(record), revision, .. } =
                    offers.borrow_and_update().clone()
                else {
                    break;
                };
                let why = match self.try_keep(record).await {
                    None => continue,
                    Some(Ok(())) => {
                        written = Some(Instant::now());
                        kept.send_replace(revision);
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
                    Some(Err(WriteError::Later(error))) => error.to_string(),
                };
                if failures == 0 {
                    warn!(why, "the job's record is not kept yet");
                    // The job may have ended.
                    let _ = self.troubles.send(Trouble::Waits(why));
                }
                tokio::time::sleep(pause(failures)).await;
                failures += 1;
            }
        }
    }

    /// Writes the list of files, if it is new, and the record; `None`: the warrant has run out
    /// first.
    async fn try_keep(&mut self, record: JobRecord) -> Option<Result<(), WriteError>> {
        if let Some(list) = record.file_list()
            && self.stored != Some(DataMark::of(list))
        {
            let stored = self.warrant.during(lists::store(&self.writer, list)).await?;
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
        let written = self.warrant.during(timeout(WRITE_TIMEOUT, self.writer.write(&data))).await?;
        Some(written.unwrap_or_else(|_| {
            let doing = "write to the job's anchor".into();
            Err(WriteError::Later(ClusterError::Unreachable {
                doing,
                message: "it took too long".into(),
            }))
        }))
    }

    fn refuse(&self, why: String) {
        error!(why, "the job's record can't be kept: the job fails");
        self.recorder.record("RecordRefused", format!("the job's record can't be kept: {why}"));
        // The job may have ended.
        let _ = self.troubles.send(Trouble::Refused(why));
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
