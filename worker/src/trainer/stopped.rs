//! Why a task of the trainer was not completed.

use elasticdl_collective::CollectiveError;
use elasticdl_collective::device::DeviceError;

use crate::failure::Failure;
use crate::session::header;
use crate::session::replicas::StateMismatch;
use crate::session::transport_switch::DeviceMismatch;
use crate::session::{GroupMismatch, InvalidData};

/// Why a task was not completed.
#[derive(Debug)]
pub(super) enum Stopped {
    /// The links broke; a new group will form.
    Broken(CollectiveError),
    /// This worker, or the job, cannot continue.
    Failed(Failure),
    /// Replicas differ, and this one is that of the majority; a new group will form.
    Left(String),
}

/// This worker, or the job, cannot continue.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) failure: Failure,
    /// Whether the GPU may still use the trainer's memory.
    pub(crate) is_in_use: bool,
}

impl From<Failure> for Failed {
    fn from(failure: Failure) -> Self {
        Self { failure, is_in_use: false }
    }
}

impl From<CollectiveError> for Stopped {
    fn from(error: CollectiveError) -> Self {
        Self::Broken(error)
    }
}

impl From<DeviceError> for Stopped {
    fn from(error: DeviceError) -> Self {
        Self::Failed(error.into())
    }
}

impl From<Failure> for Stopped {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<InvalidData> for Stopped {
    fn from(error: InvalidData) -> Self {
        Self::Failed(Failure::local(error.to_string()))
    }
}

pub(super) fn decode_all<T: serde::de::DeserializeOwned>(
    headers: Vec<Vec<u8>>,
) -> Result<Vec<T>, Stopped> {
    headers
        .iter()
        .map(|bytes| header::decode(bytes).ok_or_else(|| InvalidData("a header").into()))
        .collect()
}

pub(super) fn group_mismatch(mismatch: &GroupMismatch) -> Stopped {
    match mismatch {
        GroupMismatch::Program(other) => Stopped::Failed(Failure::local(other.to_string())),
        GroupMismatch::State(differing) => state_mismatch(differing),
        GroupMismatch::Device(DeviceMismatch { first_has_gpu }) => {
            let (here, there) =
                if *first_has_gpu { ("the CPU", "a GPU") } else { ("a GPU", "the CPU") };
            let error = format!(
                "this worker computes on {here} and the group on {there}; \
                 all must compute on the same kind of device"
            );
            Stopped::Failed(Failure::local(error))
        }
    }
}

pub(super) fn state_mismatch(mismatch: &StateMismatch) -> Stopped {
    match mismatch.is_failing() {
        true => Stopped::Failed(Failure::diverged(mismatch)),
        false => Stopped::Left(mismatch.to_string()),
    }
}

/// Compares the digests of two sums of the same gradients.
///
/// # Errors
/// The links are left, and the next group sums again. Ranks that have seen no difference have the
/// right sum: what was changed before the sum was complete, all have seen.
pub(super) fn check_sums(first: u64, again: u64) -> Result<(), Stopped> {
    if first == again {
        return Ok(());
    }
    let why = "a sum of gradients was changed while it was computed or sent: a second sum of the \
               same gradients has other bits";
    Err(Stopped::Left(why.into()))
}
