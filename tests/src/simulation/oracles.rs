//! The invariants of a run, checked from outside: the oracle sees every message and every state
//! change, and knows nothing of how the cores decide.
//!
//! **Records.** The final parameters count each record of each epoch exactly once (with `max_steps`
//! or after a stop: at most once, and as many as the ledger says); all members of the last group
//! end with the same parameters.
//!
//! **Steps.** A rank *commits* step `s` in generation `g` when its state goes from `s - 1` to `s`.
//! Then:
//!
//! * Within a generation all ranks that commit a step commit the same result.
//! * A step that a rank has committed the next step on top of is *stable*: no other result is ever
//!   committed in its place, and no later group begins below it, as long as any possible member has
//!   a state.
//! * A step that is not stable may be undone, but only together with all ranks that hold it: each
//!   member of the next group contributes its state, and the highest step wins. So each step has
//!   one committed result that survives.
//! * A joiner is given the state of a step that every member of its donor's group has committed.
//! * A group that begins with a new initial state, because all ranks that had a state are gone,
//!   begins a new *lineage*; the rules hold within each lineage. So does a group that resumes from
//!   an older state, which a joiner had fetched, because all ranks that had the newer one are gone.
//! * A rank that the master has evicted, and that is not notified yet, may complete the current
//!   step in its old group, since its peers have sent their parts before they left. It is no member
//!   of the newer group: a member of a newer group commits in no older one.
//!
//! **Leases.** A record is leased to a member of the newest generation, and only if no member of it
//! holds that record or has absorbed it.
//!
//! **Fencing.** Messages of workers that are gone, messages about older generations, and messages
//! on behalf of the group from another rank than the lowest change nothing in the master.
//!
//! **Authority.** Generations grow by one. Joins and orderly leaves break no links. A worker that
//! no fault has hit is never evicted. A group whose members and links are intact is never aborted,
//! whatever happens to the master and to its streams. No worker outlives the job.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use elasticdl::core::session::Exit;
use elasticdl_master::job::{
    Event as JobEvent, LaunchId, MasterMessage, Membership, Outcome, WorkerMessage,
};
use elasticdl_proto::{Generation, RecordRange, WorkerId};

use super::clock::Micros;
use super::process::Process;
use super::world::World;

/// All messages and state changes that the checks need.
#[derive(Debug)]
pub(super) struct Oracle {
    seed: u64,
    published: Vec<Membership>,
    /// The membership that the current master has published or restored last.
    newest: Option<Membership>,
    /// Generation of the last membership that was published by any master.
    generation: Generation,
    /// Generations that agreed on a state, at least on one rank.
    histories: BTreeMap<u64, GenerationHistory>,
    lineages: u64,
    /// Digests of stable steps, by lineage and step.
    stable: BTreeMap<(u64, u64), u64>,
    leased: BTreeMap<WorkerId, Vec<RecordRange>>,
    processes: BTreeMap<WorkerId, usize>,
    /// Workers whose stream has ended at the master and is not open again, and all of `lost`.
    gone: BTreeSet<WorkerId>,
    /// Workers that the master has evicted or ordered to be killed, or whose process it knows to
    /// have ended.
    lost: BTreeSet<WorkerId>,
    finals: BTreeMap<(usize, Generation), Final>,
    /// The last messages of workers.
    recent_messages: VecDeque<(WorkerId, WorkerMessage)>,
    /// Processes that got a shutdown message.
    shut_down: BTreeSet<usize>,
    /// The worker that the last action sent a shutdown message to, with its reason.
    shutdown_sent: Option<(WorkerId, String)>,
    pub(super) coverage: Coverage,
}

