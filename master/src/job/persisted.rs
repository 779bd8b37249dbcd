//! What of a job must outlive its master, so that another one can go on with the same group.
//!
//! The group itself holds what is trained: parameters, ledger, leases. What it can't know stands
//! here: who belongs to it, which processes there are, which names are used up, what the user asked
//! for.
//!
//! **Invariant:** whatever an action tells somebody is in the record that [`Job::to_persisted`] gave
//! before that action was done. So a master that knows the record knows of every generation, worker
//! and launch that anybody has heard of.
//!
//! Where keeping a record takes longer than the group should wait, an older one will do: launches
//! are seen by who looks for them ([`PersistedJob::observe_pods`]), and memberships are known to their
//! members. Only what nobody else knows, what [`Job::durable_before`] is for, has to be kept before
//! anything more is done.
//!
//! **Invariant:** a record's length depends on the number of workers, not on the length of the job,
//! nor on the number of files or the state of the ledger: the list of files is kept beside it
//! ([`DatasetFingerprint`]), the ledger is in the workers, a job that is over keeps its totals alone, and
//! each part that tells of the job's course has a budget of bytes. For 1,024 workers a record is
//! shorter than 640 KiB as JSON.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::{FileList, Generation, ListedFile, WorkerId};
use serde::{Deserialize, Deserializer, Serialize};

use super::action::{Membership, Outcome};
use super::event::{Finished, LaunchId, LedgerReport};
use super::history::{PersistedHistory, clip};
use super::inference::ShardResults;
use super::job::{Job, Phase};
use super::lease_table::LeaseTable;
use super::spec::JobSpec;

/// A job as its next master needs to know it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PersistedJob {
    pub(super) spec: JobSpec,
    /// Which list of files is trained on. The list itself is kept beside the record, for it may be
    /// long and never changes.
    #[serde(default)]
    pub(super) data: Option<DatasetFingerprint>,
    /// That list, once it is known; in records of version 1 it is part of the record.
    #[serde(default, skip_serializing, deserialize_with = "list_of_version_1")]
    pub(super) dataset: Option<FileList>,
    pub(super) parameters: Option<u64>,
    pub(super) wanted: u32,
    #[serde(rename = "fresh")]
    pub(super) initial_launches_left: u32,
    pub(super) failures: u32,
    #[serde(default)]
    pub(super) failures_since_progress: u32,
    /// The highest progress that the job had made by its last failure.
    #[serde(default)]
    pub(super) progress_at_failure: u64,
    pub(super) launches_made: u64,
    /// No launch after this one has been made, even where the record is old.
    pub(super) launches_reserved: u64,
    pub(super) launches: Vec<PersistedLaunch>,
    /// No generation after this one has been published.
    pub(super) generation: Generation,
    /// Nor after this one, even where the record is old.
    pub(super) generations_reserved: Generation,
    /// The newest membership; `None` before the first.
    pub(super) membership: Option<Membership>,
    /// The ring of the generation before, in which members may still be.
    #[serde(rename = "before")]
    pub(super) previous_ring: Option<Vec<WorkerId>>,
    /// That membership's group has agreed on its state.
    pub(super) formed: bool,
    pub(super) stopping: bool,
    /// The job is over, but its processes may not have ended.
    pub(super) ending: Option<PersistedShutdown>,
    #[serde(rename = "story")]
    pub(super) history: PersistedHistory,
    /// Of shards that are worked on apart.
    #[serde(default)]
    pub(super) results: ShardResults,
    /// Steps committed when the record was made; not kept up to date.
    pub(super) step: u64,
    /// Masters that the job has had, this record's included.
    #[serde(default)]
    pub(super) masters: u64,
}

/// Tells a list of files from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetFingerprint {
    /// Number of files.
    pub files: u64,
    /// Records of one epoch.
    pub records: u64,
    /// Of the paths and the counts.
    #[serde(with = "hexadecimal")]
    pub digest: u64,
}

