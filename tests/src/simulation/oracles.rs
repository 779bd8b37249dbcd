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
//! * A step that is committed again in another generation has the same result, unless the number
//!   of its records depends on the number of workers.
//! * A step that is not stable may be undone, but only together with all ranks that hold it: each
//!   member of the next group contributes its state, and the highest step wins. So each step has
//!   one committed result that survives.
//! * A joiner is given the state of a step that every member of its donor's group has committed.
//! * A group that begins with a new initial state, because all ranks that had a state are gone,
//!   begins a new *lineage*; the rules hold within each lineage. So does a group that resumes from
//!   an older state, which a joiner had fetched, because all ranks that had the newer one are gone.
//! * A rank that the master has evicted, and that is not notified yet, may complete the current
//!   step in its old group, since its peers have sent their parts before they left, and further
//!   ones if it has no peers. It is no member of the newer group: a member of a newer group commits
//!   in no older one.
//!
//! **Order.** The records of a step are a function of its number: `G` consecutive positions of an
//! epoch's order, or what is left of the epoch. Where each worker contributes a fixed number, they
//! follow the records of the step before. No records are leased.
//!
//! **Fencing.** Messages of workers that are gone, messages about older generations, and messages
//! on behalf of the group from another rank than the lowest change nothing in the master.
//!
//! **Authority.** Generations grow by one. Joins and orderly leaves break no links. A worker that
//! no fault has hit is never evicted. A group whose members and links are intact is never aborted,
//! whatever happens to the master and to its streams, and none of its members is refused when it
//! reconnects. No worker outlives the job. A failure counts only where the user's code has ended a
//! process, or a process has never reached its master.

mod rows;
mod steps;

pub(super) use steps::{check_evaluated, check_order, check_sum};

use elasticdl::session::Exit;
use elasticdl_master::job::{
    Event as JobEvent, Exit as ProcessExit, LaunchId, MasterMessage, Membership, Outcome,
    WorkerMessage,
};
use elasticdl_proto::{Generation, WorkerId};

