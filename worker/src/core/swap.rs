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
pub enum Path {
    /// The ring between the hosts, as where no rank has a GPU.
    #[default]
    Host,
    Nccl,
}

/// How far one rank's communicator of this generation is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Build {
    #[default]
    Absent,
    Building,
    Failed,
    Ready,
}

/// One rank's word when a group forms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Word {
    /// It computes on a GPU.
    pub gpu: bool,
    /// Generations in which NCCL failed, as far as it knows.
    pub failures: u32,
}

/// Why nobody tries to have NCCL in this generation, or tries no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
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
pub struct Elsewhere {
    pub first_has_gpu: bool,
}

/// One rank's part in the choice.
#[derive(Clone, Debug, Default)]
pub struct Swap {
    gpu: bool,
    mine: Build,
    path: Path,
    /// `None` where all ranks try to have NCCL, or have it.
    obstacle: Option<Obstacle>,
    failures: u32,
    /// The members of the last group, if NCCL failed amid one of its steps.
    broke: Option<Vec<WorkerId>>,
}

impl Swap {
    /// Of a rank that computes on a GPU, or not.
    pub fn new(gpu: bool) -> Self {
        Self { gpu, ..Self::default() }
    }

    /// This rank's communicator of this generation is so far.
    pub fn is_at(&mut self, build: Build) {
        self.mine = build;
    }

    /// This rank's word in a new group.
    pub fn word(&self) -> Word {
        Word { gpu: self.gpu, failures: self.failures }
    }

    /// This rank's word in a round.
    pub fn build(&self) -> Build {
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
        self.mine = Build::Absent;
        self.path = Path::Host;
        self.obstacle = Some(Obstacle::OneRank);
    }

    /// All ranks' words in a new group.
    ///
    /// # Errors
    /// This rank computes on the CPU and the first one on a GPU, or the other way round. They would
    /// not get the same bits.
    pub fn synced(&mut self, words: &[Word]) -> Result<(), Elsewhere> {
        let first = words.first().is_some_and(|word| word.gpu);
        if first != self.gpu {
            return Err(Elsewhere { first_has_gpu: first });
        }
        self.failures = words.iter().map(|word| word.failures).max().unwrap_or(0);
        self.obstacle = if !first {
            Some(Obstacle::NoGpu)
        } else if words.len() < 2 {
            Some(Obstacle::OneRank)
        } else {
            (self.failures >= FAILURES_MAX).then_some(Obstacle::GivenUp(self.failures))
        };
        Ok(())
    }

    /// All ranks' words in a round, in which a step may have been made.
    pub fn heard(&mut self, builds: impl Iterator<Item = Build>) {
        let builds: Vec<Build> = builds.collect();
        if self.obstacle.is_none() && builds.contains(&Build::Failed) {
            self.failures += 1;
            self.obstacle = Some(Obstacle::Failed);
        }
        let ready = self.obstacle.is_none() && builds.iter().all(|build| *build == Build::Ready);
        self.path = if ready { Path::Nccl } else { Path::Host };
    }

    /// NCCL failed amid a step of a group of these members, which thereby ends.
    pub fn broke(&mut self, members: &[WorkerId]) {
        self.broke = Some(members.to_vec());
    }

    /// The way of the next step.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Why nobody tries to have NCCL; the same on all ranks.
    pub fn obstacle(&self) -> Option<Obstacle> {
        self.obstacle
    }
}

