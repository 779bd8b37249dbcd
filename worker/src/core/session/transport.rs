//! What a session has to do with NCCL.

use super::{Phase, Session};
use crate::core::header::SyncHeader;
use crate::core::transport_switch::{NcclBuild, NcclObstacle, Transport, TransportSwitch};

impl Session {
    /// Whether this worker computes on a GPU.
    pub fn on_gpu(self, is: bool) -> Self {
        Self { transport: TransportSwitch::new(is), ..self }
    }

    /// This worker's NCCL communicator of its generation is so far.
    pub fn set_nccl_build(&mut self, build: NcclBuild) {
        self.transport.set_build(build);
    }

    /// NCCL failed amid a step. The links are broken, too.
    pub fn nccl_broke(&mut self) {
        if let Phase::Round { group, .. } = &self.phase {
            self.transport.broke(&group.members);
        }
    }

    /// The way of the next [`Task::Step`](super::Task::Step).
    pub fn transport(&self) -> Transport {
        self.transport.transport()
    }

    /// Why this group does not try to have NCCL. Where it does, ranks begin to build it when they
    /// are at one state.
    pub fn nccl_obstacle(&self) -> Option<NcclObstacle> {
        self.transport.obstacle()
    }
}

/// Ranks that compute elsewhere than the first one leave; that their states look different there is
/// no fault of the others.
pub(super) fn without_mismatched_devices(headers: &[SyncHeader]) -> Vec<SyncHeader> {
    let first = headers.first().is_some_and(|header| header.transport.gpu);
    let fits = |header: &&SyncHeader| header.transport.gpu == first;
    let state = |header| Some(header).filter(fits).and_then(|header| header.state);
    headers
        .iter()
        .map(|header| SyncHeader { state: state(header), transport: header.transport })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::header::StateHeader;
    use crate::core::transport_switch::TransportHeader;

    #[test]
    fn a_rank_that_computes_elsewhere_has_no_state_that_counts() {
        let header = |digest, gpu| SyncHeader {
            state: Some(StateHeader { step: 3, digest, has_result: true, was_in_group: true }),
            transport: TransportHeader { gpu, failures: 0 },
        };
        let headers = [header(1, true), header(2, false), header(1, true)];
        let found: Vec<_> = without_mismatched_devices(&headers)
            .iter()
            .map(|h| h.state.map(|s| s.digest))
            .collect();
        assert_eq!(found, [Some(1), None, Some(1)]);
        assert_eq!(without_mismatched_devices(&headers[1..2]), headers[1..2]);
    }
}
