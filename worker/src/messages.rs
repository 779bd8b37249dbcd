//! What passes between the trainer and the control stream's thread.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use elasticdl_proto::{Generation, Ledger, RecordRange, WorkerId};
use tokio::sync::mpsc::UnboundedSender;

use crate::core::session::{Membership, Report};
use crate::failure::Failure;
use crate::reader::Dataset;

/// What the master says after its welcome.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum FromMaster {
    Describe,
    Drain,
    Fetch(Vec<(WorkerId, SocketAddr)>),
    KeepCheckpoint,
    Lease(Vec<RecordRange>),
    /// The group changes; and when that arrived here.
    Membership(Membership, Instant),
    Prepare(Dataset),
    /// From the control stream itself: it was broken, and there is another master.
    Reconnected,
    Shutdown(String),
    /// The group ends with a checkpoint, for all of its members leave.
    Suspend,
}

/// What this worker says after its hello.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ToMaster {
    Checkpoint(CheckpointEvent),
    Described(Result<Dataset, String>),
    /// A shard that was leased to this worker alone; its metrics, if it was evaluated.
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
    /// In words; from the lowest rank, when it changes.
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

/// What became of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CheckpointEvent {
    /// It is not as it was written; the one before it is tried.
    Damaged { name: String, reason: String },
    /// It could not be written.
    Failed { step: u64, error: String },
    /// The group begins from it.
    Restored { step: u64, name: String },
    /// It is complete.
    Saved { step: u64, name: String, bytes: u64 },
}

/// The job's final state.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finished {
    pub(crate) generation: Generation,
    pub(crate) step: u64,
    pub(crate) digest: u64,
    pub(crate) ledger: Ledger,
    pub(crate) records_trained: u64,
    /// Evaluations got no better.
    pub(crate) stopped_early: bool,
    pub(crate) summary: Option<String>,
    /// Why the job can't go on, if it can't.
    pub(crate) failure: Option<FinishedFailure>,
    /// The group ends here, and another one goes on from its checkpoint.
    pub(crate) suspended: bool,
    /// Steps without an update.
    pub(crate) steps_skipped: u64,
    /// This rank has exported the model.
    pub(crate) exported: bool,
}

/// Why a job can't go on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FinishedFailure {
    /// The same on all ranks.
    pub(crate) error: String,
    /// This rank's records that are at fault.
    pub(crate) ranges: Vec<RecordRange>,
}

/// Microseconds from a group's last commit to its first one in a new generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Phases {
    /// Last commit until the first sign of trouble, or until the switch was agreed.
    pub(crate) detect_us: u64,
    /// Until the training thread was out of the collective call or the user's code and its links
    /// were down.
    pub(crate) abort_us: u64,
    /// Until the new membership was known.
    pub(crate) agree_us: u64,
    /// Until the new links stood.
    pub(crate) connect_us: u64,
    /// Until all ranks held the same state.
    pub(crate) state_us: u64,
    /// Until the first step was committed.
    pub(crate) first_step_us: u64,
}

/// Where the trainer puts what the master is to hear. Sending never blocks; without a master it is
/// lost.
#[derive(Clone, Debug)]
pub(crate) struct Outbox(pub(crate) UnboundedSender<ToMaster>);

impl Outbox {
    pub(crate) fn send(&self, message: ToMaster) {
        // The control stream's thread ends the process when it ends itself, so a closed channel
        // needs no answer.
        let _ = self.0.send(message);
    }
}
