//! Whether the workers of a job on several hosts see the same folder of checkpoints.
//!
//! The worker that describes the data set writes a file into a folder that is named as the
//! checkpoint of step 0 would be. Each other worker looks for the file, or for a checkpoint of the
//! job, before it builds its model. The first complete checkpoint of the job makes the file
//! superfluous, and deletes it as it does a checkpoint that has stayed incomplete.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use bytes::Bytes;
use elasticdl_data::storage::{Storage, StorageError};
use elasticdl_data::worker::pause_unless_stopped;

use super::name::{Name, PREFIX};

/// The file that this worker has written.
#[derive(Debug)]
pub(crate) struct Probe {
    storage: Storage,
    folder: String,
}

impl Probe {
    /// Writes the file of this `run`.
    pub(crate) fn write(storage: &Storage, run: &str) -> Result<Self, StorageError> {
        let folder = folder(run);
        storage.write(&format!("{folder}/{FILE}"), vec![Bytes::from_static(CONTENT)])?;
        Ok(Self { storage: storage.clone(), folder })
    }

    /// Deletes the file, if no checkpoint has.
    pub(crate) fn remove(&self) {
        if let Err(error) = self.storage.remove_folder(&self.folder, FILE) {
            tracing::warn!(%error, "checkpoints can be written, but not removed");
        }
    }

    /// Waits until the file of this `run`, or one of its checkpoints, is seen in `storage`; for
    /// `limit` at most, or until `stops` is set. Returns whether this is not the same folder.
    ///
    /// A file system of a network may show a new file late.
    pub(crate) fn is_missing(
        storage: &Storage,
        run: &str,
        limit: Duration,
        stops: &AtomicBool,
    ) -> Result<bool, StorageError> {
        let began = Instant::now();
        while !is_seen(storage, run)? {
            if began.elapsed() >= limit {
                return Ok(true);
            }
            if !Storage::is_remote(storage.address()) {
                // To open a folder makes a client of NFS ask the server for its contents.
                let folders = Path::new(storage.address()).ancestors().take(2);
                folders.for_each(|folder| drop(fs::read_dir(folder)));
            }
            if pause_unless_stopped(stops, PAUSE) {
                let folder = storage.address();
                tracing::warn!(folder, "this worker ends before it has seen the job's checkpoints");
                break;
            }
        }
        Ok(false)
    }
}

fn is_seen(storage: &Storage, run: &str) -> Result<bool, StorageError> {
    match storage.bytes(&format!("{}/{FILE}", folder(run))) {
        Err(StorageError::NotFound { .. }) => {}
        found => return found.map(|_| true),
    }
    // Written before the file is deleted.
    let files = storage.list_folders(PREFIX)?;
    Ok(Name::all(&files).keys().any(|name| name.run == run))
}

fn folder(run: &str) -> String {
    Name { step: 0, generation: 0, run: run.into() }.to_string()
}

const FILE: &str = "probe";
const CONTENT: &[u8] = b"The workers of a job check by this file that they see the same folder.\n";
const PAUSE: Duration = Duration::from_millis(250);
