//! Which records this rank computes and reads, and its behaviour while its storage does not answer:
//! it offers the group the records that are already read, and stays in the ring even if there are
//! none.

use elasticdl_proto::RecordRange;

use super::phase::{Group, Pending};
use super::{Computed, Session, plan};
use crate::session::header::StepHeader;
use crate::session::plan::{Contribution, Plan};

impl Session {
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

    /// The pending gradient now contains the records of the last
    /// [`Task::Compute`](super::Task::Compute).
    pub fn computed(&mut self, computed: Computed) {
        self.pending.loss_sum += computed.loss_sum;
        self.pending.compute_us += computed.compute_us;
        self.pending.input_us += computed.input_us;
    }

    /// The trailing records of the last [`Task::Compute`](super::Task::Compute) that could not be
    /// read yet. The pending gradient does not contain them: another rank computes them, or this
    /// one later. Of several parts of one range, the last one comes first.
    pub fn not_read(&mut self, unread: &[RecordRange]) {
        let ends_with = |range: &RecordRange, rest: &RecordRange| {
            range.epoch == rest.epoch && range.end == rest.end && range.start <= rest.start
        };
        for rest in unread {
            let computed =
                self.pending.ranges.iter_mut().rev().find(|range| ends_with(range, rest));
            computed.expect("what is computed is pending").end = rest.start;
        }
        self.pending.ranges.retain(|range| !range.is_empty());
        self.has_unread = !unread.is_empty();
    }

    /// The micro-batches that these records of the step consist of.
    pub fn micro_batches(&self, ranges: &[RecordRange]) -> Vec<RecordRange> {
        let Some(state) = &self.state else { return ranges.to_vec() };
        plan::micro_batches(&state.ledger, self.job.size, ranges)
    }

    /// Records that this rank computes for the next step; `None` if the group waits for records
    /// that cannot be read yet. Drops the pending gradient if it is not part of that step.
    pub(super) fn plan(
        &mut self,
        group: &Group,
        headers: &[StepHeader],
    ) -> Option<Vec<RecordRange>> {
        let state = self.state.as_ref()?;
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
        let plan = Plan::new(&state.ledger, self.job.size, &ranks);
        self.costs = headers.iter().map(|h| h.cost).collect();
        if !plan.keeps[group.rank] {
            self.pending = Pending::default();
        }
        let kept = ranks.iter().zip(plan.keeps).filter(|(_, keeps)| *keeps);
        let kept = kept.flat_map(|(rank, _)| &rank.pending);
        let assigned = plan.assigned.iter().flatten().flatten();
        let step: Vec<RecordRange> = kept.chain(assigned).copied().collect();
        self.look_ahead(group, if plan.assigned.is_some() { &step } else { &[] });
        plan.assigned.map(|mut assigned| assigned.swap_remove(group.rank))
    }

    /// Finds out which records this rank of `group` will compute after `step`, the records of the
    /// step that is being computed.
    pub(super) fn look_ahead(&mut self, group: &Group, step: &[RecordRange]) {
        let Some(state) = &self.state else { return };
        let mut ledger = state.ledger.clone();
        for range in step {
            ledger.absorb(*range);
        }
        // A new group has not exchanged times yet.
        self.costs.resize(group.members.len(), 0);
        let ranks = (group.rank, self.costs.as_slice());
        let upcoming = plan::upcoming(&ledger, self.job.epochs, self.job.size, ranks, STEPS_AHEAD);
        self.upcoming_changed |= self.upcoming != upcoming;
        self.upcoming = upcoming;
    }
}

/// Number of steps whose records are read ahead.
const STEPS_AHEAD: u64 = 4;
