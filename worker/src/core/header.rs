//! What ranks tell one another beside the gradient.

use elasticdl_proto::RecordRange;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::core::checkpoint::CheckpointHeader;
use crate::core::evaluation::Evaluation;
use crate::core::halt::Halt;
use crate::core::transport_switch::{NcclBuild, TransportHeader};

/// One rank's word in one round. All ranks get all headers, so all decide alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepHeader {
    /// Steps committed before this round.
    pub step: u64,
    /// The records behind this rank's gradient.
    pub ranges: Vec<RecordRange>,
    /// Sum of the loss over them.
    pub loss_sum: f64,
    /// Microseconds in the model's code.
    pub compute_us: u64,
    /// Records that this rank could compute next, by epoch.
    pub held: Vec<(u32, u64)>,
    /// Newest generation that this rank has heard of.
    pub newest_generation: u64,
    /// The master has told this rank that the job is to stop.
    pub stop: bool,
    /// The master has told this rank that the group is to end here, and another one to go on from
    /// its checkpoint.
    pub suspend: bool,
    /// Why this rank can't go on: no rank applies this step, and the job ends with the state as it
    /// is.
    pub halt: Option<Halt>,
    /// Digest of a part of the state after `step` steps, another part at each step.
    pub digest: u64,
    pub checkpoint: CheckpointHeader,
    /// What it remembers of evaluations.
    pub evaluation: Evaluation,
    /// How far its NCCL is.
    pub nccl: NcclBuild,
}

impl StepHeader {
    /// Records behind this rank's gradient.
    pub fn records(&self) -> u64 {
        self.ranges.iter().map(RecordRange::len).sum()
    }
}

/// One rank's word in a new group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SyncHeader {
    /// The state it has, if any.
    pub state: Option<StateHeader>,
    /// What it computes on.
    pub transport: TransportHeader,
}

/// The state that a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateHeader {
    /// Steps committed.
    pub step: u64,
    /// Digest of the record and of the part of the tensors whose turn it is at this step.
    pub digest: u64,
    /// Whether it still has the reduced gradient of its last step.
    pub has_result: bool,
    /// Whether this rank has trained in a group. A newcomer that has only fetched its state has
    /// not.
    pub was_in_group: bool,
}

/// The part of the training state that is not tensors, as it travels to ranks that have none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StateRecord {
    pub step: u64,
    pub records_trained: u64,
    pub epochs_complete: u32,
    pub ranges: Vec<RecordRange>,
    pub repeated: u64,
    #[serde(default)]
    pub evaluation: Evaluation,
    /// Of these steps, those whose records were absorbed without an update.
    #[serde(default)]
    pub steps_skipped: u64,
}

/// Bytes of a header.
pub fn encode<T: Serialize>(header: &T) -> Vec<u8> {
    postcard::to_stdvec(header).expect("headers hold nothing that can't be encoded")
}

/// A header from another rank's bytes; `None` where they are no such header.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((header, [])) => Some(header),
        _ => None,
    }
}

/// The records held of `epoch`, out of a header's list.
pub fn held_of(held: &[(u32, u64)], epoch: u32) -> u64 {
    held.iter().filter(|(e, _)| *e == epoch).map(|(_, records)| records).sum()
}
