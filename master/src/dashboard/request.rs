//! What users request through the page.

use elasticdl_proto::Status;
use serde::Serialize;
use tokio::sync::oneshot;

use crate::job::JobSpec;

/// A request of the user through the page.
#[derive(Debug)]
pub(crate) struct PageRequest {
    pub(crate) command: PageCommand,
    /// The reply is a text to show, or says why a request is refused.
    pub(crate) reply: oneshot::Sender<Result<String, String>>,
}

/// What a user may request through the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageCommand {
    /// Ask all workers what they do.
    Inspect,
    /// Keep this many workers.
    Scale(u32),
    /// Finish the step, then stop.
    Stop,
}

/// Numbers of workers that a job can be scaled to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ScaleLimits {
    pub(crate) min: u32,
    pub(crate) max: u32,
    /// Workers of a pod.
    pub(crate) step: u32,
}

impl ScaleLimits {
    /// The limits that a status reports: users may have changed them.
    pub(crate) fn of_status(self, status: &Status) -> Self {
        match status.workers_max {
            0 => self,
            max => Self { min: status.workers_min, max, ..self },
        }
    }
}

impl From<&JobSpec> for ScaleLimits {
    fn from(spec: &JobSpec) -> Self {
        Self { min: spec.min_workers, max: spec.max_workers, step: spec.workers_per_pod }
    }
}
