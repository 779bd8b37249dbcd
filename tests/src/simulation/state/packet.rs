//! What travels on links.

use std::rc::Rc;

use elasticdl_collective::Position;
use elasticdl_master::job::{LaunchId, MasterMessage, Resume, WorkerMessage};
use elasticdl_proto::WorkerId;

use super::operation::Frame;

/// A message to a joiner.
#[derive(Debug)]
pub(crate) struct StateMessage {
    pub(crate) kind: u32,
    pub(crate) generation: u64,
    pub(crate) note: Vec<u8>,
    pub(crate) floats: Vec<f32>,
    /// Lineage of the donor's state, for the oracle.
    pub(crate) lineage: u64,
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
