//! A worker's end of all links.

use elasticdl::session::transport_switch::NcclBuild;
use elasticdl_collective::testing::admission::Admission;
use elasticdl_collective::testing::schedule::RankInfo;
use elasticdl_proto::WorkerId;

use super::network::LinkId;
use crate::simulation::clock::Micros;

/// The listener and the fence of one process.
#[derive(Debug, Default)]
pub(crate) struct Endpoint {
    pub(crate) open: bool,
    pub(crate) admission: Admission<LinkId>,
}

/// The ring of one generation, or the attempt to build it.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) generation: u64,
    pub(crate) members: Vec<WorkerId>,
    pub(crate) seat: RankInfo,
    pub(crate) next: Option<LinkId>,
    pub(crate) prev: Option<LinkId>,
    pub(crate) introduced: bool,
    /// Time at which the next member was dialled.
    pub(crate) dialled: Micros,
    /// Sequence number of the next operation.
    pub(crate) sequence: u64,
    pub(crate) aborted: bool,
    /// State of the group's communicator on this rank.
    pub(crate) nccl: NcclBuild,
    /// The oracle's lineage of the state that is broadcast.
    pub(crate) lineage: u64,
}

/// The point at which a rank waits for its neighbours.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitPoint {
    pub(crate) generation: u64,
    pub(crate) operation: u64,
    pub(crate) received: u64,
    pub(crate) sent: u64,
    pub(crate) since: Micros,
}

/// Why an operation or the building of a group stopped.
pub(crate) enum TransferError {
    Aborted,
    Nccl,
    Next,
    Prev,
    /// The host of the next member has not answered the dial.
    Unanswered,
}

impl Ring {
    pub(crate) fn world(&self) -> usize {
        self.seat.world
    }

    pub(crate) fn members(&self) -> &[WorkerId] {
        &self.members
    }

    pub(crate) fn neighbour(&self, error: &TransferError) -> Option<WorkerId> {
        let RankInfo { rank, world } = self.seat;
        match error {
            TransferError::Aborted | TransferError::Nccl => None,
            TransferError::Next | TransferError::Unanswered => {
                Some(self.members[(rank + 1) % world])
            }
            TransferError::Prev => Some(self.members[(rank + world - 1) % world]),
        }
    }
}
