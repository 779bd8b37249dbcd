//! What travels on links.

use std::rc::Rc;

use elasticdl::session::header::{StateRecord, StepHeader};
use elasticdl_master::job::{LaunchId, MasterMessage, Resume, WorkerMessage};
use elasticdl_proto::{Generation, WorkerId};

use super::operation::Frame;

/// How much of a snapshot, and of the results after it, a joiner has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    /// Step of the snapshot.
    pub(crate) snapshot: u64,
    /// Number of its parameters that have been received.
    pub(crate) received: usize,
    /// Step of the joiner's state.
    pub(crate) step: u64,
}

/// A message to a joiner. Steps are those of the donor's group of `generation`.
#[derive(Clone, Debug)]
pub(crate) enum StateMessage {
    /// There is nothing more to send for now.
    CaughtUp,
    /// The donor enters this generation together with the joiner.
    End {
        generation: Generation,
    },
    /// Parameters of the snapshot.
    Part {
        from: usize,
        parameters: Vec<u8>,
    },
    Result {
        generation: Generation,
        step: u64,
        headers: Vec<StepHeader>,
        sum: Vec<u8>,
    },
    /// The parts of the snapshot from `from` on follow; with the oracle's lineage.
    Start {
        generation: Generation,
        record: StateRecord,
        from: usize,
        lineage: u64,
    },
}

/// A packet on a link. `Hello` to `Welcome` travel on control streams, `Dial` to `StateMessage` on
/// links between workers, `End` on both.
#[derive(Debug)]
pub(crate) enum Packet {
    /// With the highest incarnation of a master that has welcomed the worker.
    Hello(LaunchId, Option<Resume>, u64),
    Refused,
    Up(WorkerMessage),
    Down(MasterMessage),
    /// With the master's incarnation.
    Welcome(WorkerId, u64),
    Dial,
    Accepted,
    /// Without a generation: from a joiner that requests the state, or what it lacks after
    /// `position`.
    Introduction {
        generation: Option<u64>,
        from: WorkerId,
        position: Option<Position>,
    },
    Frame(Rc<Frame>),
    Position(Position),
    StateMessage(Rc<StateMessage>),
    End,
}
