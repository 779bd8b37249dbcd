//! GPUs, and communicators between them.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::WorkerId;

use crate::simulation::clock::{Micros, SimRng};

/// Properties of a job's GPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gpus {
    /// Percentage of communicators that fail to build.
    pub(crate) builds_failing: u64,
    /// Percentage of operations that fail on a rank.
    pub(crate) operations_failing: u64,
    /// Maximum time to build a communicator.
    pub(crate) build_us: Micros,
}

impl Gpus {
    /// Returns `None` for a job on CPUs.
    pub(crate) fn draw(rng: &mut SimRng) -> Option<Self> {
        rng.chance(1, 2).then(|| Self {
            builds_failing: [0, 0, 10, 50][rng.below(4) as usize],
            operations_failing: [0, 0, 1, 10][rng.below(4) as usize],
            build_us: [200, 3_000, 50_000][rng.below(3) as usize],
        })
    }
}

/// The communicators of all generations, and what processes know of them.
#[derive(Debug, Default)]
pub(crate) struct Communicators {
    pub(crate) of: BTreeMap<u64, Communicator>,
    pub(crate) known: BTreeMap<usize, Known>,
}

#[derive(Debug, Default)]
pub(crate) struct Communicator {
    /// Processes that build the communicator.
    pub(crate) begun: BTreeSet<usize>,
    /// Processes on which the communicator is ready.
    pub(crate) ready: BTreeSet<usize>,
}

/// What a process has been told about NCCL, for the oracle.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Generations in which NCCL failed.
    pub(crate) failed: BTreeSet<u64>,
    /// Whether its group builds NCCL.
    pub(crate) builds: bool,
    /// Whether all ranks reported in the last round that NCCL is ready.
    pub(crate) all_ready: bool,
    /// The group in which NCCL failed during a step.
    pub(crate) broke: Option<(u64, Vec<WorkerId>)>,
}
