//! The collective operations of a group, and the pieces that travel.

use std::collections::BTreeSet;
use std::rc::Rc;

use elasticdl::session::Broadcast;
use elasticdl::session::header::{StepHeader, SyncHeader};
use elasticdl::session::transport_switch::Transport;
use elasticdl_collective::testing::schedule::Schedule;

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collective {
    /// A part of a repair.
    Broadcast {
        root: usize,
        what: Broadcast,
    },
    /// Broadcast of the id of the NCCL communicator that is to be built.
    NcclId,
    Step,
    Synchronize,
    IdleRound,
}

/// The data of a piece that is not elements.
#[derive(Debug)]
pub(crate) enum Note {
    /// With the root's lineage, for the oracle.
    Bytes(Vec<u8>, u64),
    Step(Box<StepHeader>),
    /// With the generations in which NCCL failed, for the oracle.
    Sync(SyncHeader, BTreeSet<u64>),
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
    pub(crate) body: Vec<u8>,
}

/// One operation in progress on one rank.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) what: Collective,
    /// Transport of a step.
    pub(crate) path: Transport,
    pub(crate) nccl_fails_after: Option<u64>,
    pub(crate) sequence: u64,
    pub(crate) schedule: Schedule,
    pub(crate) notes: Vec<Option<Rc<Note>>>,
    pub(crate) received: u64,
    pub(crate) sent: u64,
    /// Buffer of a broadcast. A step sums into the model's own buffer.
    pub(crate) body: Vec<u8>,
    pub(crate) is_root: bool,
}

/// An operation that is complete on one rank.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) what: Collective,
    pub(crate) notes: Vec<Option<Rc<Note>>>,
    pub(crate) body: Vec<u8>,
    pub(crate) is_root: bool,
}

impl Collective {
    pub(crate) fn kind(&self) -> u8 {
        match self {
            Self::Broadcast { what: Broadcast::Result { .. }, .. } => 0,
            Self::Broadcast { what: Broadcast::ResultHeaders, .. } => 1,
            Self::Broadcast { what: Broadcast::State, .. } => 2,
            Self::Broadcast { what: Broadcast::StateRecord, .. } => 3,
            Self::Step => 4,
            Self::Synchronize => 5,
            Self::IdleRound => 6,
            Self::NcclId => 7,
        }
    }

    pub(crate) fn root(&self) -> Option<usize> {
        match *self {
            Self::Broadcast { root, .. } => Some(root),
            Self::NcclId => Some(0),
            Self::Step | Self::Synchronize | Self::IdleRound => None,
        }
    }
}

impl Operation {
    /// Kind of the operation; the same on every rank.
    pub(crate) fn kind(&self) -> u8 {
        match self.path {
            Transport::Host => self.what.kind(),
            Transport::Nccl => self.what.kind() | 128,
        }
    }

    pub(crate) fn what(&self) -> &Collective {
        &self.what
    }

    /// Whether NCCL fails at this point.
    pub(crate) fn nccl_fails(&self) -> bool {
        self.path == Transport::Nccl
            && self.nccl_fails_after.is_some_and(|pieces| self.received >= pieces)
    }
}
