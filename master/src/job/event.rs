//! What happens to a job: the core's whole input, besides the time.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{FileList, Generation, RecordRange, WorkerId};
use serde::{Deserialize, Serialize};

use super::action::Membership;

/// One opened stream, before and after it is a worker's. Given out by the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// One process that the master started, in a pod perhaps. Given out by the core. A pod of several
/// is known by its first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LaunchId(pub u64);

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The user wants a checkpoint now.
    Checkpoint,
    /// The job's record was refused for good: whatever is done next, no other master could go on
    /// from there.
    PersistRefused {
        /// By whom, and why.
        reason: String,
    },
    /// The job's record could not be written yet; it is tried again.
    PersistDelayed {
        /// Why.
        reason: String,
    },
    /// A stream opened, proved the job's token and said hello.
    Connected {
        /// The stream.
        connection: ConnectionId,
        /// The launch that the process says it is.
        launch: LaunchId,
        /// Where its peers reach it.
        address: SocketAddr,
        /// Its process.
        pid: u32,
        /// Who it was, if its stream was open before.
        resume: Option<Resume>,
    },
    /// A worker's stream ended.
    Disconnected {
        /// The worker.
        worker: WorkerId,
    },
    /// A worker said something.
    Message {
        /// The worker.
        worker: WorkerId,
        /// What it said.
        message: FromWorker,
    },
    /// Why a launch was taken away, when that has become known: it may have ended before.
    LaunchExplained {
        /// The launch.
        launch: LaunchId,
        /// What was done to it, and by whom.
        explanation: String,
    },
    /// A launch is being taken away, but its program still runs: its worker can leave in order. Its
    /// end follows.
    LaunchLeaves {
        /// The launch.
        launch: LaunchId,
        /// By whom or why.
        reason: String,
    },
    /// A launch has been asked for.
    LaunchMade {
        /// The launch.
        launch: LaunchId,
        /// Its priority class, where there are such.
        class: Option<String>,
    },
    /// A process ended, and printed these lines last. Its end follows.
    LaunchPrinted {
        /// The launch.
        launch: LaunchId,
        /// The lines: few, and without control characters.
        lines: String,
    },
    /// A launch has a place to run at, and will be heard of soon or never.
    LaunchRuns {
        /// The launch.
        launch: LaunchId,
    },
    /// A launch waits for a place to run at, for as long as that takes.
    LaunchWaits {
        /// The launch.
        launch: LaunchId,
        /// For what.
        wait: Wait,
    },
    /// A launched process ended, or could not be started.
    ProcessEnded {
        /// The launch.
        launch: LaunchId,
        /// How it ended.
        exit: Exit,
    },
    /// The user wants another number of workers (already checked against min and max).
    Scale {
        /// Workers to keep.
        num_workers: u32,
    },
    /// The user wants the job to stop at the end of a step.
    Stop,
}

/// What a launch waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// To be given a place; what stands in the way, if there is something to say.
    Scheduling(Option<String>),
    /// Nowhere is enough left for it; what is missing.
    Capacity(String),
    /// It has a place, which is made ready; what stands in the way, if there is something to say.
    Start(Option<String>),
}

/// Who a worker was when its stream broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resume {
    /// The name that it was given.
    pub worker: WorkerId,
    /// The newest that it has heard of, from whichever master; `None` before its first.
    pub membership: Option<Membership>,
    /// Number of f32 parameters of its model; `None` while it is being built.
    pub parameters: Option<u64>,
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// With this code.
    Code(i32),
    /// It could not be started.
    NotStarted(String),
    /// It used more than it may.
    OverLimit(String),
    /// By this signal.
    Signal(i32),
    /// It was taken away from outside.
    Reclaimed(String),
    /// No master of its own was there to see.
    Unknown,
}

