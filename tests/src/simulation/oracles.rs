//! What must hold, judged from outside: the books know what was said and done, and nothing of how
//! the cores reckon.
//!
//! **Records.** The final parameters count each record of each epoch exactly once (with `max_steps`
//! or after a stop: at most once, and as many as the ledger says); all members of the last group
//! end with the same.
//!
//! **Steps.** Say that a rank *commits* step `s` in generation `g` when its state goes from `s - 1`
//! to `s`. Then:
//!
//! * Within a generation all ranks that commit a step commit the same.
//! * Once a step has been built upon (somebody has committed the next one on top of it) it is
//!   *stable*: nothing else is ever committed in its place, and no later group begins below it, as
//!   long as anybody that may be a member has a state.
//! * A step that is not stable may be undone, but only together with all that hold it: who is in
//!   the next group brings what it has, and the highest step wins. So each step has one committed
//!   result that survives.
//! * A newcomer is given the state of a step that every member of its donor's group has committed.
//! * A group that begins from nothing, for all that had a state are gone, begins a new *era*; the
//!   rules hold within each. So does one that goes on from an older state, which a newcomer had
//!   fetched, for all that had the newer one are gone.
//! * A rank that the master has taken out, and that does not know yet, may complete the step under
//!   way in its old group, for its peers have sent their parts before they left. It is no member of
//!   the newer group: a member of a newer group commits in no older one.
//!
//! **Leases.** A record is leased to a member of the newest generation, and to nobody while a
//! member of it holds that record or has absorbed it.
//!
//! **The fence.** What the dead say, what is said of older generations, and what is said for the
//! group by another than its lowest rank changes nothing in the master.
//!
//! **Authority.** Generations grow by one. Joins and orderly leaves break no links. Nobody that no
//! fault has touched is taken out. A group whose members and links are well is never aborted,
//! whatever happens to the master and to its streams. Nobody outlives the job.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use elasticdl_master::job::{
    Event as JobEvent, FromWorker, LaunchId, Membership, Outcome, ToWorker,
};
use elasticdl_proto::{Generation, RecordRange, WorkerId};
use elasticdl_worker::core::session::Exit;

use super::clock::Micros;
use super::process::Process;
use super::world::World;

/// What was said and done.
#[derive(Debug)]
pub(super) struct Books {
    seed: u64,
    published: Vec<Membership>,
    /// The last one that some master has gone on with.
    newest: Option<Membership>,
    /// Of the last one that was published.
    generation: Generation,
    /// Generations that agreed on a state, at least on one rank.
    lines: BTreeMap<u64, Line>,
    eras: u64,
    /// Digests of stable steps, by era and step.
    stable: BTreeMap<(u64, u64), u64>,
    leased: BTreeMap<WorkerId, Vec<RecordRange>>,
    processes: BTreeMap<WorkerId, usize>,
    /// Whose stream ended, at the master, and is not open again; and `lost`.
    gone: BTreeSet<WorkerId>,
    /// Whom the master has evicted or told the system to kill, and whose process it knows to have
    /// ended.
    lost: BTreeSet<WorkerId>,
    finals: BTreeMap<(usize, Generation), Final>,
    /// What workers said lately.
    heard: VecDeque<(WorkerId, FromWorker)>,
    /// Processes that were told to end.
    told_to_end: BTreeSet<usize>,
    /// Who was told to end by the action before.
    told_off: Option<(WorkerId, String)>,
    pub(super) tally: Tally,
}

