//! Take-over: a new master continues with the group of a master that died.
//!
//! The group has continued without a master, or waits for records. Its members reconnect one by
//! one, each with the id that it had. When all have reconnected, the group continues under this
//! master in the same generation. A member that does not reconnect in time is lost, and a new
//! generation is published as after any loss.
//!
//! ```text
//!  persisted job ─► disconnected ──Connected{resume}─► connected ──HeldLeases─► known ─┐
//!                      └─ timeout, process ended ──► lost                              ├─► leases
//!                        lowest rank: Formed (its ledger), Committed up to their steps ┘
//! ```
//!
//! **The persisted job may be older than the group**, because writing it takes time. Then the group
//! has the newer information: each worker reports the newest membership that it knows, and the
//! newest of all counts, until this master publishes its own. Its members receive it, and other
//! workers are released.
//!
//! **Records that may be leased** are those that are neither in the ledger nor held by a member.
//! The lowest rank reports the ledger, at step `f`; each member reports what it holds, at its step
//! `s`; the reports arrive at different times. Once `f ≥ s` for all members no record is
//! overlooked: a record that a member put into a step that the ledger lacks (step `f + 1` or later)
//! was not committed when the member reported, so its report still names the record; and the member
//! is leased nothing after its report. Before that, a record could be in a step between `f` and
//! `s`, and in neither report.
//!
//! The loss of the lowest rank may undo a step that it alone has committed. Records that are in the
//! ledger and also named by a member are therefore remembered as that member's leases until the
//! next step, as after any report.
//!
//! **Invariant:** nothing is leased during a [`Takeover`].

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::{Generation, WorkerId};

use crate::job::action::{Action, Membership, ToWorker};
use crate::job::data::lease_table::LeaseTable;
use crate::job::data::shards::Shards;
use crate::job::event::{ConnectionId, LaunchId};
use crate::job::group::choose::Group;
use crate::job::job::{HELLO_WAIT, Job, Phase, RELEASE_WAIT};
use crate::job::lifecycle::persisted::{PersistedJob, PersistedShutdown};
use crate::job::lifecycle::restart::{Budget, Restarts};
use crate::job::outbox::Timer;
use crate::job::reporting::history::JobHistory;
use crate::job::time::Time;
use crate::job::workers::pod::PodId;
use crate::job::workers::table::{Disconnected, Launch};

/// A take-over in progress.
#[derive(Debug, Default)]
pub(crate) struct Takeover {
    /// Whether its generation had already formed, so that its report is not logged again.
    pub(crate) was_formed: bool,
    /// Reconnected members that have not reported what they hold.
    pub(crate) awaiting_holdings: BTreeSet<WorkerId>,
    /// The steps of members that have.
    pub(crate) steps: BTreeMap<WorkerId, u64>,
    /// Whether this master has published a generation, so that older memberships are ignored.
    pub(crate) has_published: bool,
}

impl Job {
    /// Restores the job of `record`, whose master died, at `now` since its start. The caller
    /// reports next the end of each of [`PersistedJob::launches`] that does not run any more.
    ///
    /// # Errors
    /// The first inconsistency of the persisted job.
    pub fn restore(mut record: PersistedJob, now: Time) -> Result<Self, String> {
        check(&record)?;
        let mut job = Self::new_silent(record.spec);
        job.wanted = record.wanted;
        job.initial_launches_left = record.initial_launches_left;
        job.launches_reserved = record.launches_reserved;
        job.generations_reserved = record.generations_reserved;
        job.parameters = record.parameters;
        job.step = record.step;
        job.masters = record.masters.max(1).saturating_add(1);
        let budget = Budget {
            counted: record.failures,
            since_progress: record.failures_since_progress,
            progress: record.progress_at_failure,
        };
        job.restarts = Restarts::new(job.spec.max_worker_restarts, budget);
        job.history = JobHistory::restore(record.history);
        job.workers.launches_made = record.launches_made;
        if let Some(dataset) = record.dataset {
            job.leases = Some(LeaseTable::new(Shards::cut(&dataset, &job.spec)?, job.spec.epochs));
            job.dataset = Some(dataset);
        }
        job.restore_results(record.results)?;
        let members = record.membership.as_ref().map_or(&[][..], |m| &m.members);
        let members: Vec<WorkerId> = members.iter().map(|(id, _)| *id).collect();
        // A pod of which one worker was forgotten is killed as a whole.
        let gone: BTreeSet<LaunchId> =
            record.launches.iter().filter(|l| l.gone).map(|l| l.launch).collect();
        let per_pod = job.spec.workers_per_pod;
        let pod_of = |launch: LaunchId| PodId::of(launch, per_pod);
        let gone: BTreeSet<PodId> = gone.into_iter().map(pod_of).collect();
        for l in &mut record.launches {
            l.gone = gone.contains(&pod_of(l.launch));
            let rank = (0..).zip(&members).find(|(_, id)| id.0 == l.launch.0).map(|(rank, _)| rank);
            let may_return = !l.gone && (l.worker.is_some() || l.found);
            let disconnected = Disconnected {
                rank,
                joined: l.joined,
                holds_state: l.holds_state,
                since: now,
                last_known: None,
            };
            let launch = Launch {
                worker: l.worker,
                leaving: l.leaving || l.gone,
                retired: l.retired,
                disconnected: may_return.then_some(disconnected),
                slot: l.slot,
                ..Launch::default()
            };
            job.workers.launches.insert(l.launch, launch);
        }
        for l in record.launches {
            match l.worker {
                _ if l.gone => job.kill(l.launch),
                None => job.out.set_timer(now + HELLO_WAIT, Timer::Hello(l.launch)),
                Some(_) if l.leaving => {
                    job.out.set_timer(now + RELEASE_WAIT, Timer::Kill(l.launch))
                }
                Some(_) => {}
            }
        }
        job.group = Group {
            generation: record
                .membership
                .as_ref()
                .map_or_else(Generation::default, |m| m.generation),
            generation_floor: record.generation,
            published: record.membership,
            previous_ring: record.previous_ring,
            ..Group::default()
        };
        let is_away = |id: &WorkerId| {
            job.workers.disconnected_members().any(|disconnected| disconnected == *id)
        };
        job.group.lost = members.iter().filter(|id| !is_away(id)).copied().collect();
        job.group.members = members;
        job.out.mark_dirty();
        if let Some(ending) = record.ending {
            job.restore_ending(ending)?;
            return Ok(job);
        }
        if record.stopping {
            job.phase = Phase::Stopping;
            job.out.set_timer(now + job.stop_wait(), Timer::Stop);
        }
        job.await_members(now, record.formed);
        Ok(job)
    }

