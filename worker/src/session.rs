//! The state machine of a worker: it decides the next task and executes nothing itself.
//!
//! ```text
//!   Fetching ◀── donors are offered while a group trains; continues like Detached, with a state
//!
//!             membership        links up       headers              same state everywhere
//!   Detached ──────────▶ Joining ──────▶ Syncing ────▶ Repairing ──────────────────────▶ Round ⟲
//!     ▲                                                                                  │   ▲
//!     └── links broke, in every phase from Joining to Finished      headers of all ranks ▼   │
//!                                             Evaluating, HandingOver, Rechecking, Verifying ┘
//!                                                                                        │
//!   Ended ◀── shutdown, in every phase                       the work is over, Finished ◀┘
//! ```
//!
//! A round ends when every rank holds the headers of all ranks. It is either a step (headers travel
//! with the gradient; a commit follows) or, while records cannot be read, an idle round (headers
//! alone). The next decision is derived from these headers, which are the same on every
//! rank: the shares of the next round, a switch to a newer generation, or the end.
//!
//! | part | what it owns |
//! |---|---|
//! | `Memberships` | the newest membership, and in which ones this worker has been |
//! | `Assignment` | the records of this rank: computed, to be computed, read ahead; its speed |
//! | `StepPart` | what is known of the current step |
//! | `Fetch`, `Checkpoints`, `TransportSwitch` | a joiner's donors; checkpoints; NCCL or not |
//! | `Requests` | why this rank wants its group to end |
//! | `Reports` | what the master is told |
//!
//! The modules below hold the parts, and the session's decisions. They are public for the
//! workspace's simulation, and not for users.
//!
//! **Invariant:** no IO, no clock, no threads; the output depends on the input alone.
//! **Invariant:** the ledger changes together with the step, and only in [`Session::updated`] and
//! [`Session::install`]. **Invariant:** a computed gradient is discarded only after the ledger has
//! absorbed its records.

use elasticdl_proto::{MasterMessage, WorkerId, WorkerMessage};

pub use self::assignment::Assignment;
use self::membership::Memberships;
use self::phase::{Fetch, Outcome, Phase, StepPart};
pub use self::reports::Reports;
pub use self::types::{
    Broadcast, Computed, Exit, FinalState, GroupMismatch, InvalidData, JobPlan, State, Task,
};
use crate::session::checkpoint::Checkpoints;
use crate::session::halt::{Ending, Halt, Reason, Requests};
use crate::session::header::{StateHeader, StepHeader, SyncHeader};
use crate::session::origin::Origin;
use crate::session::replicas::StateMismatch;
use crate::session::transport_switch::TransportSwitch;
use crate::tensor::WINDOWS;

/// State machine of one worker in a job.
#[derive(Clone, Debug)]
pub struct Session {
    me: WorkerId,
    origin: Origin,
    job: JobPlan,
    state: Option<State>,
    phase: Phase,
    memberships: Memberships,
    /// What this rank computes.
    pub assignment: Assignment,
    step: StepPart,
    fetch: Fetch,
    checkpoints: Checkpoints,
    transport: TransportSwitch,
    requests: Requests,
    /// What this worker tells its master.
    pub reports: Reports,
    /// Number of parameters, once this worker is ready.
    parameters: Option<u64>,
}

impl Session {
    pub fn new(me: WorkerId, job: JobPlan) -> Self {
        Self {
            me,
            origin: Origin::default(),
            checkpoints: Checkpoints::new(me, job.checkpoints),
            job,
            state: None,
            phase: Phase::Detached,
            memberships: Memberships::default(),
            assignment: Assignment::default(),
            step: StepPart::default(),
            fetch: Fetch::default(),
            transport: TransportSwitch::default(),
            requests: Requests::default(),
            reports: Reports::default(),
            parameters: None,
        }
    }