/// What one generation has committed.
#[derive(Debug)]
struct GenerationHistory {
    lineage: u64,
    /// The previous lineage, where this generation begins one with an older state.
    came_from: u64,
    formed_at: Micros,
    members: Vec<WorkerId>,
    /// Step and digest of the state that the generation began with.
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

/// Counts of what happened in one run or in many, so that a test can assert that the faults reach
/// every code path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Coverage {
    /// Number of jobs.
    pub runs: u64,
    /// Number of events handled.
    pub events: u64,
    /// Number of faults injected.
    pub faults: u64,
    /// Number of generations published.
    pub generations: u64,
    /// Commits of a step on a rank.
    pub commits: u64,
    /// Commits of a step that another generation had committed with another result: that one was
    /// undone with all ranks that held it.
    pub redone: u64,
    /// Commits by ranks that were no longer in the newest group.
    pub zombie_commits: u64,
    /// Ranks that were one step behind a new group and received that step's result.
    pub repaired_by_result: u64,
    /// Ranks that received the state in a repair.
    pub repaired_by_state: u64,
    /// States that joiners fetched from a donor.
    pub fetched: u64,
    /// Results of steps that joiners received after the state.
    pub followed: u64,
    /// Lineages that began with a new initial state, beyond the first one of a job.
    pub begun_again: u64,
    /// Checkpoints that were completed.
    pub checkpoints: u64,
    /// Checkpoints that a group began with.
    pub restored: u64,
    /// Groups that resumed from an older state, because all ranks that had the newer one were gone.
    pub gone_back: u64,
    /// Masters that were killed.
    pub masters_crashed: u64,
    /// Workers that the master has evicted.
    pub evicted: u64,
    /// Workers that reconnected to a master after their stream had ended.
    pub returned: u64,
    /// Runs in which faults hit the control plane only.
    pub control_only_runs: u64,
    /// Messages that were replayed to the master and had to be fenced.
    pub fenced: u64,
    /// Jobs that the user stopped before their end.
    pub stopped: u64,
    /// Steps of ranks that began over NCCL.
    pub nccl_steps: u64,
    /// Steps of ranks during which NCCL failed.
    pub nccl_failures: u64,
    /// Ranks that gave up NCCL for their group.
    pub nccl_given_up: u64,
    /// Pods of which one process failed while others ran.
    pub pods_failed: u64,
}

impl Coverage {
    /// Adds the counts of another run.
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
        self.checkpoints += other.checkpoints;
        self.restored += other.restored;
        self.gone_back += other.gone_back;
        self.masters_crashed += other.masters_crashed;
        self.evicted += other.evicted;
        self.returned += other.returned;
        self.control_only_runs += other.control_only_runs;
        self.fenced += other.fenced;
        self.stopped += other.stopped;
        self.nccl_steps += other.nccl_steps;
        self.nccl_failures += other.nccl_failures;
        self.nccl_given_up += other.nccl_given_up;
        self.pods_failed += other.pods_failed;
    }
}

