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
//! with the gradient; a commit follows) or, while records cannot be read, an idle round (headers
//! alone). The next decision is derived from these headers, which are the same on every
//! rank: the shares of the next round, a switch to a newer generation, or the end.
//!
//! The modules below it hold the parts of its decisions. The feature `simulation` makes them
//! public, so that the workspace's simulation can build whole systems from them; they are not for
//! users.
//!
//! **Invariant:** no IO, no clock, no threads; the output depends on the input alone.
//! **Invariant:** the ledger changes together with the step, and only in [`Session::updated`] and
//! [`Session::install`]. **Invariant:** a computed gradient is discarded only after the ledger has
//! absorbed its records.

use std::collections::VecDeque;
use std::time::Duration;

use elasticdl_proto::{
    Committed, Ledger, LedgerReport, MasterMessage, Membership, RecordRange, WorkerId,
    WorkerMessage,
};

use self::outcome::is_withheld;
use self::phase::{Fetch, Group, Outcome, Pending, Phase};
pub use self::types::{
    Broadcast, Computed, Exit, FinalState, GroupMismatch, InvalidData, JobPlan, State, Task,
};
use crate::session::checkpoint::{
    CheckpointHeader, Checkpoints, FinalCheckpoint, final_checkpoint,
};
use crate::session::halt::{Ending, Halt};
use crate::session::header::{StateHeader, StateRecord, StepHeader, SyncHeader};
use crate::session::origin::{Origin, without_other_programs};
use crate::session::pace::Pace;
use crate::session::repair::{Repair, Unequal, without_mismatched_devices};
use crate::session::replicas::{Found, StateMismatch};
use crate::session::transport_switch::TransportSwitch;

/// State machine of one worker in a job.
#[derive(Clone, Debug)]
pub struct Session {
    me: WorkerId,
    origin: Origin,
    job: JobPlan,
    state: Option<State>,
    /// Headers of the last commit, as long as its reduced gradient is retained.
    last_headers: Option<Vec<StepHeader>>,
    /// Records that this rank will compute next, and that are to be read ahead.
    upcoming: Vec<RecordRange>,
    /// Whether they have changed since they were [taken](Self::take_upcoming).
    upcoming_changed: bool,
    /// Number of upcoming records that can be read now; `None`: all of them.
    readable: Option<u64>,
    /// Whether this rank could not read records that it should have computed for this step.
    has_unread: bool,
    pending: Pending,
    /// Speed of this rank.
    pace: Pace,
    /// Times per record of the group's ranks, from the last headers.
    costs: Vec<u64>,
    phase: Phase,
    /// What follows from the sum that this worker has received; `None` between two steps.
    outcome: Option<Outcome>,
    /// Whether the headers of all ranks have confirmed that all hold the current step.
    confirmed: bool,
    /// Step at which the whole states of this group's ranks were last found equal.
    verified: Option<u64>,
    /// Whether the last task was an idle round.
    is_idle: bool,
    /// Number of parameters, once this worker is ready.
    parameters: Option<u64>,
    latest: Option<Membership>,
    /// A membership arrived during the [outcome](Self::outcome) of a step, and whether one of them
    /// aborts.
    deferred: Option<bool>,
    /// Whether this worker has been in a membership. A later one without it means that it must
    /// leave.
    was_member: bool,
    /// Whether this worker has been in a group that reached a common state.
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
            origin: Origin::default(),
            checkpoints: Checkpoints::new(me, job.checkpoints),
            job,
            state: None,
            last_headers: None,
            upcoming: Vec::new(),
            upcoming_changed: false,
            readable: None,
            has_unread: false,
            pending: Pending::default(),
            pace: Pace::default(),
            costs: Vec::new(),
            phase: Phase::Detached,
            outcome: None,
            confirmed: false,
            verified: None,
            is_idle: false,
            parameters: None,
            latest: None,
            deferred: None,
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

