//! The persisted job: the state that must outlive a master, so that another master can take over
//! the same group.
//!
//! The group itself holds the training state: parameters and ledger. The persisted job holds
//! what the group can't know: its membership, the launches, the used ids, and the user's requests.
//!
//! **Invariant:** everything that an action reveals is in the persisted job that
//! [`Job::to_persisted`] gave before that action was done. So a master that reads it knows every
//! generation, worker and launch that any other process knows.
//!
//! Where a write takes longer than the group should wait, an older version is sufficient: the new
//! master lists the pods ([`PersistedJob::observe_pods`]), and members know their membership. Only
//! state that no other process knows has to be durable before further actions; see
//! [`Job::durable_before`].
//!
//! **Invariant:** its length depends on the number of workers, not on the length of the job, the
//! number of files or the state of the ledger: the list of files is stored separately
//! ([`DatasetFingerprint`]), the ledger is in the workers, a job that is over stores only its
//! totals, and each part of the history has a budget of bytes. For 1,024 workers it is shorter than
//! 640 KiB as JSON.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::{FileList, Generation, MembershipChange, OrderName, WorkerId};
use serde::{Deserialize, Serialize};

use super::autoscale::Autoscale;
use super::bad_hosts::BadHosts;
use super::state::ID_BLOCK;
use crate::job::action::{Membership, Outcome};
use crate::job::data::ledger_cache::LedgerCache;
use crate::job::data::results::ShardResults;
use crate::job::event::{Finished, LaunchId, LedgerReport};
use crate::job::job::Job;
use crate::job::reporting::history::PersistedHistory;
use crate::job::scaling::Scaling;
use crate::job::spec::JobSpec;
use crate::job::text::clip;
use crate::job::workers::pod::PodId;
use crate::job::workers::state::Launch;
use crate::job::workers::table::worker_of;

/// The state of a job that its next master needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PersistedJob {
    pub(crate) spec: JobSpec,
    /// Fingerprint of the list of files. The list itself is stored separately, because it may be
    /// long and never changes.
    pub(crate) data: Option<DatasetFingerprint>,
    /// The list of files, once it is attached.
    #[serde(skip)]
    pub(crate) dataset: Option<FileList>,
    /// The order of the records, if a worker has told it.
    pub(crate) order: Option<OrderName>,
    pub(crate) parameters: Option<u64>,
    pub(crate) wanted: u32,
    /// What users have changed of it, and of its limits.
    #[serde(default)]
    pub(crate) requested: Scaling,
    /// The most workers that the policy of `--autoscale` may want; `None` without it.
    pub(crate) wanted_max: Option<u32>,
    pub(crate) initial_launches_left: u32,
    pub(crate) failures: u32,
    pub(crate) failures_since_progress: u32,
    pub(crate) kills_since_progress: u32,
    /// Faults of hosts.
    #[serde(default)]
    pub(crate) bad_hosts: BadHosts,
    /// The job's highest progress at its last failure or kill.
    pub(crate) progress_at_failure: u64,
    pub(crate) launches_made: u64,
    /// No launch after this one has been made since, even if this version is outdated.
    pub(crate) launches_reserved: u64,
    pub(crate) launches: Vec<PersistedLaunch>,
    /// No generation after this one has been published.
    pub(crate) generation: Generation,
    /// No generation after this one has been published since, even if this version is outdated.
    pub(crate) generations_reserved: Generation,
    /// The newest membership; `None` before the first.
    pub(crate) membership: Option<Membership>,
    /// The ring of the previous generation, in which members may still be.
    pub(crate) previous_ring: Option<Vec<WorkerId>>,
    /// Whether that membership's group has agreed on its state.
    pub(crate) formed: bool,
    pub(crate) stopping: bool,
    /// Why the job stops, unless the user asked for it.
    pub(crate) stop_reason: Option<String>,
    /// Whether the user has suspended the job.
    pub(crate) suspended: bool,
    /// The job is over, but its processes may not have ended.
    pub(crate) ending: Option<PersistedShutdown>,
    /// Totals of the ledger, as last reported: what is shown until a group reports its own.
    #[serde(default)]
    pub(crate) ledger: LedgerReport,
    pub(crate) history: PersistedHistory,
    /// Results of an inference job's shards.
    pub(crate) results: ShardResults,
    /// Steps committed when it was written; it is not written for each step.
    pub(crate) step: u64,
    /// Number of masters that the job has had, including the writer.
    pub(crate) masters: u64,
}

/// Identifies a list of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetFingerprint {
    /// Number of files.
    pub files: u64,
    /// Records of one epoch.
    pub records: u64,
    /// Digest of the paths and the counts.
    #[serde(with = "hexadecimal")]
    pub digest: u64,
}

