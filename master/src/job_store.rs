//! Storage of the persisted job, from which a successor master resumes: a file of this machine, or
//! the job's ConfigMap in a cluster.

use crate::job::{Event, Job};
use crate::jobdir::PersistedJobFile;
use crate::kube::persisted_job::{PersistError, PersistedJobWriter};

/// Destination of the persisted job.
#[derive(Debug)]
pub(crate) enum JobStore {
    /// Written asynchronously; a write may fail for good.
    Anchor(PersistedJobWriter),
    /// Written synchronously.
    File(PersistedJobFile),
    /// Not persisted.
    Nothing,
}

impl JobStore {
    /// Persists what a successor must know about the actions that follow. Returns what the user
    /// should know about it.
    pub(crate) fn save(&mut self, job: &Job) -> Option<String> {
        match self {
            Self::Anchor(writer) => {
                writer.submit(job.version(), job.durable_before(), job.to_persisted());
                None
            }
            Self::File(file) => file.write(&job.to_persisted()),
            Self::Nothing => None,
        }
    }

    /// Whether the newest write has failed and is to be tried again.
    pub(crate) fn has_failed(&self) -> bool {
        matches!(self, Self::File(file) if file.has_failed())
    }

    /// Whether a new step alone is worth a write. Not in a cluster, where each write is a call to
    /// the shared API server.
    pub(crate) fn saves_steps(&self) -> bool {
        matches!(self, Self::File(_))
    }

    /// Whether the job's actions may be performed: everything up to the job's barrier is durable.
    pub(crate) fn allows_actions(&self, job: &Job) -> bool {
        match self {
            Self::Anchor(writer) => writer.persisted() >= job.durable_before(),
            Self::File(_) | Self::Nothing => true,
        }
    }

    /// Waits until a write completes or fails; a failure is returned as an event for the job.
    /// Cancel safe.
    pub(crate) async fn changed(&mut self) -> Option<Event> {
        match self {
            Self::Anchor(writer) => writer.changed().await.map(|trouble| match trouble {
                PersistError::Refused(reason) => Event::PersistRefused { reason },
                PersistError::Retrying(reason) => Event::PersistDelayed { reason },
            }),
            Self::File(_) | Self::Nothing => std::future::pending().await,
        }
    }
}
