//! The errors of groups and of their operations, and what the caller does after each.

use std::io;
use std::time::Duration;

mod device;
mod fetch;

pub use device::DeviceError;
pub use fetch::FetchError;

/// Why a group could not be built, or why an operation stopped.
///
/// After a failed operation its output buffers hold unspecified values and its inputs are
/// unchanged. The group is dead: all its links are shut down, so that the failure propagates around
/// the ring, and later calls return [`Aborted`](Self::Aborted). Only [`Invalid`](Self::Invalid)
/// leaves the group unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The fence was raised above this generation, or the group had failed before. Wait for the
    /// next membership, connect, and retry with the same input.
    #[error("generation {generation} was aborted")]
    Aborted {
        /// Generation that was aborted.
        generation: u64,
    },
    /// The listener could not be set up. No socket is open; the worker can't take part on this
    /// address.
    #[error("cannot listen for peers")]
    Bind {
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A neighbour did not take part in building the group in time. Report it, then proceed as for
    /// `Aborted`.
    #[error("rank {rank} (worker {member}) did not connect within {waited:?}")]
    Deadline {
        /// Rank of the neighbour in the group that was to be built.
        rank: usize,
        /// Id of the neighbour.
        member: u64,
        /// Deadline that the caller passed.
        waited: Duration,
    },
    /// This rank's GPU or NCCL failed. Report it, then proceed as for `Aborted`, unless the
    /// device's error requires the process to end.
    #[error("the operation on the GPU failed")]
    Device {
        /// Error of the device.
        #[source]
        source: DeviceError,
    },
    /// The arguments of the call are invalid, and nothing was sent. A defect of the caller: the
    /// group is unchanged, but peers that have entered the operation wait for this rank until their
    /// fence is raised.
    #[error("invalid call: {0}")]
    Invalid(String),
    /// The operating system refused a request that concerns no peer, such as one more file
    /// descriptor. Proceed as for `Aborted`, if the condition is temporary.
    #[error("cannot {action}")]
    Io {
        /// Operation that failed.
        action: &'static str,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The link to a neighbour ended or could not be made. Report it, then proceed as for
    /// `Aborted`. The neighbour is not always the one that failed: a rank that detects a failure
    /// closes its own links too.
    #[error("lost rank {rank} (worker {member})")]
    PeerLost {
        /// Rank of the neighbour.
        rank: usize,
        /// Id of the neighbour.
        member: u64,
        /// Error of the link.
        #[source]
        source: io::Error,
    },
    /// A neighbour is in another operation, disagrees on a length, or uses another protocol: a
    /// defect on one of the two sides. Report it; the next generation may fail in the same way.
    #[error("rank {rank} (worker {member}) broke the protocol: {reason}")]
    Protocol {
        /// Rank of the neighbour.
        rank: usize,
        /// Id of the neighbour.
        member: u64,
        /// Expected and received values.
        reason: String,
    },
    /// The program that answers at the address of this rank did not prove that it knows the job's
    /// secret, and was sent nothing. Report it, then proceed as for `PeerLost`.
    #[error(
        "rank {rank} (worker {member}) did not prove that it knows the job's secret: is another \
         program listening at its address?"
    )]
    Unauthenticated {
        /// Rank of the neighbour in the group that was to be built.
        rank: usize,
        /// Id of the neighbour.
        member: u64,
    },
    /// The address of the next rank did not answer. A host's kernel answers a dial regardless of
    /// what the worker is computing, so the network is partitioned or the host is down. Report it,
    /// then proceed as for `Aborted`: one of the two ranks is cut off, or both from each other.
    #[error("rank {rank} (worker {member}) was not reachable within {waited:?}")]
    Unreachable {
        /// Rank of the neighbour in the group that was to be built.
        rank: usize,
        /// Id of the neighbour.
        member: u64,
        /// Duration of the wait for an answer.
        waited: Duration,
    },
}

impl CollectiveError {
    /// Returns the member whose link failed, if the error is about one.
    #[must_use]
    pub fn member(&self) -> Option<u64> {
        match self {
            Self::Deadline { member, .. }
            | Self::PeerLost { member, .. }
            | Self::Protocol { member, .. }
            | Self::Unauthenticated { member, .. }
            | Self::Unreachable { member, .. } => Some(*member),
            Self::Aborted { .. }
            | Self::Bind { .. }
            | Self::Device { .. }
            | Self::Invalid(_)
            | Self::Io { .. } => None,
        }
    }
}

impl From<DeviceError> for CollectiveError {
    fn from(source: DeviceError) -> Self {
        Self::Device { source }
    }
}
