//! Messages between a master and its workers.
//!
//! ```text
//!  worker                                       master
//!    │ JoinRequest::Hello ────────────────────────► │
//!    │ ◄──────────────────────── JoinResponse::Welcome
//!    │ WorkerMessage …  ──────────────────────────► │
//!    │ ◄──────────────────────────  MasterMessage … │
//! ```
//!
//! The cores of both sides take and give these types. A message from the other side has passed the
//! checks of [`wire`](crate::wire): each field is within its limits. The cores check what depends
//! on their state, such as generations and ledgers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::files::FileList;
use crate::host::HostReport;
use crate::ids::{Generation, WorkerId};
use crate::inspection::WorkerReport;
use crate::ledger::Ledger;
use crate::membership::{Membership, Phases, Stall};
use crate::order::OrderName;
use crate::ranges::RecordRange;
use crate::row_touches::{RowTouches, TablesStatus};
use crate::summary::SkippedRecords;

/// What a worker's heartbeat says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Heartbeat {
    /// The stalled operation, if the worker waits for its neighbours.
    pub stall: Option<Stall>,
    /// Whether it has been in a group whose members have agreed on a state.
    pub holds_state: bool,
    /// What its process uses, now and then.
    pub usage: Option<Usage>,
    /// Steps that its trainer's state contained when the trainer began its present task, 0 without
    /// a state; `None` before it has a trainer.
    pub step: Option<u64>,
    /// The link of this worker that the network limits most, now and then; `None` also for a worker
    /// without links over TCP.
    pub link_pace: Option<LinkPace>,
}

/// A link from one member to another one, over some seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkPace {
    /// The member that receives.
    pub to: WorkerId,
    /// Time of the measurement; not zero.
    pub measured: Duration,
    /// Part of it in which bytes waited to be sent while others were on their way: the network
    /// limited the link, and neither of its ends did.
    pub limited: Duration,
    /// Bytes that arrived.
    pub bytes: u64,
}

/// What a worker's process uses of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Thousandths of a core, on average since the last report.
    pub cpu_millicores: u32,
    /// Resident memory, in bytes.
    pub memory_bytes: u64,
}

/// A message from a worker, after its hello.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerMessage {
    /// Heartbeat of the control thread, whatever the trainer does.
    Heartbeat(Heartbeat),
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
    /// The best model so far was exported, or could not be (from the group's lowest rank).
    BestExport {
        /// Steps that it contains.
        step: u64,
        /// The file that was there before: no model of this job, and none that is known to be
        /// worse.
        kept: Option<Kept>,
        /// The store's error.
        error: Option<String>,
    },
    /// What became of a checkpoint.
    Checkpoint(CheckpointNews),
    /// The group has committed more (from its lowest rank).
    Committed(Committed),
    /// The data set as the worker's reader lists it, or why it can't be used; and the order in
    /// which its records are trained, of a job that trains.
    Described(Result<FileList, String>, Option<OrderName>),
    /// Records that the data set does not contain; precedes `Described`.
    RecordsSkipped(SkippedRecords),
    /// A shard of an inference job is done: its metrics are summed over its records, or its
    /// predictions are written.
    ShardDone {
        /// The shard.
        range: RecordRange,
        /// Sums by metric; empty for predictions.
        metrics: BTreeMap<String, f64>,
    },
    /// Replicas of the group's state differ, or results of an audit do, and this worker gives up
    /// its state; the worker ends.
    Diverged {
        /// Which workers, since when, and what speaks for which cause.
        error: String,
        /// Whether most replicas are equal. If not, no state of the group can be trusted.
        has_majority: bool,
        /// Whether an audit has found it.
        by_audit: bool,
    },
    /// The user's code failed; the worker ends.
    Failed {
        /// The user's error.
        error: String,
        /// Records that the worker was processing.
        ranges: Vec<RecordRange>,
        /// Every other worker would fail in the same way, as far as this one can tell.
        fatal: bool,
        /// The worker has exported the model of its last step beside the job's export.
        exported: bool,
    },
    /// The group has evaluated its model (from its lowest rank), for which it made no step for so
    /// long.
    Evaluated(Evaluated, Duration),
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
    /// The first message of a worker that has reconnected.
    Reconnected {
        /// Steps that its state contains; 0 if it has been in no group.
        step: u64,
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
    /// A request for more shards of an inference job; it stays open until it is filled.
    LeaseRequest {
        /// Number of additional shards.
        shards: u64,
    },
    /// What this worker's host offers.
    HostChecked(Box<HostReport>),
    /// The worker received SIGTERM and leaves at the next step boundary.
    Leaving,
    /// The worker has fetched the group's state, so the group need not wait for it when it joins.
    /// Or the group goes on without it, and it has left its links.
    CaughtUp {
        /// Steps that its state contains; `None` if it has none, and joins without.
        step: Option<u64>,
    },
    /// The worker's model is built: it can be a member.
    Ready {
        /// Number of f32 parameters of its model.
        parameters: u64,
    },
    /// What the worker does.
    Report {
        /// Number of the request; 0 for [`MasterMessage::ReportStacks`].
        request: u64,
        /// The report. Boxed, as most messages are short.
        report: Box<WorkerReport>,
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

/// A message from the master to a worker, after its welcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MasterMessage {
    /// Measure this host: [`WorkerMessage::HostChecked`].
    CheckHost,
    /// Describe the data set.
    Describe,
    /// Finish the step, then stop together.
    Drain,
    /// Fetch the group's state from one of these members, concurrently with their training.
    Fetch(Vec<(WorkerId, SocketAddr)>),
    /// The job fails, as workers fail without progress: finish the step, store the state, then end
    /// together.
    GiveUp,
    /// These joining workers may fetch this worker's state, instead of those named before.
    Joiners(Vec<WorkerId>),
    /// Write a checkpoint at the end of the step.
    KeepCheckpoint,
    /// Shards of an inference job to process.
    Lease(Vec<RecordRange>),
    /// A new membership of the group.
    Membership(Membership),
    /// Build the model for this data set.
    Prepare(FileList),
    /// Report what this worker does: [`WorkerMessage::Report`].
    Inspect {
        /// Number of the request, from 1.
        request: u64,
        /// Most bytes of the report.
        bytes_max: u64,
    },
    /// Write the stacks of all threads to the log, and report them: this worker hangs, and will be
    /// evicted.
    ReportStacks,
    /// End.
    Shutdown {
        /// Why.
        reason: String,
        /// Whether all workers end for good.
        job_is_over: bool,
    },
    /// All members leave: finish the step, write a checkpoint, then end together. Another group
    /// resumes from it.
    Suspend,
}

impl MasterMessage {
    /// The end of a worker whose job goes on.
    #[must_use]
    pub fn release(reason: impl Into<String>) -> Self {
        Self::Shutdown { reason: reason.into(), job_is_over: false }
    }
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
    /// The group goes on with older rows in place of those that are lost.
    OlderRows {
        /// The folder of the checkpoint that they are from; `None` if there is none, so that the
        /// rows begin anew.
        name: Option<String>,
        /// Touches of rows that the rows of the group's state have not counted.
        missing: u64,
    },
    /// The group starts from the checkpoint.
    Restored {
        /// Steps that it contains.
        step: u64,
        /// Its folder.
        name: String,
        /// Touches of rows of tables in these steps.
        row_touches: u64,
        /// What differs between the program that wrote it and the group's, as a list for a
        /// sentence; empty if nothing does, or if that is meant.
        differences: String,
    },
    /// All copies of some rows are lost with their workers. The group gives up its state and goes
    /// back to a checkpoint, or to the beginning; or it goes on with [older](Self::OlderRows) rows.
    RowsLost {
        /// Steps that the state contained.
        step: u64,
        /// Number of shards of the tables that are lost.
        shards: u32,
        /// Touches of rows in these steps, by the committed headers.
        row_touches: u64,
    },
    /// The checkpoint is complete.
    Saved {
        /// Steps that it contains.
        step: u64,
        /// Its folder.
        name: String,
        /// Size in bytes.
        bytes: u64,
        /// How long it took.
        times: CheckpointTimes,
    },
}

/// How long a checkpoint took, on the worker that wrote its manifest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointTimes {
    /// Microseconds for which training stopped to copy the worker's part of the state.
    pub copy_us: u64,
    /// Microseconds from then until the worker knew that all parts were written.
    pub write_us: u64,
    /// Microseconds from then until the manifest was written.
    pub publish_us: u64,
}