    /// Sets where this worker runs, and what.
    pub fn of(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    // ---- messages of the master ----

    pub fn handle(&mut self, message: MasterMessage) {
        match message {
            MasterMessage::Drain => self.requests.stop = true,
            MasterMessage::Fetch(donors) => self.handle_fetch(donors),
            MasterMessage::GiveUp => {
                let reason = Reason::Error("the job gives up after failures of workers".into());
                self.halt(Halt { reason, ranges: Vec::new() });
            }
            MasterMessage::KeepCheckpoint => self.checkpoints.request(),
            MasterMessage::Membership(membership) => self.handle_membership(membership),
            MasterMessage::Shutdown { reason, .. } => {
                self.step.outcome = None;
                self.phase = Phase::Ended(Exit::Shutdown(reason));
            }
            MasterMessage::Suspend => self.requests.suspend = true,
            // Handled where state requests arrive.
            MasterMessage::Joiners(_) => {}
            // Handled by the control thread, as this one may hang.
            MasterMessage::CheckHost
            | MasterMessage::Inspect { .. }
            | MasterMessage::ReportStacks => {}
            // Only shards of evaluation and prediction are leased.
            MasterMessage::Lease(_) => {}
            // Answered before there is a session.
            MasterMessage::Describe | MasterMessage::Prepare(_) => {}
        }
        if self.step.outcome.is_none() {
            self.handle_deferred();
        }
    }

    /// This worker can train a model of `parameters` parameters.
    pub fn ready(&mut self, parameters: u64) {
        self.parameters = Some(parameters);
        self.reports.push(WorkerMessage::Ready { parameters });
    }

    // ---- the next task ----

    pub fn poll(&mut self) -> Task {
        match &self.step.outcome {
            Some(Outcome::Nonfinite(_)) => return Task::InspectGradient,
            Some(Outcome::Apply(apply)) => {
                let records = apply.headers.iter().map(StepHeader::records).sum();
                return Task::Update { records, is_applied: records > 0 && apply.is_finite };
            }
            None => {}
        }
        if self.step.switches && matches!(self.phase, Phase::Round { computed: true, .. }) {
            self.join_latest();
        }
        let stands_by = self.is_leaving();
        match &mut self.phase {
            Phase::Detached if stands_by => Task::StandBy,
            Phase::Detached | Phase::Finished { reported: true, .. } => Task::Wait,
            Phase::Ended(exit) => Task::Exit(exit.clone()),
            Phase::Evaluating { group, .. } => {
                let plan =
                    self.job.evaluation.as_ref().expect("this phase requires an evaluation plan");
                Task::Evaluate(plan.shares(&group.serves_tables()).swap_remove(group.rank))
            }
            Phase::Fetching => {
                let (donor, address) = self.fetch.donor();
                Task::Fetch(donor, address)
            }
            Phase::HandingOver { leaves, .. } => Task::HandOver { leaves: leaves.clone() },
            Phase::Joining(membership) => Task::Connect(membership.clone()),
            Phase::Finished { group, ending, .. } => {
                Task::Finish { is_published: group.rank == 0 && *ending != Ending::Suspended }
            }
            Phase::Rechecking { again: Some(_), .. } => Task::ExchangeHeaders { pauses: false },
            Phase::Rechecking { disputes, again: None, .. } => {
                Task::Recheck(disputes.iter().map(|dispute| dispute.ranges.clone()).collect())
            }
            Phase::Repairing(_, repairing) => repairing.task(),
            Phase::Syncing(_) => Task::Synchronize,
            Phase::Round { assigned: None, .. } => {
                Task::ExchangeHeaders { pauses: self.step.is_idle }
            }
            Phase::Verifying { .. } => Task::ExchangeHeaders { pauses: false },
            Phase::Round { assigned: Some(ranges), computed, .. } => {
                let is_first = self.assignment.pending.ranges.is_empty();
                if *computed || ranges.is_empty() {
                    if let Some(part) = self.assignment.audit.part() {
                        return Task::Audit(part.clone());
                    }
                    return Task::Step { is_empty: is_first };
                }
                *computed = true;
                let ranges = ranges.clone();
                self.assignment.pending.ranges.extend(&ranges);
                Task::Compute { ranges, is_first }
            }
        }
    }

    /// Header of this rank for the round. `digest`: of the part of the state that this step covers,
    /// or of the whole state if this session [is verifying](Self::is_verifying).
    pub fn header(&self, digest: u64) -> StepHeader {
        let mut header = StepHeader {
            step: self.step(),
            newest_generation: self.memberships.newest_generation(),
            stop: self.requests.stop,
            suspend: self.requests.suspend,
            halt: self.requests.halt.clone(),
            digest,
            checkpoint: self.checkpoints.header(self.step() + 1),
            evaluation: self.evaluation(),
            nccl: self.transport.build(),
            audit: self.audit_header(),
            is_copy: self.memberships.copied_at.is_some_and(|at| self.step() < at + WINDOWS),
            ..StepHeader::default()
        };
        self.assignment.write(&mut header);
        if self.origin.serves_tables {
            header.readable = Some(0);
        }
        header
    }

    /// Header of this rank for a new group. `digest`: of the state record and a part of the
    /// tensors.
    pub fn sync_header(&self, digest: u64) -> SyncHeader {
        let state = self.state.as_ref().map(|s| StateHeader {
            step: s.step,
            digest,
            has_result: self.step.last_headers.is_some(),
            was_in_group: self.memberships.was_in_group,
        });
        let created = self.state.as_ref().map_or(0, |s| s.created);
        let (transport, origin) = (self.transport.header(), self.origin.clone());
        SyncHeader { state, created, transport, origin, owned: None, is_gathered: false }
    }

    // ---- results of tasks ----

    /// Takes in the headers of all ranks from a round without a step.
    ///
    /// # Errors
    /// Replicas differ; see [`StateMismatch`].
    pub fn headers_exchanged(&mut self, headers: &[StepHeader]) -> Result<(), StateMismatch> {
        self.check(headers)?;
        if let Some(judged) = self.end_recheck(headers) {
            return judged;
        }
        let committed = self.end_verification();
        self.transport.handle_builds(headers.iter().map(|h| h.nccl));
        self.reports.flush();
        self.handle_checkpoint_headers(headers);
        self.step.is_confirmed = true;
        // When no rank can read, each one looks again.
        if !matches!(self.phase, Phase::Round { assigned: Some(_), .. }) {
            self.assignment.read_again();
        }
        self.step.is_idle = true;
        self.end_round(headers, committed);
        Ok(())
    }
}

mod after_round;
mod assignment;
pub mod audit;
mod audited;
pub mod checkpoint;
pub mod control;
mod ending;
pub mod evaluation;
mod fetch;
pub mod halt;
pub mod header;
mod joining;
mod membership;
pub mod origin;
mod outcome;
mod pace;
mod phase;
pub mod plan;
mod queries;
mod rechecking;
mod reconnect;
pub mod repair;
pub mod replicas;
pub(crate) mod reports;
mod transfers;
pub mod transport_switch;
mod types;
mod verification;

#[cfg(test)]
mod tests;
