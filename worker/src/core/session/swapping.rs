//! What a session has to do with NCCL.

use super::{Phase, Session};
use crate::core::swap::{Build, Obstacle, Path, Swap};

impl Session {
    /// Whether this worker computes on a GPU.
    pub fn on_gpu(self, is: bool) -> Self {
        Self { swap: Swap::new(is), ..self }
    }

    /// This worker's NCCL communicator of its generation is so far.
    pub fn nccl_is_at(&mut self, build: Build) {
        self.swap.is_at(build);
    }

    /// NCCL failed amid a step. The links are broken, too.
    pub fn nccl_broke(&mut self) {
        if let Phase::Round { group, .. } = &self.phase {
            self.swap.broke(&group.members);
        }
    }

    /// The way of the next [`Task::Step`](super::Task::Step).
    pub fn path(&self) -> Path {
        self.swap.path()
    }

    /// Why this group does not try to have NCCL. Where it does, ranks begin to build it when they are at one state.
    pub fn nccl_obstacle(&self) -> Option<Obstacle> {
        self.swap.obstacle()
    }
}
