//! How a master takes over the group of one that died.
//!
//! The group has gone on without a master, or waits for records. Its members come back one by one,
//! each under the name that it had. When all have, the group is this master's, in the generation
//! that it was in; whoever does not come back in time is lost, and there is a new generation as
//! after any loss.
//!
//! ```text
//!  record ──restore──► launches away ──Connected{resume}──► back ──Holding──► told what it holds ─┐
//!                          └─ time is up, process ended ──► lost                                  ├─► leases again
//!                              lowest rank: Formed (its ledger), Committed up to their steps ─────┘
//! ```
//!
//! **The record may be older than the group**, where keeping it takes time. Then the group knows
//! better: each worker says which membership it has heard of, and the newest of these counts, as
//! long as this master has not published one of its own. Whoever belongs to it is told, and whoever
//! does not is let go.
//!
//! **What may be leased** is what is neither in the ledger nor held by a member. The ledger is the
//! lowest rank's word, at step `f`; what each member holds is its own word, at its step `s`; they
//! come at different times. Once `f ≥ s` for all members nothing is overlooked: what a member has
//! put into a step that the ledger lacks, into step `f + 1` or later, it had not committed when it
//! spoke, so it still named these records; and it is leased nothing after it spoke. Before that, a
//! record could be in a step between `f` and `s`, and in neither word.
//!
//! A step that the lowest rank has committed alone may be undone by its loss. Records that are in
//! the ledger and also named by a member are therefore kept as that member's until the next step,
//! as after any report.
//!
//! **Invariant:** nothing is leased while there is an [`Takeover`].

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::{Generation, WorkerId};

use super::action::{Action, Membership, ToWorker};
use super::event::{ConnectionId, LaunchId};
use super::group::Group;
use super::history::JobHistory;
use super::job::{HELLO_WAIT, Job, Phase, RELEASE_WAIT, Timer};
use super::lease_table::LeaseTable;
use super::persisted::{PersistedJob, PersistedShutdown};
use super::restart::{Budget, Restarts};
use super::shards::Shards;
use super::time::Time;
use super::workers::{Disconnected, Launch};

/// A group that is being taken over.
#[derive(Debug, Default)]
pub(super) struct Takeover {
    /// Its generation had formed, so that it forms again is no news.
    pub(super) was_formed: bool,
    /// Members that are back and have not said what they hold.
    pub(super) awaiting_holdings: BTreeSet<WorkerId>,
    /// The others' steps.
    pub(super) steps: BTreeMap<WorkerId, u64>,
    /// This master has published a generation: no older one is of interest.
    pub(super) has_published: bool,
}

impl Job {
    /// The job of `record`, whose master died, at `now` since its start. Of each of
    /// [`PersistedJob::launches`] that does not run any more the end is to be told next.
    ///
    /// # Errors
    /// What in the record can't be; no job can be made of it.
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
        // A pod of which one was given up goes as a whole.
        let gone: BTreeSet<LaunchId> =
            record.launches.iter().filter(|l| l.gone).map(|l| l.launch).collect();
        let pod_of =
            |launch: LaunchId| launch.0.saturating_sub(1) / u64::from(job.spec.workers_per_pod);
        let gone: BTreeSet<u64> = gone.into_iter().map(pod_of).collect();
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
                None => job.set_timer(now + HELLO_WAIT, Timer::Hello(l.launch)),
                Some(_) if l.leaving => job.set_timer(now + RELEASE_WAIT, Timer::Kill(l.launch)),
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
        job.mark_dirty();
        if let Some(ending) = record.ending {
            job.restore_ending(ending)?;
            return Ok(job);
        }
        if record.stopping {
            job.phase = Phase::Stopping;
            job.set_timer(now + job.stop_wait(), Timer::Stop);
        }
        job.await_members(now, record.formed);
        Ok(job)
    }

    /// The processes of a job that is over may not have ended; all else is done.
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
            super::shutdown::name(ending.outcome)
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
            // Who works apart is no member: it is replaced, and the shards that it held are done
            // again.
            self.watch_reconnections(now);
        } else if !self.group.members.is_empty() || self.workers.disconnected().next().is_some() {
            self.takeover = Some(Takeover { was_formed, ..Takeover::default() });
            self.watch_reconnections(now);
        }
        self.launch_missing(now);
        self.reconcile(now);
    }

    /// No generation is used twice.
    pub(super) fn raise_generation_floor(&mut self, generation: Generation) {
        if generation > self.group.generation_floor {
            self.group.generation_floor = generation;
            self.mark_dirty();
        }
    }

    /// Takes `theirs`, which a worker has heard of from the master before this one, for the newest
    /// membership; whether it may.
    pub(super) fn adopt_membership(&mut self, now: Time, theirs: &Membership) -> bool {
        let Some(takeover) = self.takeover.as_mut().filter(|a| !a.has_published) else {
            return false;
        };
        if self.dataset.is_none() {
            return false;
        }
        // The record has nothing to be completed by what it costs.
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
        self.mark_dirty();
        self.count_eligible();
        self.log_event(format!(
            "generation {} has been published by the master before",
            theirs.generation
        ));
        for id in self.workers.connected.keys().copied().collect::<Vec<_>>() {
            self.send(id, ToWorker::Membership(theirs.clone()));
        }
        for id in &excluded {
            // What it holds it has from an older group; the members of this one say what is theirs.
            if let (Some(takeover), Some(leases)) = (&mut self.takeover, &mut self.leases) {
                takeover.awaiting_holdings.remove(id);
                takeover.steps.remove(id);
                leases.forget(*id);
            }
        }
        self.release_excluded(now, &excluded);
        true
    }

    /// Refuses a worker that came back, for good: another takes its place.
    pub(super) fn refuse_reconnection(
        &mut self,
        now: Time,
        connection: ConnectionId,
        launch: LaunchId,
        reason: &str,
    ) {
        self.push(Action::Refuse { connection, reason: reason.into() });
        self.forget_disconnected(launch);
        self.expect_exit(now, launch);
        self.launch_missing(now);
        self.on_awaited_returned(now);
    }

    /// One less is awaited.
    pub(super) fn on_awaited_returned(&mut self, now: Time) {
        if self.takeover.is_some() && !self.awaits_members() && !self.group.members.is_empty() {
            self.log_event(format!(
                "generation {}: all members that are left are back",
                self.group.generation
            ));
        }
        self.reconcile(now);
    }

    /// Leases again, once it is known what may be leased.
    pub(super) fn try_finish_takeover(&mut self, now: Time) {
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

/// What [`Job::restore`] relies on.
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