    /// Sets where this worker runs, and what.
    pub fn of(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    // ---- messages of the master ----

    pub fn handle(&mut self, message: MasterMessage) {
        match message {
            MasterMessage::Drain => self.stop = true,
            MasterMessage::Fetch(donors) => self.handle_fetch(donors),
            MasterMessage::KeepCheckpoint => self.checkpoints.request(),
            MasterMessage::Membership(membership) => self.handle_membership(membership),
            MasterMessage::Shutdown(reason) => {
                self.outcome = None;
                self.phase = Phase::Ended(Exit::Shutdown(reason));
            }
            MasterMessage::Suspend => self.suspend = true,
            // Handled where state requests arrive.
            MasterMessage::Joiners(_) => {}
            // Handled by the control thread, as this one hangs.
            MasterMessage::ReportStacks => {}
            // Only shards of evaluation and prediction are leased.
            MasterMessage::Lease(_) => {}
            // Answered before there is a session.
            MasterMessage::Describe | MasterMessage::Prepare(_) => {}
        }
        if self.outcome.is_none() {
            self.handle_deferred();
        }
    }

    /// This worker can train a model of `parameters` parameters.
    pub fn ready(&mut self, parameters: u64) {
        self.parameters = Some(parameters);
        self.reports.push_back(WorkerMessage::Ready { parameters });
    }

    fn handle_membership(&mut self, membership: Membership) {
        if self.latest.as_ref().is_some_and(|latest| latest.generation >= membership.generation) {
            return;
        }
        let abort = membership.abort;
        self.latest = Some(membership);
        if self.outcome.is_some() {
            self.deferred = Some(self.deferred.unwrap_or(false) || abort);
        } else {
            self.enter_latest(abort);
        }
    }

    /// Handles the memberships that have arrived during the outcome of a step.
    fn handle_deferred(&mut self) {
        if let Some(abort) = self.deferred.take() {
            self.enter_latest(abort);
        }
    }

    fn enter_latest(&mut self, abort: bool) {
        if self.phase == Phase::Fetching {
            return self.leave_fetch();
        }
        // A switch without a loss waits for the end of the round, where all ranks switch together.
        let in_round = !matches!(self.phase, Phase::Detached | Phase::Finished { .. });
        if abort || !in_round {
            self.join_latest();
        }
    }

    // ---- the next task ----

    pub fn poll(&mut self) -> Task {
        match &self.outcome {
            Some(Outcome::Nonfinite(_)) => return Task::InspectGradient,
            Some(Outcome::Apply(apply)) => {
                let records = apply.headers.iter().map(StepHeader::records).sum();
                return Task::Update { records, is_applied: records > 0 && apply.is_finite };
            }
            None => {}
        }
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
            Phase::Finished { group, ending, .. } => {
                Task::Finish { is_published: group.rank == 0 && *ending != Ending::Suspended }
            }
            Phase::Repairing(_, repairing) => repairing.task(),
            Phase::Syncing(_) => Task::Synchronize,
            Phase::Round { assigned: None, .. } => Task::ExchangeHeaders { pauses: self.is_idle },
            Phase::Verifying { .. } => Task::ExchangeHeaders { pauses: false },
            Phase::Round { assigned: Some(ranges), computed, .. } => {
                let is_first = self.pending.ranges.is_empty();
                if *computed || ranges.is_empty() {
                    return Task::Step { is_empty: is_first };
                }
                *computed = true;
                let ranges = ranges.clone();
                self.pending.ranges.extend(&ranges);
                Task::Compute { ranges, is_first }
            }
        }
    }

