//! What others may ask of a session.

use std::ops::Range;

use elasticdl_proto::{Generation, RecordRange, WorkerId};

use super::phase::{Group, Phase};
use super::{Session, State, plan};
use crate::session::header::StepHeader;
use crate::session::origin::{Program, ProgramMismatch};

impl Session {
    /// What this worker runs.
    pub fn program(&self) -> &Program {
        &self.origin.program
    }

    /// Checks that this worker may join a group that runs `group`. A joiner asks before it fetches
    /// the state, so that one of another build is never a member.
    ///
    /// # Errors
    /// It runs another program, and the job needs one.
    pub fn check_program(&self, group: &Program) -> Result<(), ProgramMismatch> {
        if self.job.allows_mixed_builds { Ok(()) } else { self.origin.check(group) }
    }

    /// Number of committed steps; 0 without state.
    pub fn step(&self) -> u64 {
        self.own_step().unwrap_or(0)
    }

    /// Number of committed steps; `None` without state.
    pub fn own_step(&self) -> Option<u64> {
        self.state.as_ref().map(|s| s.step)
    }

    pub fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }

    /// Whether this worker has been in a group that trained, and may hold its only state.
    pub fn has_trained(&self) -> bool {
        self.memberships.was_in_group
    }

    /// Whether some steps of the job are audited.
    pub fn audits(&self) -> bool {
        self.job.audit.is_some()
    }

    /// The micro-batches that these records of the step consist of.
    pub fn micro_batches(&self, ranges: &[RecordRange]) -> Vec<RecordRange> {
        let Some(state) = &self.state else { return ranges.to_vec() };
        plan::micro_batches(&state.ledger, self.job.size, ranges)
    }

    /// Whether the sum of a step waits for its commit.
    pub fn has_sum(&self) -> bool {
        self.step.outcome.is_some()
    }

    /// Whether the group's work has ended, and this worker has reported its state.
    pub fn has_reported_end(&self) -> bool {
        matches!(self.phase, Phase::Finished { reported: true, .. })
    }

    /// Headers of the last commit, for ranks that are one step behind.
    pub fn last_headers(&self) -> Option<&[StepHeader]> {
        self.step.last_headers.as_deref()
    }

    /// Generation and rank of this worker, if it has links.
    pub fn group_rank(&self) -> Option<(Generation, usize)> {
        self.group().map(|group| (group.generation, group.rank))
    }

    pub(super) fn group(&self) -> Option<&Group> {
        match &self.phase {
            Phase::Detached | Phase::Ended(_) | Phase::Fetching | Phase::Joining(_) => None,
            Phase::Evaluating { group, .. }
            | Phase::Finished { group, .. }
            | Phase::HandingOver { group, .. }
            | Phase::Rechecking { group, .. }
            | Phase::Repairing(group, _)
            | Phase::Round { group, .. }
            | Phase::Syncing(group)
            | Phase::Verifying { group, .. } => Some(group),
        }
    }

    /// The members of this worker's group, in the order of their ranks.
    pub fn members(&self) -> &[WorkerId] {
        self.group().map_or(&[], |group| &group.members)
    }

    /// Number of ranks that compute records.
    pub(super) fn workers(&self) -> usize {
        let serves = self.group().map(Group::serves_tables).unwrap_or_default();
        serves.iter().filter(|serves| !**serves).count()
    }

    /// The blocks of the validation data that each rank evaluates.
    pub fn evaluation_shares(&self) -> Vec<Range<u64>> {
        let (Some(plan), Some(group)) = (&self.job.evaluation, self.group()) else {
            return Vec::new();
        };
        plan.shares(&group.serves_tables())
    }

    /// Generation of the group in whose round this worker is, between two tasks: its state can be
    /// copied.
    pub fn in_round(&self) -> Option<Generation> {
        match &self.phase {
            Phase::Round { group, .. } => Some(group.generation),
            _ => None,
        }
    }

    /// Whether this worker joins another group before it sums the gradient that it computes.
    pub fn is_switching(&self) -> bool {
        self.step.switches
    }

    /// Whether the gradient that this worker computes next is compared with that of another one.
    pub fn is_auditing(&self) -> bool {
        match &self.phase {
            Phase::Rechecking { .. } => true,
            Phase::Round { assigned: Some(ranges), computed: false, .. } if !ranges.is_empty() => {
                self.assignment.needs_own_digest()
            }
            _ => self.assignment.audit.part().is_some(),
        }
    }

    /// Whether the next header travels with the sum of a step.
    pub fn is_summing(&self) -> bool {
        matches!(self.phase, Phase::Round { assigned: Some(_), .. })
    }

    /// The state that this worker may send to joining workers: all ranks of its generation have
    /// reported that they hold its step.
    pub fn confirmed(&self) -> Option<(Generation, &State)> {
        self.in_round().zip(self.state.as_ref()).filter(|_| self.step.is_confirmed)
    }

    /// Whether this worker is not in the newest generation, and leaves the group.
    pub fn is_leaving(&self) -> bool {
        let latest = self.memberships.latest.as_ref();
        self.memberships.was_member
            && latest.is_some_and(|latest| latest.rank_of(self.me).is_none())
    }

    /// Whether the group that this worker is in follows a loss.
    pub fn follows_loss(&self) -> bool {
        self.memberships.follows_loss
    }

    /// Whether the master wants the job to stop.
    pub fn is_stopping(&self) -> bool {
        self.requests.stop
    }

    /// Whether ranks leave whose shards the others take over first.
    pub fn is_handing_over(&self) -> bool {
        matches!(self.phase, Phase::HandingOver { .. })
    }

    /// Whether this worker makes no further steps.
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Finished { .. } | Phase::Ended(_))
    }
}
