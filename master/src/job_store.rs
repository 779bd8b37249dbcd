//! Where what another master would need is kept: in a file, or in a cluster.

use crate::job::{Event, Job};
use crate::jobdir::PersistedJobFile;
use crate::kube::persisted_job::{PersistError, PersistedJobWriter};

/// Where records go.
#[derive(Debug)]
pub(crate) enum JobStore {
    /// Written later, and maybe never.
    Anchor(PersistedJobWriter),
    /// Written at once.
    File(PersistedJobFile),
    Nothing,
}

impl JobStore {
    /// Keeps what another master would have to know of what is done next.
    pub(crate) fn save(&mut self, job: &Job) {
        match self {
            Self::Anchor(keeper) => keeper.submit(job.revision(), job.barrier(), job.record()),
            Self::File(file) => file.write(&job.record()),
            Self::Nothing => {}
        }
    }

    /// Whether records are kept for the sake of the step alone: not where each is a call to a
    /// server that others need.
    pub(crate) fn saves_steps(&self) -> bool {
        matches!(self, Self::File(_))
    }

    /// Whether anything more may be done.
    pub(crate) fn allows_actions(&self, job: &Job) -> bool {
        match self {
            Self::Anchor(keeper) => keeper.persisted() >= job.barrier(),
            Self::File(_) | Self::Nothing => true,
        }
    }

    /// Waits until more may be allowed, or the job is to be told something. Safe to drop at any
    /// time.
    pub(crate) async fn changed(&mut self) -> Option<Event> {
        match self {
            Self::Anchor(keeper) => keeper.changed().await.map(|trouble| match trouble {
                PersistError::Refused(reason) => Event::RecordRefused { reason },
                PersistError::Retrying(reason) => Event::RecordWaits { reason },
            }),
            Self::File(_) | Self::Nothing => std::future::pending().await,
        }
    }
}
