//! The collective operations of a group, and the pieces that travel.

use std::collections::BTreeSet;
use std::rc::Rc;

use elasticdl::session::transport_switch::NcclBuild;
use elasticdl_collective::device::Path;
use elasticdl_collective::testing::schedule::Schedule;

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collective {
    /// Broadcast of tensors.
    Broadcast {
        root: usize,
    },
    BroadcastBytes {
        root: usize,
    },
    /// Each rank gives a payload to each other one.
    Exchange,
    /// Gathers the headers of a round without a step.
    IdleRound,
    /// Broadcast of the id of the NCCL communicator that is to be built.
    NcclId,
    Step(Path),
    /// The first operation of a group: gathers its headers.
    Synchronize,
}

/// The data of a piece that is not elements, and what the oracle wants to know of its sender.
#[derive(Debug)]
pub(crate) struct Note {
    pub(crate) bytes: Vec<u8>,
    /// State of its communicator.
    pub(crate) nccl: NcclBuild,
    /// Generations in which NCCL failed.
    pub(crate) failures: BTreeSet<u64>,
    pub(crate) lineage: u64,
}

/// One piece in flight.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) generation: u64,
    pub(crate) sequence: u64,
    /// Kind of the operation; the same on every rank.
    pub(crate) kind: u8,
    pub(crate) step: usize,
    pub(crate) segment: usize,
    pub(crate) origin: usize,
    pub(crate) note: Option<Rc<Note>>,
    pub(crate) body: Vec<f32>,
}

/// One operation in progress on one rank.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) what: Collective,
    pub(crate) nccl_fails_after: Option<u64>,
    pub(crate) sequence: u64,
    pub(crate) schedule: Schedule,
    pub(crate) notes: Vec<Option<Rc<Note>>>,
    pub(crate) received: u64,
    pub(crate) sent: u64,
    /// This rank's contribution to a sum.
    pub(crate) own: Vec<f32>,
    /// Buffer of a broadcast or of a sum.
    pub(crate) body: Vec<f32>,
}

/// The result of an operation on one rank.
#[derive(Debug)]
pub(crate) struct Operated {
    /// Bytes of all ranks.
    pub(crate) notes: Vec<Vec<u8>>,
    pub(crate) body: Vec<f32>,
}

impl Collective {
    pub(crate) fn kind(&self) -> u8 {
        match self {
            Self::Broadcast { .. } => 0,
            Self::BroadcastBytes { .. } => 1,
            Self::IdleRound => 2,
            Self::NcclId => 3,
            Self::Step(Path::Host) => 4,
            Self::Step(Path::Nccl) => 5,
            Self::Synchronize => 6,
            Self::Exchange => 7,
        }
    }

    /// Whether it is a part of a repair.
    pub(crate) fn repairs(&self) -> bool {
        matches!(self, Self::Broadcast { .. } | Self::BroadcastBytes { .. } | Self::NcclId)
    }
}

impl Operation {
    /// Whether NCCL fails at this point.
    pub(crate) fn nccl_fails(&self) -> bool {
        self.nccl_fails_after.is_some_and(|pieces| self.received >= pieces)
    }
}