/// What one generation did.
#[derive(Debug)]
struct Line {
    era: u64,
    /// The era before, where this generation begins one with an older state.
    came_from: u64,
    formed_at: Micros,
    members: Vec<WorkerId>,
    /// Step and digest that it began with.
    base: (u64, u64),
    /// Digests by step.
    commits: BTreeMap<u64, u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Final {
    parameters: Vec<u8>,
    step: u64,
    counted: u64,
    repeated: u64,
}

/// How often what happened, over one run or many: so that a test can tell that the storm reaches
/// every corner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// Jobs run.
    pub runs: u64,
    /// Events handled.
    pub events: u64,
    /// Faults that hit somebody.
    pub faults: u64,
    /// Generations published.
    pub generations: u64,
    /// Commits of a step on a rank.
    pub commits: u64,
    /// Commits of a step that another generation had committed otherwise: it was undone with all
    /// that held it.
    pub redone: u64,
    /// Commits by ranks that were not in the newest group any more.
    pub zombie_commits: u64,
    /// Ranks that were a step behind a new group and got that step's result.
    pub repaired_by_result: u64,
    /// Ranks that got the state.
    pub repaired_by_state: u64,
    /// States that newcomers got beside the ring.
    pub fetched: u64,
    /// Steps' results that they got after that.
    pub followed: u64,
    /// Beginnings from nothing, beyond the first of a job.
    pub begun_again: u64,
    /// Checkpoints that were completed, and those that a group began with.
    pub kept: u64,
    /// See `kept`.
    pub restored: u64,
    /// Groups that went on from an older state, for all that had the newer one were gone.
    pub gone_back: u64,
    /// Masters that were killed.
    pub masters_crashed: u64,
    /// Workers that the master has taken out.
    pub evicted: u64,
    /// Workers that came back to a master after their stream had ended.
    pub returned: u64,
    /// Storms in which nothing but the master, its streams, its records and the storage suffered.
    pub control_storms: u64,
    /// Words said again to the master that the fence had to hold back.
    pub fenced: u64,
    /// Jobs that the user stopped before their end.
    pub stopped: u64,
    /// Steps of ranks that began over NCCL, those amid which it failed, and groups of ranks that it
    /// was given up for.
    pub nccl_steps: u64,
    /// See `nccl_steps`.
    pub nccl_failures: u64,
    /// See `nccl_steps`.
    pub nccl_given_up: u64,
    /// Pods of which one failed while others ran.
    pub pods_failed: u64,
}

impl Tally {
    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        let Self { runs, events, faults, generations, commits, redone, zombie_commits, .. } = other;
        self.runs += runs;
        self.events += events;
        self.faults += faults;
        self.generations += generations;
        self.commits += commits;
        self.redone += redone;
        self.zombie_commits += zombie_commits;
        self.repaired_by_result += other.repaired_by_result;
        self.repaired_by_state += other.repaired_by_state;
        self.fetched += other.fetched;
        self.followed += other.followed;
        self.begun_again += other.begun_again;
        self.kept += other.kept;
        self.restored += other.restored;
        self.gone_back += other.gone_back;
        self.masters_crashed += other.masters_crashed;
        self.evicted += other.evicted;
        self.returned += other.returned;
        self.control_storms += other.control_storms;
        self.fenced += other.fenced;
        self.stopped += other.stopped;
        self.nccl_steps += other.nccl_steps;
        self.nccl_failures += other.nccl_failures;
        self.nccl_given_up += other.nccl_given_up;
        self.pods_failed += other.pods_failed;
    }
}

impl Books {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            seed,
            published: Vec::new(),
            newest: None,
            generation: Generation::default(),
            lines: BTreeMap::new(),
            eras: 0,
            stable: BTreeMap::new(),
            leased: BTreeMap::new(),
            processes: BTreeMap::new(),
            gone: BTreeSet::new(),
            lost: BTreeSet::new(),
            finals: BTreeMap::new(),
            heard: VecDeque::new(),
            told_to_end: BTreeSet::new(),
            told_off: None,
            tally: Tally { runs: 1, ..Tally::default() },
        }
    }

    /// Whether it was lost.
    pub(super) fn on_admitted(&mut self, worker: WorkerId, p: usize) -> bool {
        self.processes.insert(worker, p);
        self.tally.returned += u64::from(self.gone.remove(&worker));
        self.lost.remove(&worker)
    }

    /// The worker may come back.
    pub(super) fn on_stream_end(&mut self, worker: WorkerId) {
        self.gone.insert(worker);
    }

    pub(super) fn on_gone(&mut self, worker: WorkerId) {
        self.gone.insert(worker);
        self.lost.insert(worker);
    }

    /// A worker without a stream will not be taken back.
    pub(super) fn on_killed(&mut self, worker: WorkerId) {
        if self.gone.contains(&worker) {
            self.lost.insert(worker);
        }
    }

    /// The newest generation that has been published.
    pub(super) fn newest_generation(&self) -> Generation {
        self.newest.as_ref().map_or_else(Generation::default, |m| m.generation)
    }

    /// What the master said may not have been heard; what workers hold they tell the next one.
    pub(super) fn on_master_crash(&mut self) {
        self.leased.clear();
        self.tally.masters_crashed += 1;
    }

    pub(super) fn on_said(&mut self, worker: WorkerId, message: &FromWorker) {
        if let FromWorker::Holding { ranges, .. } = message {
            self.leased.insert(worker, ranges.clone());
        }
        if !matches!(message, FromWorker::Alive(_)) {
            self.heard.push_back((worker, message.clone()));
            if self.heard.len() > HEARD_MAX {
                self.heard.pop_front();
            }
        }
    }

    /// Whether a group has committed this step so.
    pub(super) fn has_committed(&self, generation: u64, step: u64, digest: u64) -> bool {
        let line = self.lines.get(&generation);
        line.is_some_and(|line| {
            line.base == (step, digest) || line.commits.get(&step) == Some(&digest)
        })
    }

    pub(super) fn begin_era(&mut self) -> u64 {
        self.eras += 1;
        self.tally.begun_again += u64::from(self.eras > 1);
        self.eras
    }

    pub(super) fn has_finished(&self, p: usize) -> bool {
        let newest = self.newest.as_ref().map(|m| m.generation);
        newest.is_some_and(|generation| self.finals.contains_key(&(p, generation)))
    }

    /// The process of the lowest rank of the newest generation.
    pub(super) fn first_member(&self) -> Option<usize> {
        let (first, _) = self.newest.as_ref()?.members.first()?;
        self.processes.get(first).copied()
    }
}

