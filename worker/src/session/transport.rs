//! The session's part in the choice between the host ring and NCCL.

use super::Session;
use super::phase::Phase;
use crate::session::transport_switch::{NcclBuild, NcclObstacle, Transport, TransportSwitch};

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
