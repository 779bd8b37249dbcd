//! What a session has to do with NCCL.

use super::{Phase, Session};
use crate::core::header::SyncHeader;
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

    /// Why this group does not try to have NCCL. Where it does, ranks begin to build it when they
    /// are at one state.
    pub fn nccl_obstacle(&self) -> Option<Obstacle> {
        self.swap.obstacle()
    }
}

/// Ranks that compute elsewhere than the first one leave; that their states look different there is
/// no fault of the others.
pub(super) fn without_misfits(headers: &[SyncHeader]) -> Vec<SyncHeader> {
    let first = headers.first().is_some_and(|header| header.swap.gpu);
    let fits = |header: &&SyncHeader| header.swap.gpu == first;
    let state = |header| Some(header).filter(fits).and_then(|header| header.state);
    headers.iter().map(|header| SyncHeader { state: state(header), swap: header.swap }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::header::StateHeader;
    use crate::core::swap::Word;

    #[test]
    fn a_rank_that_computes_elsewhere_has_no_state_that_counts() {
        let header = |digest, gpu| SyncHeader {
            state: Some(StateHeader { step: 3, digest, kept: true, was_in_group: true }),
            swap: Word { gpu, failures: 0 },
        };
        let headers = [header(1, true), header(2, false), header(1, true)];
        let found: Vec<_> =
            without_misfits(&headers).iter().map(|h| h.state.map(|s| s.digest)).collect();
        assert_eq!(found, [Some(1), None, Some(1)]);
        assert_eq!(without_misfits(&headers[1..2]), headers[1..2]);
    }
}