use super::clock::Micros;
use super::state::network::{LinkId, MASTER};
use super::state::oracle::Final;
use super::state::process::{EXIT_MASTER_LOST, EXIT_TERMINATED, Process};
use super::world::World;

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
        if self.master.is_replaced {
            return self.check_message_of_replaced(message);
        }
        match message {
            MasterMessage::Lease(ranges) => {
                self.violate(format!("{ranges:?} are leased to worker {worker}, which trains"));
            }
            MasterMessage::Membership(membership) => self.check_membership(membership),
            MasterMessage::Shutdown { reason, .. } => {
                self.oracle.shutdown_sent = Some((worker, reason.clone()));
                self.oracle.shut_down.extend(self.oracle.processes.get(&worker));
            }
            MasterMessage::Describe
            | MasterMessage::Drain
            | MasterMessage::Fetch(_)
            | MasterMessage::GiveUp
            | MasterMessage::Inspect { .. }
            | MasterMessage::Joiners(_)
            | MasterMessage::KeepCheckpoint
            | MasterMessage::Prepare(_)
            | MasterMessage::CheckHost
            | MasterMessage::ReportStacks
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
        self.check_unique(membership);
        let last = self.oracle.newest.as_ref();
        if last == Some(membership) {
            return;
        }
        if self.oracle.published.contains(membership) {
            // No worker that is left has received any later membership.
            self.oracle.newest = Some(membership.clone());
            if !self.oracle.may_be_outdated {
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
        // The members of a group that has ended with a checkpoint leave.
        let has_ended = last.is_some_and(|m| self.oracle.suspended == Some(m.generation));
        let is_stale = std::mem::take(&mut self.oracle.is_master_stale);
        let aborts_for_nothing =
            membership.abort && !has_ended && !is_stale && self.is_unharmed(last);
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
        // What the master knows of waiting ranks is at least one heartbeat old, and older if it was
        // paused.
        let grace = self.setting.spec.options.worker_timeout.unwrap_or_default();
        let grace = grace.as_micros() as Micros;
        let has_formed = group.is_some_and(|m| {
            let history = self.oracle.histories.get(&m.generation.0);
            history.is_some_and(|history| history.formed_at + grace <= self.clock.now())
        });
        has_formed && group.is_some_and(|m| m.members.iter().all(|(id, _)| is_well(id)))
    }

    /// A master has resumed the job with these `launches`, possibly from an outdated snapshot.
    /// Local processes that it does not know are refused, and end. So are all if no data set was
    /// known yet: the job begins again.
    pub(super) fn note_resumed(
        &mut self,
        is_outdated: bool,
        launches: &[LaunchId],
        knows_data: bool,
    ) {
        self.oracle.may_be_outdated |= is_outdated || self.setting.may_restore_stale;
        if !is_outdated || self.setting.may_restore_stale {
            return;
        }
        self.oracle.coverage.resumed_outdated += 1;
        self.fault_plan.links_may_break = true;
        for p in 0..self.processes.len() {
            let is_known = launches.contains(&self.processes[self.pod(p).start].launch);
            self.processes[p].is_unknown |= !is_known;
            self.processes[p].is_degraded |= !is_known || !knows_data;
        }
    }

    /// A master with a stale snapshot resumes with an older group, if no worker that reconnects
    /// knows a newer one, which may be one of a master that was replaced.
    fn note_restored_generation(&mut self) {
        let generation = self.master.job.status(self.time()).generation;
        let is_other = |m: &Membership| m.generation != generation;
        if self.oracle.may_be_outdated && self.oracle.newest.as_ref().is_none_or(is_other) {
            let resumed = self.oracle.published.iter().find(|m| m.generation == generation);
            self.oracle.newest = resumed.cloned();
        }
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
        // An unreachable member may be evicted if its group has stalled. An unreachable joiner may
        // be replaced.
        let newest = self.oracle.newest.as_ref();
        let is_member = newest.is_some_and(|m| m.rank_of(worker).is_some());
        // It may also wait for its checkpoint, which only itself could tell.
        let patience =
            self.setting.spec.options.worker_timeout.unwrap_or_default().as_micros() as Micros / 2;
        let has_stalled = self.oracle.committed_at + patience <= self.clock.now();
        let goes = lost_contact && (!is_member || has_stalled || !self.is_unharmed(newest));
        // Where no worker waits, the master can't tell which member hangs.
        let hangs = self.processes.iter().any(|q| q.is_alive() && q.trainer.is_hung);
        // The end of its process may not have been noticed.
        if !is_degraded && !goes && !hangs && self.processes[p].is_alive() {
            self.violate(format!("worker {worker} is evicted without a reason"));
        }
    }

    /// The master refuses a connection. That of a member is a loss, unless the member holds the
    /// final state, is about to be killed, was told to end, or its group is not intact.
    pub(super) fn check_refusal(&mut self, link: LinkId, reason: &str) {
        let Some(p) = self.net.link(link).peer(MASTER).checked_sub(1) else { return };
        if self.master.is_replaced {
            self.processes[p].is_degraded = true;
            // The leader may not know that it has joined.
            self.oracle.failures_max += 1;
            return;
        }
        let newest = self.oracle.newest.as_ref();
        let Some(worker) = self.processes[p].worker else { return };
        let is_member = newest.is_some_and(|m| m.rank_of(worker).is_some());
        let is_over = self.oracle.shut_down.contains(&p)
            || self.oracle.lost.contains(&worker)
            || self.oracle.has_finished(p)
            || newest.is_some_and(|m| self.oracle.suspended == Some(m.generation));
        if is_member && !is_over && self.is_unharmed(newest) {
            self.violate(format!("worker {worker}, a member, is refused: {reason}"));
        }
    }

    /// Replays messages to the master that fencing must reject.
    pub(super) fn check_fencing(&mut self) {
        let Some(generation) = self.oracle.newest.as_ref().map(|m| m.generation) else { return };
        let is_unavailable =
            self.master.outcome.is_some() || !self.master.is_alive || !self.master.persists;
        let messages = self.oracle.recent_messages.len();
        if is_unavailable {
            return;
        }
        if self.setting.is_explored {
            // Once for each group.
            if std::mem::replace(&mut self.oracle.fenced_in, generation) != generation {
                (0..messages).for_each(|index| self.check_fenced(index, generation));
            }
        } else if self.rng.chance(1, 24) && messages > 0 {
            let index = self.rng.below(messages as u64) as usize;
            self.check_fenced(index, generation);
        }
    }

    fn check_fenced(&mut self, index: usize, generation: Generation) {
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

    /// Notes the end of a process that has been `welcomed` by a master, or has not.
    pub(super) fn note_exit(&mut self, exit: &ProcessExit, welcomed: bool) {
        let is_failure = match exit {
            ProcessExit::Code(EXIT_MASTER_LOST) => !welcomed,
            ProcessExit::Code(EXIT_TERMINATED) | ProcessExit::Signal(9 | 15) => false,
            _ => true,
        };
        self.oracle.failures_max += u64::from(is_failure);
    }

    /// Checks the failures that this master has counted. A successor counts anew.
    pub(super) fn check_failures(&self) -> Result<(), String> {
        let counted = self.master.job.snapshot(self.time()).counters.failures;
        let most = self.oracle.failures_max;
        if counted > most {
            return Err(format!("{counted} failures are counted, and {most} processes failed"));
        }
        Ok(())
    }

    // ---- actions of workers ----

    /// Checks that links break only after a fault: joins and orderly leaves break none.
    pub(super) fn check_break(&mut self, p: usize, why: &str) {
        self.processes[p].broke_in = self.oracle.newest_generation();
        let is_over = self.oracle.shut_down.contains(&p);
        let is_expected = is_over || self.is_held_up() || self.counts_rows(p);
        if !self.fault_plan.links_may_break && !is_expected {
            self.violate(format!("the links of {} broke without a fault: {why}", self.name(p)));
        }
    }

    /// Whether a worker that the newest group does without has still to end its last round with
    /// the others, and a fault keeps it from that.
    fn is_held_up(&self) -> bool {
        let Some(newest) = &self.oracle.newest else { return false };
        self.processes.iter().any(|process| {
            let is_member = process.worker.is_some_and(|worker| newest.rank_of(worker).is_some());
            !is_member && process.is_degraded && process.trainer.ring.is_some()
        })
    }

    /// Whether `p`, which has been a member, leaves in order and was not released: a group that
    /// needs its state can have it.
    pub(super) fn is_in_reserve(&self, p: usize) -> bool {
        let process = &self.processes[p];
        let Some(worker) = process.worker.filter(|_| process.trainer.committed_in.is_some()) else {
            return false;
        };
        let newest = self.oracle.newest.as_ref();
        process.is_alive()
            && process.trainer.ended.is_none()
            && !process.is_kill_requested
            && self.master.workers.contains_key(&worker)
            && !self.oracle.shut_down.contains(&p)
            && newest.is_some_and(|m| m.rank_of(worker).is_none())
    }

    /// Whether `p` counts the touches of rows at the end of its group's work, and does not know yet
    /// that there is a newer group: ranks that do know leave without counting.
    fn counts_rows(&self, p: usize) -> bool {
        let is_newer = |generation| generation < self.oracle.newest_generation();
        self.setting.shards() > 0
            && self.processes[p].trainer.seen.has_ended
            && self.generation_of(p).is_some_and(is_newer)
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
        let parameters = trainer.seen.parameters.clone();
        let (counted, repeated) = (state.ledger.counted(), state.ledger.repeated());
        let evaluated = state.evaluation.at;
        self.oracle.finals.insert(
            (p, generation),
            Final { parameters, step: state.step, evaluated, counted, repeated },
        );
    }

    // ---- the end of the job ----

    /// Checks the outcome of the job, and that no process is left.
    pub(super) fn check_end(&mut self) -> Result<(), String> {
        self.oracle.coverage.events = self.events;
        self.check_failures()?;
        self.note_restored_generation();
        let orphans = (0..self.processes.len())
            .find(|&p| self.processes[p].is_alive() && self.processes[p].is_wanted());
        if let Some(p) = orphans {
            return Err(format!("the job has ended, and {} lives", self.name(p)));
        }
        match self.master.outcome {
            Some(Outcome::Completed) => self.check_final(),
            Some(Outcome::Stopped) if self.fault_plan.stopped => {
                self.oracle.coverage.stopped += 1;
                Ok(())
            }
            Some(Outcome::Failed) if self.lacks_last_checkpoint() => self.check_final(),
            // The final states differ, too late for a step or a checkpoint to show it.
            Some(Outcome::Failed) if self.processes.iter().any(|p| p.trainer.is_wrong()) => Ok(()),
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

    /// Whether the job has failed because its last state is in no checkpoint, and it is in none.
    fn lacks_last_checkpoint(&self) -> bool {
        let summary = self.master.job.summary(self.time());
        let newest = self.checkpoint_store.complete.last_key_value();
        let is_in_none = newest.is_none_or(|((step, _), _)| *step < summary.steps);
        let error = summary.error.unwrap_or_default();
        error.starts_with("no checkpoint in vault has the model") && is_in_none
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
        let is_full = counted == all || self.setting.spec.options.max_steps == Some(last.step);
        let is_once = last.parameters.iter().all(|&n| n <= 1);
        self.check_touches(last.step, &last.parameters)?;
        if !is_once || !is_full || last.counted != counted || last.repeated != 0 {
            return Err(format!("some record was not absorbed exactly once: {last:?}"));
        }
        if self.setting.spec.options.validation.is_some() && last.evaluated != last.step {
            return Err(format!("step {} is not evaluated at the end", last.step));
        }
        let summary = self.master.job.summary(self.time()).records;
        if (summary.counted, summary.missing, summary.repeated) == (counted, 0, 0) {
            Ok(())
        } else {
            Err(format!("the summary reports {summary:?}, and {counted} were counted"))
        }
    }
}

const JOB_BYTES_MAX: usize = 64 << 10;
