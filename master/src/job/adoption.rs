//! How a master takes over the group of one that died.
//!
//! The group has gone on without a master, or waits for records. Its members come back one by one, each under the name
//! that it had. When all have, the group is this master's, in the generation that it was in; whoever does not come back
//! in time is lost, and there is a new generation as after any loss.
//!
//! ```text
//!  record ──restore──► members away ──Connected{resume}──► back ──Holding──► told what it holds ─┐
//!                          └─ time is up, process ended ──► lost                                 ├─► leases again
//!                              lowest rank: Formed (its ledger), Committed up to their steps ────┘
//! ```
//!
//! **What may be leased** is what is neither in the ledger nor held by a member. The ledger is the lowest rank's word, at
//! step `f`; what each member holds is its own word, at its step `s`; they come at different times. Once `f ≥ s` for
//! all members nothing is overlooked: what a member has put into a step that the ledger lacks, into step `f + 1` or later,
//! it had not committed when it spoke, so it still named these records; and it is leased nothing after it spoke. Before
//! that, a record could be in a step between `f` and `s`, and in neither word.
//!
//! A step that the lowest rank has committed alone may be undone by its loss. Records that are in the ledger and also
//! named by a member are therefore kept as that member's until the next step, as after any report.
//!
//! **Invariant:** nothing is leased while there is an [`Adoption`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{RecordRange, WorkerId};

use super::action::{Action, ToWorker};
use super::crew::{Away, Crew, Fate, Launch};
use super::event::{ConnectionId, LaunchId, Resume};
use super::group::Group;
use super::job::{Job, Phase, RELEASE_WAIT, Timer};
use super::queue::Records;
use super::record::{EndingRecord, JobRecord};
use super::restart::Restarts;
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
}

