//! Messages between the trainer and the thread of the control stream.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use elasticdl_proto::{Generation, Ledger, RecordRange, WorkerId};
use tokio::sync::mpsc::UnboundedSender;

use crate::core::session::{Membership, Report};
use crate::failure::Failure;
use crate::reader::Dataset;

/// Messages of the master after its welcome.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum FromMaster {
    Describe,
    Drain,
    Fetch(Vec<(WorkerId, SocketAddr)>),
    KeepCheckpoint,
    Lease(Vec<RecordRange>),
    /// The group changes. Second field: the time of arrival.
    Membership(Membership, Instant),
    Prepare(Dataset),
    /// Sent by the control stream itself: the stream is open again, possibly to another master.
    Reconnected,
    Shutdown(String),
    /// The group ends with a checkpoint, because all of its members leave.
    Suspend,
}

/// Messages of this worker after its hello.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ToMaster {
    Checkpoint(CheckpointEvent),
    Described(Result<Dataset, String>),
    /// A shard that was leased to this worker alone is processed. `metrics`: its scores, in an
    /// evaluation.
    Done {
        range: RecordRange,
        metrics: BTreeMap<String, f64>,
    },
    Failed(Failure),
    Finished(Finished),
    Ready {
        parameters: u64,
    },
    Report(Report),
    /// Description of the all-reduce transport. The lowest rank sends it when it changes.
    AllreduceTransport {
        generation: Generation,
        what: String,
    },
    Resumed {
        generation: Generation,
        step: u64,
        phases: Phases,
    },
}

/// Outcome of a checkpoint operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CheckpointEvent {
    /// The checkpoint does not match its digests; the one before it is tried.
    Damaged { name: String, reason: String },
    /// The checkpoint could not be written.
    Failed { step: u64, error: String },
    /// The group starts from the checkpoint.
    Restored { step: u64, name: String },
    /// The checkpoint is complete.
    Saved { step: u64, name: String, bytes: u64 },
}

/// The final state of the job.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finished {
    pub(crate) generation: Generation,
    pub(crate) step: u64,
    pub(crate) digest: u64,
    pub(crate) ledger: Ledger,
    pub(crate) records_trained: u64,
    /// Whether the job ended before its data because evaluations no longer improved.
    pub(crate) stopped_early: bool,
    pub(crate) summary: Option<String>,
    /// Why the job cannot continue, if so.
    pub(crate) failure: Option<FinishedFailure>,
    /// Whether another group resumes from this group's checkpoint.
    pub(crate) suspended: bool,
    /// Number of steps without an update.
    pub(crate) steps_skipped: u64,
    /// Whether this rank has exported the model.
    pub(crate) exported: bool,
}

/// Why a job cannot continue.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FinishedFailure {
    /// The error; the same on all ranks.
    pub(crate) error: String,
    /// Records of this rank that are at fault.
    pub(crate) ranges: Vec<RecordRange>,
}

/// Phases between a group's last commit and its first one in a new generation, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Phases {
    /// From the last commit until the first sign of trouble, or until the switch was agreed.
    pub(crate) detect_us: u64,
    /// Until the trainer thread had left the collective call or the user's code and its links were
    /// closed.
    pub(crate) abort_us: u64,
    /// Until the new membership had arrived.
    pub(crate) agree_us: u64,
    /// Until the new links were up.
    pub(crate) connect_us: u64,
    /// Until all ranks held the same state.
    pub(crate) state_us: u64,
    /// Until the first step was committed.
    pub(crate) first_step_us: u64,
}

/// Channel from the trainer to the master. Sending never blocks; without a master the message is
/// lost.
#[derive(Clone, Debug)]
pub(crate) struct Outbox(pub(crate) UnboundedSender<ToMaster>);

impl Outbox {
    pub(crate) fn send(&self, message: ToMaster) {
        // The thread of the control stream ends the process when it fails, so a closed channel can
        // be ignored.
        let _ = self.0.send(message);
    }
}
