//! Over what the gradients of ranks that compute on GPUs are summed: the host ring, which is always
//! there, or NCCL, which takes seconds to build.
//!
//! ```text
//!   new group ──▶ host ring ──── all ranks say Ready ───▶ NCCL
//!       ▲           ▲   NCCL is built beside the steps     │ │
//!       │           └───────── a rank says Failed ─────────┘ │
//!       └──────────────── it fails amid a step ◀─────────────┘
//! ```
//!
//! Whether NCCL is built is decided from what all ranks say when a group forms, which way a step
//! goes from what they say in the round before. So all decide alike, and the master never hears of
//! it.
//!
//! **Invariant:** a step goes over NCCL only after every rank has said, in one round of this
//! generation, that its communicator of this generation is ready. **Invariant:** a new group begins
//! on the host ring.

use elasticdl_proto::WorkerId;
use serde::{Deserialize, Serialize};

/// Over what a step's gradients are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// The ring between the hosts, as where no rank has a GPU.
    #[default]
    Host,
    Nccl,
}

/// How far one rank's communicator of this generation is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NcclBuild {
    #[default]
    Absent,
    Building,
    Failed,
    Ready,
}

/// One rank's header when a group forms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportHeader {
    /// It computes on a GPU.
    pub gpu: bool,
    /// Generations in which NCCL failed, as far as it knows.
    pub failures: u32,
}

/// Why nobody tries to have NCCL in this generation, or tries no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NcclObstacle {
    /// It failed in this generation; the next one tries again.
    Failed,
    /// It failed in so many generations that no other tries it.
    GivenUp(u32),
    /// All compute on CPUs.
    NoGpu,
    /// There is one rank, and nothing to sum.
    OneRank,
}

/// This rank does not compute where the first rank of its group does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMismatch {
    pub first_has_gpu: bool,
}

/// One rank's part in the choice.
#[derive(Clone, Debug, Default)]
pub struct TransportSwitch {
    gpu: bool,
    mine: NcclBuild,
    transport: Transport,
    /// `None` where all ranks try to have NCCL, or have it.
    obstacle: Option<NcclObstacle>,
    failures: u32,
    /// The members of the last group, if NCCL failed amid one of its steps.
    broke: Option<Vec<WorkerId>>,
}

impl TransportSwitch {
    /// Of a rank that computes on a GPU, or not.
    pub fn new(gpu: bool) -> Self {
        Self { gpu, ..Self::default() }
    }

    /// This rank's communicator of this generation is so far.
    pub fn set_build(&mut self, build: NcclBuild) {
        self.mine = build;
    }

    /// This rank's header in a new group.
    pub fn header(&self) -> TransportHeader {
        TransportHeader { gpu: self.gpu, failures: self.failures }
    }

    /// This rank's header in a round.
    pub fn build(&self) -> NcclBuild {
        self.mine
    }

    /// A group of these members has links.
    pub fn regrouped(&mut self, members: &[WorkerId]) {
        // Where a member is lost, NCCL had to fail; where all are still there, it did so by itself.
        if let Some(before) = self.broke.take()
            && before.iter().all(|member| members.contains(member))
        {
            self.failures += 1;
        }
        self.mine = NcclBuild::Absent;
        self.transport = Transport::Host;
        self.obstacle = Some(NcclObstacle::OneRank);
    }

    /// All ranks' headers in a new group.
    ///
    /// # Errors
    /// This rank computes on the CPU and the first one on a GPU, or the other way round. They would
    /// not get the same bits.
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

    /// All ranks' headers in a round, in which a step may have been made.
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

    /// NCCL failed amid a step of a group of these members, which thereby ends.
    pub fn broke(&mut self, members: &[WorkerId]) {
        self.broke = Some(members.to_vec());
    }

    /// The way of the next step.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Why nobody tries to have NCCL; the same on all ranks.
    pub fn obstacle(&self) -> Option<NcclObstacle> {
        self.obstacle
    }
}

