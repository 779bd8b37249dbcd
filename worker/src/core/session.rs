//! The state machine of a worker: it decides the next task and executes nothing itself.
//!
//! ```text
//!   Fetching ◀── donors are offered while a group trains; continues like Detached, with a state
//!
//!               membership          links up          same state everywhere
//!   Detached ────────────▶ Joining ─────────▶ Syncing ─────▶ Repairing ─────▶ Round ⟲ ──▶ Finished
//!     ▲                                                                         │
//!     └───────────────────────────── links broke ◀──────────────────────────────┘
//! ```
//!
//! A round ends when every rank holds the headers of all ranks. It is either a step (headers travel
//! with the gradient; a commit follows) or, while leased records have not arrived, an idle round
//! (headers alone). The next decision is derived from these headers, which are the same on every
//! rank: the shares of the next round, a switch to a newer generation, or the end.
//!
//! **Invariant:** no IO, no clock, no threads; the output depends on the input alone.
//! **Invariant:** the ledger changes together with the step, and only in [`Session::commit`] and
//! [`Session::install`]. **Invariant:** a computed gradient is discarded only after the ledger has
//! absorbed its records.

use std::collections::VecDeque;
use std::time::Duration;

use elasticdl_proto::{
    Committed, Generation, Ledger, LedgerReport, Membership, RecordRange, WorkerId, WorkerMessage,
};

use self::fetch::Fetch;
pub use self::types::{Exit, GroupMismatch, JobPlan, State, Task};
use crate::core::checkpoint::{
    self, CheckpointHeader, Checkpoints, FinalCheckpoint, final_checkpoint,
};
use crate::core::evaluation::Evaluation;
use crate::core::halt::{Ending, Halt};
use crate::core::header::{StateHeader, StateRecord, StepHeader, SyncHeader, held_of};
use crate::core::leases::Leases;
use crate::core::plan::{self, AvailableRecords};
use crate::core::repair::{Repair, StateMismatch};
use crate::core::transport_switch::TransportSwitch;

/// A gradient of this worker that no known step has absorbed.
#[derive(Clone, Debug, Default, PartialEq)]
struct Pending {
    ranges: Vec<RecordRange>,
    loss_sum: f64,
    compute_us: u64,
}

#[derive(Clone, Debug, PartialEq)]
struct Group {
    generation: Generation,
    members: Vec<WorkerId>,
    rank: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Detached,
    Ended(Exit),
    /// Between the end of a round and the decision that its headers lead to.
    Evaluating {
        group: Group,
        headers: Vec<StepHeader>,
        committed: Option<Duration>,
    },
    /// The worker receives the state from a member that trains meanwhile.
    Fetching,
    Joining(Membership),
    Finished {
        group: Group,
        reported: bool,
        ending: Ending,
    },
    Repairing(Group, Repair),
    Round {
        group: Group,
        quotas: Option<Vec<u64>>,
        computed: bool,
    },
    Syncing(Group),
}

/// State machine of one worker in a job.
#[derive(Clone, Debug)]
pub struct Session {
    me: WorkerId,
    job: JobPlan,
    state: Option<State>,
    /// Headers of the last commit, as long as its reduced gradient is retained.
    last_headers: Option<Vec<StepHeader>>,
    leases: Leases,
    /// Number of leased records that can be read now; `None`: all of them.
    readable: Option<u64>,
    pending: Pending,
    phase: Phase,
    latest: Option<Membership>,
    /// Whether this worker has been in a membership. A later one without it means that it must
    /// leave.
    was_member: bool,
    /// Whether this worker has been in a group that reached a common state. It may then have
    /// consumed leases.
    was_in_group: bool,
    fetch: Fetch,
    checkpoints: Checkpoints,
    transport: TransportSwitch,
    stop: bool,
    suspend: bool,
    /// Why this rank cannot continue. It is never reset: every group that this rank joins ends.
    halt: Option<Halt>,
    progress: Committed,
    reported_at: Duration,
    /// Time of the last commit in this group.
    committed_at: Option<Duration>,
    reports: VecDeque<WorkerMessage>,
}

impl Session {
    pub fn new(me: WorkerId, job: JobPlan) -> Self {
        Self {
            me,
            checkpoints: Checkpoints::new(me, job.checkpoints),
            job,
            state: None,
            last_headers: None,
            leases: Leases::default(),
            readable: None,
            pending: Pending::default(),
            phase: Phase::Detached,
            latest: None,
            was_member: false,
            was_in_group: false,
            fetch: Fetch::default(),
            transport: TransportSwitch::default(),
            stop: false,
            suspend: false,
            halt: None,
            progress: Committed::default(),
            reported_at: Duration::ZERO,
            committed_at: None,
            reports: VecDeque::new(),
        }
    }

