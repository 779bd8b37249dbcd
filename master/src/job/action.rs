//! What a job wants done: the core's whole output, besides its status.

use std::net::SocketAddr;

use elasticdl_proto::{FileList, Generation, RecordRange, WorkerId};
use serde::{Deserialize, Serialize};

use super::event::{ConnectionId, LaunchId};

/// Something the shell is to do, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// The stream is `worker`'s from now on: welcome it. A stream that it had before is dead.
    Admit {
        /// The stream.
        connection: ConnectionId,
        /// Its worker.
        worker: WorkerId,
    },
    /// End a worker's stream from this side.
    Disconnect {
        /// The worker.
        worker: WorkerId,
    },
    /// The job is over. Last action of a job; processes that still run are to be ended.
    End(Outcome),
    /// End a launched process, or pod, at once.
    Kill {
        /// The launch; of a pod, the first.
        launch: LaunchId,
    },
    /// Start a process, or a pod of [`workers_per_pod`](super::JobSpec::workers_per_pod), whose
    /// launches and places follow this one's.
    Launch {
        /// Its name for this job's life.
        launch: LaunchId,
        /// The lowest place that nobody who stays has. The lower, the less the job can do without
        /// it: those below the least number of workers are its core.
        slot: u32,
    },
    /// End a stream that is no worker's.
    Refuse {
        /// The stream.
        connection: ConnectionId,
        /// Why.
        reason: String,
    },
    /// Tell the user: one line per change of state.
    Log(String),
    /// Tell a worker.
    Send {
        /// The worker.
        worker: WorkerId,
        /// What.
        message: ToWorker,
    },
}

/// What the master says to a worker, besides its welcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToWorker {
    /// Describe the data set.
    Describe,
    /// Finish the step, then stop together.
    Drain,
    /// Fetch the group's state from one of these members while they train.
    Fetch(Vec<(WorkerId, SocketAddr)>),
    /// Keep a checkpoint at the end of the step.
    KeepCheckpoint,
    /// Records to train.
    Lease(Vec<RecordRange>),
    /// The group changes.
    Membership(Membership),
    /// Get ready to be a member.
    Prepare(FileList),
    /// It is over for this worker.
    Shutdown(String),
    /// All members leave: finish the step, keep a checkpoint, then end together. Another group goes
    /// on.
    Suspend,
}

/// A group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// Its generation.
    pub generation: Generation,
    /// Its members in ring order, with where their peers reach them.
    pub members: Vec<(WorkerId, SocketAddr)>,
    /// A member of an earlier generation is lost: leave the step at once. Else switch together at a
    /// step's end.
    pub abort: bool,
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// It came to the end of its data or of its steps.
    Completed,
    /// It could not go on; the summary says why.
    Failed,
    /// Nothing was started: the data can't be used; the summary says why.
    #[serde(rename = "Refused")]
    InvalidInput,
    /// The user stopped it.
    Stopped,
}
