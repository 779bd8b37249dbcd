//! Memberships of a group, and what a worker says of them.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::{Generation, LaunchId, WorkerId};
use crate::limits::STALL_FAR_MAX;
use crate::members::Members;

/// The members of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// The generation.
    pub generation: Generation,
    /// The members.
    pub members: Members,
    /// A member of an earlier generation is lost: members abort the step at once. Otherwise they
    /// switch together at a step boundary.
    pub abort: bool,
}

impl Membership {
    /// The index of `worker` in the ring; `None` if the worker is no member.
    #[must_use]
    pub fn rank_of(&self, worker: WorkerId) -> Option<usize> {
        self.members.iter().position(|(id, _)| *id == worker)
    }
}

/// The first message of a worker on its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Name of the job.
    pub job: String,
    /// The launch that started the process.
    pub launch: LaunchId,
    /// The address at which peers reach the worker.
    pub address: SocketAddr,
    /// Process id; not 0.
    pub pid: u32,
    /// The worker's identity, if a master has welcomed it before.
    pub resume: Option<Resume>,
    /// Highest incarnation of a master that has welcomed this worker; 0 for none.
    pub incarnation: u64,
    /// Where the worker runs.
    pub location: Location,
}

/// Where a worker runs; empty where it is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// Zone of the node.
    pub zone: String,
    /// Rack of the node, within its zone.
    pub rack: String,
    /// Name of the node.
    pub node: String,
}

/// A worker's identity when its stream broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resume {
    /// The worker's id.
    pub worker: WorkerId,
    /// The newest membership that the worker knows, from any master; `None` before its first.
    pub membership: Option<Membership>,
    /// Number of f32 parameters of its model; `None` while it is being built.
    pub parameters: Option<u64>,
    /// Whether it has been in a group whose members have agreed on a state.
    pub holds_state: bool,
}

impl Resume {
    /// The newest generation that the worker knows; 0 for none.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.membership.as_ref().map_or_else(Generation::default, |m| m.generation)
    }
}

/// An operation of the group in which no byte moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The ring's generation.
    pub generation: Generation,
    /// Number of operations begun in this generation, including this one; 0 while the worker waits
    /// for the previous member's dial.
    pub operation: u64,
    /// Bytes of it received from the previous member.
    pub received: u64,
    /// Bytes of it sent to the next member. Where an operation's bytes flow in both directions,
    /// `sent` and `received` are counted so that the two ends of a link differ by the bytes in
    /// flight.
    pub sent: u64,
    /// Whether the awaited bytes come from the next member.
    pub waits_for_next: bool,
    /// Members that are no neighbours in the ring, and from which bytes are awaited.
    pub far: [Option<WorkerId>; STALL_FAR_MAX],
    /// Time since the last byte moved.
    pub since: Duration,
}

/// Microseconds from a group's last commit to its first one in a new generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phases {
    /// From the last commit until the failure was detected (a link's error, or the arrival of a
    /// membership that aborts the step), or until the switch was agreed.
    pub detect_us: u64,
    /// Until the training thread was out of the collective call or the user's code, and its links
    /// were down.
    pub abort_us: u64,
    /// Until the new membership was known.
    pub agree_us: u64,
    /// Until the new links were connected.
    pub connect_us: u64,
    /// Until all ranks held the same state.
    pub state_us: u64,
    /// Until the first step was committed.
    pub first_step_us: u64,
}

impl Phases {
    /// The whole gap between the two commits, in microseconds; saturates.
    #[must_use]
    pub fn gap_us(&self) -> u64 {
        [self.abort_us, self.agree_us, self.connect_us, self.state_us, self.first_step_us]
            .into_iter()
            .fold(self.detect_us, u64::saturating_add)
    }
}