    // ---- messages of the master ----

    pub fn handle_membership(&mut self, membership: Membership) {
        if self.latest.as_ref().is_some_and(|latest| latest.generation >= membership.generation) {
            return;
        }
        let abort = membership.abort;
        self.latest = Some(membership);
        if self.phase == Phase::Fetching {
            return self.leave_fetch();
        }
        // A switch without a loss waits for the end of the round, where all ranks switch together.
        let in_round = !matches!(self.phase, Phase::Detached | Phase::Finished { .. });
        if abort || !in_round {
            self.join_latest();
        }
    }

    pub fn handle_lease(&mut self, ranges: Vec<RecordRange>) {
        for range in ranges {
            self.leases.add(range);
        }
    }

    pub fn handle_drain(&mut self) {
        self.stop = true;
    }

    pub fn handle_shutdown(&mut self, reason: String) {
        self.phase = Phase::Ended(Exit::Shutdown(reason));
    }

    // ---- the next task ----

    pub fn poll(&mut self) -> Task {
        match &mut self.phase {
            Phase::Detached | Phase::Finished { reported: true, .. } => Task::Wait,
            Phase::Ended(exit) => Task::Exit(exit.clone()),
            Phase::Evaluating { group, .. } => {
                let plan =
                    self.job.evaluation.as_ref().expect("this phase requires an evaluation plan");
                Task::Evaluate(plan.share(group.rank, group.members.len()))
            }
            Phase::Fetching => {
                let (donor, address) = self.fetch.donor();
                Task::Fetch(donor, address)
            }
            Phase::Joining(membership) => Task::Connect(membership.clone()),
            Phase::Finished { .. } => Task::Finish,
            Phase::Repairing(_, repair) => Task::Repair(repair.clone()),
            Phase::Syncing(_) => Task::Synchronize,
            Phase::Round { quotas: None, .. } => Task::ExchangeHeaders,
            Phase::Round { group, quotas: Some(quotas), computed } => {
                let quota = quotas[group.rank];
                if *computed || quota == 0 {
                    return Task::Step;
                }
                *computed = true;
                let epoch = self.state.as_ref().map_or(0, |s| s.ledger.epoch());
                let ranges = self.leases.take(epoch, quota);
                self.pending.ranges.extend(&ranges);
                Task::Compute(ranges)
            }
        }
    }

    /// Header of this rank for the round. `digest`: of the part of the state that this step covers.
    pub fn header(&self, digest: u64) -> StepHeader {
        let epoch = self.state.as_ref().map_or(0, |s| s.ledger.epoch());
        StepHeader {
            step: self.step(),
            ranges: self.pending.ranges.clone(),
            loss_sum: self.pending.loss_sum,
            compute_us: self.pending.compute_us,
            held: reading::limited(self.leases.held_from(epoch), epoch, self.readable),
            newest_generation: self.latest.as_ref().map_or(0, |m| m.generation.0),
            stop: self.stop,
            suspend: self.suspend,
            halt: self.halt.clone(),
            digest,
            checkpoint: self.checkpoints.header(self.step() + 1),
            evaluation: self.evaluation(),
            nccl: self.transport.build(),
        }
    }

    /// Header of this rank for a new group. `digest`: of the state record and a part of the
    /// tensors.
    pub fn sync_header(&self, digest: u64) -> SyncHeader {
        let state = self.state.as_ref().map(|s| StateHeader {
            step: s.step,
            digest,
            has_result: self.last_headers.is_some(),
            was_in_group: self.was_in_group,
        });
        SyncHeader { state, transport: self.transport.header() }
    }

    // ---- results of tasks ----

    /// The links of the membership are up.
    pub fn connected(&mut self) {
        if let Phase::Joining(membership) = &self.phase {
            let rank =
                membership.rank_of(self.me).expect("only memberships with this worker are joined");
            let members: Vec<WorkerId> = membership.members.iter().map(|(id, _)| *id).collect();
            self.transport.regrouped(&members);
            let group = Group { generation: membership.generation, members, rank };
            self.phase = Phase::Syncing(group);
        }
    }

    /// The links of the current generation broke, at the link to `suspect`.
    pub fn broken(&mut self, suspect: Option<WorkerId>, error: String) {
        self.leave_links(suspect, error, false);
    }

    /// The links of the current generation could not be built: `suspect` answered no dial.
    pub fn unreachable_peer(&mut self, suspect: WorkerId, error: String) {
        self.leave_links(Some(suspect), error, true);
    }

