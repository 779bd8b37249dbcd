//! Which records this rank computes and reads, and its behaviour while its storage does not answer:
//! it offers the group the records that are already read, and stays in the ring even if there are
//! none.

use elasticdl_proto::{Ledger, RecordRange};

use super::phase::{Group, Pending};
use super::{Computed, JobPlan, State, plan};
use crate::session::header::{StepHeader, add_sums};
use crate::session::pace::Pace;
use crate::session::plan::{Contribution, Plan};

/// What this rank computes, has computed for the step, and reads ahead.
#[derive(Clone, Debug, Default)]
pub struct Assignment {
    /// Records that this rank will compute next, and that are to be read ahead.
    upcoming: Vec<RecordRange>,
    /// Whether they have changed since they were [taken](Self::take_upcoming).
    upcoming_changed: bool,
    /// Number of upcoming records that can be read now; `None`: all of them.
    readable: Option<u64>,
    /// Whether this rank could not read records that it should have computed for this step.
    has_unread: bool,
    /// Whether all ranks of the group wait for storage, by the last headers.
    all_wait: bool,
    pub(super) pending: Pending,
    /// Speed of this rank.
    pace: Pace,
    /// Times per record of the group's ranks, from the last headers.
    costs: Vec<u64>,
}

impl Assignment {
    /// Records that this rank will compute next, in this order, if nothing happens to its group.
    pub fn upcoming(&self) -> &[RecordRange] {
        &self.upcoming
    }

    /// The [upcoming](Self::upcoming) records, if they have changed since the last call.
    pub fn take_upcoming(&mut self) -> Option<&[RecordRange]> {
        std::mem::take(&mut self.upcoming_changed).then_some(self.upcoming.as_slice())
    }

    /// Limits what this rank offers to compute to the first `readable` of the upcoming records;
    /// `None`: all can be read.
    pub fn limit_readable(&mut self, readable: Option<u64>) {
        self.readable = readable;
    }

    /// Whether all ranks of the group wait for storage.
    pub fn all_wait(&self) -> bool {
        self.all_wait
    }

    /// The pending gradient now contains the records of the last
    /// [`Task::Compute`](super::Task::Compute).
    pub fn computed(&mut self, computed: Computed) {
        self.pending.loss_sum += computed.loss_sum;
        add_sums(&mut self.pending.metrics, &computed.metrics);
        add_sums(&mut self.pending.tally, &computed.tally);
        self.pending.compute_us += computed.compute_us;
        self.pending.input_us += computed.input_us;
        self.pending.row_touches += computed.row_touches;
    }

    /// The trailing records of the last [`Task::Compute`](super::Task::Compute) that could not be
    /// read yet. The pending gradient does not contain them: another rank computes them, or this
    /// one later. Of several parts of one range, the last one comes first.
    pub fn not_read(&mut self, unread: &[RecordRange]) {
        self.not_computed(unread);
        self.has_unread = !unread.is_empty();
    }

    /// These trailing records of the last [`Task::Compute`](super::Task::Compute) are not in the
    /// pending gradient, because the links broke before. Of several parts of one range, the last
    /// one comes first.
    pub fn not_computed(&mut self, ranges: &[RecordRange]) {
        let ends_with = |range: &RecordRange, rest: &RecordRange| {
            range.epoch == rest.epoch && range.end == rest.end && range.start <= rest.start
        };
        for rest in ranges {
            let computed =
                self.pending.ranges.iter_mut().rev().find(|range| ends_with(range, rest));
            computed.expect("what is computed is pending").end = rest.start;
        }
        self.pending.ranges.retain(|range| !range.is_empty());
    }

    /// Adds what this rank has computed and can read to its header.
    pub(super) fn write(&self, header: &mut StepHeader) {
        header.ranges.clone_from(&self.pending.ranges);
        header.loss_sum = self.pending.loss_sum;
        header.metrics.clone_from(&self.pending.metrics);
        header.tally.clone_from(&self.pending.tally);
        header.compute_us = self.pending.compute_us;
        header.input_us = self.pending.input_us;
        header.row_touches = self.pending.row_touches;
        header.cost = self.pace.cost();
        header.readable = if self.has_unread { Some(0) } else { self.readable };
    }

    /// Takes the gradient that a step of this round has absorbed.
    pub(super) fn commit(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        let records = pending.ranges.iter().map(RecordRange::len).sum();
        self.pace.note(records, pending.compute_us);
    }

    /// Discards the pending gradient: it is that of a state which this rank gives up.
    pub(super) fn forget(&mut self) {
        self.pending = Pending::default();
    }

    /// Discards the pending gradient if the ledger has absorbed it.
    pub(super) fn settle(&mut self, ledger: &Ledger) {
        // A commit absorbs a rank's whole contribution.
        if self.pending.ranges.iter().any(|range| ledger.absorbed_of(*range) > 0) {
            self.pending = Pending::default();
        }
    }

    /// Another attempt to read begins.
    pub(super) fn read_again(&mut self) {
        self.has_unread = false;
    }

    /// Records that this rank computes for the next step; `None` if the group waits for records
    /// that cannot be read yet. Drops the pending gradient if it is not part of that step.
    pub(super) fn plan(
        &mut self,
        (job, state): (&JobPlan, &State),
        group: &Group,
        headers: &[StepHeader],
    ) -> Option<Vec<RecordRange>> {
        // After a commit nothing is pending; after an idle round the headers' ranges are.
        let committed = headers.iter().all(|h| h.step < state.step);
        let ranks: Vec<Contribution> = headers
            .iter()
            .map(|h| Contribution {
                pending: if committed { Vec::new() } else { h.ranges.clone() },
                readable: h.readable,
                cost: h.cost,
            })
            .collect();
        let plan = Plan::new(&state.ledger, job.size, &ranks);
        self.costs = headers.iter().map(|h| h.cost).collect();
        self.all_wait = headers.iter().all(|header| header.readable.is_some());
        if !plan.keeps[group.rank] {
            self.pending = Pending::default();
        }
        let kept = ranks.iter().zip(plan.keeps).filter(|(_, keeps)| *keeps);
        let kept = kept.flat_map(|(rank, _)| &rank.pending);
        let assigned = plan.assigned.iter().flatten().flatten();
        let step: Vec<RecordRange> = kept.chain(assigned).copied().collect();
        self.look_ahead((job, state), group, if plan.assigned.is_some() { &step } else { &[] });
        plan.assigned.map(|mut assigned| assigned.swap_remove(group.rank))
    }

    /// Finds out which records this rank of `group` will compute after `step`, the records of the
    /// step that is being computed.
    pub(super) fn look_ahead(
        &mut self,
        (job, state): (&JobPlan, &State),
        group: &Group,
        step: &[RecordRange],
    ) {
        let mut ledger = state.ledger.clone();
        for range in step {
            ledger.absorb(*range);
        }
        // A new group has not exchanged times yet.
        self.costs.resize(group.members.len(), 0);
        let ranks = (group.rank, self.costs.as_slice());
        let upcoming = plan::upcoming(&ledger, job.epochs, job.size, ranks, STEPS_AHEAD);
        self.upcoming_changed |= self.upcoming != upcoming;
        self.upcoming = upcoming;
    }
}

/// Number of steps whose records are read ahead.
const STEPS_AHEAD: u64 = 4;