    /// Restores a job that is over, whose processes may still run.
    fn restore_ending(&mut self, ending: PersistedShutdown) -> Result<(), String> {
        if let Some(leases) = &mut self.leases {
            let ledger = leases.check(&ending.ledger)?;
            leases.rebuild(self.step, ledger, |_| false);
        }
        self.history.error = ending.error;
        self.final_report = ending.final_report;
        self.phase = Phase::Ending(ending.outcome);
        self.log_event(format!(
            "the job was {} when its master died",
            crate::job::lifecycle::shutdown::name(ending.outcome)
        ));
        self.end_now();
        Ok(())
    }

    fn await_members(&mut self, now: Time, was_formed: bool) {
        let (disconnected, generation) =
            (self.workers.disconnected_members().count(), self.group.generation);
        if self.group.members.is_empty() {
            self.log_event("a new master resumes the job; there is no group yet".into());
        } else {
            self.log_event(format!(
                "a new master resumes the job; generation {generation} has {disconnected} members \
                 left"
            ));
        }
        if !self.spec.work.trains() {
            // A worker of an inference job is no member: it is replaced, and the shards that it
            // held are processed again.
            self.watch_reconnections(now);
        } else if !self.group.members.is_empty() || self.workers.disconnected().next().is_some() {
            self.takeover = Some(Takeover { was_formed, ..Takeover::default() });
            self.watch_reconnections(now);
        }
        self.launch_missing(now);
        self.reconcile(now);
    }

    /// Raises the generation floor: no generation is used twice.
    pub(crate) fn raise_generation_floor(&mut self, generation: Generation) {
        if generation > self.group.generation_floor {
            self.group.generation_floor = generation;
            self.out.mark_dirty();
        }
    }

