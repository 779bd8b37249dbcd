//! Input, tasks and reports of a session.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;

use elasticdl_proto::{CheckpointEvery, Ledger, Membership, RecordRange, WorkerId};

use crate::session::audit::AuditPlan;
use crate::session::evaluation::{self, Evaluation};
use crate::session::header::StateRecord;
use crate::session::origin::ProgramMismatch;
use crate::session::plan::StepSize;
use crate::session::replicas::StateMismatch;
use crate::session::transport_switch::DeviceMismatch;

/// Parameters of a job that a worker needs.
#[derive(Clone, Debug)]
pub struct JobPlan {
    /// Number of records of one epoch.
    pub records: u64,
    pub epochs: u32,
    pub max_steps: Option<u64>,
    pub size: StepSize,
    /// Interval between checkpoints; `None` if the job writes none.
    pub checkpoints: Option<CheckpointEvery>,
    pub evaluation: Option<evaluation::Plan>,
    /// Whether a step whose gradient is not finite is skipped. If not, it ends the job.
    pub skips_nonfinite: bool,
    /// Whether workers of different builds may train together.
    pub allows_mixed_builds: bool,
    /// Whether the best model is exported, so that its state is compared between all ranks first.
    pub exports_best: bool,
    /// Whether the model has tables, so that all ranks take part in each look-up of rows.
    pub has_tables: bool,
    /// Whether the optimizer's state is divided over the group, so that no rank can give all of it
    /// to a joining worker.
    pub shards_optimizer: bool,
    /// Which steps are audited; `None`: no step.
    pub audit: Option<AuditPlan>,
}

#[cfg(test)]
impl JobPlan {
    /// One epoch of `records` records in steps of `batch`.
    pub(crate) fn of_one_epoch(records: u64, batch: u64) -> Self {
        let batch = std::num::NonZeroU64::new(batch).expect("a batch holds records");
        Self {
            records,
            epochs: 1,
            max_steps: None,
            size: StepSize { batch: elasticdl_proto::Batch::Global(batch), micro_batch: 1 },
            checkpoints: None,
            evaluation: None,
            skips_nonfinite: false,
            allows_mixed_builds: false,
            exports_best: false,
            has_tables: false,
            shards_optimizer: false,
            audit: None,
        }
    }
}

/// The next task of the worker. Each variant names the call that reports its result.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Compute the gradient of these records of another rank by itself: `Assignment::audited`.
    Audit(Vec<RecordRange>),
    /// Start to build the group's NCCL communicator, a collective operation:
    /// `Session::nccl_started`.
    BuildNccl,
    /// Take part in a broadcast from rank `root`: `Session::bytes_broadcast` or
    /// `Session::tensors_broadcast`.
    Broadcast { root: usize, what: Broadcast },
    /// Compute the gradient of these records, and add it to the pending one unless it `is_first`:
    /// `Session::computed`.
    Compute { ranges: Vec<RecordRange>, is_first: bool },
    /// Build the links of this membership: `Session::connected` or `Session::broken`.
    Connect(Membership),
    /// Create the state of a new group, the initial one or that of a checkpoint: `Session::begin`
    /// or `Session::restore`.
    CreateState,
    /// All ranks are at one state. Prepare for rounds: `Session::repaired`.
    EndRepair,
    /// Evaluate these blocks of the validation data and exchange the scores: `Session::evaluated`.
    Evaluate(Range<u64>),
    /// End this process.
    Exit(Exit),
    /// Receive the next message from this donor, over the open link to it or a new one:
    /// `Session::install` and `Session::fetched` for a state, `Session::result_fetched` for a
    /// step's result, `Session::caught_up`, `Session::fetch_ended`; or `Session::fetch_broke`.
    Fetch(WorkerId, SocketAddr),
    /// The group's work is over: `Session::finish`. If the state `is_published`, this worker
    /// exports and describes it.
    Finish { is_published: bool },
    /// Copy the shards that too few of the ranks hold that stay: `Session::handed_over`.
    HandOver { leaves: Vec<bool> },
    /// Examine this worker's own gradient, because the sum is not finite: `Session::inspected`.
    InspectGradient,
    /// The group goes on without this worker, which keeps its state: wait for a message from the
    /// master, for a limited time: `Session::leave`.
    StandBy,
    /// Compute the gradient of each of these parts of a step by itself, as ranks disagree about
    /// them: `Session::rechecked`.
    Recheck(Vec<Vec<RecordRange>>),
    /// All-reduce the pending gradient, or zeros if it `is_empty`, together with
    /// `Session::header`: `Session::summed`.
    Step { is_empty: bool },
    /// Exchange `Session::sync_header`: `Session::synced`.
    Synchronize,
    /// Exchange `Session::header` without a gradient (idle round): `Session::headers_exchanged`.
    /// If it `pauses`, the last round was idle, too: wait a little for a message of the master.
    ExchangeHeaders { pauses: bool },
    /// Apply the reduced gradient of this many records, if it `is_applied`, and retain it:
    /// `Session::updated`.
    Update { records: u64, is_applied: bool },
    /// Wait for a message from the master.
    Wait,
}