impl Oracle {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            seed,
            published: Vec::new(),
            newest: None,
            generation: Generation::default(),
            histories: BTreeMap::new(),
            lineages: 0,
            stable: BTreeMap::new(),
            leased: BTreeMap::new(),
            processes: BTreeMap::new(),
            gone: BTreeSet::new(),
            lost: BTreeSet::new(),
            finals: BTreeMap::new(),
            recent_messages: VecDeque::new(),
            shut_down: BTreeSet::new(),
            shutdown_sent: None,
            coverage: Coverage { runs: 1, ..Coverage::default() },
        }
    }

    /// A worker is admitted. Returns whether it was lost.
    pub(super) fn on_admitted(&mut self, worker: WorkerId, p: usize) -> bool {
        self.processes.insert(worker, p);
        self.coverage.returned += u64::from(self.gone.remove(&worker));
        self.lost.remove(&worker)
    }

    /// The stream of a worker has ended; the worker may reconnect.
    pub(super) fn on_stream_end(&mut self, worker: WorkerId) {
        self.gone.insert(worker);
    }

    pub(super) fn on_gone(&mut self, worker: WorkerId) {
        self.gone.insert(worker);
        self.lost.insert(worker);
    }

    /// A worker without a stream will not be readmitted. Returns whether `worker` has none.
    pub(super) fn on_killed(&mut self, worker: WorkerId) -> bool {
        let is_gone = self.gone.contains(&worker);
        if is_gone {
            self.lost.insert(worker);
        }
        is_gone
    }

    /// The newest generation that has been published.
    pub(super) fn newest_generation(&self) -> Generation {
        self.newest.as_ref().map_or_else(Generation::default, |m| m.generation)
    }

    /// Messages of the master may be lost; workers report the leases that they hold to the next
    /// master.
    pub(super) fn on_master_crash(&mut self) {
        self.leased.clear();
        self.coverage.masters_crashed += 1;
    }

    pub(super) fn on_worker_message(&mut self, worker: WorkerId, message: &WorkerMessage) {
        if let WorkerMessage::HeldLeases { ranges, .. } = message {
            self.leased.insert(worker, ranges.clone());
        }
        if !matches!(message, WorkerMessage::Heartbeat(_)) {
            self.recent_messages.push_back((worker, message.clone()));
            if self.recent_messages.len() > RECENT_MESSAGES_MAX {
                self.recent_messages.pop_front();
            }
        }
    }

    /// Whether a group has committed `step` with this digest.
    pub(super) fn has_committed(&self, generation: u64, step: u64, digest: u64) -> bool {
        let history = self.histories.get(&generation);
        history.is_some_and(|history| {
            history.base == (step, digest) || history.commits.get(&step) == Some(&digest)
        })
    }

    pub(super) fn begin_lineage(&mut self) -> u64 {
        self.lineages += 1;
        self.coverage.begun_again += u64::from(self.lineages > 1);
        self.lineages
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
            self.oracle.on_gone(worker);
        }
    }

    // ---- messages of the master ----

    pub(super) fn forget_shutdown_sent(&mut self) {
        self.oracle.shutdown_sent = None;
    }

    pub(super) fn check_message(&mut self, worker: WorkerId, message: &MasterMessage) {
        self.oracle.shutdown_sent = None;
        match message {
            MasterMessage::Lease(ranges) => self.check_lease(worker, ranges),
            MasterMessage::Membership(membership) => self.check_membership(membership),
            MasterMessage::Shutdown(reason) => {
                self.oracle.shutdown_sent = Some((worker, reason.clone()));
                self.oracle.shut_down.extend(self.oracle.processes.get(&worker));
            }
            MasterMessage::Describe
            | MasterMessage::Drain
            | MasterMessage::Fetch(_)
            | MasterMessage::KeepCheckpoint
            | MasterMessage::Prepare(_)
            | MasterMessage::Suspend => {}
        }
        // A message that was held back until a snapshot was durable may be for a worker that has
        // gone meanwhile.
        if self.oracle.gone.contains(&worker) && !self.master.has_waited {
            self.violate(format!(
                "the master sends to worker {worker}, which is gone: {message:?}"
            ));
        }
    }

    fn check_membership(&mut self, membership: &Membership) {
        let last = self.oracle.newest.as_ref();
        if last == Some(membership) {
            return;
        }
        if self.oracle.published.contains(membership) {
            // No worker that is left has received any later membership.
            self.oracle.newest = Some(membership.clone());
            if !self.setting.may_restore_stale {
                self.violate(format!(
                    "generation {} is published a second time",
                    membership.generation
                ));
            }
            return;
        }
        let next = self.oracle.generation.next();
        let gone = |m: &Membership| m.members.iter().any(|(id, _)| self.oracle.gone.contains(id));
        // A membership that a master has persisted but not published is published by the next one,
        // or its generation is skipped; a worker that is lost meanwhile is in it.
        // One that was held back until it was persisted may have members that are gone meanwhile.
        let is_first_master = self.oracle.coverage.masters_crashed == 0 && !self.master.has_waited;
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
        self.oracle.generation = membership.generation;
        self.oracle.newest = Some(membership.clone());
        self.oracle.published.push(membership.clone());
        self.oracle.coverage.generations += 1;
        wrong.into_iter().for_each(|wrong| self.violate(wrong));
        if aborts_for_nothing {
            self.violate(format!(
                "generation {next} aborts a group whose members and links are intact"
            ));
        }
    }

    /// Whether a group has formed, all its members are alive, no fault has hit them or the network
    /// between them, and none of their links has broken. Faults of the master, or between it and
    /// the members, do not count.
    fn is_unharmed(&self, group: Option<&Membership>) -> bool {
        let is_well = |id: &WorkerId| {
            let process = self.oracle.processes.get(id).map(|&p| &self.processes[p]);
            process.is_some_and(|process| {
                let is_intact = group.is_some_and(|m| process.broke_in < m.generation);
                process.is_alive()
                    && !process.is_kill_requested
                    && !process.is_degraded
                    && is_intact
            })
        };
        // What the master knows of waiting ranks is at least one heartbeat old.
        let grace = self.setting.spec.worker_timeout.unwrap_or_default().as_micros() as Micros / 4;
        let has_formed = group.is_some_and(|m| {
            let history = self.oracle.histories.get(&m.generation.0);
            history.is_some_and(|history| history.formed_at + grace <= self.clock.now())
        });
        has_formed && group.is_some_and(|m| m.members.iter().all(|(id, _)| is_well(id)))
    }

    /// A master with a stale snapshot resumes with an older group, if no worker that reconnects
    /// knows a newer one. It may give that group no lease, so the end of the job looks as well.
    fn note_restored_generation(&mut self) {
        let generation = self.master.job.status(self.time()).generation;
        let is_older = |m: &Membership| m.generation > generation;
        if self.setting.may_restore_stale && self.oracle.newest.as_ref().is_some_and(is_older) {
            let older = self.oracle.published.iter().find(|m| m.generation == generation);
            self.oracle.newest = older.cloned();
        }
    }

    fn check_lease(&mut self, worker: WorkerId, ranges: &[RecordRange]) {
        self.note_restored_generation();
        let members = match self.oracle.newest.as_ref() {
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
                    .oracle
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
                let leased = self.oracle.leased.get(member).map_or(&[][..], Vec::as_slice);
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
        self.oracle.leased.entry(worker).or_default().extend(ranges);
    }

    /// The master closes the stream of a worker that it evicts.
    pub(super) fn check_eviction(&mut self, worker: WorkerId) {
        self.oracle.coverage.evicted += 1;
        self.fault_plan.links_may_break = true;
        if let Some((other, reason)) = self.oracle.shutdown_sent.take()
            && other == worker
        {
            return self.violate(format!(
                "the master evicts worker {worker} right after its shutdown: {reason}"
            ));
        }
        let Some(&p) = self.oracle.processes.get(&worker) else { return };
        let Process { is_degraded, lost_contact, .. } = self.processes[p];
        // An unreachable member may be evicted if its group has stalled.
        let goes = lost_contact && !self.is_unharmed(self.oracle.newest.as_ref());
        if !is_degraded && !goes {
            self.violate(format!("worker {worker} is evicted without a reason"));
        }
    }

    /// Replays a message to the master that fencing must reject.
    pub(super) fn check_fencing(&mut self) {
        let Some(generation) = self.oracle.newest.as_ref().map(|m| m.generation) else { return };
        let is_unavailable =
            self.master.outcome.is_some() || !self.master.is_alive || !self.master.persists;
        if is_unavailable || !self.rng.chance(1, 24) || self.oracle.recent_messages.is_empty() {
            return;
        }
        let index = self.rng.below(self.oracle.recent_messages.len() as u64) as usize;
        let (mut worker, message) = self.oracle.recent_messages[index].clone();
        let about = match &message {
            WorkerMessage::Broken { generation, .. } | WorkerMessage::Formed { generation, .. } => {
                Some(*generation)
            }
            WorkerMessage::Committed(report) => Some(report.generation),
            WorkerMessage::Finished(report) => Some(report.generation),
            _ => None,
        };
        let is_for_group =
            matches!(message, WorkerMessage::Committed(_) | WorkerMessage::Formed { .. });
        if !self.oracle.gone.contains(&worker) && about.is_none_or(|g| g >= generation) {
            // A message on behalf of the group, from another rank than the lowest.
            let others = self.oracle.newest.as_ref().map(|m| m.members.iter().skip(1));
            let others: Vec<WorkerId> = others.into_iter().flatten().map(|(id, _)| *id).collect();
            match self.rng.pick(&others) {
                Some(other) if is_for_group => worker = other,
                _ => return,
            }
        }
        let p = self.oracle.processes.get(&worker).copied();
        // The master would take the worker's message as a sign of life.
        let is_touched = |p: usize| self.processes[p].is_degraded || self.processes[p].lost_contact;
        if !self.oracle.gone.contains(&worker) && p.is_none_or(is_touched) {
            return;
        }
        self.oracle.coverage.fenced += 1;
        let now = self.time();
        let before = (self.master.job.status(now), self.master.job.poll_timeout());
        self.master.job.handle(now, JobEvent::Message { worker, message: message.clone() });
        let after = (self.master.job.status(now), self.master.job.poll_timeout());
        let action = self.master.job.poll_action();
        if before != after || action.is_some() {
            self.violate(format!("{message:?} of worker {worker} is not fenced: {action:?}"));
        }
    }

    // ---- actions of workers ----

    /// Checks that links break only after a fault: joins and orderly leaves break none.
    pub(super) fn check_break(&mut self, p: usize, why: &str) {
        self.processes[p].broke_in = self.oracle.newest_generation();
        let is_over = self.oracle.shut_down.contains(&p);
        if !self.fault_plan.links_may_break && !is_over {
            self.violate(format!("the links of {} broke without a fault: {why}", self.name(p)));
        }
    }

    pub(super) fn check_exit(&mut self, p: usize, exit: &Exit) {
        if *exit == Exit::Outdated {
            self.violate(format!("{} is too old to be repaired", self.name(p)));
        }
    }

    /// `p` holds the final state.
    pub(super) fn record_final_state(&mut self, p: usize, generation: Generation) {
        let trainer = &self.processes[p].trainer;
        let Some(state) = trainer.state() else { return };
        let parameters = trainer.model.parameters.clone();
        let (counted, repeated) = (state.ledger.counted(), state.ledger.repeated());
        self.oracle
            .finals
            .insert((p, generation), Final { parameters, step: state.step, counted, repeated });
    }

    // ---- the end of the job ----

    /// Checks the outcome of the job, and that no process is left.
    pub(super) fn check_end(&mut self) -> Result<(), String> {
        self.oracle.coverage.events = self.events;
        self.note_restored_generation();
        let orphans = (0..self.processes.len())
            .find(|&p| self.processes[p].is_alive() && !self.processes[p].is_kill_requested);
        if let Some(p) = orphans {
            return Err(format!("the job has ended, and {} lives", self.name(p)));
        }
        match self.master.outcome {
            Some(Outcome::Completed) => self.check_final(),
            Some(Outcome::Stopped) if self.fault_plan.stopped => {
                self.oracle.coverage.stopped += 1;
                Ok(())
            }
            other => Err(format!(
                "the job ends {other:?}: {:?}",
                self.master.job.summary(self.time()).error
            )),
        }?;
        if self.oracle.seed.is_multiple_of(32) {
            let bytes = format!("{:?}", self.master.job).len();
            if bytes > JOB_BYTES_MAX {
                return Err(format!("the job has grown to {bytes} bytes of text"));
            }
        }
        match self.master.job.poll_timeout() {
            Some(_) => Err("the job has ended, and has a timeout".into()),
            None => Ok(()),
        }
    }

    fn check_final(&self) -> Result<(), String> {
        let newest = self.oracle.newest.as_ref().ok_or("the job has ended without a group")?;
        let mut first: Option<&Final> = None;
        for (worker, _) in &newest.members {
            let key = (self.oracle.processes[worker], newest.generation);
            let last = self
                .oracle
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
            return Err(format!("some record was not absorbed exactly once: {last:?}"));
        }
        let summary = self.master.job.summary(self.time()).records;
        if (summary.counted, summary.missing, summary.repeated) == (counted, 0, 0) {
            Ok(())
        } else {
            Err(format!("the summary reports {summary:?}, and {counted} were counted"))
        }
    }
}

const RECENT_MESSAGES_MAX: usize = 48;
const JOB_BYTES_MAX: usize = 64 << 10;

mod steps;
