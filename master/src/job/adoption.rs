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
//! **Invariant:** nothing is leased while there is an [`Adoption`].

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::{Generation, WorkerId};

use super::action::{Action, Membership, ToWorker};
use super::crew::{Away, Launch};
use super::event::{ConnectionId, LaunchId};
use super::group::Group;
use super::job::{HELLO_WAIT, Job, Phase, RELEASE_WAIT, Timer};
use super::queue::Records;
use super::record::{EndingRecord, JobRecord};
use super::restart::{Budget, Restarts};
use super::shards::Shards;
use super::story::Story;
use super::time::Time;

/// A group that is being taken over.
#[derive(Debug, Default)]
pub(super) struct Adoption {
    /// Its generation had formed, so that it forms again is no news.
    pub(super) was_formed: bool,
    /// Members that are back and have not said what they hold.
    pub(super) mute: BTreeSet<WorkerId>,
    /// The others' steps.
    pub(super) steps: BTreeMap<WorkerId, u64>,
    /// This master has published a generation: no older one is of interest.
    pub(super) has_published: bool,
}

impl Job {
    /// The job of `record`, whose master died, at `now` since its start. Of each of
    /// [`JobRecord::launches`] that does not run any more the end is to be told next.
    ///
    /// # Errors
    /// What in the record can't be; no job can be made of it.
    pub fn restore(mut record: JobRecord, now: Time) -> Result<Self, String> {
        check(&record)?;
        let mut job = Self::new_silent(record.spec);
        job.wanted = record.wanted;
        job.fresh = record.fresh;
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
        job.story = Story::restore(record.story);
        job.crew.launches_made = record.launches_made;
        if let Some(dataset) = record.dataset {
            job.records = Some(Records::new(Shards::cut(&dataset, &job.spec)?, job.spec.epochs));
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
            let away = Away {
                rank,
                joined: l.joined,
                holds_state: l.holds_state,
                since: now,
                known: None,
            };
            let launch = Launch {
                worker: l.worker,
                leaving: l.leaving || l.gone,
                retired: l.retired,
                away: may_return.then_some(away),
                index: l.index,
                ..Launch::default()
            };
            job.crew.launches.insert(l.launch, launch);
        }
        for l in record.launches {
            match l.worker {
                _ if l.gone => job.kill(l.launch),
                None => job.timer(now + HELLO_WAIT, Timer::Hello(l.launch)),
                Some(_) if l.leaving => job.timer(now + RELEASE_WAIT, Timer::Kill(l.launch)),
                Some(_) => {}
            }
        }
        job.group = Group {
            generation: record
                .membership
                .as_ref()
                .map_or_else(Generation::default, |m| m.generation),
            passed: record.generation,
            published: record.membership,
            before: record.before,
            ..Group::default()
        };
        let is_away = |id: &WorkerId| job.crew.members_away().any(|away| away == *id);
        job.group.lost = members.iter().filter(|id| !is_away(id)).copied().collect();
        job.group.members = members;
        job.touch();
        if let Some(ending) = record.ending {
            job.restore_ending(ending)?;
            return Ok(job);
        }
        if record.stopping {
            job.phase = Phase::Stopping;
            job.timer(now + job.stop_wait(), Timer::Stop);
        }
        job.await_members(now, record.formed);
        Ok(job)
    }

    /// The processes of a job that is over may not have ended; all else is done.
    fn restore_ending(&mut self, ending: EndingRecord) -> Result<(), String> {
        if let Some(records) = &mut self.records {
            let ledger = records.check(&ending.ledger)?;
            records.rebuild(self.step, ledger, |_| false);
        }
        self.story.error = ending.error;
        self.last_word = ending.last_word;
        self.phase = Phase::Ending(ending.outcome);
        self.say(format!(
            "the job was {} when its master died",
            super::ending::name(ending.outcome)
        ));
        self.end_now();
        Ok(())
    }

    fn await_members(&mut self, now: Time, was_formed: bool) {
        let (away, generation) = (self.crew.members_away().count(), self.group.generation);
        if self.group.members.is_empty() {
            self.say("another master goes on with the job; it knows of no group".into());
        } else {
            self.say(format!(
                "another master goes on with the job; generation {generation} has {away} members left"
            ));
        }
        if !self.spec.work.trains() {
            // Who works apart is no member: it is replaced, and the shards that it held are done
            // again.
            self.watch_returns(now);
        } else if !self.group.members.is_empty() || self.crew.away().next().is_some() {
            self.adoption = Some(Adoption { was_formed, ..Adoption::default() });
            self.watch_returns(now);
        }
        self.launch_missing(now);
        self.settle(now);
    }

