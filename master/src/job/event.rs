//! The events of a job: the core's whole input, in addition to the time.

use std::net::SocketAddr;

pub use elasticdl_proto::{
    CheckpointNews, Committed, Evaluated, Failure, Finished, Heartbeat, LaunchId, LedgerReport,
    Phases, Resume, Stall, StepTimes, WorkerMessage,
};
use elasticdl_proto::{Location, WorkerId};

use super::scaling::Scaling;

/// Id of an open stream, assigned by the shell before the stream belongs to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// An event.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The user wants a checkpoint now.
    Checkpoint,
    /// The store refused the persisted job permanently: another master could not take over from any
    /// later state.
    PersistRefused {
        /// The store and its error.
        reason: String,
    },
    /// The persisted job could not be written yet; the write is retried.
    PersistDelayed {
        /// Why.
        reason: String,
    },
    /// A stream opened and sent its hello with the job's token.
    Connected {
        /// The stream.
        connection: ConnectionId,
        /// The launch that the process claims to be.
        launch: LaunchId,
        /// The address at which peers reach the worker.
        address: SocketAddr,
        /// Process id.
        pid: u32,
        /// The worker's earlier identity, if it had a stream before.
        resume: Option<Resume>,
    },
    /// A worker's stream ended.
    Disconnected {
        /// The worker.
        worker: WorkerId,
    },
    /// A worker sent a message.
    Message {
        /// The worker.
        worker: WorkerId,
        /// The message.
        message: WorkerMessage,
    },
    /// The reason for a launch's removal has become known, possibly after the launch ended.
    LaunchExplained {
        /// The launch.
        launch: LaunchId,
        /// What removed the launch, and why.
        explanation: String,
    },
    /// A launch that has not joined the job needs the user's attention.
    LaunchNoted {
        /// The launch.
        launch: LaunchId,
        /// What the user should know.
        note: String,
    },
    /// A launch is being terminated and its program still runs, so its worker can leave in order.
    /// [`Event::ProcessEnded`] follows.
    LaunchLeaves {
        /// The launch.
        launch: LaunchId,
        /// Why the launch is terminated, for decisions.
        cause: ReclaimCause,
        /// Why the launch is terminated, for the user.
        reason: String,
    },
    /// The pod or process of a launch has been created.
    LaunchMade {
        /// The launch.
        launch: LaunchId,
        /// Priority class, where the cluster has them.
        class: Option<String>,
    },
    /// Last lines of output of a process that ended. [`Event::ProcessEnded`] follows.
    LaunchPrinted {
        /// The launch.
        launch: LaunchId,
        /// A few lines without control characters.
        lines: String,
    },
    /// A worker's hello, or the cluster, says where a launch runs.
    LaunchLocated {
        /// The launch.
        launch: LaunchId,
        /// Where it runs.
        location: Location,
    },
    /// A launch that has not joined yet uses the processor or does I/O.
    LaunchIsBusy {
        /// The launch.
        launch: LaunchId,
    },
    /// A launch runs: its hello is expected within the hello timeout.
    LaunchRuns {
        /// The launch.
        launch: LaunchId,
    },
    /// A launch waits, without a time limit.
    LaunchWaits {
        /// The launch.
        launch: LaunchId,
        /// What the launch waits for.
        wait: Wait,
    },
    /// A launched process ended, or could not be started.
    ProcessEnded {
        /// The launch.
        launch: LaunchId,
        /// How the process ended.
        exit: Exit,
    },
    /// The user resumes a suspended job.
    Resume,
    /// The user changes the number of workers, or its limits, as far as the job can.
    Scale(Scaling),
    /// The user stops the job at the end of a step.
    Stop,
    /// The user ends the job at once, whatever its workers do.
    StopNow,
    /// Whether the collector takes the job's traces, and if not, why.
    Traced {
        /// The collector's address or answer.
        error: Option<String>,
    },
    /// Whether the tracking server takes the job's metrics, and if not, why.
    Tracked {
        /// The server's address or answer, and the remedy.
        error: Option<String>,
    },
    /// The user suspends the job: its workers end, with their state in a checkpoint, and none is
    /// started until [`Event::Resume`].
    Suspend,
}

/// What a launch waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The scheduler's decision; the obstacle, if one is known.
    Scheduling(Option<String>),
    /// Capacity: the launch is unschedulable; what is missing.
    Capacity(String),
    /// Its turn: a queue holds the launch back, or the scheduler of its gang; what is missing.
    Queue(String),
    /// Its start on the node that it is assigned to; the obstacle, if one is known.
    Start(Option<String>),
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The process exited with this code.
    Code(i32),
    /// The process could not be started.
    NotStarted(String),
    /// The process exceeded a resource limit.
    OverLimit(String),
    /// The process was killed by this signal.
    Signal(i32),
    /// The cluster reclaimed the process (preemption, eviction, loss of its node).
    Reclaimed {
        /// Cause, for decisions.
        cause: ReclaimCause,
        /// The cluster's message, for the user.
        detail: String,
    },
    /// Unknown: the process ended while no master watched it.
    Unknown,
}

/// Why a process was reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReclaimCause {
    /// A user or a controller deleted its pod and gave no reason, or its pod does not exist.
    Deleted,
    /// Its node was drained or tainted, or was short of a resource; or its queue withdrew it.
    Evicted,
    /// Its node does not exist any more, or has not reported how it ended.
    NodeLost,
    /// Its node did not admit it, or could not start it in time.
    NotStarted,
    /// A pod or workload of higher priority needed its capacity.
    Preempted,
    /// The master itself has withdrawn it.
    Unwanted,
}

impl Exit {
    /// A process that was reclaimed.
    pub(crate) fn reclaimed(cause: ReclaimCause, detail: impl Into<String>) -> Self {
        Self::Reclaimed { cause, detail: detail.into() }
    }
}
