//! What a worker does next: the part of a worker that decides, and does nothing itself.
//!
//! ```text
//!   Fetching ◀── told to fetch the state while others train: then as from Detached, with state
//!
//!            membership          links stand         all same state
//!   Detached ──────────────▶ Joining ─────────▶ Syncing ─────▶ Repairing ─────▶ Round ⟲ ──▶ Over
//!     ▲                                                                        │
//!     └───────────────────────────── links broke ◀─────────────────────────────┘
//! ```
//!
//! A round ends with all ranks' headers on every rank: either a step (headers beside a gradient,
//! then a commit), or, where records are on their way, a talk (headers alone). What follows is
//! decided from these headers, which are the same everywhere: the next round's shares, a switch to
//! a newer generation, the end.
//!
//! **Invariant:** no IO, no clock, no threads; what comes out depends on what went in.
//! **Invariant:** the ledger changes together with the step, by [`Session::commit`] or
//! [`Session::install`] alone. **Invariant:** a computed gradient is given up only when the ledger
//! has absorbed it.

use std::collections::VecDeque;
use std::time::Duration;

use elasticdl_proto::{Generation, Ledger, RecordRange, WorkerId};

use self::fetch::Fetch;
pub use self::types::{
    Exit, GroupMismatch, JobPlan, Membership, Progress, Report, State, StepTimes, Task,
};
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

/// A gradient of this worker that no step is known to have absorbed.
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
    /// Between a round and what its headers bring.
    Evaluating {
        group: Group,
        headers: Vec<StepHeader>,
        committed: Option<Duration>,
    },
    /// The state comes from a member while it trains.
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

