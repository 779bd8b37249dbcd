//! The session's part in the choice between the host ring and NCCL.

use super::{Phase, Session};
use crate::core::header::SyncHeader;
use crate::core::transport_switch::{NcclBuild, NcclObstacle, Transport, TransportSwitch};

impl Session {
    /// Sets whether this worker computes on a GPU.
    pub fn on_gpu(self, gpu: bool) -> Self {
        Self { transport: TransportSwitch::new(gpu), ..self }
    }

    /// State of this worker's NCCL communicator in its generation.
    pub fn set_nccl_build(&mut self, build: NcclBuild) {
        self.transport.set_build(build);
    }

    /// NCCL failed during a step. The links are broken, too.
    pub fn nccl_broke(&mut self) {
        if let Phase::Round { group, .. } = &self.phase {
            self.transport.broke(&group.members);
        }
    }

    /// Transport of the next [`Task::Step`](super::Task::Step).
    pub fn transport(&self) -> Transport {
        self.transport.transport()
    }

    /// Why this group does not use NCCL. `None`: the ranks start to build it when they are at one
    /// state.
    pub fn nccl_obstacle(&self) -> Option<NcclObstacle> {
        self.transport.obstacle()
    }
}

/// Drops the states of ranks whose kind of device differs from the first rank's. Those ranks leave,
/// and a differing state of theirs is no mismatch of the others.
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
    fn the_state_of_a_rank_on_another_kind_of_device_is_ignored() {
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
