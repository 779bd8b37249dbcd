//! The events of a job: the core's whole input, in addition to the time.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{FileList, Generation, RecordRange, WorkerId};
use serde::{Deserialize, Serialize};

use super::action::Membership;

/// Id of an open stream, assigned by the shell before the stream belongs to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// Id of one start of a worker process, assigned by the core. A pod of several workers is
/// identified by its first launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaunchId(pub u64);

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
        message: FromWorker,
    },
    /// The reason for a launch's removal has become known, possibly after the launch ended.
    LaunchExplained {
        /// The launch.
        launch: LaunchId,
        /// What removed the launch, and why.
        explanation: String,
    },
    /// A launch is being terminated and its program still runs, so its worker can leave in order.
    /// [`Event::ProcessEnded`] follows.
    LaunchLeaves {
        /// The launch.
        launch: LaunchId,
        /// Why the launch is terminated.
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
    /// The user changes the number of workers (already validated against min and max).
    Scale {
        /// Workers to keep.
        num_workers: u32,
    },
    /// The user stops the job at the end of a step.
    Stop,
}

/// What a launch waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The scheduler's decision; the obstacle, if one is known.
    Scheduling(Option<String>),
    /// Capacity: the launch is unschedulable; what is missing.
    Capacity(String),
    /// Its start on the node that it is assigned to; the obstacle, if one is known.
    Start(Option<String>),
}

/// A worker's identity when its stream broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resume {
    /// The worker's id.
    pub worker: WorkerId,
    /// The newest membership that the worker knows, from any master; `None` before its first.
    pub membership: Option<Membership>,
    /// Number of f32 parameters of its model; `None` while it is being built.
    pub parameters: Option<u64>,
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
    Reclaimed(String),
    /// Unknown: the process ended while no master watched it.
    Unknown,
}

/// A message from a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum FromWorker {
    /// Heartbeat; the stalled operation, if the worker waits for its neighbours.
    Heartbeat(Option<Stall>),
    /// The worker's links of `generation` broke.
    Broken {
        /// The generation whose links broke.
        generation: Generation,
        /// The member whose link failed, if known.
        suspect: Option<WorkerId>,
        /// The link's error.
        error: String,
        /// Whether the suspect answered no dial; otherwise an established link ended.
        unreachable: bool,
    },
    /// What became of a checkpoint.
    Checkpoint(CheckpointNews),
    /// The group has committed more (from its lowest rank).
    Committed(Committed),
    /// The data set as the worker's reader lists it, or why it can't be used.
    Described(Result<FileList, String>),
    /// A shard of an inference job is done: its metrics are summed over its records, or its
    /// predictions are written.
    ShardDone {
        /// The shard.
        range: RecordRange,
        /// Sums by metric; empty for predictions.
        metrics: BTreeMap<String, f64>,
    },
    /// The user's code failed; the worker ends.
    Failed {
        /// The user's error.
        error: String,
        /// Records that the worker was processing.
        ranges: Vec<RecordRange>,
        /// Every other worker would fail in the same way.
        fatal: bool,
    },
    /// The group has evaluated its model (from its lowest rank).
    Evaluated(Evaluated),
    /// The group holds the job's final state.
    Finished(Finished),
    /// A new group agrees on its state (from its lowest rank).
    Formed {
        /// The group's generation.
        generation: Generation,
        /// Steps committed.
        step: u64,
        /// What the parameters have absorbed.
        ledger: LedgerReport,
    },
    /// A reconnected worker reports what it holds.
    HeldLeases {
        /// Steps that its state contains.
        step: u64,
        /// Its leases that no step it has committed contains.
        ranges: Vec<RecordRange>,
    },
    /// The worker waits for storage that does not answer, or no longer waits.
    StorageWait {
        /// The request and its last error; `None` when storage answers again.
        storage: Option<String>,
        /// Time waited since the previous report.
        waited: Duration,
    },
    /// The transport of the group's gradient all-reduce, as text (from the lowest rank).
    AllreduceTransport {
        /// The group's generation.
        generation: Generation,
        /// `TCP`, for example.
        what: String,
    },
    /// A request for more records of an epoch; it stays open until it is filled or the epoch is
    /// complete.
    LeaseRequest {
        /// The epoch.
        epoch: u32,
        /// Number of additional records.
        records: u64,
    },
    /// The worker received SIGTERM and leaves at the next step boundary.
    Leaving,
    /// The worker has fetched the group's state, so the group need not wait for it when it joins.
    CaughtUp {
        /// Steps that its state contains.
        step: u64,
    },
    /// The worker's model is built: it can be a member.
    Ready {
        /// Number of f32 parameters of its model.
        parameters: u64,
    },
    /// The worker's first commit in a new generation.
    Resumed {
        /// The new generation.
        generation: Generation,
        /// The step committed, from 1.
        step: u64,
        /// The parts of the pause.
        phases: Phases,
    },
}