/// NCCL is tried in no more generations after it has failed in as many.
pub const FAILURES_MAX: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    /// Words of ranks with a GPU each.
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

    /// In a group of two that builds.
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
    fn a_step_goes_over_nccl_after_a_round_in_which_all_were_ready_and_no_sooner() {
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
    fn a_ranks_own_word_moves_nothing_and_is_of_one_generation() {
        let mut switch = building();
        switch.set_build(NcclBuild::Ready);
        assert_eq!((switch.build(), switch.transport()), (NcclBuild::Ready, Transport::Host));
        switch.regrouped(&members(&[1, 2]));
        assert_eq!(switch.build(), NcclBuild::Absent);
    }

    #[test]
    fn a_new_group_begins_on_the_host_ring_whatever_carried_the_last_one() {
        let mut switch = on_nccl();
        switch.regrouped(&members(&[1, 2, 3]));
        assert_eq!(switch.transport(), Transport::Host);
        // What is said before the headers of the new group have come counts for nothing.
        switch.handle_builds([NcclBuild::Ready, NcclBuild::Ready, NcclBuild::Ready].into_iter());
        assert_eq!(switch.transport(), Transport::Host);
    }

    #[test]
    fn a_rank_that_failed_takes_all_back_for_this_generation() {
        for mut switch in [building(), on_nccl()] {
            switch.handle_builds([NcclBuild::Ready, NcclBuild::Failed].into_iter());
            switch.handle_builds([NcclBuild::Ready, NcclBuild::Ready].into_iter());
            assert_eq!(
                (switch.transport(), switch.obstacle()),
                (Transport::Host, Some(NcclObstacle::Failed))
            );
            // Said again and again, it is one failure.
            switch.handle_builds([NcclBuild::Ready, NcclBuild::Failed].into_iter());
            assert_eq!(switch.header().failures, 1);
            switch.regrouped(&members(&[1, 2]));
            switch.synced(&headers(2)).unwrap();
            assert_eq!(switch.obstacle(), None);
        }
    }

    #[test]
    fn a_failure_amid_a_step_counts_where_no_member_is_lost() {
        for (after, failures) in [(&[1, 2][..], 1), (&[1, 2, 3], 1), (&[1], 0), (&[2, 3], 0)] {
            let mut switch = on_nccl();
            switch.broke(&members(&[1, 2]));
            switch.regrouped(&members(after));
            assert_eq!(switch.header().failures, failures, "{after:?}");
            // And once.
            switch.regrouped(&members(&[1, 2, 3]));
            assert_eq!(switch.header().failures, failures, "{after:?}");
        }
    }

    #[test]
    fn after_as_many_failures_as_are_tolerated_all_stay_on_the_host_ring() {
        for failures in [0, 1, 2, 3, 7] {
            let mut switch = first_of(&[1, 2]);
            // A newcomer hears of it from those who were there.
            let mut headers = headers(2);
            headers[1].failures = failures;
            switch.synced(&headers).unwrap();
            let expected = (failures >= 3).then_some(NcclObstacle::GivenUp(failures));
            assert_eq!((switch.obstacle(), switch.header().failures), (expected, failures));
        }
    }

    #[test]
    fn one_rank_has_nothing_to_sum_and_cpus_have_no_use_for_nccl() {
        let mut switch = first_of(&[1]);
        switch.synced(&headers(1)).unwrap();
        assert_eq!(switch.obstacle(), Some(NcclObstacle::OneRank));
        let mut switch = TransportSwitch::new(false);
        switch.regrouped(&members(&[1, 2]));
        switch.synced(&[TransportHeader::default(); 2]).unwrap();
        assert_eq!(switch.obstacle(), Some(NcclObstacle::NoGpu));
    }

    #[test]
    fn who_does_not_compute_where_the_first_rank_does_is_no_member() {
        let mut headers = headers(3);
        headers[2].gpu = false;
        for (rank, header) in headers.iter().enumerate() {
            let mut switch = TransportSwitch::new(header.gpu);
            let expected =
                if rank == 2 { Err(DeviceMismatch { first_has_gpu: true }) } else { Ok(()) };
            assert_eq!(switch.synced(&headers), expected, "rank {rank}");
            // And without GPUs elsewhere.
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
