//! The actions of a job: the core's whole output, in addition to its status.

use elasticdl_proto::WorkerId;
pub use elasticdl_proto::{MasterMessage, Membership};
use serde::{Deserialize, Serialize};

use super::event::{ConnectionId, LaunchId};

/// An action for the shell. Actions are done in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Assign the stream to `worker` and send the welcome. An earlier stream of this worker is
    /// dead.
    Admit {
        /// The stream.
        connection: ConnectionId,
        /// Its worker.
        worker: WorkerId,
    },
    /// Close a worker's stream.
    Disconnect {
        /// The worker.
        worker: WorkerId,
    },
    /// The job is over. This is its last action; the shell ends the processes that still run.
    End(Outcome),
    /// Kill a launched process, or pod, at once.
    Kill {
        /// The launch; for a pod, its first launch.
        launch: LaunchId,
    },
    /// Start a process, or a pod of [`workers_per_pod`](super::JobSpec::workers_per_pod) workers
    /// whose launches and slots have consecutive numbers from these on.
    Launch {
        /// Unique id within the job.
        launch: LaunchId,
        /// The lowest free slot. Low slots matter most: those below `min_workers` are the core
        /// workers.
        slot: u32,
        /// Nodes on which a worker has failed a short while ago, or workers had several faults, and
        /// those that the user avoids: others are better.
        avoid: Vec<String>,
    },
    /// Refuse a stream that belongs to no worker.
    Refuse {
        /// The stream.
        connection: ConnectionId,
        /// Why.
        reason: String,
    },
    /// Log a line for the user: one per change of state.
    Log(String),
    /// Send a message to a worker.
    Send {
        /// The worker.
        worker: WorkerId,
        /// The message.
        message: MasterMessage,
    },
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The job reached the end of its data or of its steps.
    Completed,
    /// The job failed; the summary holds the error.
    Failed,
    /// The data can't be used, so nothing was started; the summary holds the error.
    #[serde(rename = "Refused")]
    InvalidInput,
    /// The user stopped it.
    Stopped,
}