/// One worker's part in a job.
#[derive(Clone, Debug)]
pub struct Session {
    me: WorkerId,
    job: JobPlan,
    state: Option<State>,
    /// Headers of the last commit, while its reduced gradient is kept.
    last_headers: Option<Vec<StepHeader>>,
    leases: Leases,
    /// How many of the leased records can be had now, where that is not all of them.
    readable: Option<u64>,
    pending: Pending,
    phase: Phase,
    latest: Option<Membership>,
    /// This worker has been in a membership, so one without it means that it is to go.
    was_member: bool,
    /// This worker has been in a group that came to one state, so it may have used up leases.
    was_in_group: bool,
    fetch: Fetch,
    checkpoints: Checkpoints,
    transport: TransportSwitch,
    stop: bool,
    suspend: bool,
    /// Why this rank can't go on. It never goes away: whichever group this rank joins ends.
    halt: Option<Halt>,
    progress: Progress,
    reported_at: Duration,
    /// When this group committed last.
    committed_at: Option<Duration>,
    reports: VecDeque<Report>,
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
            progress: Progress::default(),
            reported_at: Duration::ZERO,
            committed_at: None,
            reports: VecDeque::new(),
        }
    }

    // ---- what the master says ----

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

    // ---- what there is to do ----

    pub fn poll(&mut self) -> Task {
        match &mut self.phase {
            Phase::Detached | Phase::Finished { reported: true, .. } => Task::Wait,
            Phase::Ended(exit) => Task::Exit(exit.clone()),
            Phase::Evaluating { group, .. } => {
                let plan =
                    self.job.evaluation.as_ref().expect("there is a plan where it is evaluated");
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

    /// This rank's word in the round. `digest`: of the part of the state that is this step's turn.
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

    /// This rank's word in a new group. `digest`: of the record and a part of the tensors.
    pub fn sync_header(&self, digest: u64) -> SyncHeader {
        let state = self.state.as_ref().map(|s| StateHeader {
            step: s.step,
            digest,
            has_result: self.last_headers.is_some(),
            was_in_group: self.was_in_group,
        });
        SyncHeader { state, transport: self.transport.header() }
    }

    // ---- what was done ----

    /// The links of the membership stand.
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

    /// The links of the current generation were not built: `suspect` answered no dial.
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
            self.reports.push_back(Report::Broken { generation, suspect, error, unreachable });
        }
    }

    /// All ranks' words in a new group.
    ///
    /// # Errors
    /// Replicas at the same step differ, and the job can't go on; or this worker is none for this
    /// group.
    pub fn synced(&mut self, headers: &[SyncHeader]) -> Result<(), GroupMismatch> {
        if let Phase::Syncing(group) = &self.phase {
            self.transport.synced(&headers.iter().map(|h| h.transport).collect::<Vec<_>>())?;
            let repair = Repair::plan(&transport::without_mismatched_devices(headers))?;
            let takes =
                repair.state.as_ref().is_some_and(|(_, takers)| takers.contains(&group.rank));
            // Survivors of a failure differ by one step at most, so this rank was away; what it has
            // consumed of its leases is known to nobody. A new worker in its place starts from
            // nothing. (One that only has fetched has consumed none.)
            self.phase = match takes && self.state.is_some() && self.was_in_group {
                true => Phase::Ended(Exit::Outdated),
                false => Phase::Repairing(group.clone(), repair),
            };
            if takes {
                // The broadcast overwrites the parameters. If it breaks midway, this rank has no
                // state.
                self.state = None;
                self.last_headers = None;
            }
        }
        Ok(())
    }

    /// This rank made the initial state.
    pub fn begin(&mut self) {
        self.state = Some(State {
            step: 0,
            ledger: Ledger::new(self.job.records),
            records_trained: 0,
            evaluation: Evaluation::default(),
            steps_skipped: 0,
        });
    }

    /// This rank took over another one's state; `kept` are the headers of its last step, if this
    /// rank has that step's reduced gradient. `false` where the record makes no sense.
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
            self.reports.push_back(Report::Formed {
                generation: group.generation,
                step: state.step,
                ledger: state.ledger.clone(),
            });
        }
        self.progress = Progress::default();
        self.committed_at = None;
        self.checkpoints.regrouped(&group.members);
        self.request_leases(group.members.len());
        // What each rank holds is known only after the repair, so the first round is a talk. So is
        // whether the final state is kept, and judged.
        match self.at_end() && !self.checkpoints.are_enabled() && self.job.evaluation.is_none() {
            true => self.end(group, Ending::Done),
            false => self.phase = Phase::Round { group, quotas: None, computed: false },
        }
    }

    /// The pending gradient now contains the records of the last [`Task::Compute`].
    pub fn computed(&mut self, loss_sum: f64, compute_us: u64) {
        self.pending.loss_sum += loss_sum;
        self.pending.compute_us += compute_us;
    }

    /// All ranks' headers of a round without a step.
    ///
    /// # Errors
    /// As for [`Session::check`].
    pub fn headers_exchanged(&mut self, headers: &[StepHeader]) -> Result<(), StateMismatch> {
        self.check(headers)?;
        self.transport.handle_builds(headers.iter().map(|h| h.nccl));
        // The group waits for records, and the master may wait for word of those that it has
        // leased.
        self.flush_progress();
        self.handle_checkpoint_headers(headers);
        self.end_round(headers, None);
        Ok(())
    }

    /// Compares all ranks' headers of a round: the same step, the same state.
    ///
    /// # Errors
    /// The ranks that differ from the lowest; the job can't go on.
    pub fn check(&self, headers: &[StepHeader]) -> Result<(), StateMismatch> {
        let differs = |h: &StepHeader| {
            (h.step, h.digest) != (headers[0].step, headers[0].digest) || h.step != self.step()
        };
        let ranks: Vec<usize> = (0..headers.len()).filter(|&r| differs(&headers[r])).collect();
        match ranks.is_empty() {
            true => Ok(()),
            false => Err(StateMismatch { step: self.step(), ranks, from: 0 }),
        }
    }

    /// The update of a step was applied: takes its records into the ledger. Ends the round, or
    /// serves a repair. `now` paces the reports to the master.
    pub fn commit(&mut self, headers: Vec<StepHeader>, now: Duration) {
        self.commit_step(headers, now, false);
    }

    /// As [`commit`](Self::commit), of a step that all ranks leave out: its records count as
    /// absorbed, and the parameters stay as they are.
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
            // In a round every rank's gradient is in the step; in a repair the ledger tells
            // (`repaired`).
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

    /// The master was told that the job is over.
    pub fn finish_reported(&mut self) {
        if let Phase::Finished { reported, .. } = &mut self.phase {
            *reported = true;
        }
    }

    // ---- what there is ----

    /// Steps committed; 0 without state.
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

    /// Headers of the last commit, for ranks that are a step behind.
    pub fn last_headers(&self) -> Option<&[StepHeader]> {
        self.last_headers.as_deref()
    }

    /// Generation and rank of this worker where it has links.
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

    /// The group in whose round this worker is, between two tasks: its state can be copied.
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

    /// Whether this worker makes no more steps.
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

    /// Gives the pending gradient up if the state has absorbed it.
    fn settle_pending(&mut self) {
        let Some(state) = &self.state else { return };
        let absorbed: u64 = self.pending.ranges.iter().map(|r| state.ledger.absorbed_of(*r)).sum();
        if absorbed > 0 {
            // A commit takes a rank's whole contribution, so the rest can only be empty; were it
            // not, it would be computed again.
            let missing = |r: &RecordRange| state.ledger.missing_of(*r);
            let again: Vec<RecordRange> = self.pending.ranges.iter().flat_map(missing).collect();
            self.pending = Pending::default();
            self.leases.put_back(again.into_iter());
        }
    }

    /// The job is over for `group`. Nobody makes another round, so a newer group has nothing to
    /// wait for.
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

    /// `committed`: when a step was, if this round made one.
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
        let last = match ends && self.checkpoints.are_enabled() {
            true => final_checkpoint(&of_checkpoint, self.step()),
            false => FinalCheckpoint::Nothing,
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
            // The best model is worth a wait: there is no later step to keep it at.
            let waits = ends || (best && !is_free);
            let quotas = if waits { None } else { self.quotas(headers) };
            self.phase = Phase::Round { group, quotas, computed: false };
        }
    }

    fn quotas(&self, headers: &[StepHeader]) -> Option<Vec<u64>> {
        let state = self.state.as_ref()?;
        let epoch = state.ledger.epoch();
        // After a commit nothing is pending; after a talk what the headers say is.
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
