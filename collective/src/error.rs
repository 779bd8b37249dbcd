use std::io;
use std::time::Duration;

use crate::device::DeviceError;

/// Why a group could not be built, or an operation stopped.
///
/// After a failed operation its output buffers hold unspecified values, its inputs are untouched,
/// and the ring is dead: both links are shut down, so that the news runs around the ring, and later
/// calls return [`Aborted`](Self::Aborted). Only [`Invalid`](Self::Invalid) leaves the ring as it
/// was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The fence was raised above this generation, or the ring had failed before. Wait for the next
    /// membership, connect, and contribute the same input again.
    #[error("generation {generation} is over")]
    Aborted {
        /// The generation that is over.
        generation: u64,
    },
    /// The listener could not be set up. Nothing is open; the worker can't take part on this
    /// address.
    #[error("cannot listen for peers")]
    Bind {
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
    /// A neighbour did not take part in building the ring in time. Report it, then as for
    /// `Aborted`.
    #[error("rank {rank} (worker {member}) did not show up within {waited:?}")]
    Deadline {
        /// The neighbour's rank in the group that was to be built.
        rank: usize,
        /// The neighbour's id.
        member: u64,
        /// The deadline that the caller gave.
        waited: Duration,
    },
    /// This rank's GPU or NCCL failed. Report it, then as for `Aborted`, unless the device's error
    /// says that the process has to end.
    #[error("the GPU ring failed")]
    Device {
        /// What happened.
        #[source]
        source: DeviceError,
    },
    /// The caller asked for something that makes no sense, and nothing was sent. A defect of the
    /// caller: the ring is as it was, but peers that have entered the operation wait for this rank
    /// until their fence is raised.
    #[error("invalid call: {0}")]
    Invalid(String),
    /// The operating system refused something that has to do with no peer, such as one more file
    /// descriptor. As for `Aborted`, if it goes away.
    #[error("cannot {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
    /// The link to a neighbour ended or could not be made. Report it, then as for `Aborted`. The
    /// neighbour is not always the one that failed: who hears of a failure ends its own links too.
    #[error("lost rank {rank} (worker {member})")]
    PeerLost {
        /// The neighbour's rank.
        rank: usize,
        /// The neighbour's id.
        member: u64,
        /// How the link ended.
        #[source]
        source: io::Error,
    },
    /// A neighbour is in another operation, disagrees on a length, or speaks another language: a
    /// defect on one of the two sides. Report it; the next generation may well end the same way.
    #[error("rank {rank} (worker {member}) broke the protocol: {reason}")]
    Protocol {
        /// The neighbour's rank.
        rank: usize,
        /// The neighbour's id.
        member: u64,
        /// What was expected, and what came.
        reason: String,
    },
    /// Nobody answered at the address of the next rank, not even its system, which does so whatever
    /// the worker is busy with. Report it, then as for `Aborted`: one of the two is cut off, or
    /// both from each other.
    #[error("rank {rank} (worker {member}) could not be reached within {waited:?}")]
    Unreachable {
        /// The neighbour's rank in the group that was to be built.
        rank: usize,
        /// The neighbour's id.
        member: u64,
        /// How long an answer was waited for.
        waited: Duration,
    },
}

impl CollectiveError {
    /// The member whose link failed, if the error is about one.
    #[must_use]
    pub fn member(&self) -> Option<u64> {
        match self {
            Self::Deadline { member, .. }
            | Self::PeerLost { member, .. }
            | Self::Protocol { member, .. }
            | Self::Unreachable { member, .. } => Some(*member),
            Self::Aborted { .. }
            | Self::Bind { .. }
            | Self::Device { .. }
            | Self::Invalid(_)
            | Self::Io { .. } => None,
        }
    }
}