impl Task {
    /// What a worker does in this task, for people: the predicate of a sentence.
    pub(crate) fn activity(&self) -> &'static str {
        match self {
            Self::Audit(_) => "computes records of another rank again, to audit it,",
            Self::BuildNccl => "builds the group's NCCL communicator",
            Self::Broadcast { .. } => "takes part in a broadcast of the group's state",
            Self::Compute { .. } => "reads and computes its records of a step",
            Self::Connect(_) => "builds the links of its group",
            Self::CreateState => "creates the group's state",
            Self::EndRepair => "agrees with its group on the state",
            Self::Evaluate(_) => "evaluates the model",
            Self::Exit(_) => "ends",
            Self::Fetch(..) => "fetches the group's state",
            Self::Finish { .. } => "finishes: it exports the model and reports the final state,",
            Self::HandOver { .. } => "copies rows of tables from workers that leave",
            Self::InspectGradient => "examines its gradient",
            Self::StandBy => "waits for the master to take it back or to release it",
            Self::Recheck(_) => "computes parts of a step again",
            Self::Step { .. } => "sums the gradient with its group",
            Self::Synchronize => "compares its state with its group",
            Self::ExchangeHeaders { .. } => "waits with its group for work",
            Self::Update { .. } => "updates the parameters",
            Self::Wait => "waits for a message of the master",
        }
    }
}

impl Task {
    /// The records that the task computes.
    pub fn records(&self) -> &[RecordRange] {
        match self {
            Self::Compute { ranges, .. } => ranges,
            _ => &[],
        }
    }
}

/// What a rank has computed in one [`Task::Compute`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Computed {
    /// Sum of the loss over the records.
    pub loss_sum: f64,
    /// Sums of the program's metrics over the records.
    pub metrics: BTreeMap<String, f64>,
    /// What the program has added to the step's tally with the records.
    pub tally: BTreeMap<String, f64>,
    /// Time in the model's code, in microseconds.
    pub compute_us: u64,
    /// Time spent waiting for the records to be read, in microseconds.
    pub input_us: u64,
    /// Pairs of one of the records and a row of a table that it touches.
    pub row_touches: u64,
}

/// What the root of a repair sends to all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broadcast {
    /// Bytes: the headers of the root's last step.
    ResultHeaders,
    /// The retained reduced gradient of that step. If it `is_kept`, the receiving rank retains it.
    Result { is_kept: bool },
    /// Bytes: the record of the root's state.
    StateRecord,
    /// The parameters and the optimizer state.
    State,
}

/// A peer that has the job's token sent invalid data: the ranks run different programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a peer sent {0} that can't be read; do all workers run the same program?")]
pub struct InvalidData(pub &'static str);

/// The final state of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinalState {
    /// Digest of the parameters, the optimizer state and the ledger.
    pub digest: u64,
    pub parameters_are_finite: bool,
    /// The model's description of the state.
    pub summary: Option<String>,
    pub is_exported: bool,
    /// Why the model is not where it should be.
    pub export_error: Option<String>,
    /// Touches that the rows of all ranks have counted, if there are tables.
    pub row_touches: Option<u64>,
}

/// Why a worker cannot be part of its new group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupMismatch {
    State(StateMismatch),
    Device(DeviceMismatch),
    Program(ProgramMismatch),
}

impl From<ProgramMismatch> for GroupMismatch {
    fn from(mismatch: ProgramMismatch) -> Self {
        Self::Program(mismatch)
    }
}

impl From<StateMismatch> for GroupMismatch {
    fn from(mismatch: StateMismatch) -> Self {
        Self::State(mismatch)
    }
}

impl From<DeviceMismatch> for GroupMismatch {
    fn from(mismatch: DeviceMismatch) -> Self {
        Self::Device(mismatch)
    }
}

/// Why a worker ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The group goes on without this worker, and no master has released it in time.
    Left,
    /// The worker's state is older than any repair reaches.
    Outdated,
    /// The master shut the worker down, for this reason.
    Shutdown(String),
}

/// The part of the training state that is not tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Number of committed steps.
    pub step: u64,
    /// Records that the parameters have absorbed.
    pub ledger: Ledger,
    /// Records that went into the steps, by the steps' own counts.
    pub records_trained: u64,
    pub evaluation: Evaluation,
    /// Steps whose records were absorbed without an update.
    pub steps_skipped: u64,
    /// Pairs of an absorbed record and a row of a table that it touches.
    pub row_touches: u64,
    /// Generation of the group that created the state, from a checkpoint or as the initial one.
    pub created: u64,
}

impl State {
    /// The form in which the state is sent and stored.
    pub fn record(&self) -> StateRecord {
        StateRecord {
            step: self.step,
            records_trained: self.records_trained,
            epochs_complete: self.ledger.epoch(),
            ranges: self.ledger.ranges().collect(),
            repeated: self.ledger.repeated(),
            evaluation: self.evaluation,
            steps_skipped: self.steps_skipped,
            row_touches: self.row_touches,
            created: self.created,
        }
    }
}
