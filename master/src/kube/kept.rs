//! What the next master of a job needs, kept in its anchor.
//!
//! A write takes some milliseconds, and for ever where the API server is away, so the master does not wait for it, but for
//! what nobody else could tell ([`Job::barrier`](crate::job::Job::barrier)). The newest record is the one that is written;
//! those that came while another was on its way are not.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tracing::warn;

use super::anchor::{Anchor, Data, RECORD};
use super::lease::Warrant;
use super::watch::pause;
use crate::job::JobRecord;

/// Keeps the records of one master.
#[derive(Debug)]
pub(crate) struct Keeper {
    offered: watch::Sender<Offer>,
    kept: watch::Receiver<u64>,
    task: JoinHandle<()>,
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

#[derive(Deserialize, Serialize)]
struct Versioned<T> {
    version: u32,
    #[serde(flatten)]
    content: T,
}

impl Keeper {
    /// Keeps in `anchor` while the warrant holds. Must be called within a runtime.
    pub(crate) fn new(anchor: Anchor, warrant: Warrant) -> Self {
        let (offered, offers) = watch::channel(Offer::default());
        let (tell_kept, kept) = watch::channel(0);
        Self { offered, kept, task: tokio::spawn(keep(anchor, warrant, offers, tell_kept)) }
    }

    /// Has `record` written in time, and at once where its `revision` must be kept before anything more is done.
    pub(crate) fn offer(&self, revision: u64, barrier: u64, record: JobRecord) {
        self.offered.send_replace(Offer { record: Some(record), revision, barrier });
    }

    /// The newest revision that is kept.
    pub(crate) fn kept(&self) -> u64 {
        *self.kept.borrow()
    }

    /// Waits until a newer one is kept. Safe to drop at any time.
    pub(crate) async fn changed(&mut self) {
        if self.kept.changed().await.is_err() {
            // Only a panic ends the task while this is here.
            std::future::pending().await
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

/// A record as [`Keeper`] has written it.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn read(text: &str) -> Result<JobRecord, String> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if version != VERSION {
        return Err(format!("it is of version {version}; this program reads version {VERSION}"));
    }
    let record: Versioned<JobRecord> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    Ok(record.content)
}

async fn keep(
    anchor: Anchor,
    mut warrant: Warrant,
    mut offers: watch::Receiver<Offer>,
    kept: watch::Sender<u64>,
) {
    let mut written: Option<Instant> = None;
    let mut failures = 0;
    while offers.changed().await.is_ok() {
        // More may come soon; it goes with the same write, unless somebody waits for it.
        if let Some(written) = written {
            let known = *kept.borrow();
            let urgent = offers.wait_for(|offer| offer.barrier > known);
            let _ = tokio::time::timeout_at(written + INTERVAL, urgent).await;
        }
        loop {
            let Offer { record: Some(record), revision, .. } = offers.borrow_and_update().clone() else {
                break;
            };
            let text = serde_json::to_string(&Versioned { version: VERSION, content: record })
                .expect("a record's keys are strings");
            let data = Data::from([(RECORD.into(), text)]);
            let write = timeout(WRITE_TIMEOUT, anchor.write(&data));
            let Some(write) = warrant.during(write).await else { continue };
            match write.map_err(|_| "no answer".to_owned()).and_then(|w| w.map_err(|e| e.to_string())) {
                Ok(()) => {
                    (written, failures) = (Some(Instant::now()), 0);
                    kept.send_replace(revision);
                    break;
                }
                Err(error) => {
                    if failures == 0 {
                        warn!(error, "the job's record is not kept yet");
                    }
                    tokio::time::sleep(pause(failures)).await;
                    failures += 1;
                }
            }
        }
    }
}

/// Between two writes that nobody waits for.
const INTERVAL: Duration = Duration::from_secs(1);
/// A write that takes longer is tried again.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Of what records look like.
const VERSION: u32 = 1;

#[cfg(test)]
mod tests;
