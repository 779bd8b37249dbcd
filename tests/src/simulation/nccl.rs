//! NCCL between the GPUs of a group: seconds of building in one, and operations that fail by themselves now and then.
//!
//! The pieces of a step are the same whatever carries them; what is simulated is who builds, when that comes to an end on
//! which rank, and that no step goes over what not all have.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_worker::core::session::Session;
use elasticdl_worker::core::swap::{Build, Obstacle, Path};

use super::clock::{Dice, Micros};
use super::ring::{Operation, Ring};
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

/// The communicators of all generations.
#[derive(Debug, Default)]
pub(super) struct Communicators(BTreeMap<u64, Communicator>);

#[derive(Debug, Default)]
struct Communicator {
    /// Processes that build it.
    begun: BTreeSet<usize>,
    /// Processes on which it stands.
    ready: BTreeSet<usize>,
}

impl World {
    /// The last part of a repair: all know by what they find each other.
    pub(super) fn begin_nccl(&mut self, p: usize) {
        self.build_nccl(p);
        self.go_on_repairing(p);
    }

    /// `p` begins to build its group's communicator. Building ends when all have begun, or when nobody waits any longer.
    fn build_nccl(&mut self, p: usize) {
        let Some(gpus) = self.setting.gpus else { return };
        let Some(ring) = &mut self.processes[p].trainer.ring else { return };
        ring.nccl = Build::Building;
        let (generation, world) = (ring.generation(), ring.world());
        tell!(self, "{}: builds NCCL for generation {generation}", self.name(p));
        let communicator = self.communicators.0.entry(generation).or_default();
        communicator.begun.insert(p);
        if communicator.begun.len() == world {
            let begun = communicator.begun.clone();
            let fails = self.dice.chance(gpus.builds_failing, 100);
            for q in begun {
                // Where it fails, some may not notice.
                let build = if fails && self.dice.chance(2, 3) { Build::Failed } else { Build::Ready };
                let delay = self.dice.between(1, gpus.build_us);
                self.clock.after(delay, Event::Nccl { p: q, generation, build });
            }
        }
        self.clock.after(BUILD_DEADLINE_US, Event::Nccl { p, generation, build: Build::Failed });
    }

    pub(super) fn on_nccl(&mut self, p: usize, generation: u64, build: Build) {
        let ring = self.processes[p].trainer.ring.as_mut();
        let Some(ring) = ring.filter(|r| r.generation() == generation && r.nccl == Build::Building) else {
            return;
        };
        ring.nccl = build;
        tell!(self, "{}: NCCL of generation {generation} is {build:?}", self.name(p));
        if build == Build::Ready {
            self.communicators.0.entry(generation).or_default().ready.insert(p);
        }
    }

    /// Says how far NCCL is on `p`, and which way its next step goes.
    pub(super) fn path_of(&mut self, p: usize) -> Path {
        let trainer = &mut self.processes[p].trainer;
        let (Some(session), Some(ring)) = (&mut trainer.session, &trainer.ring) else { return Path::Host };
        session.nccl_is_at(ring.nccl);
        session.path()
    }

    /// No step goes over what not all have.
    pub(super) fn check_path(&mut self, p: usize) {
        let Some(ring) = &self.processes[p].trainer.ring else { return };
        let (generation, world) = (ring.generation(), ring.world());
        let ready = self.communicators.0.get(&generation).map_or(0, |c| c.ready.len());
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
        trainer.ring.iter_mut().for_each(Ring::fail);
        trainer.session.iter_mut().for_each(Session::nccl_broke);
        self.broke(p, None, "NCCL failed");
    }

    /// Whether the group is to build NCCL, as all its ranks find.
    pub(super) fn is_to_build_nccl(&mut self, p: usize) -> bool {
        let obstacle = self.processes[p].trainer.session.as_ref().and_then(Session::nccl_obstacle);
        self.books.tally.nccl_given_up += u64::from(matches!(obstacle, Some(Obstacle::GivenUp(_))));
        self.processes[p].trainer.session.is_some() && obstacle.is_none()
    }
}

impl Operation {
    /// Whether it is NCCL's turn to fail.
    pub(super) fn nccl_fails(&self) -> bool {
        self.path == Path::Nccl && self.nccl_fails_after.is_some_and(|pieces| self.received >= pieces)
    }
}

/// Nobody waits longer for a communicator.
const BUILD_DEADLINE_US: Micros = 200_000;