    fn leave_links(&mut self, suspect: Option<WorkerId>, error: String, unreachable: bool) {
        let generation = match &self.phase {
            Phase::Detached | Phase::Ended(_) | Phase::Fetching => return,
            Phase::Joining(membership) => membership.generation,
            Phase::Evaluating { group, .. }
            | Phase::Finished { group, .. }
            | Phase::Repairing(group, _)
            | Phase::Round { group, .. }
            | Phase::Syncing(group) => group.generation,
        };
        self.phase = Phase::Detached;
        if self.latest.as_ref().is_some_and(|latest| latest.generation > generation) {
            self.join_latest();
        } else {
            self.reports.push_back(WorkerMessage::Broken {
                generation,
                suspect,
                error,
                unreachable,
            });
        }
    }

    /// Takes in the headers of all ranks of a new group.
    ///
    /// # Errors
    /// Replicas at the same step differ and the job cannot continue, or this worker's device does
    /// not match the group's.
    pub fn synced(&mut self, headers: &[SyncHeader]) -> Result<(), GroupMismatch> {
        if let Phase::Syncing(group) = &self.phase {
            self.transport.synced(&headers.iter().map(|h| h.transport).collect::<Vec<_>>())?;
            let repair = Repair::plan(&transport::without_mismatched_devices(headers))?;
            let receives =
                repair.state.as_ref().is_some_and(|(_, receivers)| receivers.contains(&group.rank));
            // Survivors of a failure differ by at most one step, so this rank was cut off. No other
            // rank knows which of its leased records it has consumed, so the process ends and a new
            // worker starts without state. (A rank that has only fetched its state has consumed
            // none.)
            self.phase = if receives && self.state.is_some() && self.was_in_group {
                Phase::Ended(Exit::Outdated)
            } else {
                Phase::Repairing(group.clone(), repair)
            };
            if receives {
                // The broadcast overwrites the parameters. If it fails midway, this rank has no
                // state.
                self.state = None;
                self.last_headers = None;
            }
        }
        Ok(())
    }

    /// This rank has created the initial state.
    pub fn begin(&mut self) {
        self.state = Some(State {
            step: 0,
            ledger: Ledger::new(self.job.records),
            records_trained: 0,
            evaluation: Evaluation::default(),
            steps_skipped: 0,
        });
    }

    /// This rank has received the state of another rank. `last_headers`: headers of the last step,
    /// if this rank also has that step's reduced gradient. Returns `false` for an inconsistent
    /// record.
    pub fn install(&mut self, record: StateRecord, last_headers: Option<Vec<StepHeader>>) -> bool {
        let StateRecord {
            step,
            records_trained,
            epochs_complete,
            ranges,
            repeated,
            evaluation,
            steps_skipped,
        } = record;
        let Ok(ledger) = Ledger::from_parts(self.job.records, epochs_complete, ranges, repeated)
        else {
            return false;
        };
        self.state = Some(State { step, ledger, records_trained, evaluation, steps_skipped });
        self.last_headers = last_headers;
        true
    }

    /// All ranks hold the same state.
    pub fn repaired(&mut self) {
        let Phase::Repairing(group, _) = &self.phase else { return };
        let group = group.clone();
        self.was_in_group = true;
        self.settle_pending();
        if let (0, Some(state)) = (group.rank, &self.state) {
            self.reports.push_back(WorkerMessage::Formed {
                generation: group.generation,
                step: state.step,
                ledger: LedgerReport::from(&state.ledger),
            });
        }
        self.progress = Committed::default();
        self.committed_at = None;
        self.checkpoints.regrouped(&group.members);
        self.request_leases(group.members.len());
        // The ranks learn each other's held records only after the repair, so the first round is an
        // idle one. The same holds for whether the final state is checkpointed and evaluated.
        if self.at_end() && !self.checkpoints.are_enabled() && self.job.evaluation.is_none() {
            self.end(group, Ending::Done);
        } else {
            self.phase = Phase::Round { group, quotas: None, computed: false };
        }
    }

    /// The pending gradient now contains the records of the last [`Task::Compute`].
    pub fn computed(&mut self, loss_sum: f64, compute_us: u64) {
        self.pending.loss_sum += loss_sum;
        self.pending.compute_us += compute_us;
    }