    /// Header of this rank for the round. `digest`: of the part of the state that this step covers,
    /// or of the whole state if this session [is verifying](Self::is_verifying).
    pub fn header(&self, digest: u64) -> StepHeader {
        StepHeader {
            step: self.step(),
            ranges: self.pending.ranges.clone(),
            loss_sum: self.pending.loss_sum,
            compute_us: self.pending.compute_us,
            input_us: self.pending.input_us,
            cost: self.pace.cost(),
            readable: if self.has_unread { Some(0) } else { self.readable },
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
        SyncHeader { state, transport: self.transport.header(), origin: self.origin.clone() }
    }

    // ---- results of tasks ----

    /// The links of the membership are up.
    pub fn connected(&mut self) {
        if let Phase::Joining(membership) = &self.phase {
            let rank =
                membership.rank_of(self.me).expect("only memberships with this worker are joined");
            let members: Vec<WorkerId> = membership.members.iter().map(|(id, _)| *id).collect();
            self.transport.regrouped(&members);
            let group =
                Group { generation: membership.generation, members, rank, origins: Vec::new() };
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
            | Phase::Syncing(group)
            | Phase::Verifying { group, .. } => group.generation,
        };
        self.phase = Phase::Detached;
        self.outcome = None;
        self.deferred = None;
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
    /// Replicas at the same step differ, or this worker's device or program is not the group's.
    pub fn synced(&mut self, headers: &[SyncHeader]) -> Result<(), GroupMismatch> {
        if let Phase::Syncing(group) = &self.phase {
            let mut group = group.clone();
            group.origins = headers.iter().map(|header| header.origin.clone()).collect();
            self.transport.synced(&headers.iter().map(|h| h.transport).collect::<Vec<_>>())?;
            let mut counted = without_mismatched_devices(headers);
            if !self.job.allows_mixed_builds {
                origin::check(headers, &self.origin)?;
                counted = without_other_programs(&counted);
            }
            let plan = Repair::plan(&counted).map_err(|unequal| {
                let Unequal { step, verdict } = unequal;
                group.mismatch(step, Found::Sync, verdict)
            })?;
            let receives =
                plan.state.as_ref().is_some_and(|(_, receivers)| receivers.contains(&group.rank));
            // Survivors of a failure differ by at most one step, so this rank was cut off. The
            // process ends, and a new worker starts without state.
            if receives && self.state.is_some() && self.was_in_group {
                self.phase = Phase::Ended(Exit::Outdated);
            } else {
                self.begin_repair(group, &plan);
            }
            if receives {
                // The broadcast overwrites the parameters. If it fails midway, this rank has no
                // state.
                self.state = None;
                self.last_headers = None;
            }
        }
        Ok(())
    }

    /// This rank has received the state of another rank. `last_headers`: headers of the last step,
    /// if this rank also has that step's reduced gradient. Returns `false` for an inconsistent
    /// record.
    ///
    /// For a state that is fetched or restored; a broadcast one is installed by
    /// [`tensors_broadcast`](Self::tensors_broadcast).
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

    /// All ranks hold the same state, and this rank is prepared for rounds.
    pub fn repaired(&mut self) {
        let Phase::Repairing(group, _) = &self.phase else { return };
        let group = group.clone();
        self.was_in_group = true;
        self.confirmed = false;
        self.verified = None;
        self.is_idle = false;
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
        self.look_ahead(&group, &[]);
        // The ranks learn each other's pending records only after the repair, so the first round is
        // an idle one. The same holds for whether the final state is checkpointed, evaluated and
        // equal.
        self.phase = Phase::Round { group, assigned: None, computed: false };
    }

    /// Takes in the headers of all ranks from a round without a step.
    ///
    /// # Errors
    /// Replicas differ; see [`StateMismatch`].
    pub fn headers_exchanged(&mut self, headers: &[StepHeader]) -> Result<(), StateMismatch> {
        self.check(headers)?;
        let committed = self.end_verification();
        self.transport.handle_builds(headers.iter().map(|h| h.nccl));
        self.flush_progress();
        self.handle_checkpoint_headers(headers);
        self.confirmed = true;
        // When no rank can read, each one looks again.
        self.has_unread &= matches!(self.phase, Phase::Round { assigned: Some(_), .. });
        self.is_idle = true;
        self.end_round(headers, committed);
        Ok(())
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
        // A commit absorbs a rank's whole contribution.
        if self.pending.ranges.iter().any(|range| state.ledger.absorbed_of(*range) > 0) {
            self.pending = Pending::default();
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
        let of_checkpoint = checkpoint_headers(headers);
        let checkpoint = if self.checkpoints.are_enabled() {
            final_checkpoint(&of_checkpoint, self.step())
        } else {
            FinalCheckpoint::Nothing
        };
        // An evaluation of the final state can end the processes: the state is stored before.
        let is_safe = !self.at_end() || checkpoint == FinalCheckpoint::Nothing;
        if is_safe && self.is_to_be_evaluated() && !is_withheld(headers) {
            // An evaluation may take long, and the next report would follow it.
            self.flush_progress();
            self.phase = Phase::Evaluating { group, headers: headers.to_vec(), committed };
            return;
        }
        let seen = headers.iter().map(|h| h.newest_generation).min().unwrap_or(0);
        let ending = self.ending(&group, headers);
        let ends = ending.is_some();
        let last = if ends { checkpoint } else { FinalCheckpoint::Nothing };
        if self.is_to_be_verified(ending.as_ref().filter(|_| last == FinalCheckpoint::Nothing)) {
            self.flush_progress();
            self.phase = Phase::Verifying { group, committed };
            return;
        }
        let best = self.is_best() && checkpoint != FinalCheckpoint::Nothing;
        let is_free = checkpoint == FinalCheckpoint::Begin;
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
            let assigned = if waits { None } else { self.plan(&group, headers) };
            self.phase = Phase::Round { group, assigned, computed: false };
        }
    }
}

fn checkpoint_headers(headers: &[StepHeader]) -> Vec<&CheckpointHeader> {
    headers.iter().map(|header| &header.checkpoint).collect()
}

pub mod checkpoint;
mod checkpointing;
pub mod control;
pub mod evaluation;
mod fetch;
pub mod halt;
mod halting;
pub mod header;
pub mod origin;
mod outcome;
mod pace;
mod phase;
pub mod plan;
mod queries;
mod reading;
mod reconnect;
pub mod repair;
mod repairing;
pub mod replicas;
mod reports;
mod transport;
pub mod transport_switch;
mod types;
mod verification;

#[cfg(test)]
mod tests;