impl World {
    pub(super) fn on_process_gone(&mut self, launch: LaunchId) {
        let pod = self.process_of(launch).map(|p| self.pod(p)).unwrap_or_default();
        for worker in pod.filter_map(|p| self.processes[p].worker).collect::<Vec<_>>() {
            self.books.on_gone(worker);
        }
    }

    // ---- what the master says ----

    pub(super) fn forget_told_off(&mut self) {
        self.books.told_off = None;
    }

    pub(super) fn check_word(&mut self, worker: WorkerId, word: &ToWorker) {
        self.books.told_off = None;
        match word {
            ToWorker::Lease(ranges) => self.check_lease(worker, ranges),
            ToWorker::Membership(membership) => self.check_membership(membership),
            ToWorker::Shutdown(reason) => {
                self.books.told_off = Some((worker, reason.clone()));
                self.books.told_to_end.extend(self.books.processes.get(&worker));
            }
            ToWorker::Describe
            | ToWorker::Drain
            | ToWorker::Fetch(_)
            | ToWorker::KeepCheckpoint
            | ToWorker::Prepare(_)
            | ToWorker::Suspend => {}
        }
        // What has waited for a record may be for somebody who has gone meanwhile.
        if self.books.gone.contains(&worker) && !self.master.has_waited {
            self.violate(format!("the master speaks to worker {worker}, which is gone: {word:?}"));
        }
    }

    fn check_membership(&mut self, membership: &Membership) {
        let last = self.books.newest.as_ref();
        if last == Some(membership) {
            return;
        }
        if self.books.published.contains(membership) {
            // Those after it nobody has heard of who is left.
            self.books.newest = Some(membership.clone());
            if !self.setting.keeps_late {
                self.violate(format!(
                    "generation {} is published a second time",
                    membership.generation
                ));
            }
            return;
        }
        let next = self.books.generation.next();
        let gone = |m: &Membership| m.members.iter().any(|(id, _)| self.books.gone.contains(id));
        // One that a master has written down and told to nobody is told by the next one, or is used
        // up; whoever is lost meanwhile is in it.
        let is_first_master = self.books.tally.masters_crashed == 0;
        let is_next =
            membership.generation == next || (membership.generation > next && !is_first_master);
        let wrong = if !is_next {
            Some(format!("generation {} is published, and {next} is due", membership.generation))
        } else if (is_first_master && gone(membership)) || membership.members.is_empty() {
            Some(format!("generation {next} has members that are gone, or none: {membership:?}"))
        } else if is_first_master && !membership.abort && last.is_some_and(gone) {
            Some(format!("generation {next} does not abort, and a member is gone: {membership:?}"))
        } else {
            None
        };
        let aborts_for_nothing = membership.abort && self.is_unharmed(last);
        self.books.generation = membership.generation;
        self.books.newest = Some(membership.clone());
        self.books.published.push(membership.clone());
        self.books.tally.generations += 1;
        wrong.into_iter().for_each(|wrong| self.violate(wrong));
        if aborts_for_nothing {
            self.violate(format!(
                "generation {next} aborts a group whose members and links are well"
            ));
        }
    }