    /// Takes in the headers of all ranks from a round without a step.
    ///
    /// # Errors
    /// See [`Session::check`].
    pub fn headers_exchanged(&mut self, headers: &[StepHeader]) -> Result<(), StateMismatch> {
        self.check(headers)?;
        self.transport.handle_builds(headers.iter().map(|h| h.nccl));
        // The group waits for records, and the master may wait for a report about records that it
        // has leased.
        self.flush_progress();
        self.handle_checkpoint_headers(headers);
        self.end_round(headers, None);
        Ok(())
    }

    /// Compares the headers of all ranks in a round: they must be at the same step with the same
    /// state.
    ///
    /// # Errors
    /// The ranks that differ from the lowest one; the job cannot continue.
    pub fn check(&self, headers: &[StepHeader]) -> Result<(), StateMismatch> {
        let differs = |h: &StepHeader| {
            (h.step, h.digest) != (headers[0].step, headers[0].digest) || h.step != self.step()
        };
        let ranks: Vec<usize> = (0..headers.len()).filter(|&r| differs(&headers[r])).collect();
        if ranks.is_empty() {
            Ok(())
        } else {
            Err(StateMismatch { step: self.step(), ranks, from: 0 })
        }
    }

    /// Commits a step whose update was applied: the ledger absorbs the step's records. Ends the
    /// round, or serves a repair. `now` paces the reports to the master.
    pub fn commit(&mut self, headers: Vec<StepHeader>, now: Duration) {
        self.commit_step(headers, now, false);
    }

    /// Like [`commit`](Self::commit), for a step that all ranks skip: the ledger absorbs its
    /// records and the parameters stay unchanged.
    pub fn commit_skipped(&mut self, headers: Vec<StepHeader>, now: Duration) {
        self.commit_step(headers, now, true);
    }

    fn commit_step(&mut self, headers: Vec<StepHeader>, now: Duration, is_skipped: bool) {
        let state = self.state.as_mut().expect("a rank without state has no step to commit");
        let records: u64 = headers.iter().map(StepHeader::records).sum();
        for range in headers.iter().flat_map(|h| &h.ranges) {
            state.ledger.absorb(*range);
        }
        state.step += 1;
        state.steps_skipped += u64::from(is_skipped);
        state.records_trained += records;
        self.leases.forget_before(state.ledger.epoch());
        self.progress.step = state.step;
        self.progress.steps_skipped = state.steps_skipped;
        if let Phase::Round { group, .. } = &self.phase {
            let world_size = group.members.len();
            // In a round every rank's gradient is part of the step. In a repair the ledger decides
            // (see `repaired`).
            self.pending = Pending::default();
            if group.rank == 0 {
                self.note_progress(group.generation, &headers, now);
            }
            self.request_leases(world_size);
            self.checkpoints.tick(now);
            self.transport.handle_builds(headers.iter().map(|h| h.nccl));
            self.handle_checkpoint_headers(&headers);
            self.end_round(&headers, Some(now));
        }
        self.last_headers = Some(headers);
    }

    /// The master has received the final report.
    pub fn finish_reported(&mut self) {
        if let Phase::Finished { reported, .. } = &mut self.phase {
            *reported = true;
        }
    }

    // ---- accessors ----

    /// Number of committed steps; 0 without state.
    pub fn step(&self) -> u64 {
        self.state.as_ref().map_or(0, |s| s.step)
    }

    pub fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    /// Records whose gradient is computed and not absorbed.
    pub fn pending_ranges(&self) -> &[RecordRange] {
        &self.pending.ranges
    }

    /// Headers of the last commit, for ranks that are one step behind.
    pub fn last_headers(&self) -> Option<&[StepHeader]> {
        self.last_headers.as_deref()
    }

    /// Generation and rank of this worker, if it has links.
    pub fn group_rank(&self) -> Option<(Generation, usize)> {
        match &self.phase {
            Phase::Detached | Phase::Ended(_) | Phase::Fetching | Phase::Joining(_) => None,
            Phase::Evaluating { group, .. }
            | Phase::Finished { group, .. }
            | Phase::Repairing(group, _)
            | Phase::Round { group, .. }
            | Phase::Syncing(group) => Some((group.generation, group.rank)),
        }
    }

    /// Generation of the group in whose round this worker is, between two tasks: its state can be
    /// copied.
    pub fn in_round(&self) -> Option<Generation> {
        match &self.phase {
            Phase::Round { group, .. } => Some(group.generation),
            _ => None,
        }
    }

    /// Whether this worker has not been in a membership yet.
    pub fn is_joiner(&self) -> bool {
        !self.was_member
    }