/// NCCL is tried in no more generations after it has failed in as many.
pub const FAILURES_MAX: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    /// Words of ranks with a GPU each.
    fn words(ranks: usize) -> Vec<Word> {
        vec![Word { gpu: true, failures: 0 }; ranks]
    }

    fn members(ids: &[u64]) -> Vec<WorkerId> {
        ids.iter().map(|id| WorkerId(*id)).collect()
    }

    /// The first rank of a group of these members.
    fn first_of(ids: &[u64]) -> Swap {
        let mut swap = Swap::new(true);
        swap.regrouped(&members(ids));
        swap
    }

    /// In a group of two that builds.
    fn building() -> Swap {
        let mut swap = first_of(&[1, 2]);
        swap.synced(&words(2)).unwrap();
        assert_eq!((swap.path(), swap.obstacle()), (Path::Host, None));
        swap
    }

    fn on_nccl() -> Swap {
        let mut swap = building();
        swap.heard([Build::Ready, Build::Ready].into_iter());
        assert_eq!(swap.path(), Path::Nccl);
        swap
    }

    #[test]
    fn a_step_goes_over_nccl_after_a_round_in_which_all_were_ready_and_no_sooner() {
        let all = [Build::Absent, Build::Building, Build::Failed, Build::Ready];
        for first in all {
            for second in all {
                let mut swap = building();
                swap.heard([first, second].into_iter());
                let both = first == Build::Ready && second == Build::Ready;
                assert_eq!(swap.path() == Path::Nccl, both, "{first:?} {second:?}");
            }
        }
    }

    #[test]
    fn a_ranks_own_word_moves_nothing_and_is_of_one_generation() {
        let mut swap = building();
        swap.is_at(Build::Ready);
        assert_eq!((swap.build(), swap.path()), (Build::Ready, Path::Host));
        swap.regrouped(&members(&[1, 2]));
        assert_eq!(swap.build(), Build::Absent);
    }

    #[test]
    fn a_new_group_begins_on_the_host_ring_whatever_carried_the_last_one() {
        let mut swap = on_nccl();
        swap.regrouped(&members(&[1, 2, 3]));
        assert_eq!(swap.path(), Path::Host);
        // What is said before the words of the new group have come counts for nothing.
        swap.heard([Build::Ready, Build::Ready, Build::Ready].into_iter());
        assert_eq!(swap.path(), Path::Host);
    }

    #[test]
    fn a_rank_that_failed_takes_all_back_for_this_generation() {
        for mut swap in [building(), on_nccl()] {
            swap.heard([Build::Ready, Build::Failed].into_iter());
            swap.heard([Build::Ready, Build::Ready].into_iter());
            assert_eq!((swap.path(), swap.obstacle()), (Path::Host, Some(Obstacle::Failed)));
            // Said again and again, it is one failure.
            swap.heard([Build::Ready, Build::Failed].into_iter());
            assert_eq!(swap.word().failures, 1);
            swap.regrouped(&members(&[1, 2]));
            swap.synced(&words(2)).unwrap();
            assert_eq!(swap.obstacle(), None);
        }
    }

    #[test]
    fn a_failure_amid_a_step_counts_where_no_member_is_lost() {
        for (after, failures) in [(&[1, 2][..], 1), (&[1, 2, 3], 1), (&[1], 0), (&[2, 3], 0)] {
            let mut swap = on_nccl();
            swap.broke(&members(&[1, 2]));
            swap.regrouped(&members(after));
            assert_eq!(swap.word().failures, failures, "{after:?}");
            // And once.
            swap.regrouped(&members(&[1, 2, 3]));
            assert_eq!(swap.word().failures, failures, "{after:?}");
        }
    }

    #[test]
    fn after_as_many_failures_as_are_tolerated_all_stay_on_the_host_ring() {
        for failures in [0, 1, 2, 3, 7] {
            let mut swap = first_of(&[1, 2]);
            // A newcomer hears of it from those who were there.
            let mut words = words(2);
            words[1].failures = failures;
            swap.synced(&words).unwrap();
            let expected = (failures >= 3).then_some(Obstacle::GivenUp(failures));
            assert_eq!((swap.obstacle(), swap.word().failures), (expected, failures));
        }
    }

    #[test]
    fn one_rank_has_nothing_to_sum_and_cpus_have_no_use_for_nccl() {
        let mut swap = first_of(&[1]);
        swap.synced(&words(1)).unwrap();
        assert_eq!(swap.obstacle(), Some(Obstacle::OneRank));
        let mut swap = Swap::new(false);
        swap.regrouped(&members(&[1, 2]));
        swap.synced(&[Word::default(); 2]).unwrap();
        assert_eq!(swap.obstacle(), Some(Obstacle::NoGpu));
    }

    #[test]
    fn who_does_not_compute_where_the_first_rank_does_is_no_member() {
        let mut words = words(3);
        words[2].gpu = false;
        for (rank, word) in words.iter().enumerate() {
            let mut swap = Swap::new(word.gpu);
            let expected = if rank == 2 { Err(Elsewhere { first_has_gpu: true }) } else { Ok(()) };
            assert_eq!(swap.synced(&words), expected, "rank {rank}");
            // And without GPUs elsewhere.
            let expected = if rank == 2 { Ok(()) } else { Err(Elsewhere { first_has_gpu: false }) };
            assert_eq!(swap.synced(&[Word::default(), *word]), expected, "rank {rank}");
        }
    }
}