/// What became of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointNews {
    /// The checkpoint is damaged; the one before it is tried.
    Damaged {
        /// Its folder.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The checkpoint could not be written.
    Failed {
        /// Steps that it would contain.
        step: u64,
        /// The store's error.
        error: String,
    },
    /// The group starts from the checkpoint.
    Restored {
        /// Steps that it contains.
        step: u64,
        /// Its folder.
        name: String,
    },
    /// The checkpoint is complete.
    Saved {
        /// Steps that it contains.
        step: u64,
        /// Its folder.
        name: String,
        /// Size in bytes.
        bytes: u64,
    },
}

impl Resume {
    /// The newest generation that the worker knows; 0 for none.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.membership.as_ref().map_or_else(Generation::default, |m| m.generation)
    }
}

/// An operation of the group in which no byte moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The ring's generation.
    pub generation: Generation,
    /// Number of operations begun in this generation, including this one; 0 while the worker waits
    /// for the previous member's dial.
    pub operation: u64,
    /// Bytes of it received from the previous member.
    pub received: u64,
    /// Bytes of it sent to the next member. Where an operation's bytes flow in both directions,
    /// `sent` and `received` are counted so that the two ends of a link differ by the bytes in
    /// flight.
    pub sent: u64,
    /// Whether the awaited bytes come from the next member.
    pub waits_for_next: bool,
    /// Time since the last byte moved.
    pub since: Duration,
}

/// What a group has committed since its previous report.
#[derive(Clone, Debug, PartialEq)]
pub struct Committed {
    /// The group's generation.
    pub generation: Generation,
    /// Steps committed so far.
    pub step: u64,
    /// Newly absorbed records.
    pub ranges: Vec<RecordRange>,
    /// Sum of the loss over `records`.
    pub loss_sum: f64,
    /// Records of these steps.
    pub records: u64,
    /// Per rank: microseconds in the model's code in the last of these steps.
    pub compute_us: Vec<u64>,
    /// Durations of these steps.
    pub times: StepTimes,
    /// Steps skipped without an update, of all that the state contains.
    pub steps_skipped: u64,
}

/// Durations of steps on the lowest rank. A group's first step is excluded: it is part of the pause
/// of the membership change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Steps that were timed.
    pub steps: u64,
    /// Microseconds from commit to commit, over all of them.
    pub step_us: u64,
    /// Part of `step_us` in the all-reduce: the wait for slower ranks and the transfer.
    pub reduce_us: u64,
}

/// A group's final state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finished {
    /// The group's generation.
    pub generation: Generation,
    /// Steps committed.
    pub step: u64,
    /// Digest of the state, the same on every rank.
    pub digest: u64,
    /// What the parameters have absorbed.
    pub ledger: LedgerReport,
    /// Records that went into committed steps, by the steps' own counts.
    pub records_trained: u64,
    /// Whether training stopped early because evaluations did not improve.
    #[serde(default)]
    pub stopped_early: bool,
    /// The model's summary text, from the lowest rank.
    pub summary: Option<String>,
    /// Why the job can't continue, although the group holds a state.
    #[serde(default)]
    pub failure: Option<Failure>,
    /// Whether all members leave: another group resumes from the checkpoint of this step.
    #[serde(default)]
    pub suspended: bool,
    /// Steps whose records were absorbed without an update.
    #[serde(default)]
    pub steps_skipped: u64,
    /// Whether this worker has exported the model.
    #[serde(default)]
    pub exported: bool,
}

/// A failure that ends a job before its work is done, with its newest state saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What failed, and where; identical from all members.
    pub error: String,
    /// Records of this worker that caused the failure.
    pub ranges: Vec<RecordRange>,
}

/// An evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// Steps that the evaluated model contains.
    pub step: u64,
    /// Records of the validation data.
    pub records: u64,
    /// Means over these records; `None` where a mean is not finite.
    pub metrics: BTreeMap<String, Option<f64>>,
}

/// A ledger as received, not yet validated against the data set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerReport {
    /// Number of complete epochs: all before this one.
    pub epochs_complete: u32,
    /// Absorbed records of later epochs.
    pub ranges: Vec<RecordRange>,
    /// Records absorbed more than once.
    pub repeated: u64,
}

/// Microseconds from a group's last commit to its first one in a new generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phases {
    /// From the last commit until the failure was detected (a link's error, or the arrival of a
    /// membership that aborts the step), or until the switch was agreed.
    pub detect_us: u64,
    /// Until the training thread was out of the collective call or the user's code, and its links
    /// were down.
    pub abort_us: u64,
    /// Until the new membership was known.
    pub agree_us: u64,
    /// Until the new links were connected.
    pub connect_us: u64,
    /// Until all ranks held the same state.
    pub state_us: u64,
    /// Until the first step was committed.
    pub first_step_us: u64,
}

impl Phases {
    /// The whole gap between the two commits, in microseconds; saturates.
    #[must_use]
    pub fn gap_us(&self) -> u64 {
        [self.abort_us, self.agree_us, self.connect_us, self.state_us, self.first_step_us]
            .into_iter()
            .fold(self.detect_us, u64::saturating_add)
    }
}
