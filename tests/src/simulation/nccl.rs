//! NCCL between the GPUs of a group: seconds of building in one, and operations that fail by
//! themselves now and then.
//!
//! The pieces of a step are the same whatever carries them; what is simulated is who builds, and
//! when that comes to an end on which rank. The oracles' rules, from what ranks have told each
//! other:
//!
//! * A step goes over NCCL if, and only if, all ranks have said in the round before that they have
//!   it, and nobody has said in this generation that it failed. Then all do have it.
//! * A group of several ranks builds it unless one of them knows of three generations in which it
//!   failed: by somebody's word in a round, or amid a step after which nobody was missing.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::WorkerId;
use elasticdl_worker::core::header::StepHeader;
use elasticdl_worker::core::session::Session;
use elasticdl_worker::core::swap::{Build, Obstacle, Path};

use super::clock::{Dice, Micros};
use super::operation::Operation;
use super::story::tell;
use super::world::{Event, World};

/// What a job's GPUs are like.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gpus {
    /// Of a hundred communicators that are built, so many fail.
    builds_failing: u64,
    /// Of a hundred operations on a rank, so many fail.
    operations_failing: u64,
    /// The longest time to build one.
    build_us: Micros,
}

impl Gpus {
    /// `None`: a job on CPUs.
    pub(super) fn draw(dice: &mut Dice) -> Option<Self> {
        dice.chance(1, 2).then(|| Self {
            builds_failing: [0, 0, 10, 50][dice.below(4) as usize],
            operations_failing: [0, 0, 1, 10][dice.below(4) as usize],
            build_us: [200, 3_000, 50_000][dice.below(3) as usize],
        })
    }
}

/// The communicators of all generations, and what processes know of them.
#[derive(Debug, Default)]
pub(super) struct Communicators {
    of: BTreeMap<u64, Communicator>,
    heard: BTreeMap<usize, Heard>,
}

#[derive(Debug, Default)]
struct Communicator {
    /// Processes that build it.
    begun: BTreeSet<usize>,
    /// Processes on which it stands.
    ready: BTreeSet<usize>,
}

/// What a process has been told, for the oracles.
#[derive(Debug, Default)]
struct Heard {
    /// Generations in which NCCL failed.
    failed: BTreeSet<u64>,
    /// Its group builds NCCL.
    builds: bool,
    /// All said so in the last round.
    all_ready: bool,
    /// The group in which NCCL failed amid a step.
    broke: Option<(u64, Vec<WorkerId>)>,
}

impl World {
    // ---- what ranks tell each other ----

    /// `p` has links of a new group.
    pub(super) fn note_nccl_regrouped(&mut self, p: usize) {
        let Some(ring) = &self.processes[p].trainer.ring else { return };
        let heard = self.communicators.heard.entry(p).or_default();
        if let Some((generation, before)) = heard.broke.take()
            && before.iter().all(|member| ring.members().contains(member))
        {
            heard.failed.insert(generation);
        }
        (heard.builds, heard.all_ready) = (false, false);
        let path = self.processes[p].trainer.session.as_ref().map_or(Path::Host, Session::path);
        self.check_what_all_said(p, path);
    }

    /// The generations in which NCCL failed, as far as `p` knows when it meets a new group.
    pub(super) fn nccl_failures(&self, p: usize) -> BTreeSet<u64> {
        self.communicators.heard.get(&p).map(|heard| heard.failed.clone()).unwrap_or_default()
    }

