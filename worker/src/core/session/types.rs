//! What a session is told, what it wants done, and what it says.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;

use elasticdl_proto::{Generation, Ledger, RecordRange, WorkerId};

use crate::core::checkpoint::Interval;
use crate::core::evaluation::{self, Evaluation};
use crate::core::header::StateRecord;
use crate::core::plan::Batch;
use crate::core::repair::{Repair, StateMismatch};
use crate::core::transport_switch::DeviceMismatch;

/// What a job asks of its workers.
#[derive(Clone, Debug)]
pub struct JobPlan {
    /// Records of one epoch.
    pub records: u64,
    pub epochs: u32,
    pub max_steps: Option<u64>,
    pub batch: Batch,
    /// How often a checkpoint is written; `None` where there is no place for them.
    pub checkpoints: Option<Interval>,
    pub evaluation: Option<evaluation::Plan>,
}

/// A group, as the master publishes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    pub generation: Generation,
    /// In ring order.
    pub members: Vec<(WorkerId, SocketAddr)>,
    /// A member of an earlier generation is lost: leave the step at once.
    pub abort: bool,
}

impl Membership {
    pub(super) fn rank_of(&self, worker: WorkerId) -> Option<usize> {
        self.members.iter().position(|(id, _)| *id == worker)
    }
}

/// What the session wants done next. The doer answers with the call that stands beside each.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Compute the gradient of these records and add it to what is pending: `Session::computed`.
    Compute(Vec<RecordRange>),
    /// Build the links of this membership: `Session::connected` or `Session::broken`.
    Connect(Membership),
    /// Evaluate these blocks of the validation data, and exchange the scores: `Session::evaluated`.
    Evaluate(Range<u64>),
    /// End this process.
    Exit(Exit),
    /// Take what comes from this member, over the link to it (a new one, if there is none to it):
    /// `Session::install` and `Session::fetched` for a state, `Session::commit` and
    /// `Session::fetched` for a step's result, `Session::caught_up`, `Session::fetch_ended`; or
    /// `Session::fetch_broke`.
    Fetch(WorkerId, SocketAddr),
    /// The job is over: say so, with the final state: `Session::told`.
    Finish,
    /// Bring all ranks to one state: `Session::begin`, `Session::commit`, `Session::install` as the
    /// plan says, then `Session::repaired`.
    Repair(Repair),
    /// Reduce the pending gradient with `Session::header` beside it: `Session::commit`.
    Step,
    /// Exchange `Session::sync_header`: `Session::synced`.
    Synchronize,
    /// Exchange `Session::header` alone: `Session::headers_exchanged`.
    ExchangeHeaders,
    /// Nothing, until the master says something.
    Wait,
}

/// Why a worker has no place in its new group.
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
    /// The group goes on without it, as it or the user wished.
    Left,
    /// Its state is older than any repair reaches.
    Outdated,
    /// The master said so.
    Shutdown(String),
}

/// What the session tells the master.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// `unreachable`: the suspect has answered no dial.
    Broken {
        generation: Generation,
        suspect: Option<WorkerId>,
        error: String,
        unreachable: bool,
    },
    Committed(Progress),
    /// Means over the validation data, by metric. From the lowest rank.
    Evaluated {
        step: u64,
        records: u64,
        means: BTreeMap<String, f64>,
    },
    Formed {
        generation: Generation,
        step: u64,
        ledger: Ledger,
    },
    HeldLeases {
        step: u64,
        ranges: Vec<RecordRange>,
    },
    LeaseRequest {
        epoch: u32,
        records: u64,
    },
    CaughtUp {
        step: u64,
    },
}

/// What a group has committed since its last word.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    pub generation: Generation,
    pub step: u64,
    pub ranges: Vec<RecordRange>,
    pub loss_sum: f64,
    pub records: u64,
    pub compute_us: Vec<u64>,
    pub times: StepTimes,
    /// Steps without an update, of all that the state contains.
    pub steps_skipped: u64,
}

/// What steps took on this rank. A group's first step is not among them: it is part of what the
/// change cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    pub steps: u64,
    /// From commit to commit, over all of them.
    pub step_us: u64,
    /// Of these, in the all-reduce.
    pub reduce_us: u64,
}

/// The part of the training state that is not tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Steps committed.
    pub step: u64,
    /// What the parameters have absorbed.
    pub ledger: Ledger,
    /// Records that went into the steps, by the steps' own counts.
    pub records_trained: u64,
    pub evaluation: Evaluation,
    /// Steps whose records were absorbed without an update.
    pub steps_skipped: u64,
}

impl State {
    /// As it travels.
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
