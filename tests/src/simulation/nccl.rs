//! NCCL between the GPUs of a group: communicators take seconds to build, and operations fail now
//! and then.
//!
//! The pieces of a step are the same for every transport; what is simulated is which ranks build,
//! and when building ends on which rank. The oracle checks these rules against what ranks have
//! reported to each other:
//!
//! * A step runs over NCCL if and only if all ranks have reported in the round before that their
//!   communicator is ready, and no rank has reported in this generation that it failed. Then all
//!   ranks do have it.
//! * A group of several ranks builds a communicator unless one of them knows of three generations
//!   in which NCCL failed: from the header of a rank in a round of equal replicas, or from a step
//!   that failed without the loss of a member.

use std::collections::BTreeSet;

use elasticdl::session::transport_switch::{NcclBuild, NcclObstacle};
use elasticdl_collective::device::Path;

use super::clock::Micros;
use super::state::endpoint::TransferError;
use super::state::event::Event;
use super::trace::trace;
use super::world::World;

impl World {
    // ---- what ranks report to each other ----

    /// `p` has the links of a new group.
    pub(super) fn note_nccl_regrouped(&mut self, p: usize) {
        let Some(ring) = &self.processes[p].trainer.ring else { return };
        let known = self.communicators.known.entry(p).or_default();
        if let Some((generation, before)) = known.broke.take()
            && before.iter().all(|member| ring.members().contains(member))
        {
            known.failed.insert(generation);
        }
        (known.builds, known.all_ready) = (false, false);
    }

    /// The generations in which NCCL failed, as far as `p` knows when it enters a new group.
    pub(super) fn nccl_failures(&self, p: usize) -> BTreeSet<u64> {
        self.communicators.known.get(&p).map(|known| known.failed.clone()).unwrap_or_default()
    }

    /// `p` has received what the ranks of its new group know of failures.
    pub(super) fn note_nccl_met<'a>(
        &mut self,
        p: usize,
        all: impl Iterator<Item = &'a BTreeSet<u64>> + Clone,
    ) {
        let known = self.communicators.known.entry(p).or_default();
        known.builds = self.setting.gpus.is_some()
            && all.clone().count() > 1
            && all.clone().all(|known| known.len() < 3);
        known.failed = all.max_by_key(|known| known.len()).cloned().unwrap_or_default();
    }

    /// `p` has received the headers of all ranks in a round, with the state of NCCL on each.
    pub(super) fn note_nccl_round(&mut self, p: usize, all: &[NcclBuild]) {
        let Some(ring) = &self.processes[p].trainer.ring else { return };
        let known = self.communicators.known.entry(p).or_default();
        if known.builds && all.contains(&NcclBuild::Failed) {
            known.failed.insert(ring.generation);
        }
        known.all_ready = known.builds
            && !known.failed.contains(&ring.generation)
            && all.iter().all(|build| *build == NcclBuild::Ready);
    }

    // ---- building and operations ----

    /// All ranks have the id of the communicator, and `p` starts to build it. Building ends when
    /// all ranks have started, or at the deadline.
    pub(super) fn begin_nccl(&mut self, p: usize) {
        let Some(gpus) = self.setting.gpus else { return };
        let Some(ring) = &mut self.processes[p].trainer.ring else { return };
        ring.nccl = NcclBuild::Building;
        let (generation, world) = (ring.generation, ring.world());
        trace!(self, "{}: builds NCCL for generation {generation}", self.name(p));
        let communicator = self.communicators.of.entry(generation).or_default();
        communicator.begun.insert(p);
        if communicator.begun.len() == world {
            let begun = communicator.begun.clone();
            let fails = self.rng.chance(gpus.builds_failing, 100);
            for q in begun {
                // Where it fails, some ranks may not notice.
                let build = if fails && self.rng.chance(2, 3) {
                    NcclBuild::Failed
                } else {
                    NcclBuild::Ready
                };
                let delay = self.rng.between(1, gpus.build_us);
                self.clock.after(delay, Event::Nccl { p: q, generation, build });
            }
        }
        self.clock
            .after(BUILD_DEADLINE_US, Event::Nccl { p, generation, build: NcclBuild::Failed });
    }

    pub(super) fn on_nccl(&mut self, p: usize, generation: u64, build: NcclBuild) {
        let ring = self.processes[p].trainer.ring.as_mut();
        let Some(ring) =
            ring.filter(|r| r.generation == generation && r.nccl == NcclBuild::Building)
        else {
            return;
        };
        ring.nccl = build;
        trace!(self, "{}: NCCL of generation {generation} is {build:?}", self.name(p));
        if build == NcclBuild::Ready {
            self.communicators.of.entry(generation).or_default().ready.insert(p);
        }
    }

    /// The state of NCCL on `p`; `None` on CPUs.
    pub(super) fn nccl(&self, p: usize) -> Option<NcclBuild> {
        let ring = self.processes[p].trainer.ring.as_ref();
        self.setting.gpus.map(|_| ring.map_or(NcclBuild::Absent, |ring| ring.nccl))
    }

    /// Checks the transport of a step.
    pub(super) fn check_path_agreement(&mut self, p: usize, path: Path) {
        let all_ready = self.communicators.known.get(&p).is_some_and(|known| known.all_ready);
        if (path == Path::Nccl) != all_ready {
            let name = self.name(p);
            self.violate(format!(
                "{name} steps over {path:?}; all ranks have reported NCCL as ready: {all_ready}"
            ));
        }
    }

    /// Checks that a step over NCCL starts only when all ranks have a communicator.
    pub(super) fn check_path(&mut self, p: usize) {
        let Some(ring) = &self.processes[p].trainer.ring else { return };
        let (generation, world) = (ring.generation, ring.world());
        let ready = self.communicators.of.get(&generation).map_or(0, |c| c.ready.len());
        self.oracle.coverage.nccl_steps += 1;
        if ready != world {
            self.violate(format!(
                "{} steps over NCCL in generation {generation}, which is ready on {ready} of \
                 {world} ranks",
                self.name(p)
            ));
        }
    }

    /// Draws the number of pieces after which NCCL fails during an operation.
    pub(super) fn draw_nccl_failure(&mut self) -> Option<u64> {
        let gpus = self.setting.gpus?;
        let fails = self.rng.chance(gpus.operations_failing, 100);
        fails.then(|| self.rng.below(3))
    }

    /// NCCL has failed during a step.
    pub(super) fn nccl_broke(&mut self, p: usize) {
        trace!(self, "FAULT: NCCL fails, {}", self.name(p));
        self.fault_plan.links_may_break = true;
        self.processes[p].is_degraded = true;
        self.oracle.coverage.nccl_failures += 1;
        let trainer = &mut self.processes[p].trainer;
        if let Some(ring) = &trainer.ring {
            let group = (ring.generation, ring.members().to_vec());
            self.communicators.known.entry(p).or_default().broke = Some(group);
        }
        self.broke(p, TransferError::Nccl);
    }

    /// Checks that the group builds NCCL if and only if no rank knows of an obstacle.
    pub(super) fn check_obstacle(&mut self, p: usize, obstacle: Option<NcclObstacle>) {
        self.oracle.coverage.nccl_given_up +=
            u64::from(matches!(obstacle, Some(NcclObstacle::GivenUp(_))));
        let builds = self.communicators.known.get(&p).is_some_and(|known| known.builds);
        if builds != obstacle.is_none() {
            self.violate(format!(
                "{} builds NCCL: {builds}; its obstacle is {obstacle:?}",
                self.name(p)
            ));
        }
    }
}

/// How long a rank waits for a communicator.
const BUILD_DEADLINE_US: Micros = 200_000;