    /// Whether a group has formed, all its members live, no fault has touched them or what is
    /// between them, and no link of theirs has broken. What happens to the master, or between it
    /// and them, is no such fault.
    fn is_unharmed(&self, group: Option<&Membership>) -> bool {
        let is_well = |id: &WorkerId| {
            let process = self.books.processes.get(id).map(|&p| &self.processes[p]);
            process.is_some_and(|process| {
                let is_intact = group.is_some_and(|m| process.broke_in < m.generation);
                process.is_alive() && !process.is_doomed && !process.is_blemished && is_intact
            })
        };
        // What the master knows of who waits is older than a heartbeat.
        let grace = self.setting.spec.worker_timeout.unwrap_or_default().as_micros() as Micros / 4;
        let has_formed = group.is_some_and(|m| {
            let line = self.books.lines.get(&m.generation.0);
            line.is_some_and(|line| line.formed_at + grace <= self.clock.now())
        });
        has_formed && group.is_some_and(|m| m.members.iter().all(|(id, _)| is_well(id)))
    }

    /// A master whose record is old goes on with an older group, if nobody who comes back has heard
    /// of a newer one.
    fn note_what_master_goes_on_with(&mut self) {
        let generation = self.master.job.status(self.time()).generation;
        let is_older = |m: &Membership| m.generation > generation;
        if self.setting.keeps_late && self.books.newest.as_ref().is_some_and(is_older) {
            let older = self.books.published.iter().find(|m| m.generation == generation);
            self.books.newest = older.cloned();
        }
    }

    fn check_lease(&mut self, worker: WorkerId, ranges: &[RecordRange]) {
        self.note_what_master_goes_on_with();
        let members = match self.books.newest.as_ref() {
            Some(newest) => newest.members.iter().map(|(id, _)| *id).collect(),
            None => Vec::new(),
        };
        if !members.contains(&worker) {
            return self
                .violate(format!("{ranges:?} are leased to worker {worker}, which is no member"));
        }
        for &range in ranges {
            for member in &members {
                let state = self
                    .books
                    .processes
                    .get(member)
                    .and_then(|&p| self.processes[p].trainer.state());
                let missing =
                    state.map_or_else(|| vec![range], |state| state.ledger.missing_of(range));
                if missing != [range] {
                    let what = format!(
                        "{range} is leased to worker {worker}; worker {member} has absorbed it"
                    );
                    return self.violate(what);
                }
                let leased = self.books.leased.get(member).map_or(&[][..], Vec::as_slice);
                let overlaps = |other: &&RecordRange| {
                    other.epoch == range.epoch && other.start < range.end && range.start < other.end
                };
                if let Some(held) = leased.iter().find(overlaps) {
                    let what = format!(
                        "{range} is leased to worker {worker}; worker {member} holds {held}"
                    );
                    return self.violate(what);
                }
            }
        }
        self.books.leased.entry(worker).or_default().extend(ranges);
    }

    /// The master ends a worker's stream.
    pub(super) fn check_eviction(&mut self, worker: WorkerId) {
        self.books.tally.evicted += 1;
        self.storm.has_harmed = true;
        if let Some((other, reason)) = self.books.told_off.take()
            && other == worker
        {
            return self.violate(format!("the master does not believe worker {worker}: {reason}"));
        }
        let Some(&p) = self.books.processes.get(&worker) else { return };
        let Process { is_blemished, lost_contact, .. } = self.processes[p];
        // A member that can't be heard goes where its group has come to a standstill.
        let goes = lost_contact && !self.is_unharmed(self.books.newest.as_ref());
        if !is_blemished && !goes {
            self.violate(format!("worker {worker} is taken out, and nothing is wrong with it"));
        }
    }

    /// Says something to the master again that it must not listen to.
    pub(super) fn try_the_fence(&mut self) {
        let Some(generation) = self.books.newest.as_ref().map(|m| m.generation) else { return };
        let is_deaf =
            self.master.outcome.is_some() || !self.master.is_alive || !self.master.keeps_records;
        if is_deaf || !self.dice.chance(1, 24) || self.books.heard.is_empty() {
            return;
        }
        let index = self.dice.below(self.books.heard.len() as u64) as usize;
        let (mut worker, message) = self.books.heard[index].clone();
        let said_of = match &message {
            FromWorker::Broken { generation, .. } | FromWorker::Formed { generation, .. } => {
                Some(*generation)
            }
            FromWorker::Committed(report) => Some(report.generation),
            FromWorker::Finished(report) => Some(report.generation),
            _ => None,
        };
        let speaks = matches!(message, FromWorker::Committed(_) | FromWorker::Formed { .. });
        if !self.books.gone.contains(&worker) && said_of.is_none_or(|g| g >= generation) {
            // Said for the group, by another than its lowest rank.
            let others = self.books.newest.as_ref().map(|m| m.members.iter().skip(1));
            let others: Vec<WorkerId> = others.into_iter().flatten().map(|(id, _)| *id).collect();
            match self.dice.pick(&others) {
                Some(other) if speaks => worker = other,
                _ => return,
            }
        }
        let p = self.books.processes.get(&worker).copied();
        // It would be heard, though not listened to.
        let is_touched =
            |p: usize| self.processes[p].is_blemished || self.processes[p].lost_contact;
        if !self.books.gone.contains(&worker) && p.is_none_or(is_touched) {
            return;
        }
        self.books.tally.fenced += 1;
        let now = self.time();
        let before = (self.master.job.status(now), self.master.job.poll_timeout());
        self.master.job.handle(now, JobEvent::Message { worker, message: message.clone() });
        let after = (self.master.job.status(now), self.master.job.poll_timeout());
        let action = self.master.job.poll_action();
        if before != after || action.is_some() {
            self.violate(format!(
                "the fence lets through {message:?} of worker {worker}: {action:?}"
            ));
        }
    }