/// A launch that was not known to have ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PersistedLaunch {
    pub(crate) launch: LaunchId,
    pub(crate) slot: u32,
    pub(crate) worker: Option<WorkerId>,
    pub(crate) joined: Option<Generation>,
    pub(crate) holds_state: bool,
    pub(crate) leaving: bool,
    pub(crate) retired: bool,
    /// Whether it was forgotten: it is refused if it connects.
    pub(crate) gone: bool,
    /// Whether a rule of the user for its end is applied.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) ruled: bool,
    /// Whether its pod was observed; it may have become a worker since the last write.
    #[serde(skip)]
    pub(crate) found: bool,
}

/// The final state of a job that is about to end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PersistedShutdown {
    pub(crate) outcome: Outcome,
    /// Whether the job ended because it was stopped.
    #[serde(default)]
    pub(crate) was_stopping: bool,
    pub(crate) error: Option<String>,
    pub(crate) final_report: Option<Finished>,
}

impl PersistedJob {
    /// The job's specification.
    pub(crate) fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// Steps committed, as known at the last write.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Notes a step that the previous master has published since the last write.
    pub(crate) fn note_step(&mut self, step: u64) {
        self.step = self.step.max(step);
    }

    /// Fingerprint of the job's list of files; `None` before it is known.
    #[must_use]
    pub fn data(&self) -> Option<DatasetFingerprint> {
        self.data
    }

    /// The list of files, if it has been attached.
    pub(crate) fn file_list(&self) -> Option<&FileList> {
        self.dataset.as_ref()
    }

    /// The order of the records, if it is known.
    pub(crate) fn order(&self) -> Option<OrderName> {
        self.order
    }

    /// Records and steps of the state that the first group began with; `None` before it.
    pub(crate) fn begun_with(&self) -> Option<(u64, u64)> {
        let totals = &self.history.totals;
        totals.formed_first.map(|_| totals.begun_with)
    }

    /// The newest membership changes, oldest first.
    pub(crate) fn memberships(&self) -> &[MembershipChange] {
        &self.history.memberships
    }

    /// Drops the history and the launches of a job that has ended: its summary has the history.
    pub(crate) fn of_ended(mut self) -> Self {
        self.shorten();
        self.launches.clear();
        self
    }

    /// Drops the history, for a persisted job that is too long in spite of the budgets.
    pub(crate) fn shorten(&mut self) {
        self.history.memberships.clear();
        self.history.failed_shards.clear();
        self.history.evaluations.all.clear();
        self.history.totals.checkpoints.restored.clear();
    }

    /// Completes a persisted job with the separately stored list of files.
    ///
    /// # Errors
    /// The list has another fingerprint.
    pub(crate) fn attach_file_list(&mut self, list: FileList) -> Result<(), String> {
        let found = DatasetFingerprint::of(&list);
        match self.data {
            Some(data) if data == found => {
                self.dataset = Some(list);
                Ok(())
            }
            Some(data) => Err(format!(
                "the list of the data set's files is not the one that the job was started with: \
                 it has {} files with {} records and digest {:016x}, the job's has {} files \
                 with {} records and digest {:016x}",
                found.files, found.records, found.digest, data.files, data.records, data.digest
            )),
            None => {
                Err("there is a list of the data set's files, and the job knows of none".into())
            }
        }
    }

    /// Merges the observed pods, given by their first launches with these launches' slots; newer
    /// ones than this version knows are added. Returns stray pods, which do not belong to the job
    /// any more: the caller deletes them.
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
            self.launches.push(PersistedLaunch {
                launch,
                slot,
                worker: None,
                joined: None,
                holds_state: false,
                leaving: false,
                retired: false,
                gone: false,
                ruled: false,
                found: true,
            });
        }
        let strays = strays.into_iter().map(|(&launch, _)| launch);
        let strays = strays.filter(|launch| pods.contains_key(launch)).collect();
        self.raise_ids(LaunchId(0));
        strays
    }

    /// Prepares a take-over, on this machine, from a version that is older than the job: a launch
    /// may have joined since, and no id is used again that the previous master may have used since,
    /// or that a launch up to `noted` has.
    pub fn note_outdated(&mut self, noted: LaunchId) {
        self.launches.iter_mut().for_each(|l| l.found = true);
        // The master before could not write which ids it reserved next.
        let has_unwritten = noted.0 > self.launches_reserved;
        self.raise_ids(noted);
        if has_unwritten {
            self.generation = Generation(self.generation.0 + ID_BLOCK);
        }
    }

    fn raise_ids(&mut self, noted: LaunchId) {
        self.launches_made = self.launches_made.max(self.launches_reserved).max(noted.0);
        self.generation = self.generation.max(self.generations_reserved);
    }

    /// The first launches of pods, or processes, that may still run.
    pub fn launches(&self) -> impl Iterator<Item = LaunchId> + '_ {
        let per_pod = self.spec.workers_per_pod;
        let is_first = move |launch: &LaunchId| PodId::of(*launch, per_pod).first() == *launch;
        self.launches.iter().map(|l| l.launch).filter(is_first)
    }
}

impl DatasetFingerprint {
    /// The fingerprint of `list`.
    pub(crate) fn of(list: &FileList) -> Self {
        Self { files: list.len() as u64, records: list.records(), digest: list.digest() }
    }
}