    /// Whether this worker makes no further steps.
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Finished { .. } | Phase::Ended(_))
    }

    // ---- private ----

    fn join_latest(&mut self) {
        if matches!(self.phase, Phase::Ended(_)) {
            return;
        }
        let Some(latest) = &self.latest else { return };
        let is_member = latest.rank_of(self.me).is_some();
        self.phase = match (is_member, self.was_member) {
            (true, _) => Phase::Joining(latest.clone()),
            (false, true) => Phase::Ended(Exit::Left),
            (false, false) => Phase::Detached,
        };
        self.was_member |= is_member;
    }

    /// Discards the pending gradient if the state has absorbed it.
    fn settle_pending(&mut self) {
        let Some(state) = &self.state else { return };
        let absorbed: u64 = self.pending.ranges.iter().map(|r| state.ledger.absorbed_of(*r)).sum();
        if absorbed > 0 {
            // A commit absorbs a rank's whole contribution, so the remainder is empty. Any record
            // in it would be computed again.
            let missing = |r: &RecordRange| state.ledger.missing_of(*r);
            let again: Vec<RecordRange> = self.pending.ranges.iter().flat_map(missing).collect();
            self.pending = Pending::default();
            self.leases.put_back(again.into_iter());
        }
    }

    /// Ends the job for `group`. No rank starts another round, so a newer group need not wait for
    /// one.
    fn end(&mut self, group: Group, ending: Ending) {
        let newer = self.latest.as_ref().is_some_and(|latest| latest.generation > group.generation);
        self.phase = Phase::Finished { group, reported: false, ending };
        if newer {
            self.join_latest();
        }
    }

    fn at_end(&self) -> bool {
        self.state.as_ref().is_some_and(|s| {
            s.ledger.epoch() >= self.job.epochs
                || self.job.max_steps.is_some_and(|max| s.step >= max)
        }) || self.stops_early()
    }

    /// `committed`: time of the commit, if this round made a step.
    fn end_round(&mut self, headers: &[StepHeader], committed: Option<Duration>) {
        let Phase::Round { group, .. } = &self.phase else { return };
        let group = group.clone();
        if self.is_to_be_evaluated() {
            self.phase = Phase::Evaluating { group, headers: headers.to_vec(), committed };
            return;
        }
        let seen = headers.iter().map(|h| h.newest_generation).min().unwrap_or(0);
        let ending = self.ending(&group, headers);
        let ends = ending.is_some();
        let of_checkpoint = checkpoint_headers(headers);
        let last = if ends && self.checkpoints.are_enabled() {
            final_checkpoint(&of_checkpoint, self.step())
        } else {
            FinalCheckpoint::Nothing
        };
        let best = self.is_best()
            && self.checkpoints.are_enabled()
            && final_checkpoint(&of_checkpoint, self.step()) != FinalCheckpoint::Nothing;
        let is_free = final_checkpoint(&of_checkpoint, self.step()) == FinalCheckpoint::Begin;
        if last == FinalCheckpoint::Begin
            || (best && is_free)
            || (committed.is_some() && checkpoint::begins(&of_checkpoint))
        {
            let (step, generation) = (self.step(), group.generation);
            self.checkpoints.begin(step, generation, &group.members, committed.unwrap_or_default());
        }
        if let (Some(ending), FinalCheckpoint::Nothing) = (ending, last) {
            self.flush_progress();
            self.end(group, ending);
        } else if seen > group.generation.0 {
            self.flush_progress();
            self.join_latest();
        } else {
            // Saving the best model is worth the wait: no later step would have it.
            let waits = ends || (best && !is_free);
            let quotas = if waits { None } else { self.quotas(headers) };
            self.phase = Phase::Round { group, quotas, computed: false };
        }
    }

    fn quotas(&self, headers: &[StepHeader]) -> Option<Vec<u64>> {
        let state = self.state.as_ref()?;
        let epoch = state.ledger.epoch();
        // After a commit nothing is pending; after an idle round the headers' ranges are.
        let committed = headers.iter().all(|h| h.step < state.step);
        let ranks: Vec<AvailableRecords> = headers
            .iter()
            .map(|h| AvailableRecords {
                pending: if committed { 0 } else { h.records() },
                held: held_of(&h.held, epoch),
            })
            .collect();
        plan::quotas(self.job.batch, state.ledger.remaining(epoch), &ranks)
    }
}

fn checkpoint_headers(headers: &[StepHeader]) -> Vec<&CheckpointHeader> {
    headers.iter().map(|header| &header.checkpoint).collect()
}

mod checkpointing;
mod fetch;
mod halting;
mod reading;
mod reconnect;
mod reports;
mod transport;
mod types;

#[cfg(test)]
mod tests;
