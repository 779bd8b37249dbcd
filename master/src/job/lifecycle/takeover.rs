//! Take-over: a new master continues with the group of a master that died.
//!
//! The group has continued without a master. Its members reconnect one by one, each with the id
//! that it had. When all have reconnected, the group continues under this master in the same
//! generation. A member that does not reconnect in time is lost, and a new generation is published
//! as after any loss.
//!
//! ```text
//!  persisted job ─► disconnected ──Connected{resume}─► connected ──Reconnected─► step ─┐
//!                      └─ timeout, process ended ──► lost                              ├─► over
//!                        lowest rank: Formed (ledger), Committed up to their steps ────┘
//! ```
//!
//! **The persisted job may be older than the group**, because writing it takes time. Then the group
//! has the newer information: each worker reports the newest membership that it knows, and the
//! newest of all counts, until this master publishes its own. Its members receive it, and other
//! workers are released.
//!
//! **The end of a take-over.** The lowest rank reports the ledger as of its step, and each member
//! reports its own step, which may be one more. The take-over ends when the ledger has reached the
//! steps of all members: from then on the master's step and ledger are as complete as those of the
//! master that died.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::limits::WORKERS_MAX;
use elasticdl_proto::{Generation, WorkerId};

use super::persisted::{PersistedJob, PersistedLaunch, PersistedShutdown};
use super::removal::RELEASE_WAIT;
use super::restart::{Budget, Restarts};
use super::state::{Phase, ReservedIds};
use super::takeover_state::Takeover;
use crate::job::action::{Action, MasterMessage, Membership};
use crate::job::event::{ConnectionId, LaunchId};
use crate::job::group::generation::Group;
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::reporting::history::JobHistory;
use crate::job::text::counted;
use crate::job::time::Time;
use crate::job::workers::pod::PodId;
use crate::job::workers::slot_use::SlotUse;
use crate::job::workers::state::{Disconnected, Launch, LaunchState, Worker};
use crate::job::workers::table::{launch_of, worker_of};

impl Job {
    /// Restores the job of `record`, whose master died, at `now` since its start. The caller
    /// reports next the end of each of [`PersistedJob::launches`] that does not run any more.
    ///
    /// # Errors
    /// The first inconsistency of the persisted job.
    pub fn restore(record: PersistedJob, now: Time) -> Result<Self, String> {
        check(&record)?;
        let mut job = Self::new_silent(record.spec);
        job.lifecycle.wanted = record.wanted;
        job.lifecycle.requested = record.requested;
        record.wanted_max.into_iter().for_each(|most| job.lifecycle.limit_autoscale(most));
        job.lifecycle.bad_hosts = record.bad_hosts;
        job.lifecycle.initial_launches_left = record.initial_launches_left;
        job.lifecycle.reserved = ReservedIds {
            launches: record.launches_reserved,
            generations: record.generations_reserved,
        };
        job.lifecycle.masters = record.masters.max(1).saturating_add(1);
        let budget = Budget {
            counted: record.failures,
            since_progress: record.failures_since_progress,
            kills_since_progress: record.kills_since_progress,
            progress: record.progress_at_failure,
        };
        job.lifecycle.restarts = Restarts::new(now, job.spec.max_worker_restarts, budget);
        job.lifecycle.is_suspended = record.suspended;
        job.lifecycle.stop_reason = record.stop_reason;
        job.reporting = JobHistory::restore(record.history);
        if let Some(files) = record.dataset {
            job.data.describe(files, record.order, &job.spec)?;
        }
        job.data.restore(record.parameters, record.step);
        job.data.restore_results(record.results)?;
        if job.spec.options.work.trains() || record.ending.is_some() {
            job.data.restore_ledger(&record.ledger)?;
        }
        job.workers.raise_launches_made(record.launches_made);
        job.restore_launches(now, &record.launches, record.membership.as_ref());
        let returning: BTreeSet<WorkerId> = job.workers.disconnected_members().collect();
        let is_lost = |id| !returning.contains(&id);
        job.group =
            Group::restored(record.membership, record.generation, record.previous_ring, is_lost);
        if record.suspended && record.launches.is_empty() {
            job.group.excuse_losses();
        }
        job.out.mark_dirty();
        if let Some(ending) = record.ending {
            job.restore_ending(now, ending);
            return Ok(job);
        }
        if record.stopping {
            job.lifecycle.phase = Phase::Stopping;
            job.out.set_timer(now + job.stop_wait(), Timer::Stop);
        }
        job.watch_deadline();
        job.await_members(now, record.formed);
        if record.stopping {
            job.log_stop_awaits_members();
        }
        Ok(job)
    }

    fn restore_launches(
        &mut self,
        now: Time,
        launches: &[PersistedLaunch],
        membership: Option<&Membership>,
    ) {
        // A pod of which one worker was forgotten is killed as a whole.
        let pod_of = |l: &PersistedLaunch| PodId::of(l.launch, self.spec.workers_per_pod);
        let gone: BTreeSet<PodId> = launches.iter().filter(|l| l.gone).map(pod_of).collect();
        let is_gone: Vec<bool> = launches.iter().map(|l| gone.contains(&pod_of(l))).collect();
        let members = membership.map_or(&[][..], |m| &m.members);
        for (l, &is_gone) in launches.iter().zip(&is_gone) {
            let is_member = |(_, (id, _)): &(u32, &(WorkerId, _))| *id == worker_of(l.launch);
            let disconnected = Disconnected {
                rank: (0..).zip(members).find(is_member).map(|(rank, _)| rank),
                joined: l.joined,
                holds_state: l.holds_state,
                since: now,
                last_known: None,
            };
            let state = match l.worker {
                Some(_) if is_gone => LaunchState::Forgotten,
                Some(_) => LaunchState::Disconnected(disconnected),
                // The writer may have known a member only by the membership of another.
                None if (l.found || disconnected.rank.is_some()) && !is_gone => {
                    LaunchState::Unconfirmed(disconnected)
                }
                None => LaunchState::Starting,
            };
            let slot_use = SlotUse::restored(l.leaving || is_gone, l.retired);
            let launch = Launch::restored(l.slot, state, slot_use, l.ruled);
            self.workers.restore(l.launch, launch);
        }
        for (l, is_gone) in launches.iter().zip(is_gone) {
            match l.worker {
                _ if is_gone => self.kill(l.launch),
                None => self.await_hello(now, l.launch),
                Some(_) if l.leaving => {
                    self.out.set_timer(now + RELEASE_WAIT, Timer::Kill(l.launch));
                }
                Some(_) => {}
            }
        }
    }