    /// Adopts `theirs`, which a worker knows from the previous master, as the newest membership.
    /// Returns whether it was adopted.
    pub(crate) fn adopt_membership(&mut self, now: Time, theirs: &Membership) -> bool {
        let Some(takeover) = self.takeover.as_mut().filter(|a| !a.has_published) else {
            return false;
        };
        if self.dataset.is_none() {
            return false;
        }
        // Its pause is not measured: the persisted history does not hold this membership.
        takeover.was_formed = true;
        let members: Vec<WorkerId> = theirs.members.iter().map(|(id, _)| *id).collect();
        let before = std::mem::take(&mut self.group.members);
        let rank_of = |id: u64| (0..).zip(&members).find(|(_, m)| m.0 == id).map(|(rank, _)| rank);
        for (&launch, l) in &mut self.workers.launches {
            if let Some(disconnected) = &mut l.disconnected {
                disconnected.rank = rank_of(launch.0);
            }
        }
        let mut excluded = Vec::new();
        for (&id, w) in &mut self.workers.connected {
            let rank = rank_of(id.0);
            if w.rank.is_some() && rank.is_none() {
                excluded.push(id);
            }
            w.rank = rank;
        }
        let may_live = |id: &WorkerId| {
            self.workers.connected.contains_key(id)
                || self.workers.disconnected_members().any(|m| m == *id)
        };
        let lost = members.iter().filter(|id| !may_live(id)).copied().collect();
        let newest = members.iter().map(|id| id.0).max().unwrap_or_default();
        let newest = newest.next_multiple_of(u64::from(self.spec.workers_per_pod));
        self.workers.launches_made = self.workers.launches_made.max(newest);
        self.group = Group {
            generation: theirs.generation,
            generation_floor: self.group.generation_floor,
            previous_ring: (!theirs.abort && !before.is_empty()).then_some(before),
            members,
            published: Some(theirs.clone()),
            lost,
            ..Group::default()
        };
        self.out.mark_dirty();
        self.count_eligible();
        self.log_event(format!(
            "generation {} has been published by the master before",
            theirs.generation
        ));
        for id in self.workers.connected.keys().copied().collect::<Vec<_>>() {
            self.send(id, ToWorker::Membership(theirs.clone()));
        }
        for id in &excluded {
            // Its leases are from an older group; the members of this one report their own.
            if let (Some(takeover), Some(leases)) = (&mut self.takeover, &mut self.leases) {
                takeover.awaiting_holdings.remove(id);
                takeover.steps.remove(id);
                leases.forget(*id);
            }
        }
        self.release_excluded(now, &excluded);
        true
    }

    /// Refuses a reconnecting worker permanently: a replacement is started.
    pub(crate) fn refuse_reconnection(
        &mut self,
        now: Time,
        connection: ConnectionId,
        launch: LaunchId,
        reason: &str,
    ) {
        self.out.push(Action::Refuse { connection, reason: reason.into() });
        self.forget_disconnected(launch);
        self.expect_exit(now, launch);
        self.launch_missing(now);
        self.on_awaited_returned(now);
    }

    /// An awaited worker has reconnected or is not coming.
    pub(crate) fn on_awaited_returned(&mut self, now: Time) {
        if self.takeover.is_some() && !self.awaits_members() && !self.group.members.is_empty() {
            self.log_event(format!(
                "generation {}: all members that are left are back",
                self.group.generation
            ));
        }
        self.reconcile(now);
    }

    /// Ends the take-over and leases again, once it is known which records may be leased.
    pub(crate) fn try_finish_takeover(&mut self, now: Time) {
        let Self { takeover: Some(takeover), leases: Some(leases), workers, .. } = self else {
            return;
        };
        let behind =
            |(id, step): (&WorkerId, &u64)| *step > self.step && workers.connected.contains_key(id);
        let settled =
            self.group.formed && !self.group.is_broken() && takeover.awaiting_holdings.is_empty();
        if !settled
            || workers.disconnected_members().next().is_some()
            || takeover.steps.iter().any(behind)
        {
            return;
        }
        leases.requeue();
        self.takeover = None;
        let (generation, step) = (self.group.generation, self.step);
        self.log_event(format!("generation {generation} is taken over at step {step}"));
        self.fill_all();
        self.reconcile(now);
    }
}

/// Validates what [`Job::restore`] relies on.
fn check(record: &PersistedJob) -> Result<(), String> {
    record.spec.check().map_err(|error| error.to_string())?;
    let PersistedJob { spec, launches, launches_made, .. } = record;
    if !(spec.min_workers..=spec.max_workers).contains(&record.wanted) {
        return Err(format!("{} workers are wanted", record.wanted));
    }
    let members = record.membership.as_ref().map_or(&[][..], |m| &m.members);
    let distinct: BTreeSet<WorkerId> = members.iter().map(|(id, _)| *id).collect();
    if distinct.len() != members.len() || members.len() > spec.max_workers as usize {
        return Err("the membership is no group".into());
    }
    if record
        .membership
        .as_ref()
        .is_some_and(|m| m.generation > record.generation || m.members.is_empty())
    {
        return Err("the membership is not of this job".into());
    }
    if record.dataset.is_none() && !members.is_empty() {
        return Err("there is a group, but no data set".into());
    }
    if record.data.is_some() && record.dataset.is_none() {
        return Err("the list of the data set's files is missing".into());
    }
    let per_pod = spec.workers_per_pod;
    if !record.wanted.is_multiple_of(per_pod) || !launches_made.is_multiple_of(per_pod.into()) {
        return Err(format!("pods of {per_pod} workers are not whole"));
    }
    let names: BTreeSet<LaunchId> = launches.iter().map(|l| l.launch).collect();
    let workers = launches.iter().filter_map(|l| l.worker).chain(distinct);
    if names.len() != launches.len() || names.last().is_some_and(|l| l.0 > *launches_made) {
        return Err("its launches are not those that were made".into());
    }
    if workers.max().is_some_and(|w| w.0 > *launches_made) {
        return Err("its workers are not those that were made".into());
    }
    Ok(())
}