/// A process that was not known to have ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PersistedLaunch {
    pub(super) launch: LaunchId,
    #[serde(rename = "index")]
    pub(super) slot: u32,
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
pub(super) struct PersistedShutdown {
    pub(super) outcome: Outcome,
    pub(super) error: Option<String>,
    pub(super) ledger: LedgerReport,
    #[serde(rename = "last_word")]
    pub(super) final_report: Option<Finished>,
}

impl PersistedJob {
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

    /// Which list of files the job trains on; `None` before it is known.
    #[must_use]
    pub fn data(&self) -> Option<DatasetFingerprint> {
        self.data
    }

    /// The list of files, if it has been attached or was part of the record.
    #[must_use]
    pub fn file_list(&self) -> Option<&FileList> {
        self.dataset.as_ref()
    }

    /// Gives up what only tells of the job's course. For records that are too long nevertheless.
    pub fn shorten(&mut self) {
        self.history.memberships.clear();
        self.history.failed_shards.clear();
        self.history.evaluations.all.clear();
        self.history.checkpoints.restored.clear();
    }

    /// Completes a record that was read with the list of files that was kept beside it.
    ///
    /// # Errors
    /// It is another list.
    pub fn attach_file_list(&mut self, list: FileList) -> Result<(), String> {
        let found = DatasetFingerprint::of(&list);
        match self.data {
            Some(data) if data == found => {
                self.dataset = Some(list);
                Ok(())
            }
            Some(data) => Err(format!(
                "the list of the data set's files is not the one that the job was started with: it has {} files with {} \
                 records and digest {:016x}, the job's has {} files with {} records and digest {:016x}",
                found.files, found.records, found.digest, data.files, data.records, data.digest
            )),
            None => {
                Err("there is a list of the data set's files, and the job knows of none".into())
            }
        }
    }

