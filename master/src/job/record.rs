//! What of a job must outlive its master, so that another one can go on with the same group.
//!
//! The group itself holds what is trained: parameters, ledger, leases. What it can't know stands here: who belongs to
//! it, which processes there are, which names are used up, what the user asked for.
//!
//! **Invariant:** whatever an action tells somebody is in the record that [`Job::record`] gave before that action was
//! done. So a master that knows the record knows of every generation, worker and launch that anybody has heard of.
//! **Invariant:** a record's length depends on the number of workers, not on the length of the job.

use elasticdl_proto::{Generation, WorkerId};
use serde::{Deserialize, Serialize};

use super::action::{Membership, Outcome};
use super::event::{Finished, LaunchId, LedgerReport};
use super::job::{Job, Phase};
use super::queue::Records;
use super::spec::{Dataset, JobSpec};
use super::story::StoryRecord;

/// A job as its next master needs to know it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    pub(super) spec: JobSpec,
    pub(super) dataset: Option<Dataset>,
    pub(super) parameters: Option<u64>,
    pub(super) wanted: u32,
    pub(super) fresh: u32,
    pub(super) failures: u32,
    pub(super) launches_made: u64,
    pub(super) workers_made: u64,
    pub(super) launches: Vec<LaunchRecord>,
    /// No generation after this one has been published.
    pub(super) generation: Generation,
    /// The newest membership; `None` before the first.
    pub(super) membership: Option<Membership>,
    /// The ring of the generation before, in which members may still be.
    pub(super) before: Option<Vec<WorkerId>>,
    /// That membership's group has agreed on its state.
    pub(super) formed: bool,
    pub(super) stopping: bool,
    /// The job is over, but its processes may not have ended.
    pub(super) ending: Option<EndingRecord>,
    pub(super) story: StoryRecord,
    /// Steps committed when the record was made; not kept up to date.
    pub(super) step: u64,
}

/// A process that was not known to have ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct LaunchRecord {
    pub(super) launch: LaunchId,
    pub(super) index: u32,
    pub(super) worker: Option<WorkerId>,
    pub(super) joined: Option<Generation>,
    pub(super) holds_state: bool,
    pub(super) leaving: bool,
    pub(super) retired: bool,
    /// It was given up: whatever it says, it is not wanted any more.
    pub(super) gone: bool,
}

/// How a job is about to end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct EndingRecord {
    pub(super) outcome: Outcome,
    pub(super) error: Option<String>,
    pub(super) ledger: LedgerReport,
    pub(super) last_word: Option<Finished>,
}

impl JobRecord {
    /// What the job was asked to do.
    #[must_use]
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// Steps committed, as known when the record was made.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Processes that may still run.
    pub fn launches(&self) -> impl Iterator<Item = LaunchId> + '_ {
        self.launches.iter().map(|l| l.launch)
    }
}

impl Job {
    /// Grows whenever the next [`Job::record`] would differ in something that must outlive this master. Cheap: to be
    /// compared before each action is done.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// What another master needs in order to go on where this one is.
    #[must_use]
    pub fn record(&self) -> JobRecord {
        let launches = self.crew.launches.iter().map(|(&launch, l)| {
            let worker = l.worker.and_then(|id| self.crew.workers.get(&id));
            let (joined, holds_state) = match (worker, l.away) {
                (Some(w), _) => (w.joined, w.holds_state),
                (None, Some(away)) => (away.joined, away.holds_state),
                (None, None) => (None, false),
            };
            let given_up = l.worker.is_some() && worker.is_none() && l.away.is_none();
            LaunchRecord {
                launch,
                index: l.index,
                worker: l.worker,
                joined,
                holds_state,
                leaving: l.leaving,
                retired: l.retired,
                gone: l.killed || given_up,
            }
        });
        let ending = match self.phase {
            Phase::Ended(outcome) | Phase::Ending(outcome) => Some(EndingRecord {
                outcome,
                error: self.story.error.clone(),
                ledger: self.records.as_ref().map(Records::report).unwrap_or_default(),
                last_word: self.last_word.clone(),
            }),
            Phase::Running | Phase::Stopping => None,
        };
        JobRecord {
            spec: self.spec.clone(),
            dataset: self.dataset.clone(),
            parameters: self.parameters,
            wanted: self.wanted,
            fresh: self.fresh,
            failures: self.restarts.counted(),
            launches_made: self.crew.launches_made,
            workers_made: self.crew.workers_made,
            launches: launches.collect(),
            generation: self.group.generation,
            membership: self.group.published.clone(),
            before: self.group.before.clone(),
            formed: self.group.formed || self.adoption.as_ref().is_some_and(|a| a.was_formed),
            stopping: self.phase == Phase::Stopping,
            ending,
            story: self.story.record(),
            step: self.step,
        }
    }

    /// Something has changed that must outlive this master.
    pub(super) fn touch(&mut self) {
        self.revision += 1;
    }
}