    /// `p` has met a new group, whose ranks know of these failures.
    pub(super) fn note_nccl_met<'a>(
        &mut self,
        p: usize,
        all: impl Iterator<Item = &'a BTreeSet<u64>> + Clone,
    ) {
        let heard = self.communicators.heard.entry(p).or_default();
        heard.builds = self.setting.gpus.is_some()
            && all.clone().count() > 1
            && all.clone().all(|known| known.len() < 3);
        heard.failed = all.max_by_key(|known| known.len()).cloned().unwrap_or_default();
    }

    /// `p` has heard all ranks in a round.
    pub(super) fn note_nccl_round(&mut self, p: usize, headers: &[StepHeader]) {
        let Some(ring) = &self.processes[p].trainer.ring else { return };
        let heard = self.communicators.heard.entry(p).or_default();
        if heard.builds && headers.iter().any(|header| header.nccl == Build::Failed) {
            heard.failed.insert(ring.generation());
        }
        heard.all_ready = heard.builds
            && !heard.failed.contains(&ring.generation())
            && headers.iter().all(|header| header.nccl == Build::Ready);
    }

    // ---- what they do ----

    /// The last part of a repair: all know by what they find each other.
    pub(super) fn begin_nccl(&mut self, p: usize) {
        self.build_nccl(p);
        self.go_on_repairing(p);
    }

    /// `p` begins to build its group's communicator. Building ends when all have begun, or when
    /// nobody waits any longer.
    fn build_nccl(&mut self, p: usize) {
        let Some(gpus) = self.setting.gpus else { return };
        let Some(ring) = &mut self.processes[p].trainer.ring else { return };
        ring.nccl = Build::Building;
        let (generation, world) = (ring.generation(), ring.world());
        tell!(self, "{}: builds NCCL for generation {generation}", self.name(p));
        let communicator = self.communicators.of.entry(generation).or_default();
        communicator.begun.insert(p);
        if communicator.begun.len() == world {
            let begun = communicator.begun.clone();
            let fails = self.dice.chance(gpus.builds_failing, 100);
            for q in begun {
                // Where it fails, some may not notice.
                let build =
                    if fails && self.dice.chance(2, 3) { Build::Failed } else { Build::Ready };
                let delay = self.dice.between(1, gpus.build_us);
                self.clock.after(delay, Event::Nccl { p: q, generation, build });
            }
        }
        self.clock.after(BUILD_DEADLINE_US, Event::Nccl { p, generation, build: Build::Failed });
    }

    pub(super) fn on_nccl(&mut self, p: usize, generation: u64, build: Build) {
        let ring = self.processes[p].trainer.ring.as_mut();
        let Some(ring) = ring.filter(|r| r.generation() == generation && r.nccl == Build::Building)
        else {
            return;
        };
        ring.nccl = build;
        tell!(self, "{}: NCCL of generation {generation} is {build:?}", self.name(p));
        if build == Build::Ready {
            self.communicators.of.entry(generation).or_default().ready.insert(p);
        }
    }

    /// Says how far NCCL is on `p`, and which way its next step goes.
    pub(super) fn path_of(&mut self, p: usize) -> Path {
        let trainer = &mut self.processes[p].trainer;
        let (Some(session), Some(ring)) = (&mut trainer.session, &trainer.ring) else {
            return Path::Host;
        };
        session.nccl_is_at(ring.nccl);
        let path = session.path();
        self.check_what_all_said(p, path);
        path
    }

    fn check_what_all_said(&mut self, p: usize, path: Path) {
        let all_ready = self.communicators.heard.get(&p).is_some_and(|heard| heard.all_ready);
        if (path == Path::Nccl) != all_ready {
            let name = self.name(p);
            self.violate(format!(
                "{name} goes over {path:?}; all have said that NCCL is there: {all_ready}"
            ));
        }
    }

    /// No step goes over what not all have.
    pub(super) fn check_path(&mut self, p: usize) {
        let Some(ring) = &self.processes[p].trainer.ring else { return };
        let (generation, world) = (ring.generation(), ring.world());
        let ready = self.communicators.of.get(&generation).map_or(0, |c| c.ready.len());
        self.books.tally.nccl_steps += 1;
        if ready != world {
            self.violate(format!(
                "{} steps over NCCL in generation {generation}, and {ready} of {world} ranks have it",
                self.name(p)
            ));
        }
    }

    /// After how many pieces NCCL fails amid an operation.
    pub(super) fn draw_nccl_failure(&mut self) -> Option<u64> {
        let gpus = self.setting.gpus?;
        let fails = self.dice.chance(gpus.operations_failing, 100);
        fails.then(|| self.dice.below(3))
    }

    /// NCCL has failed amid a step.
    pub(super) fn nccl_broke(&mut self, p: usize) {
        tell!(self, "FAULT: NCCL fails, {}", self.name(p));
        self.storm.has_harmed = true;
        self.processes[p].is_blemished = true;
        self.books.tally.nccl_failures += 1;
        let trainer = &mut self.processes[p].trainer;
        if let Some(ring) = &trainer.ring {
            let group = (ring.generation(), ring.members().to_vec());
            self.communicators.heard.entry(p).or_default().broke = Some(group);
        }
        trainer.ring.iter_mut().for_each(|ring| ring.failed = true);
        trainer.session.iter_mut().for_each(Session::nccl_broke);
        self.broke(p, None, "NCCL failed");
    }

    /// Whether the group is to build NCCL, as all its ranks find.
    pub(super) fn is_to_build_nccl(&mut self, p: usize) -> bool {
        let obstacle = self.processes[p].trainer.session.as_ref().and_then(Session::nccl_obstacle);
        self.books.tally.nccl_given_up += u64::from(matches!(obstacle, Some(Obstacle::GivenUp(_))));
        let builds = self.communicators.heard.get(&p).is_some_and(|heard| heard.builds);
        if builds != obstacle.is_none() {
            self.violate(format!(
                "{} is to build NCCL: {builds}; its obstacle is {obstacle:?}",
                self.name(p)
            ));
        }
        builds
    }
}

impl Operation {
    /// Whether it is NCCL's turn to fail.
    pub(super) fn nccl_fails(&self) -> bool {
        self.path == Path::Nccl
            && self.nccl_fails_after.is_some_and(|pieces| self.received >= pieces)
    }
}

/// Nobody waits longer for a communicator.
const BUILD_DEADLINE_US: Micros = 200_000;
