//! Headers that ranks exchange, with the gradient or alone.

use std::collections::BTreeMap;

use elasticdl_proto::RecordRange;
use elasticdl_tables::OwnedHeader;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::session::audit::AuditHeader;
use crate::session::checkpoint::CheckpointHeader;
use crate::session::evaluation::Evaluation;
use crate::session::halt::Halt;
use crate::session::origin::Origin;
use crate::session::transport_switch::{NcclBuild, TransportHeader};

/// Header of one rank for one round. All ranks receive all headers, so all make the same decisions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepHeader {
    /// Number of steps committed before this round.
    pub step: u64,
    /// Records in this rank's gradient.
    pub ranges: Vec<RecordRange>,
    /// Sum of the loss over these records.
    pub loss_sum: f64,
    /// Sums of the program's metrics over these records.
    pub metrics: BTreeMap<String, f64>,
    /// What the program has added to the step's tally with these records.
    pub tally: BTreeMap<String, f64>,
    /// Time spent in the model's code, in microseconds.
    pub compute_us: u64,
    /// Time spent waiting for these records to be read, in microseconds.
    pub input_us: u64,
    /// Pairs of one of these records and a row of a table that it touches.
    pub row_touches: u64,
    /// Time that this rank needed per record lately, in nanoseconds; 0: not known yet.
    pub cost: u64,
    /// Number of its upcoming records that this rank can read now; `None`: all.
    pub readable: Option<u64>,
    /// Newest generation that the master has published to this rank.
    pub newest_generation: u64,
    /// Whether this rank is not in that generation, and holds shards of the model's tables or of
    /// the optimizer's state. The trainer sets it.
    pub leaves: bool,
    /// Whether a sum of the step is not finite, if no rank has all of them. The trainer sets it.
    pub has_nonfinite_sum: bool,
    /// Digest of a chunk of the optimizer's state after `step` steps, if this rank holds it: each
    /// step covers another chunk. The trainer sets it.
    pub chunk_digest: Option<u64>,
    /// Whether the master wants the job to stop.
    pub stop: bool,
    /// Whether the master wants the group to end here; another group resumes from its checkpoint.
    pub suspend: bool,
    /// Why this rank cannot continue. If set, no rank applies this step and the job ends with the
    /// current state.
    pub halt: Option<Halt>,
    /// Digest of a part of the state after `step` steps: each step covers another part. Of the
    /// whole state, before a model of it is exported.
    pub digest: u64,
    pub checkpoint: CheckpointHeader,
    /// Evaluation results that this rank knows.
    pub evaluation: Evaluation,
    /// State of this rank's NCCL communicator.
    pub nccl: NcclBuild,
    /// What the rank has of the model's tables, or had lately. The trainer sets it.
    pub tables: Option<HeldRows>,
    /// Whether this rank has looked up the rows of all records that it will compute for the next
    /// step, if nothing happens to the group. The trainer sets it.
    pub has_looked_ahead: bool,
    /// What this rank contributes to the audit of the step, if it is audited.
    pub audit: Option<AuditHeader>,
    /// Whether the rank has copied its state from another one, and parts of it have not been
    /// compared since: it has no vote.
    pub is_copy: bool,
}

/// Size of a rank's part of the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldRows {
    /// Rows that it owns.
    pub rows: u64,
    /// Memory of the rows that it holds, in bytes.
    pub bytes: u64,
    /// Shards of the group with fewer copies than there could be.
    pub at_risk: u32,
}

impl StepHeader {
    /// Number of records in this rank's gradient.
    pub fn records(&self) -> u64 {
        self.ranges.iter().map(RecordRange::len).sum()
    }
}

/// Adds sums of metrics to others, by name.
pub(super) fn add_sums(sums: &mut BTreeMap<String, f64>, more: &BTreeMap<String, f64>) {
    for (name, sum) in more {
        match sums.get_mut(name) {
            Some(before) => *before += sum,
            None => drop(sums.insert(name.clone(), *sum)),
        }
    }
}

/// Header of one rank for a new group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SyncHeader {
    /// The rank's state, if it has one.
    pub state: Option<StateHeader>,
    /// Generation of the group that created this state.
    pub created: u64,
    /// The kind of device that the rank computes on.
    pub transport: TransportHeader,
    /// Where the rank runs, and what.
    pub origin: Origin,
    /// What the rank has of what is divided over the group: rows of tables, or the optimizer's
    /// state. The trainer adds it.
    pub owned: Option<OwnedHeader>,
    /// Whether the rank has all parameters of its step, with a sharded optimizer. The trainer adds
    /// it.
    pub is_gathered: bool,
}

/// Description of the state of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateHeader {
    /// Number of committed steps.
    pub step: u64,
    /// Digest of the record and of the part of the tensors that this step covers.
    pub digest: u64,
    /// Whether the rank still has the reduced gradient of its last step.
    pub has_result: bool,
    /// Whether the rank has trained in a group. A joiner that has only fetched its state has not.
    pub was_in_group: bool,
}

/// The part of the training state that is not tensors, in the form that is sent to other ranks and
/// stored in checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StateRecord {
    pub step: u64,
    pub records_trained: u64,
    pub epochs_complete: u32,
    pub ranges: Vec<RecordRange>,
    pub repeated: u64,
    #[serde(default)]
    pub evaluation: Evaluation,
    /// Number of steps, out of `step`, whose records were absorbed without an update.
    #[serde(default)]
    pub steps_skipped: u64,
    /// Pairs of an absorbed record and a row of a table that it touches.
    #[serde(default)]
    pub row_touches: u64,
    /// Generation of the group that created the state, from a checkpoint or as the initial one.
    #[serde(default)]
    pub created: u64,
}

impl StateRecord {
    /// The state of a group that has absorbed the first `records` records of an order with
    /// `per_epoch` records in each epoch.
    pub fn after(records: u64, per_epoch: u64) -> Self {
        let epochs = u32::try_from(records / per_epoch.max(1)).unwrap_or(u32::MAX);
        let rest = RecordRange { epoch: epochs, start: 0, end: records % per_epoch.max(1) };
        Self {
            records_trained: records,
            epochs_complete: epochs,
            ranges: if rest.is_empty() { Vec::new() } else { vec![rest] },
            ..Self::default()
        }
    }
}

/// Serializes a header.
pub fn encode<T: Serialize>(header: &T) -> Vec<u8> {
    postcard::to_stdvec(header).expect("every header can be encoded")
}

/// Deserializes the header of another rank; `None` for invalid bytes.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((header, [])) => Some(header),
        _ => None,
    }
}