    // ---- what workers do ----

    /// Who comes and goes in order breaks nobody's links.
    pub(super) fn check_break(&mut self, p: usize, why: &str) {
        self.processes[p].broke_in = self.books.newest_generation();
        let is_over = self.books.told_to_end.contains(&p);
        if !self.storm.has_harmed && !is_over {
            self.violate(format!(
                "the links of {} broke, {why}, and nothing has happened",
                self.name(p)
            ));
        }
    }

    pub(super) fn check_exit(&mut self, p: usize, exit: &Exit) {
        if *exit == Exit::Outdated {
            self.violate(format!("{} is too old to be repaired", self.name(p)));
        }
    }

    /// `p` holds the final state.
    pub(super) fn books_finish(&mut self, p: usize, generation: Generation) {
        let trainer = &self.processes[p].trainer;
        let Some(state) = trainer.state() else { return };
        let parameters = trainer.model.parameters.clone();
        let (counted, repeated) = (state.ledger.counted(), state.ledger.repeated());
        self.books
            .finals
            .insert((p, generation), Final { parameters, step: state.step, counted, repeated });
    }

    // ---- the end ----

    /// The job has ended: was it right to, and who is left?
    pub(super) fn check_end(&mut self) -> Result<(), String> {
        self.books.tally.events = self.events;
        let orphans = (0..self.processes.len())
            .find(|&p| self.processes[p].is_alive() && !self.processes[p].is_doomed);
        if let Some(p) = orphans {
            return Err(format!("the job has ended, and {} lives", self.name(p)));
        }
        match self.master.outcome {
            Some(Outcome::Completed) => self.check_final(),
            Some(Outcome::Stopped) if self.storm.stopped => {
                self.books.tally.stopped += 1;
                Ok(())
            }
            other => Err(format!(
                "the job ends {other:?}: {:?}",
                self.master.job.summary(self.time()).error
            )),
        }?;
        if self.books.seed.is_multiple_of(32) {
            let bytes = format!("{:?}", self.master.job).len();
            if bytes > JOB_BYTES_MAX {
                return Err(format!("the job has grown to {bytes} bytes of text"));
            }
        }
        match self.master.job.poll_timeout() {
            Some(_) => Err("the job has ended, and wants to be called again".into()),
            None => Ok(()),
        }
    }

    fn check_final(&self) -> Result<(), String> {
        let newest = self.books.newest.as_ref().ok_or("the job has ended without a group")?;
        let mut first: Option<&Final> = None;
        for (worker, _) in &newest.members {
            let key = (self.books.processes[worker], newest.generation);
            let last = self
                .books
                .finals
                .get(&key)
                .ok_or_else(|| format!("worker {worker} has not finished"))?;
            if first.is_some_and(|first| first != last) {
                return Err(format!(
                    "worker {worker} ends with another state: {last:?}, not {first:?}"
                ));
            }
            first = Some(last);
        }
        let last = first.ok_or("the last group has no members")?;
        let counted = last.parameters.iter().filter(|&&n| n == 1).count() as u64;
        let all = self.setting.parameters() as u64;
        let is_full = counted == all || self.setting.spec.max_steps == Some(last.step);
        let is_once = last.parameters.iter().all(|&n| n <= 1);
        if !is_once || !is_full || last.counted != counted || last.repeated != 0 {
            return Err(format!("not each record was absorbed once: {last:?}"));
        }
        let summary = self.master.job.summary(self.time()).records;
        match (summary.counted, summary.missing, summary.repeated) == (counted, 0, 0) {
            true => Ok(()),
            false => Err(format!("the summary tells {summary:?}, and {counted} were counted")),
        }
    }
}

const HEARD_MAX: usize = 48;
const JOB_BYTES_MAX: usize = 64 << 10;

mod steps;
