//! Choice of the all-reduce transport for ranks that compute on GPUs: the host ring, which is
//! always available, or NCCL, which takes seconds to build.
//!
//! ```text
//!   new group ──▶ host ring ─── all ranks report Ready ───▶ NCCL
//!       ▲           ▲   NCCL is built during the steps      │ │
//!       │           └──────── a rank reports Failed ────────┘ │
//!       └──────────────── it fails during a step ◀────────────┘
//! ```
//!
//! Whether NCCL is built is decided from the headers of a new group, and the transport of a step
//! from the headers of the round before. So all ranks decide alike, and the master is not involved.
//!
//! **Invariant:** a step uses NCCL only after every rank has reported, in one round of this
//! generation, that its communicator of this generation is ready. **Invariant:** a new group starts
//! on the host ring.

use elasticdl_proto::WorkerId;
use serde::{Deserialize, Serialize};

/// Transport of a step's all-reduce.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// The ring between the hosts, which also serves groups without GPUs.
    #[default]
    Host,
    Nccl,
}

/// State of one rank's communicator of this generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NcclBuild {
    #[default]
    Absent,
    Building,
    Failed,
    Ready,
}

/// Part of a rank's header for a new group that concerns the transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportHeader {
    /// Whether the rank computes on a GPU.
    pub gpu: bool,
    /// Number of generations in which NCCL failed, as far as this rank knows.
    pub failures: u32,
}

/// Why the ranks do not use NCCL in this generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NcclObstacle {
    /// It failed in this generation; the next one tries again.
    Failed,
    /// It failed in this many generations, so it is no longer tried.
    GivenUp(u32),
    /// All ranks compute on CPUs.
    NoGpu,
    /// The group has one rank and nothing to sum.
    OneRank,
}

/// This rank and the first rank of its group compute on different kinds of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMismatch {
    pub first_has_gpu: bool,
}

/// State of the choice on one rank.
#[derive(Clone, Debug, Default)]
pub struct TransportSwitch {
    gpu: bool,
    mine: NcclBuild,
    transport: Transport,
    /// `None` while the ranks build or use NCCL.
    obstacle: Option<NcclObstacle>,
    failures: u32,
    /// Members of the last group, if NCCL failed during one of its steps.
    broke: Option<Vec<WorkerId>>,
}

impl TransportSwitch {
    /// `gpu`: whether the rank computes on a GPU.
    pub fn new(gpu: bool) -> Self {
        Self { gpu, ..Self::default() }
    }

    /// Sets the state of this rank's communicator of this generation.
    pub fn set_build(&mut self, build: NcclBuild) {
        self.mine = build;
    }

    /// Header of this rank for a new group.
    pub fn header(&self) -> TransportHeader {
        TransportHeader { gpu: self.gpu, failures: self.failures }
    }

    /// State of this rank's communicator, for the header of a round.
    pub fn build(&self) -> NcclBuild {
        self.mine
    }

    /// A group of these members has links.
    pub fn regrouped(&mut self, members: &[WorkerId]) {
        // After the loss of a member NCCL had to fail. If all members are still there, the failure
        // was its own.
        if let Some(before) = self.broke.take()
            && before.iter().all(|member| members.contains(member))
        {
            self.failures += 1;
        }
        self.mine = NcclBuild::Absent;
        self.transport = Transport::Host;
        self.obstacle = Some(NcclObstacle::OneRank);
    }

    /// Takes in the headers of all ranks of a new group.
    ///
    /// # Errors
    /// This rank computes on the CPU and the first one on a GPU, or vice versa. Their results would
    /// not be bit-identical.
    pub fn synced(&mut self, headers: &[TransportHeader]) -> Result<(), DeviceMismatch> {
        let first = headers.first().is_some_and(|header| header.gpu);
        if first != self.gpu {
            return Err(DeviceMismatch { first_has_gpu: first });
        }
        self.failures = headers.iter().map(|header| header.failures).max().unwrap_or(0);
        self.obstacle = if !first {
            Some(NcclObstacle::NoGpu)
        } else if headers.len() < 2 {
            Some(NcclObstacle::OneRank)
        } else {
            (self.failures >= FAILURES_MAX).then_some(NcclObstacle::GivenUp(self.failures))
        };
        Ok(())
    }

    /// Takes in the builds of all ranks from a round, with or without a step.
    pub fn handle_builds(&mut self, builds: impl Iterator<Item = NcclBuild>) {
        let builds: Vec<NcclBuild> = builds.collect();
        if self.obstacle.is_none() && builds.contains(&NcclBuild::Failed) {
            self.failures += 1;
            self.obstacle = Some(NcclObstacle::Failed);
        }
        let ready =
            self.obstacle.is_none() && builds.iter().all(|build| *build == NcclBuild::Ready);
        self.transport = if ready { Transport::Nccl } else { Transport::Host };
    }

    /// NCCL failed during a step of a group of these members. The group thereby ends.
    pub fn broke(&mut self, members: &[WorkerId]) {
        self.broke = Some(members.to_vec());
    }

    /// Transport of the next step.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Why the ranks do not use NCCL; the same on all ranks.
    pub fn obstacle(&self) -> Option<NcclObstacle> {
        self.obstacle
    }
}

