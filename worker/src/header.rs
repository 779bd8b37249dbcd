//! What ranks tell one another beside the gradient.

use elasticdl_proto::RecordRange;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// One rank's word in one round. All ranks get all headers, so all decide alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepHeader {
    /// Steps committed before this round.
    pub(crate) step: u64,
    /// The records behind this rank's gradient.
    pub(crate) ranges: Vec<RecordRange>,
    /// Sum of the loss over them.
    pub(crate) loss_sum: f64,
    /// Microseconds in the model's code.
    pub(crate) compute_us: u64,
    /// Records that this rank could compute next, by epoch.
    pub(crate) held: Vec<(u32, u64)>,
    /// Newest generation that this rank has heard of.
    pub(crate) seen: u64,
    /// The master has told this rank that the job is to stop.
    pub(crate) stop: bool,
    /// Digest of a part of the state after `step` steps, another part at each step.
    pub(crate) digest: u64,
}

impl StepHeader {
    /// Records behind this rank's gradient.
    pub(crate) fn records(&self) -> u64 {
        self.ranges.iter().map(RecordRange::len).sum()
    }
}

/// One rank's word in a new group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SyncHeader {
    /// The state it has, if any.
    pub(crate) state: Option<StateHeader>,
}

/// The state that a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StateHeader {
    /// Steps committed.
    pub(crate) step: u64,
    /// Digest of the whole state.
    pub(crate) digest: u64,
    /// Whether it still has the reduced gradient of its last step.
    pub(crate) kept: bool,
}

/// The part of the training state that is not tensors, as it travels to ranks that have none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StateRecord {
    pub(crate) step: u64,
    pub(crate) records_trained: u64,
    pub(crate) epochs_complete: u32,
    pub(crate) ranges: Vec<RecordRange>,
    pub(crate) repeated: u64,
}

/// Bytes of a header.
pub(crate) fn encode<T: Serialize>(header: &T) -> Vec<u8> {
    postcard::to_stdvec(header).expect("headers hold nothing that can't be encoded")
}

/// A header from another rank's bytes; `None` where they are no such header.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((header, [])) => Some(header),
        _ => None,
    }
}

/// The records held of `epoch`, out of a header's list.
pub(crate) fn held_of(held: &[(u32, u64)], epoch: u32) -> u64 {
    held.iter().filter(|(e, _)| *e == epoch).map(|(_, records)| records).sum()
}