/// What a worker says.
#[derive(Clone, Debug, PartialEq)]
pub enum FromWorker {
    /// Its process runs; where it waits for its neighbours, if it does.
    Heartbeat(Option<Stall>),
    /// Its links of `generation` broke.
    Broken {
        /// The generation whose links broke.
        generation: Generation,
        /// The member whose link failed, if known.
        suspect: Option<WorkerId>,
        /// The link's error.
        error: String,
        /// The suspect has answered no dial; else a link that stood has ended.
        unreachable: bool,
    },
    /// What became of a checkpoint.
    Checkpoint(CheckpointNews),
    /// The group has committed more (from its lowest rank).
    Committed(Committed),
    /// The data set as its reader sees it, or why it can't be used.
    Described(Result<FileList, String>),
    /// A shard that is worked on apart is done: its metrics summed over its records, or its
    /// predictions written.
    ShardDone {
        /// The shard.
        range: RecordRange,
        /// By name; none of predictions.
        metrics: BTreeMap<String, f64>,
    },
    /// The user's code failed; the worker ends.
    Failed {
        /// The user's error.
        error: String,
        /// What it was working on.
        ranges: Vec<RecordRange>,
        /// No other worker would do better.
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
    /// It came back and says what it holds.
    HeldLeases {
        /// Steps that its state contains.
        step: u64,
        /// Its leases, as far as no step that it has committed contains them.
        ranges: Vec<RecordRange>,
    },
    /// It waits for storage that does not answer, or no longer does.
    StorageWait {
        /// What it asks, and the last error; `None`: storage answers again.
        storage: Option<String>,
        /// How long it has waited since it last said so.
        waited: Duration,
    },
    /// What the group sums its gradients over, in words (from its lowest rank).
    AllreduceTransport {
        /// The group's generation.
        generation: Generation,
        /// `TCP`, for example.
        what: String,
    },
    /// It wants more records of an epoch; open until filled or the epoch is complete.
    LeaseRequest {
        /// The epoch.
        epoch: u32,
        /// How many records more.
        records: u64,
    },
    /// It was told to end and goes at the next boundary.
    Leaving,
    /// It has fetched the group's state: taking it in costs the group no wait.
    CaughtUp {
        /// Steps that its state contains.
        step: u64,
    },
    /// Its model stands: it can be a member.
    Ready {
        /// Number of f32 parameters of its model.
        parameters: u64,
    },
    /// Its first commit in a new generation.
    Resumed {
        /// The new generation.
        generation: Generation,
        /// The step committed, from 1.
        step: u64,
        /// Where the time went.
        phases: Phases,
    },
}

/// What became of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointNews {
    /// It is not as it was written; the one before it is tried.
    Damaged {
        /// Its folder.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// It could not be written.
    Failed {
        /// Steps that it would contain.
        step: u64,
        /// The store's word.
        error: String,
    },
    /// The group begins from it.
    Restored {
        /// Steps that it contains.
        step: u64,
        /// Its folder.
        name: String,
    },
    /// It is complete.
    Saved {
        /// Steps that it contains.
        step: u64,
        /// Its folder.
        name: String,
        /// How large it is.
        bytes: u64,
    },
}

impl Resume {
    /// The newest generation that the worker has heard of; 0 for none.
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
    /// Operations begun in this generation, this one included; 0 while the previous member's dial
    /// is awaited.
    pub operation: u64,
    /// Bytes of it that came from the previous member.
    pub received: u64,
    /// Bytes of it that were sent to the next member. Where an operation's bytes run both ways,
    /// `sent` and `received` are counted so that a link's two ends differ by what is on its way.
    pub sent: u64,
    /// What is awaited comes from the next member.
    pub waits_for_next: bool,
    /// How long no byte has moved.
    pub since: Duration,
}

/// What a group has committed since its last word.
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
    /// What these steps took.
    pub times: StepTimes,
    /// Steps without an update, of all that the state contains.
    pub steps_skipped: u64,
}

/// What steps took on the lowest rank. A group's first step is not among them: it is part of what
/// the change cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Steps that were timed.
    pub steps: u64,
    /// Microseconds from commit to commit, over all of them.
    pub step_us: u64,
    /// Of these, in the all-reduce: the wait for slower ranks, and the transfer.
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
    /// It ends before its data does, for evaluations got no better.
    #[serde(default)]
    pub stopped_early: bool,
    /// The model's closing words, from the lowest rank.
    pub summary: Option<String>,
    /// Why the job can't go on, though the group holds a state.
    #[serde(default)]
    pub failure: Option<Failure>,
    /// All members leave: another group goes on from the checkpoint of this step.
    #[serde(default)]
    pub suspended: bool,
    /// Steps whose records were absorbed without an update.
    #[serde(default)]
    pub steps_skipped: u64,
    /// This worker has exported the model.
    #[serde(default)]
    pub exported: bool,
}

/// What ends a job before its work is done, with its newest state kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What is wrong, and where; the same from all members.
    pub error: String,
    /// Records of this worker that are at fault.
    pub ranges: Vec<RecordRange>,
}

/// An evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    /// Steps that the model had made.
    pub step: u64,
    /// Records of the validation data.
    pub records: u64,
    /// Means over them; `None` where one is not finite.
    pub metrics: BTreeMap<String, Option<f64>>,
}

/// A ledger as it was received, not yet checked against the data set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerReport {
    /// Epochs before this one are complete.
    pub epochs_complete: u32,
    /// What is absorbed of later ones.
    pub ranges: Vec<RecordRange>,
    /// Records absorbed more than once.
    pub repeated: u64,
}

/// Microseconds from a group's last commit to its first one in a new generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phases {
    /// Last commit until the first sign of trouble (a link's error, or the arrival of a membership
    /// that aborts the step), or until the switch was agreed.
    pub detect_us: u64,
    /// Until the training thread was out of the collective call or the user's code, and its links
    /// were down.
    pub abort_us: u64,
    /// Until the new membership was known.
    pub agree_us: u64,
    /// Until the new links stood.
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
