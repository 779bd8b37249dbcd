//! What a summary and a status say of a job's checkpoints.

use serde::{Deserialize, Serialize};

/// A job's checkpoints. The names of its fields are a public format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointsSummary {
    /// Their folder; `None` if the job writes none and only started from another job's checkpoint.
    pub dir: Option<String>,
    /// The newest complete one.
    pub newest: Option<SavedCheckpoint>,
    /// Number of completed checkpoints.
    pub saved: u64,
    /// Number of checkpoints that could not be written.
    pub failed: u64,
    /// Number of checkpoints that were found damaged when a group tried to start from them.
    pub damaged: u64,
    /// Error of the last failed write; `None` after the next successful one.
    pub error: Option<String>,
    /// Checkpoints from which the group started; the newest 100.
    pub restored: Vec<RestoredCheckpoint>,
}

impl CheckpointsSummary {
    /// The first and the last of the job's first `steps` steps that no checkpoint contains. `None`:
    /// all are in one, or the job writes none.
    #[must_use]
    pub fn unsaved(&self, steps: u64) -> Option<(u64, u64)> {
        let newest = self.newest.as_ref().map(|newest| newest.step);
        let saved = newest.max(self.restored.last().map(|last| last.step)).unwrap_or(0);
        (self.dir.is_some() && saved < steps).then(|| (saved + 1, steps))
    }

    /// The address of the newest complete checkpoint.
    #[must_use]
    pub fn newest_address(&self) -> Option<String> {
        let (dir, newest) = (self.dir.as_ref()?, self.newest.as_ref()?);
        Some(format!("{}/{}", dir.trim_end_matches('/'), newest.name))
    }
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedCheckpoint {
    /// Steps that it contains.
    pub step: u64,
    /// Its folder.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
}

/// A checkpoint from which the group started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredCheckpoint {
    /// Steps that it contains.
    pub step: u64,
    /// Its folder.
    pub name: String,
    /// Steps committed after it, as far as the master knew: this work is repeated.
    pub lost_steps: u64,
}
