//! What the oracle has seen, and the questions that this answers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use elasticdl::simulated::Placement;
use elasticdl_master::job::{Membership, WorkerMessage};
use elasticdl_proto::{Generation, WorkerId};

use super::coverage::Coverage;
use crate::simulation::clock::Micros;
use crate::simulation::rows::Rows;

/// All messages and state changes that the checks need.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    pub(crate) seed: u64,
    pub(crate) published: Vec<Membership>,
    /// The membership that the current master has published or restored last.
    pub(crate) newest: Option<Membership>,
    /// Generation of the last membership that was published by any master.
    pub(crate) generation: Generation,
    /// Generations that agreed on a state, at least on one rank.
    pub(crate) histories: BTreeMap<u64, GenerationHistory>,
    pub(crate) lineages: u64,
    /// For each lineage that began with an older state of another one: that one, and the step.
    pub(crate) parents: BTreeMap<u64, (u64, u64)>,
    /// Digests of stable steps, by lineage and step.
    pub(crate) stable: BTreeMap<(u64, u64), u64>,
    pub(crate) processes: BTreeMap<WorkerId, usize>,
    /// Workers whose stream has ended at the master and is not open again, and all of `lost`.
    pub(crate) gone: BTreeSet<WorkerId>,
    /// Workers that the master has evicted or ordered to be killed, or whose process it knows to
    /// have ended.
    pub(crate) lost: BTreeSet<WorkerId>,
    /// The newest generation whose members have ended with a checkpoint.
    pub(crate) suspended: Option<Generation>,
    /// Whether the master has resumed from a snapshot that lacks the newest generation, and has
    /// published none since. It awaits members that the snapshot does not name for 3 s only.
    pub(crate) is_master_stale: bool,
    /// Whether a master may have resumed from a snapshot that its predecessor had outdated.
    pub(crate) may_be_outdated: bool,
    pub(crate) finals: BTreeMap<(usize, Generation), Final>,
    /// When a rank committed a step last.
    pub(crate) committed_at: Micros,
    /// The last messages of workers.
    pub(crate) recent_messages: VecDeque<(WorkerId, WorkerMessage)>,
    /// The newest generation in which they were replayed to the master.
    pub(crate) fenced_in: Generation,
    /// Processes that got a shutdown message.
    pub(crate) shut_down: BTreeSet<usize>,
    /// The worker that the last action sent a shutdown message to, with its reason.
    pub(crate) shutdown_sent: Option<(WorkerId, String)>,
    /// Ends of processes that may count as failures.
    pub(crate) failures_max: u64,
    pub(crate) rows: RowsSeen,
    /// Whether no rank can tell any more which state is right.
    pub(crate) is_void: bool,
    pub(crate) coverage: Coverage,
}

/// What the oracle knows of the rows of tables.
#[derive(Debug, Default)]
pub(crate) struct RowsSeen {
    /// References, by step and digest of the parameters: more than one if several histories lead
    /// there.
    pub(crate) states: BTreeMap<(u64, u64), Vec<Rc<Rows>>>,
    /// Placements, by generation and step.
    pub(crate) placements: BTreeMap<(u64, u64), Placement>,
    /// The placements in which each shard had all of its copies, by generation and step: the
    /// workers that held shards, and the copies of each shard.
    pub(crate) whole: BTreeMap<(u64, u64), (BTreeSet<u64>, usize)>,
}

/// What one generation has committed.
#[derive(Debug)]
pub(crate) struct GenerationHistory {
    pub(crate) lineage: u64,
    pub(crate) formed_at: Micros,
    pub(crate) members: Vec<WorkerId>,
    /// Step and digest of the state that the generation began with.
    pub(crate) base: (u64, u64),
    /// Digests by step.
    pub(crate) commits: BTreeMap<u64, u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Final {
    pub(crate) parameters: Vec<u8>,
    pub(crate) step: u64,
    /// Step of the last evaluation.
    pub(crate) evaluated: u64,
    pub(crate) counted: u64,
    pub(crate) repeated: u64,
}

impl Oracle {
    /// A master has resumed the job in `generation`.
    pub(crate) fn note_resumed(&mut self, generation: Generation) {
        self.is_master_stale = generation < self.generation;
    }

    pub(crate) fn new(seed: u64) -> Self {
        let coverage = Coverage { runs: 1, ..Coverage::default() };
        Self { seed, coverage, ..Self::default() }
    }

    /// A worker is admitted. Returns whether it was lost.
    pub(crate) fn on_admitted(&mut self, worker: WorkerId, p: usize) -> bool {
        self.processes.insert(worker, p);
        self.coverage.returned += u64::from(self.gone.remove(&worker));
        self.lost.remove(&worker)
    }

    /// The stream of a worker has ended; the worker may reconnect.
    pub(crate) fn on_stream_end(&mut self, worker: WorkerId) {
        self.gone.insert(worker);
    }

    pub(crate) fn on_gone(&mut self, worker: WorkerId) {
        self.gone.insert(worker);
        self.lost.insert(worker);
    }

    /// A worker without a stream will not be readmitted. Returns whether `worker` has none.
    pub(crate) fn on_killed(&mut self, worker: WorkerId) -> bool {
        let is_gone = self.gone.contains(&worker);
        if is_gone {
            self.lost.insert(worker);
        }
        is_gone
    }

    /// The newest generation that has been published.
    pub(crate) fn newest_generation(&self) -> Generation {
        self.newest.as_ref().map_or_else(Generation::default, |m| m.generation)
    }

    pub(crate) fn on_master_crash(&mut self) {
        self.coverage.masters_crashed += 1;
    }

    pub(crate) fn on_worker_message(&mut self, worker: WorkerId, message: &WorkerMessage) {
        if !matches!(message, WorkerMessage::Heartbeat(_)) {
            self.recent_messages.push_back((worker, message.clone()));
            if self.recent_messages.len() > RECENT_MESSAGES_MAX {
                self.recent_messages.pop_front();
            }
        }
    }

    /// Whether a group has committed `step` with this digest.
    pub(crate) fn has_committed(&self, generation: u64, step: u64, digest: u64) -> bool {
        let history = self.histories.get(&generation);
        history.is_some_and(|history| {
            history.base == (step, digest) || history.commits.get(&step) == Some(&digest)
        })
    }

    /// The oldest lineage that has the same state of `step` as `lineage`.
    pub(crate) fn origin(&self, lineage: u64, step: u64) -> u64 {
        let parent = self.parents.get(&lineage).filter(|(_, until)| step <= *until);
        parent.map_or(lineage, |&(parent, _)| self.origin(parent, step))
    }

    pub(crate) fn begin_lineage(&mut self) -> u64 {
        self.lineages += 1;
        self.coverage.begun_again += u64::from(self.lineages > 1);
        self.lineages
    }

    pub(crate) fn has_finished(&self, p: usize) -> bool {
        let newest = self.newest.as_ref().map(|m| m.generation);
        newest.is_some_and(|generation| self.finals.contains_key(&(p, generation)))
    }

    /// The process of the lowest rank of the newest generation.
    pub(crate) fn first_member(&self) -> Option<usize> {
        let (first, _) = self.newest.as_ref()?.members.first()?;
        self.processes.get(first).copied()
    }
}

pub(crate) const RECENT_MESSAGES_MAX: usize = 48;
