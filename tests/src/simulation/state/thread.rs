//! The threads of a worker's process.

use elasticdl_proto::WorkerId;

use super::network::LinkId;
use super::operation::Operation;
use crate::simulation::clock::Micros;

/// A thread: its process, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ThreadId {
    pub(crate) p: usize,
    pub(crate) number: usize,
}

/// The number of the trainer among the threads of a process.
pub(crate) const TRAINER: usize = 0;

/// A thread of a process, or the place of one.
#[derive(Debug, Default)]
pub(crate) struct Thread {
    pub(crate) doing: Doing,
    /// Ticket of the wake-up that counts; wake-ups with older tickets are ignored.
    pub(crate) ticket: u32,
    /// Whether a wake-up is on its way.
    pub(crate) woken: bool,
    /// Lineage of the state that a donor's thread sends, for the oracle.
    pub(crate) lineage: u64,
    /// Number of links over which a donor's thread has served its joiner.
    pub(crate) links: u32,
    /// Number of answers that it got from the world, since its last turn if it is the trainer.
    pub(crate) answers: u64,
}

/// What a thread does, or waits for.
#[derive(Debug, Default)]
pub(crate) enum Doing {
    /// Waits for messages of other threads.
    Blocked,
    /// Busy until the wake-up that is scheduled.
    Busy,
    /// Computes a gradient until the wake-up that is scheduled.
    Computing,
    /// Waits for links, or for their end.
    Connecting,
    /// Waits for a donor, or for messages of the master.
    Fetching,
    /// Not started, or done.
    #[default]
    Nothing,
    /// Waits for the pieces of an operation.
    Operating(Box<Operation>),
}

/// The donor that a joiner fetches the state from.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) link: LinkId,
    /// Time of the last packet from the donor; `None` before the first one.
    pub(crate) received_at: Option<Micros>,
    /// Whether this worker has closed the link.
    pub(crate) is_closed: bool,
    /// Generation and lineage of the snapshot.
    pub(crate) snapshot: Option<(u64, u64)>,
}

/// A joiner's request for the state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateRequest {
    pub(crate) member: WorkerId,
    pub(crate) link: LinkId,
    /// What the joiner has received over earlier links.
    pub(crate) position: Option<elasticdl_collective::Position>,
}
