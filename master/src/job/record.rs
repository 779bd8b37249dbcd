//! What of a job must outlive its master, so that another one can go on with the same group.
//!
//! The group itself holds what is trained: parameters, ledger, leases. What it can't know stands here: who belongs to
//! it, which processes there are, which names are used up, what the user asked for.
//!
//! **Invariant:** whatever an action tells somebody is in the record that [`Job::record`] gave before that action was
//! done. So a master that knows the record knows of every generation, worker and launch that anybody has heard of.
//!
//! Where keeping a record takes longer than the group should wait, an older one will do: launches are seen by who looks for
//! them ([`JobRecord::find`]), and memberships are known to their members. Only what nobody else knows, what
//! [`Job::barrier`] is for, has to be kept before anything more is done.
//!
//! **Invariant:** a record's length depends on the number of workers, not on the length of the job.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::{Generation, WorkerId};
use serde::{Deserialize, Serialize};

use super::action::{Membership, Outcome};
use super::apart::Results;
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
    #[serde(default)]
    pub(super) failures_since_progress: u32,
    /// The highest progress that the job had made by its last failure.
    #[serde(default)]
    pub(super) progress_at_failure: u64,
    pub(super) launches_made: u64,
    /// No launch after this one has been made, even where the record is old.
    pub(super) launches_reserved: u64,
    pub(super) launches: Vec<LaunchRecord>,
    /// No generation after this one has been published.
    pub(super) generation: Generation,
    /// Nor after this one, even where the record is old.
    pub(super) generations_reserved: Generation,
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
    /// Of shards that are worked on apart.
    #[serde(default)]
    pub(super) results: Results,
    /// Steps committed when the record was made; not kept up to date.
    pub(super) step: u64,
    /// Masters that the job has had, this record's included.
    #[serde(default)]
    pub(super) masters: u64,
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
    /// It is there, and may have become a worker since the record was made.
    #[serde(skip)]
    pub(super) found: bool,
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

    /// Takes in which pods are there, by their first launches, with these launches' places, where the record may be older
    /// than the last of them. Those that are given back belong to it no more: they are to be ended.
    #[must_use]
    pub fn find(&mut self, there: &BTreeMap<LaunchId, u32>) -> Vec<LaunchId> {
        let per_pod = self.spec.workers_per_pod;
        let launches = |(&LaunchId(first), &index): (&LaunchId, &u32)| {
            let launch = move |i| LaunchId(first.saturating_add(u64::from(i)));
            (0..per_pod).map(move |i| (launch(i), index.saturating_add(i)))
        };
        let pods = there;
        let there: BTreeMap<LaunchId, u32> = there.iter().flat_map(launches).collect();
        for l in self.launches.iter_mut().filter(|l| there.contains_key(&l.launch)) {
            l.found = true;
        }
        let known: BTreeSet<LaunchId> = self.launches.iter().map(|l| l.launch).collect();
        let unknown = there.iter().filter(|(launch, _)| !known.contains(launch));
        let (newer, strays): (Vec<_>, Vec<_>) =
            unknown.partition(|(launch, _)| launch.0 > self.launches_made);
        for (&launch, &index) in newer {
            let (joined, found) = (None, true);
            let (holds_state, leaving, retired, gone) = (false, false, false, false);
            let worker = None;
            let made =
                LaunchRecord { launch, index, worker, joined, holds_state, leaving, retired, gone, found };
            self.launches.push(made);
        }
        let strays = strays.into_iter().map(|(&launch, _)| launch);
        let strays = strays.filter(|launch| pods.contains_key(launch)).collect();
        // Names that the master before may have used since.
        self.launches_made = self.launches_made.max(self.launches_reserved);
        self.generation = self.generation.max(self.generations_reserved);
        strays
    }

    /// Pods, or processes, that may still run: the first launch of each.
    pub fn launches(&self) -> impl Iterator<Item = LaunchId> + '_ {
        let per_pod = u64::from(self.spec.workers_per_pod);
        self.launches.iter().map(|l| l.launch).filter(move |launch| launch.0 % per_pod == 1 % per_pod)
    }
}

impl Job {
    /// Grows whenever the next [`Job::record`] would differ in something that must outlive this master. Cheap: to be
    /// compared before each action is done.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Steps committed, as last reported.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The [revision](Self::revision) that must be kept before any further action is done: what there is to train, and
    /// that it is done, nobody else could tell.
    #[must_use]
    pub fn barrier(&self) -> u64 {
        self.barrier
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
                found: false,
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
            failures: self.restarts.budget().counted,
            failures_since_progress: self.restarts.budget().since_progress,
            progress_at_failure: self.restarts.budget().progress,
            launches_made: self.crew.launches_made,
            launches_reserved: self.launches_reserved,
            launches: launches.collect(),
            generation: self.group.generation.max(self.group.passed),
            generations_reserved: self.generations_reserved,
            membership: self.group.published.clone(),
            before: self.group.before.clone(),
            formed: self.group.formed || self.adoption.as_ref().is_some_and(|a| a.was_formed),
            stopping: self.phase == Phase::Stopping,
            ending,
            story: self.story.record(),
            results: self.results.kept(),
            step: self.step,
            masters: self.masters,
        }
    }

    /// Masters that the job has had, this one included.
    #[must_use]
    pub fn masters(&self) -> u64 {
        self.masters
    }

    /// Sees to it that whoever knows this record, or an older one, uses no name again: they are kept a stretch ahead.
    pub(super) fn reserve(&mut self) {
        let (launch, generation) = (self.crew.launches_made, self.group.generation);
        if launch > self.launches_reserved {
            let stretch = STRETCH.next_multiple_of(u64::from(self.spec.workers_per_pod));
            self.launches_reserved = launch + stretch;
            self.touch_first();
        }
        if generation > self.generations_reserved {
            self.generations_reserved = Generation(generation.0 + STRETCH);
            self.touch_first();
        }
    }

    /// Something has changed that must outlive this master, and that it alone knows.
    pub(super) fn touch_first(&mut self) {
        self.touch();
        self.barrier = self.revision;
    }

    /// Something has changed that must outlive this master.
    pub(super) fn touch(&mut self) {
        self.revision += 1;
    }
}

/// Names that may be used before a record has to be kept.
const STRETCH: u64 = 16;