impl Job {
    /// Version of the persisted state: grows whenever the next [`Job::to_persisted`] would differ
    /// in something that must outlive this master. Cheap to compare before each action.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.out.version()
    }

    /// Steps committed, as last reported.
    pub(crate) fn step(&self) -> u64 {
        self.data.step()
    }

    /// The [version](Self::version) that must be durable before any further action, because no
    /// other process knows this state (the data set; the end of the job).
    #[must_use]
    pub fn durable_before(&self) -> u64 {
        self.out.durable_before()
    }

    /// What the job is.
    pub(crate) fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// Number of masters that the job has had, including this one.
    pub(crate) fn masters(&self) -> u64 {
        self.lifecycle.masters
    }

    /// The state that another master needs to take over from this one.
    #[must_use]
    pub fn to_persisted(&self) -> PersistedJob {
        let Self { spec, workers, group, data, lifecycle, reporting, .. } = self;
        let ending = lifecycle.outcome().map(|outcome| PersistedShutdown {
            outcome,
            was_stopping: lifecycle.was_stopping,
            error: reporting.error().map(str::to_owned),
            final_report: reporting.final_report().map(short_report),
        });
        let budget = lifecycle.restarts.budget();
        PersistedJob {
            spec: spec.clone(),
            data: data.files().map(DatasetFingerprint::of),
            dataset: data.files().cloned(),
            order: data.order(),
            parameters: data.parameters(),
            wanted: lifecycle.wanted,
            requested: lifecycle.requested,
            wanted_max: lifecycle.autoscale.as_ref().map(Autoscale::max),
            initial_launches_left: lifecycle.initial_launches_left,
            failures: budget.counted,
            failures_since_progress: budget.since_progress,
            kills_since_progress: budget.kills_since_progress,
            bad_hosts: lifecycle.bad_hosts.clone(),
            progress_at_failure: budget.progress,
            launches_made: workers.launches_made(),
            launches_reserved: lifecycle.reserved.launches,
            launches: workers.launches().map(|(id, l)| PersistedLaunch::of(id, l)).collect(),
            generation: group.newest_published(),
            generations_reserved: lifecycle.reserved.generations,
            membership: group.published().cloned(),
            previous_ring: group.previous_ring().map(<[WorkerId]>::to_vec),
            formed: group.is_formed() || lifecycle.had_formed(),
            stopping: lifecycle.is_stopping(),
            stop_reason: lifecycle.stop_reason().map(|reason| clip(reason).to_owned()),
            suspended: lifecycle.is_suspended(),
            ending,
            ledger: data.cache().map(LedgerCache::totals).unwrap_or_default(),
            history: reporting.record(),
            results: data.results().kept(),
            step: data.step(),
            masters: lifecycle.masters,
        }
    }

    /// Reserves blocks of ids ahead of their use (hi/lo), so that a master that reads this version,
    /// or an older one, uses no id again.
    pub(crate) fn reserve_id_block(&mut self) {
        let (launch, generation) = (self.workers.launches_made(), self.group.generation());
        let reserved = &mut self.lifecycle.reserved;
        if launch > reserved.launches {
            let block = ID_BLOCK.next_multiple_of(u64::from(self.spec.workers_per_pod));
            reserved.launches = launch + block;
            self.out.mark_dirty_urgent();
        }
        if generation > reserved.generations {
            reserved.generations = Generation(generation.0 + ID_BLOCK);
            self.out.mark_dirty_urgent();
        }
    }
}

impl PersistedLaunch {
    fn of(launch: LaunchId, l: &Launch) -> Self {
        let (joined, holds_state) = match (l.worker(), l.disconnected()) {
            (Some(w), _) => (w.joined(), w.holds_state()),
            (None, Some(disconnected)) => (disconnected.joined, disconnected.holds_state),
            (None, None) => (None, false),
        };
        Self {
            launch,
            slot: l.slot(),
            worker: l.has_registered().then(|| worker_of(launch)),
            joined,
            holds_state,
            leaving: l.is_leaving(),
            retired: l.is_retired(),
            gone: l.is_killed() || l.is_forgotten(),
            ruled: l.is_ruled(),
            found: false,
        }
    }
}

/// A final report without its ledger, which has been compared with those of the other members.
fn short_report(word: &Finished) -> Finished {
    Finished {
        generation: word.generation,
        step: word.step,
        digest: word.digest,
        ledger: LedgerReport::default(),
        records_trained: word.records_trained,
        stopped_early: word.stopped_early,
        summary: word.summary.as_deref().map(|words| clip(words).to_owned()),
        // The job's error and its failed shards hold this.
        failure: None,
        suspended: word.suspended,
        steps_skipped: word.steps_skipped,
        exported: word.exported,
        row_touches: word.row_touches,
    }
}

/// Numbers that JSON would round, as hexadecimal text.
mod hexadecimal {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(crate) fn serialize<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{number:016x}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map_err(D::Error::custom)
    }
}