    /// No generation is used twice.
    pub(super) fn pass_over(&mut self, generation: Generation) {
        if generation > self.group.passed {
            self.group.passed = generation;
            self.touch();
        }
    }

    /// Takes `theirs`, which a worker has heard of from the master before this one, for the newest
    /// membership; whether it may.
    pub(super) fn learn(&mut self, now: Time, theirs: &Membership) -> bool {
        let Some(adoption) = self.adoption.as_mut().filter(|a| !a.has_published) else {
            return false;
        };
        if self.dataset.is_none() {
            return false;
        }
        // The record has nothing to be completed by what it costs.
        adoption.was_formed = true;
        let members: Vec<WorkerId> = theirs.members.iter().map(|(id, _)| *id).collect();
        let before = std::mem::take(&mut self.group.members);
        let rank_of = |id: u64| (0..).zip(&members).find(|(_, m)| m.0 == id).map(|(rank, _)| rank);
        for (&launch, l) in &mut self.crew.launches {
            if let Some(away) = &mut l.away {
                away.rank = rank_of(launch.0);
            }
        }
        let mut excluded = Vec::new();
        for (&id, w) in &mut self.crew.workers {
            let rank = rank_of(id.0);
            if w.rank.is_some() && rank.is_none() {
                excluded.push(id);
            }
            w.rank = rank;
        }
        let may_live = |id: &WorkerId| {
            self.crew.workers.contains_key(id) || self.crew.members_away().any(|m| m == *id)
        };
        let lost = members.iter().filter(|id| !may_live(id)).copied().collect();
        let newest = members.iter().map(|id| id.0).max().unwrap_or_default();
        let newest = newest.next_multiple_of(u64::from(self.spec.workers_per_pod));
        self.crew.launches_made = self.crew.launches_made.max(newest);
        self.group = Group {
            generation: theirs.generation,
            passed: self.group.passed,
            before: (!theirs.abort && !before.is_empty()).then_some(before),
            members,
            published: Some(theirs.clone()),
            lost,
            ..Group::default()
        };
        self.touch();
        self.count_eligible();
        self.say(format!(
            "generation {} has been published by the master before",
            theirs.generation
        ));
        for id in self.crew.workers.keys().copied().collect::<Vec<_>>() {
            self.send(id, ToWorker::Membership(theirs.clone()));
        }
        for id in &excluded {
            // What it holds it has from an older group; the members of this one say what is theirs.
            if let (Some(adoption), Some(records)) = (&mut self.adoption, &mut self.records) {
                adoption.mute.remove(id);
                adoption.steps.remove(id);
                records.forget(*id);
            }
        }
        self.let_go(now, &excluded);
        true
    }

    /// Refuses a worker that came back, for good: another takes its place.
    pub(super) fn dismiss(
        &mut self,
        now: Time,
        connection: ConnectionId,
        launch: LaunchId,
        reason: &str,
    ) {
        self.push(Action::Refuse { connection, reason: reason.into() });
        self.miss(launch);
        self.excuse(now, launch);
        self.launch_missing(now);
        self.stop_awaiting(now);
    }

    /// One less is awaited.
    pub(super) fn stop_awaiting(&mut self, now: Time) {
        if self.adoption.is_some() && !self.awaits_members() && !self.group.members.is_empty() {
            self.say(format!(
                "generation {}: all members that are left are back",
                self.group.generation
            ));
        }
        self.settle(now);
    }

    /// Leases again, once it is known what may be leased.
    pub(super) fn conclude_adoption(&mut self, now: Time) {
        let Self { adoption: Some(adoption), records: Some(records), crew, .. } = self else {
            return;
        };
        let behind =
            |(id, step): (&WorkerId, &u64)| *step > self.step && crew.workers.contains_key(id);
        let settled = self.group.formed && !self.group.is_broken() && adoption.mute.is_empty();
        if !settled || crew.members_away().next().is_some() || adoption.steps.iter().any(behind) {
            return;
        }
        records.requeue();
        self.adoption = None;
        let (generation, step) = (self.group.generation, self.step);
        self.say(format!("generation {generation} is taken over at step {step}"));
        self.fill_all();
        self.settle(now);
    }
}

/// What [`Job::restore`] relies on.
fn check(record: &JobRecord) -> Result<(), String> {
    record.spec.check().map_err(|error| error.to_string())?;
    let JobRecord { spec, launches, launches_made, .. } = record;
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