/// Number of generations with a failure after which NCCL is no longer tried.
pub const FAILURES_MAX: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    /// Headers of ranks with a GPU each.
    fn headers(ranks: usize) -> Vec<TransportHeader> {
        vec![TransportHeader { gpu: true, failures: 0 }; ranks]
    }

    fn members(ids: &[u64]) -> Vec<WorkerId> {
        ids.iter().map(|id| WorkerId(*id)).collect()
    }

    /// The first rank of a group of these members.
    fn first_of(ids: &[u64]) -> TransportSwitch {
        let mut switch = TransportSwitch::new(true);
        switch.regrouped(&members(ids));
        switch
    }

    /// The first rank of a group of two that builds NCCL.
    fn building() -> TransportSwitch {
        let mut switch = first_of(&[1, 2]);
        switch.synced(&headers(2)).unwrap();
        assert_eq!((switch.transport(), switch.obstacle()), (Transport::Host, None));
        switch
    }

    fn on_nccl() -> TransportSwitch {
        let mut switch = building();
        switch.handle_builds([NcclBuild::Ready, NcclBuild::Ready].into_iter());
        assert_eq!(switch.transport(), Transport::Nccl);
        switch
    }

    #[test]
    fn a_step_uses_nccl_only_after_a_round_in_which_all_ranks_were_ready() {
        let all = [NcclBuild::Absent, NcclBuild::Building, NcclBuild::Failed, NcclBuild::Ready];
        for first in all {
            for second in all {
                let mut switch = building();
                switch.handle_builds([first, second].into_iter());
                let both = first == NcclBuild::Ready && second == NcclBuild::Ready;
                assert_eq!(switch.transport() == Transport::Nccl, both, "{first:?} {second:?}");
            }
        }
    }

    #[test]
    fn a_ranks_own_build_changes_nothing_and_is_reset_by_a_new_generation() {
        let mut switch = building();
        switch.set_build(NcclBuild::Ready);
        assert_eq!((switch.build(), switch.transport()), (NcclBuild::Ready, Transport::Host));
        switch.regrouped(&members(&[1, 2]));
        assert_eq!(switch.build(), NcclBuild::Absent);
    }

    #[test]
    fn a_new_group_starts_on_the_host_ring() {
        let mut switch = on_nccl();
        switch.regrouped(&members(&[1, 2, 3]));
        assert_eq!(switch.transport(), Transport::Host);
        // Reports that arrive before the headers of the new group have no effect.
        switch.handle_builds([NcclBuild::Ready, NcclBuild::Ready, NcclBuild::Ready].into_iter());
        assert_eq!(switch.transport(), Transport::Host);
    }

    #[test]
    fn one_failed_rank_returns_all_ranks_to_the_host_ring_for_this_generation() {
        for mut switch in [building(), on_nccl()] {
            switch.handle_builds([NcclBuild::Ready, NcclBuild::Failed].into_iter());
            switch.handle_builds([NcclBuild::Ready, NcclBuild::Ready].into_iter());
            assert_eq!(
                (switch.transport(), switch.obstacle()),
                (Transport::Host, Some(NcclObstacle::Failed))
            );
            // Repeated reports count as one failure.
            switch.handle_builds([NcclBuild::Ready, NcclBuild::Failed].into_iter());
            assert_eq!(switch.header().failures, 1);
            switch.regrouped(&members(&[1, 2]));
            switch.synced(&headers(2)).unwrap();
            assert_eq!(switch.obstacle(), None);
        }
    }

    #[test]
    fn a_failure_during_a_step_counts_if_no_member_is_lost() {
        for (after, failures) in [(&[1, 2][..], 1), (&[1, 2, 3], 1), (&[1], 0), (&[2, 3], 0)] {
            let mut switch = on_nccl();
            switch.broke(&members(&[1, 2]));
            switch.regrouped(&members(after));
            assert_eq!(switch.header().failures, failures, "{after:?}");
            // It counts once.
            switch.regrouped(&members(&[1, 2, 3]));
            assert_eq!(switch.header().failures, failures, "{after:?}");
        }
    }

    #[test]
    fn after_too_many_failures_all_ranks_stay_on_the_host_ring() {
        for failures in [0, 1, 2, 3, 7] {
            let mut switch = first_of(&[1, 2]);
            // A joining worker learns the count from the other ranks.
            let mut headers = headers(2);
            headers[1].failures = failures;
            switch.synced(&headers).unwrap();
            let expected = (failures >= 3).then_some(NcclObstacle::GivenUp(failures));
            assert_eq!((switch.obstacle(), switch.header().failures), (expected, failures));
        }
    }

    #[test]
    fn single_ranks_and_cpu_groups_do_not_build_nccl() {
        let mut switch = first_of(&[1]);
        switch.synced(&headers(1)).unwrap();
        assert_eq!(switch.obstacle(), Some(NcclObstacle::OneRank));
        let mut switch = TransportSwitch::new(false);
        switch.regrouped(&members(&[1, 2]));
        switch.synced(&[TransportHeader::default(); 2]).unwrap();
        assert_eq!(switch.obstacle(), Some(NcclObstacle::NoGpu));
    }

    #[test]
    fn a_rank_on_another_kind_of_device_than_the_first_is_refused() {
        let mut headers = headers(3);
        headers[2].gpu = false;
        for (rank, header) in headers.iter().enumerate() {
            let mut switch = TransportSwitch::new(header.gpu);
            let expected =
                if rank == 2 { Err(DeviceMismatch { first_has_gpu: true }) } else { Ok(()) };
            assert_eq!(switch.synced(&headers), expected, "rank {rank}");
            // Likewise if the other ranks have no GPUs.
            let expected =
                if rank == 2 { Ok(()) } else { Err(DeviceMismatch { first_has_gpu: false }) };
            assert_eq!(
                switch.synced(&[TransportHeader::default(), *header]),
                expected,
                "rank {rank}"
            );
        }
    }
}