    /// Takes in which pods are there, by their first launches, with these launches' places, where
    /// the record may be older than the last of them. Those that are given back belong to it no
    /// more: they are to be ended.
    #[must_use]
    pub fn observe_pods(&mut self, there: &BTreeMap<LaunchId, u32>) -> Vec<LaunchId> {
        let per_pod = self.spec.workers_per_pod;
        let launches = |(&LaunchId(first), &slot): (&LaunchId, &u32)| {
            let launch = move |i| LaunchId(first.saturating_add(u64::from(i)));
            (0..per_pod).map(move |i| (launch(i), slot.saturating_add(i)))
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
        for (&launch, &slot) in newer {
            let (joined, found) = (None, true);
            let (holds_state, leaving, retired, gone) = (false, false, false, false);
            let worker = None;
            let made = PersistedLaunch {
                launch,
                slot,
                worker,
                joined,
                holds_state,
                leaving,
                retired,
                gone,
                found,
            };
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
        self.launches
            .iter()
            .map(|l| l.launch)
            .filter(move |launch| launch.0 % per_pod == 1 % per_pod)
    }
}

impl DatasetFingerprint {
    /// That of `list`.
    #[must_use]
    pub fn of(list: &FileList) -> Self {
        Self { files: list.len() as u64, records: list.records(), digest: list.digest() }
    }
}

impl Job {
    /// Grows whenever the next [`Job::to_persisted`] would differ in something that must outlive this
    /// master. Cheap: to be compared before each action is done.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Steps committed, as last reported.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The [revision](Self::revision) that must be kept before any further action is done: what
    /// there is to train, and that it is done, nobody else could tell.
    #[must_use]
    pub fn durable_before(&self) -> u64 {
        self.durable_before
    }

    /// What another master needs in order to go on where this one is.
    #[must_use]
    pub fn to_persisted(&self) -> PersistedJob {
        let launches = self.workers.launches.iter().map(|(&launch, l)| {
            let worker = l.worker.and_then(|id| self.workers.connected.get(&id));
            let (joined, holds_state) = match (worker, l.disconnected) {
                (Some(w), _) => (w.joined, w.holds_state),
                (None, Some(disconnected)) => (disconnected.joined, disconnected.holds_state),
                (None, None) => (None, false),
            };
            let given_up = l.worker.is_some() && worker.is_none() && l.disconnected.is_none();
            PersistedLaunch {
                launch,
                slot: l.slot,
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
            Phase::Ended(outcome) | Phase::Ending(outcome) => Some(PersistedShutdown {
                outcome,
                error: self.history.error.clone(),
                ledger: self.leases.as_ref().map(LeaseTable::totals).unwrap_or_default(),
                final_report: self.final_report.as_ref().map(short_report),
            }),
            Phase::Running | Phase::Stopping => None,
        };
        PersistedJob {
            spec: self.spec.clone(),
            data: self.dataset.as_ref().map(DatasetFingerprint::of),
            dataset: self.dataset.clone(),
            parameters: self.parameters,
            wanted: self.wanted,
            initial_launches_left: self.initial_launches_left,
            failures: self.restarts.budget().counted,
            failures_since_progress: self.restarts.budget().since_progress,
            progress_at_failure: self.restarts.budget().progress,
            launches_made: self.workers.launches_made,
            launches_reserved: self.launches_reserved,
            launches: launches.collect(),
            generation: self.group.generation.max(self.group.generation_floor),
            generations_reserved: self.generations_reserved,
            membership: self.group.published.clone(),
            previous_ring: self.group.previous_ring.clone(),
            formed: self.group.formed || self.takeover.as_ref().is_some_and(|a| a.was_formed),
            stopping: self.phase == Phase::Stopping,
            ending,
            history: self.history.record(),
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

    /// Sees to it that whoever knows this record, or an older one, uses no name again: they are
    /// kept a stretch ahead.
    pub(super) fn reserve_id_block(&mut self) {
        let (launch, generation) = (self.workers.launches_made, self.group.generation);
        if launch > self.launches_reserved {
            let block = ID_BLOCK.next_multiple_of(u64::from(self.spec.workers_per_pod));
            self.launches_reserved = launch + block;
            self.mark_dirty_urgent();
        }
        if generation > self.generations_reserved {
            self.generations_reserved = Generation(generation.0 + ID_BLOCK);
            self.mark_dirty_urgent();
        }
    }

    /// Something has changed that must outlive this master, and that it alone knows.
    pub(super) fn mark_dirty_urgent(&mut self) {
        self.mark_dirty();
        self.durable_before = self.version;
    }

    /// Something has changed that must outlive this master.
    pub(super) fn mark_dirty(&mut self) {
        self.version += 1;
    }
}

/// Names that may be used before a record has to be kept.
const ID_BLOCK: u64 = 16;

/// A last word without its ledger, which was compared with those of the others before.
fn short_report(word: &Finished) -> Finished {
    Finished {
        generation: word.generation,
        step: word.step,
        digest: word.digest,
        ledger: LedgerReport::default(),
        records_trained: word.records_trained,
        stopped_early: word.stopped_early,
        summary: word.summary.as_deref().map(|words| clip(words).to_owned()),
        // The error is told by the job's own, the ranges by its failed shards.
        failure: None,
        suspended: word.suspended,
        steps_skipped: word.steps_skipped,
        exported: word.exported,
    }
}

/// As many of `items`, from the first on, as take no more than `bytes` together in JSON.
pub(super) fn first_within<'a, T: Serialize + Clone + 'a>(
    items: impl Iterator<Item = &'a T>,
    bytes: usize,
) -> Vec<T> {
    let mut left = bytes;
    let fits = |item: &&T| {
        let taken = serde_json::to_string(item).map_or(usize::MAX, |json| json.len() + 1);
        let fits = taken <= left;
        left = left.saturating_sub(taken);
        fits
    };
    items.take_while(fits).cloned().collect()
}

/// Version 1 holds the files themselves.
fn list_of_version_1<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<FileList>, D::Error> {
    #[derive(Deserialize)]
    struct Dataset {
        files: Vec<File>,
    }
    #[derive(Deserialize)]
    struct File {
        path: String,
        records: u64,
        #[serde(default)]
        version: Option<u32>,
    }
    let dataset = Option::<Dataset>::deserialize(deserializer)?;
    Ok(dataset.map(|dataset| {
        FileList::pack(dataset.files.into_iter().map(|f| ListedFile {
            path: f.path,
            records: f.records,
            version: f.version,
        }))
    }))
}

/// Numbers that JSON would round.
mod hexadecimal {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{number:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}