/// What a group has committed since its previous report.
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// Sums of the program's metrics over `records`.
    pub metrics: BTreeMap<String, f64>,
    /// What each rank did in the last of these steps.
    pub ranks: Vec<RankStep>,
    /// Durations of these steps.
    pub times: StepTimes,
    /// Duration of the last of these steps, if it was timed. Boxed, as most messages are short.
    pub last: Option<Box<StepTimes>>,
    /// Steps skipped without an update, of all that the state contains.
    pub steps_skipped: u64,
    /// Learning rate of the last of these steps; `None` if the model has none.
    pub learning_rate: Option<f64>,
    /// Mean loss of the first of these steps whose loss is finite; `None` if no loss is.
    pub first_loss: Option<f64>,
    /// Mean loss of the last of these steps whose loss is finite; `None` as above.
    pub last_loss: Option<f64>,
    /// Step at which the newest of the epochs that these steps completed was complete, if any was.
    pub epoch_step: Option<u64>,
    /// The model's tables; `None` if it has none. Boxed, as most messages are short.
    pub tables: Option<Box<TablesStatus>>,
    /// Number of these steps whose records were all computed by two ranks, with equal results.
    pub steps_audited: u64,
}

/// What a rank did in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankStep {
    /// Records that it computed.
    pub records: u64,
    /// Microseconds in the model's code.
    pub compute_us: u64,
    /// Microseconds of waiting for the records to be read.
    pub input_us: u64,
    /// Microseconds for which its training has stopped to copy the state for checkpoints, in all
    /// steps of its process.
    pub checkpoint_us: u64,
    /// Memory of the rows of tables that it holds, in bytes.
    pub table_bytes: u64,
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

impl StepTimes {
    /// Mean time of an all-reduce in milliseconds; 0 if no step was timed.
    #[must_use]
    pub fn all_reduce_ms(&self) -> f64 {
        self.reduce_us as f64 / self.steps.max(1) as f64 / 1000.0
    }
}

/// A group's final state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Touches of the rows of the model's tables, if it has tables.
    pub row_touches: Option<RowTouches>,
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

/// A file that the best model of a job has replaced, and that is kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// Where it is kept.
    pub address: String,
    /// Its value of the metric that decides which model is best; `None` if that does not compare
    /// with the job's own values.
    pub value: Option<f64>,
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

impl From<&Ledger> for LedgerReport {
    fn from(ledger: &Ledger) -> Self {
        Self {
            epochs_complete: ledger.epoch(),
            ranges: ledger.ranges().collect(),
            repeated: ledger.repeated(),
        }
    }
}
