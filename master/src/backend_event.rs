//! What the backends of workers report.

use elasticdl_proto::Location;

use crate::job::{Exit, ReclaimCause, Wait};

/// A change of state of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BackendEvent {
    /// The launch has not joined the job yet, and uses the processor or does I/O.
    Busy,
    /// The launch was requested, with this priority class.
    Created(Option<String>),
    /// The launch ended.
    Ended(Exit),
    /// Cause of the launch's removal. May follow `Ended`.
    Explained(String),
    /// Where the launch runs, as far as the cluster says.
    Located(Location),
    /// What the user should know of a launch; not why it ended.
    Noted(String),
    /// The last lines of output of a launch that ended; `Ended` follows.
    OutputTail(String),
    /// The launch is scheduled and its program runs.
    Running,
    /// The launch is being removed for this reason, and its program still runs.
    Terminating(ReclaimCause, String),
    /// The launch waits to run.
    Waiting(Wait),
}