    /// Restores a job that is over, whose processes may still run.
    fn restore_ending(&mut self, now: Time, ending: PersistedShutdown) {
        self.reporting.restore_ending(ending.error, ending.final_report);
        self.lifecycle.was_stopping = ending.was_stopping;
        self.lifecycle.phase = Phase::Ending(ending.outcome);
        self.log_event(format!(
            "the job was {} when its master died",
            super::shutdown::name(ending.outcome)
        ));
        self.await_ends(now, ending.outcome);
    }

    fn await_members(&mut self, now: Time, was_formed: bool) {
        let has_group = !self.group.members().is_empty();
        self.log_event(if has_group {
            format!(
                "a new master resumes the job; generation {} has {} left",
                self.group.generation(),
                counted(self.workers.disconnected_members().count() as u64, "member")
            )
        } else {
            "a new master resumes the job; there is no group yet".into()
        });
        // A worker of an inference job is no member: it is replaced, and the shards that it held
        // are processed again.
        if self.spec.options.work.trains() && (has_group || self.workers.has_disconnected()) {
            self.lifecycle.takeover = Some(Takeover::new(was_formed));
        }
        self.group.note_progress(now);
        self.watch_reconnections(now);
        self.launch_missing(now);
        self.reconcile(now);
    }

    /// Raises the generation floor: no generation is used twice.
    pub(super) fn raise_generation_floor(&mut self, generation: Generation) {
        if self.group.raise_floor(generation) {
            self.out.mark_dirty();
        }
    }

    /// Adopts `theirs`, which a worker knows from the previous master, as the newest membership.
    /// Returns whether it was adopted.
    pub(super) fn adopt_membership(&mut self, now: Time, theirs: &Membership) -> bool {
        let Some(takeover) = self.lifecycle.takeover.as_mut().filter(|a| !a.has_published) else {
            return false;
        };
        if self.data.files().is_none() {
            return false;
        }
        // Its pause is not measured: the persisted history does not hold this membership.
        takeover.was_formed = true;
        let Self { workers, group, .. } = self;
        let ranks: BTreeMap<WorkerId, u32> =
            theirs.members.iter().map(|(id, _)| *id).zip(0..).collect();
        let rank_of = |id| ranks.get(&id).copied();
        workers.assign_ranks_of_disconnected(rank_of);
        let excluded = workers.assign_ranks(rank_of);
        group.adopt(theirs, |id| {
            !workers.is_connected(id) && workers.get_disconnected(launch_of(id)).is_none()
        });
        workers.raise_launches_made(ranks.keys().map(|id| id.0).max().unwrap_or_default());
        self.out.mark_dirty();
        self.log_event(format!(
            "generation {} has been published by the master before",
            theirs.generation
        ));
        for &id in self.workers.select(Worker::is_member).iter().chain(&excluded) {
            self.send(id, MasterMessage::Membership(theirs.clone()));
        }
        for &id in &excluded {
            // It may be ahead of the members of this group.
            if let Some(takeover) = &mut self.lifecycle.takeover {
                takeover.forget(id);
            }
        }
        self.hold_in_reserve(now, &excluded);
        true
    }

    /// Refuses a reconnecting worker permanently: a replacement is started.
    pub(super) fn refuse_reconnection(
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
        let is_taking_over = self.lifecycle.takeover.is_some();
        if is_taking_over && !self.awaits_members() && !self.group.members().is_empty() {
            self.log_event(format!(
                "generation {}: all members that are left are back",
                self.group.generation()
            ));
        }
        self.reconcile(now);
    }

    /// Ends the take-over, once the ledger has reached the steps of all members.
    pub(crate) fn try_finish_takeover(&mut self, now: Time) {
        let Self { lifecycle, data, workers, group, .. } = self;
        let known = data.step();
        let Some(takeover) = &lifecycle.takeover else { return };
        let is_settled = group.is_formed()
            && !group.is_broken()
            && !workers.has_disconnected_members()
            && takeover.has_reached(known, |id| workers.is_connected(id));
        if !is_settled {
            return;
        }
        lifecycle.takeover = None;
        self.log_event(format!(
            "generation {} is taken over at step {known}",
            self.group.generation()
        ));
        self.reconcile(now);
    }
}

/// Validates what [`Job::restore`] relies on.
fn check(record: &PersistedJob) -> Result<(), String> {
    record.spec.check().map_err(|error| error.to_string())?;
    let PersistedJob { spec, launches, launches_made, .. } = record;
    if !spec.limits().contains(&record.wanted) {
        return Err(format!("{} workers are wanted", record.wanted));
    }
    let members = record.membership.as_ref().map_or(&[][..], |m| &m.members);
    let distinct: BTreeSet<WorkerId> = members.iter().map(|(id, _)| *id).collect();
    // More than `max_workers` may still be members after that was lowered.
    if distinct.len() != members.len() || members.len() > WORKERS_MAX as usize {
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
