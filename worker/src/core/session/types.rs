//! Input, tasks and reports of a session.

use std::net::SocketAddr;
use std::ops::Range;

use elasticdl_proto::{Batch, CheckpointEvery, Ledger, Membership, RecordRange, WorkerId};

use crate::core::evaluation::{self, Evaluation};
use crate::core::header::StateRecord;
use crate::core::repair::{Repair, StateMismatch};
use crate::core::transport_switch::DeviceMismatch;

/// Parameters of a job that a worker needs.
#[derive(Clone, Debug)]
pub struct JobPlan {
    /// Number of records of one epoch.
    pub records: u64,
    pub epochs: u32,
    pub max_steps: Option<u64>,
    pub batch: Batch,
    /// Interval between checkpoints; `None` if the job writes none.
    pub checkpoints: Option<CheckpointEvery>,
    pub evaluation: Option<evaluation::Plan>,
}

/// The next task of the worker. Each variant names the call that reports its result.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Compute the gradient of these records and add it to the pending one: `Session::computed`.
    Compute(Vec<RecordRange>),
    /// Build the links of this membership: `Session::connected` or `Session::broken`.
    Connect(Membership),
    /// Evaluate these blocks of the validation data and exchange the scores: `Session::evaluated`.
    Evaluate(Range<u64>),
    /// End this process.
    Exit(Exit),
    /// Receive the next message from this donor, over the open link to it or a new one:
    /// `Session::install` and `Session::fetched` for a state, `Session::commit` and
    /// `Session::fetched` for a step's result, `Session::caught_up`, `Session::fetch_ended`; or
    /// `Session::fetch_broke`.
    Fetch(WorkerId, SocketAddr),
    /// The job is over. Report the final state to the master: `Session::finish_reported`.
    Finish,
    /// Bring all ranks to one state: `Session::begin`, `Session::commit` and `Session::install` as
    /// the plan demands, then `Session::repaired`.
    Repair(Repair),
    /// All-reduce the pending gradient together with `Session::header`: `Session::commit`.
    Step,
    /// Exchange `Session::sync_header`: `Session::synced`.
    Synchronize,
    /// Exchange `Session::header` without a gradient (idle round): `Session::headers_exchanged`.
    ExchangeHeaders,
    /// Wait for a message from the master.
    Wait,
}

/// Why a worker cannot be part of its new group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupMismatch {
    State(StateMismatch),
    Device(DeviceMismatch),
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
    /// The group continues without this worker, at its own or the user's request.
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
        }
    }
}