impl Job {
    /// The job of `record`, whose master died, at `now` since its start. Of each of [`JobRecord::launches`] that does not
    /// run any more the end is to be told next.
    ///
    /// # Errors
    /// What in the record can't be; no job can be made of it.
    pub fn restore(record: JobRecord, now: Time) -> Result<Self, String> {
        check(&record)?;
        let mut job = Self::new_silent(record.spec);
        job.wanted = record.wanted;
        job.fresh = record.fresh;
        job.parameters = record.parameters;
        job.step = record.step;
        job.restarts = Restarts::new(job.spec.max_worker_restarts, record.failures);
        job.story = Story::restore(record.story);
        job.crew = Crew {
            launches_made: record.launches_made,
            workers_made: record.workers_made,
            ..Crew::default()
        };
        if let Some(dataset) = record.dataset {
            job.records = Some(Records::new(Shards::cut(&dataset, &job.spec)?, job.spec.epochs));
            job.dataset = Some(dataset);
        }
        let members = record.membership.as_ref().map_or(&[][..], |m| &m.members);
        let members: Vec<WorkerId> = members.iter().map(|(id, _)| *id).collect();
        for l in record.launches {
            let rank = (0..).zip(&members).find(|(_, id)| Some(**id) == l.worker).map(|(rank, _)| rank);
            // One that was on its way to be a member has not cost much: another takes its place.
            let returns = !l.gone && (rank.is_some() || (l.leaving && l.joined.is_some()));
            let away = Away { rank, joined: l.joined, holds_state: l.holds_state };
            let launch = Launch {
                worker: l.worker,
                fate: Fate::Open,
                leaving: l.leaving || !(returns || l.retired),
                retired: l.retired,
                killed: false,
                away: returns.then_some(away),
                index: l.index,
                ..Launch::default()
            };
            job.crew.launches.insert(l.launch, launch);
            match rank {
                _ if !returns => job.kill(l.launch),
                None => job.timer(now + RELEASE_WAIT, Timer::Kill(l.launch)),
                Some(_) => {}
            }
        }
        job.group = Group {
            generation: record.generation,
            published: record.membership,
            before: record.before,
            ..Group::default()
        };
        let is_away = |id: &WorkerId| job.crew.members_away().any(|(_, away)| away == *id);
        job.group.lost = members.iter().filter(|id| !is_away(id)).copied().collect();
        job.group.members = members;
        job.touch();
        if let Some(ending) = record.ending {
            job.restore_ending(ending)?;
            return Ok(job);
        }
        if record.stopping {
            job.phase = Phase::Stopping;
            job.timer(now + super::ending::STOP_WAIT, Timer::Stop);
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
        self.say(format!("the job was {} when its master died", super::ending::name(ending.outcome)));
        self.end_now();
        Ok(())
    }

    fn await_members(&mut self, now: Time, was_formed: bool) {
        let (away, generation) = (self.crew.members_away().count(), self.group.generation);
        if self.group.members.is_empty() {
            self.say("another master goes on with the job; there was no group yet".into());
        } else {
            self.say(format!(
                "another master goes on with the job; generation {generation} has {away} members left"
            ));
            self.adoption = Some(Adoption { was_formed, ..Adoption::default() });
            self.timer(now + self.return_wait(), Timer::Return);
        }
        self.launch_missing(now);
        self.settle(now);
    }

    /// Workers that look for their master look once a second at least; one that is stopped for less than the timeout
    /// is to have its chance.
    fn return_wait(&self) -> Duration {
        let silence = self.spec.worker_timeout.unwrap_or_default();
        (silence + RETURN_SLACK).max(RETURN_WAIT_MIN)
    }

    /// Whether the group can't be judged yet, because members may be on their way.
    pub(super) fn awaits_members(&self) -> bool {
        self.adoption.is_some() && self.crew.members_away().next().is_some()
    }

    /// A worker is back whose stream was open to the master before this one.
    pub(super) fn on_returned(
        &mut self,
        now: Time,
        connection: ConnectionId,
        launch: LaunchId,
        address: SocketAddr,
        pid: u32,
        resume: Resume,
    ) {
        if resume.generation > self.group.generation {
            // The record is older than the group. It will form anew; its generation must be newer than all that there were.
            self.group.generation = resume.generation;
            self.touch();
            let reason = "this master's record of the job is older than this worker's group";
            return self.push(Action::Refuse { connection, reason: reason.into() });
        }
        let unlike = self.parameters.is_some() && resume.parameters != self.parameters;
        let known = self.crew.launches.get(&launch).is_some_and(|l| l.worker == Some(resume.worker));
        let worker = match known && !unlike {
            true => self.crew.readmit(now, launch, address, pid),
            false => None,
        };
        let Some(worker) = worker else {
            let reason = "this master has given this worker up, or never knew it";
            return self.push(Action::Refuse { connection, reason: reason.into() });
        };
        self.touch();
        self.count_eligible();
        self.watch_silence(now);
        self.push(Action::Admit { connection, worker });
        let published = self.group.published.clone().filter(|m| m.generation > resume.generation);
        if let Some(membership) = published {
            self.send(worker, ToWorker::Membership(membership));
        }
        if self.crew.workers[&worker].rank.is_none() {
            // It was let go: it ends at the switch.
            return;
        }
        if self.phase == Phase::Stopping {
            self.send(worker, ToWorker::Drain);
        }
        if let Some(adoption) = &mut self.adoption {
            adoption.mute.insert(worker);
        }
        if !self.awaits_members() {
            self.say(format!("generation {}: all members that are left are back", self.group.generation));
            self.settle(now);
        }
    }

    /// A worker that is back says what it holds.
    pub(super) fn on_holding(&mut self, now: Time, worker: WorkerId, step: u64, ranges: &[RecordRange]) {
        let Self { adoption: Some(adoption), records: Some(records), .. } = self else {
            return;
        };
        if !adoption.mute.contains(&worker) {
            return;
        }
        if let Err(wrong) = records.hold(worker, ranges) {
            return self.fail_worker(now, worker, &format!("it holds {wrong}, which can't be"));
        }
        adoption.mute.remove(&worker);
        adoption.steps.insert(worker, step);
        self.conclude_adoption(now);
    }

    /// A worker that was expected back is not coming.
    pub(super) fn miss(&mut self, launch: LaunchId) {
        let Some(l) = self.crew.launches.get_mut(&launch) else {
            return;
        };
        let member = l.away.take().is_some_and(|away| away.rank.is_some());
        let in_order = l.leaving || l.retired;
        if let Some(worker) = l.worker.filter(|_| member) {
            if in_order { &mut self.group.left } else { &mut self.group.lost }.push(worker);
            self.touch();
        }
    }

    /// Whoever is not back by now is lost.
    pub(super) fn on_return_due(&mut self, now: Time) {
        let away: Vec<(LaunchId, WorkerId)> = self.crew.members_away().collect();
        for (launch, worker) in away {
            self.say(format!("worker {worker} has not come back and is taken out"));
            self.miss(launch);
            self.group.hung = true;
            self.kill(launch);
        }
        self.settle(now);
    }

    /// Leases again, once it is known what may be leased.
    pub(super) fn conclude_adoption(&mut self, now: Time) {
        let Self { adoption: Some(adoption), records: Some(records), crew, .. } = self else {
            return;
        };
        let behind = |(id, step): (&WorkerId, &u64)| *step > self.step && crew.workers.contains_key(id);
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
    let JobRecord { spec, launches, launches_made, workers_made, .. } = record;
    if !(spec.min_workers..=spec.max_workers).contains(&record.wanted) {
        return Err(format!("{} workers are wanted", record.wanted));
    }
    let members = record.membership.as_ref().map_or(&[][..], |m| &m.members);
    let distinct: BTreeSet<WorkerId> = members.iter().map(|(id, _)| *id).collect();
    if distinct.len() != members.len() || members.len() > spec.max_workers as usize {
        return Err("the membership is no group".into());
    }
    if record.membership.as_ref().is_some_and(|m| m.generation > record.generation || m.members.is_empty()) {
        return Err("the membership is not of this job".into());
    }
    if record.dataset.is_none() && !members.is_empty() {
        return Err("there is a group, but no data set".into());
    }
    let names: BTreeSet<LaunchId> = launches.iter().map(|l| l.launch).collect();
    let workers = launches.iter().filter_map(|l| l.worker).chain(distinct);
    if names.len() != launches.len() || names.last().is_some_and(|l| l.0 > *launches_made) {
        return Err("its launches are not those that were made".into());
    }
    if workers.max().is_some_and(|w| w.0 > *workers_made) {
        return Err("its workers are not those that were made".into());
    }
    Ok(())
}

/// A worker without a master looks for one once a second, and then it has to be heard.
const RETURN_SLACK: Duration = Duration::from_secs(2);
const RETURN_WAIT_MIN: Duration = Duration::from_secs(3);
