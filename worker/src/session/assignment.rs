//! Which records this rank computes and reads, and its behaviour while its storage does not answer:
//! it offers the group the records that are already read, and stays in the ring even if there are
//! none.

use elasticdl_proto::{Ledger, RecordRange};

use super::audited::Audit;
use super::phase::{Group, Pending};
use super::{Computed, JobPlan, State, plan};
use crate::session::header::{StepHeader, add_sums};
use crate::session::pace::Pace;
use crate::session::plan::{Contribution, Plan, StepSize};

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
    pub(super) audit: Audit,
    /// Speed of this rank.
    pace: Pace,
    /// Times per record of the group's ranks, from the last headers, and which are table servers.
    ranks: Vec<Contribution>,
    /// The step after the one that is computed, with tables: rows may be looked up for it.
    next: Option<NextStep>,
    /// Whether the step that is computed is the one for which rows were looked up.
    is_foreseen: bool,
}

/// A step that a group will compute, if nothing happens to it. All of its ranks know it.
#[derive(Clone, Debug, PartialEq)]
struct NextStep {
    ledger: Ledger,
    size: StepSize,
    /// Records that each rank computes.
    of_ranks: Vec<Vec<RecordRange>>,
    rank: usize,
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

    /// Records that this rank will compute for the step after the one that is computed, and the
    /// micro-batches that they consist of; `None` if no rank looks rows up for it.
    pub fn next(&self) -> Option<(&[RecordRange], Vec<RecordRange>)> {
        let NextStep { ledger, size, of_ranks, rank } = self.next.as_ref()?;
        let ranges = &of_ranks[*rank];
        Some((ranges, plan::micro_batches(ledger, *size, ranges)))
    }

    /// Whether all ranks compute the records for which they have looked rows up one step early.
    pub fn is_foreseen(&self) -> bool {
        self.is_foreseen
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

    /// Whether a part of the pending gradient is audited.
    pub fn is_audited(&self) -> bool {
        self.audit.own().is_some()
    }

    /// Whether the records of the last [`Task::Compute`](super::Task::Compute) are audited, and
    /// their [digest](Self::set_own_digest) is not known yet.
    pub fn needs_own_digest(&self) -> bool {
        self.audit.needs_own_digest()
    }

    /// Digest of the gradient that is pending.
    pub fn set_own_digest(&mut self, digest: u64) {
        self.audit.set_own_digest(digest);
    }

    /// The part of another rank is computed, with a gradient of this digest; `None`: its records
    /// can't be read now.
    pub fn audited(&mut self, digest: Option<u64>) {
        self.audit.computed(digest);
    }

    /// Sum of the loss over the records of the pending gradient.
    pub fn loss_sum(&self) -> f64 {
        self.pending.loss_sum
    }

    /// How long the records of the pending gradient took, in microseconds.
    pub fn computed_us(&self) -> u64 {
        self.pending.compute_us
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
        if !ranges.is_empty() {
            self.audit.not_computed();
        }
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
        header.cost = self.pace_with_pending().cost();
        header.readable = if self.has_unread { Some(0) } else { self.readable };
    }

    /// Takes the gradient that a step of this round has absorbed. Returns whether the step was
    /// audited.
    pub(super) fn commit(&mut self, job: &JobPlan, headers: &[StepHeader]) -> bool {
        let is_audited = self.audit.commit(job, headers);
        self.pace = self.pace_with_pending();
        self.pending = Pending::default();
        is_audited
    }

    /// The pace of this rank if the step absorbs the pending gradient.
    fn pace_with_pending(&self) -> Pace {
        let mut pace = self.pace;
        let records = self.pending.ranges.iter().map(RecordRange::len).sum();
        pace.note(records, self.pending.compute_us);
        pace
    }

    /// Discards the pending gradient: it is that of a state which this rank gives up.
    pub(super) fn forget(&mut self) {
        self.audit.forget();
        self.pending = Pending::default();
    }

    /// Discards the pending gradient if the ledger has absorbed it.
    pub(super) fn settle(&mut self, ledger: &Ledger) {
        // A commit absorbs a rank's whole contribution.
        if self.pending.ranges.iter().any(|range| ledger.absorbed_of(*range) > 0) {
            self.pending = Pending::default();
            self.audit.forget();
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
            .zip(group.serves_tables())
            .map(|(h, serves_tables)| Contribution {
                pending: if committed { Vec::new() } else { h.ranges.clone() },
                readable: h.readable,
                cost: h.cost,
                serves_tables,
            })
            .collect();
        let has_looked_ahead = committed && headers.iter().all(|h| h.has_looked_ahead);
        let next = self.next.take().filter(|next| {
            has_looked_ahead && next.ledger == state.ledger && next.of_ranks.len() == ranks.len()
        });
        let plan = Plan::new(&state.ledger, job.size, &ranks);
        self.ranks.clone_from(&ranks);
        self.all_wait = headers.iter().all(|header| header.readable.is_some());
        if !plan.keeps[group.rank] {
            self.pending = Pending::default();
        }
        let kept = ranks.iter().zip(&plan.keeps).filter(|(_, keeps)| **keeps);
        let kept = kept.flat_map(|(rank, _)| &rank.pending);
        let is_foreseen = next.is_some();
        let mut assigned = next.map(|next| next.of_ranks).or(plan.assigned);
        if let Some(assigned) = &assigned {
            let of_step = (headers, ranks.as_slice());
            self.audit.plan((job, state.step), group, of_step, (&plan.keeps, assigned));
        }
        let step = kept.chain(assigned.iter().flatten().flatten()).copied();
        let step: Vec<RecordRange> = if assigned.is_some() { step.collect() } else { Vec::new() };
        let ledger = self.look_ahead((job, state), group, &step);
        self.is_foreseen = is_foreseen;
        if job.has_tables && assigned.is_some() {
            let of_ranks = plan::next(&ledger, job.epochs, job.size, &self.ranks);
            let (size, rank) = (job.size, group.rank);
            self.next = of_ranks.map(|of_ranks| NextStep { ledger, size, of_ranks, rank });
        }
        assigned.as_mut().map(|assigned| assigned.swap_remove(group.rank))
    }

    /// Finds out which records this rank of `group` will compute after `step`, the records of the
    /// step that is being computed. Returns the ledger after it.
    pub(super) fn look_ahead(
        &mut self,
        (job, state): (&JobPlan, &State),
        group: &Group,
        step: &[RecordRange],
    ) -> Ledger {
        (self.next, self.is_foreseen) = (None, false);
        let mut ledger = state.ledger.clone();
        for range in step {
            ledger.absorb(*range);
        }
        // A new group has not exchanged times yet.
        self.ranks.resize(group.members.len(), Contribution::default());
        for (rank, serves_tables) in self.ranks.iter_mut().zip(group.serves_tables()) {
            rank.serves_tables = serves_tables;
        }
        let ranks = (group.rank, self.ranks.as_slice());
        let upcoming = plan::upcoming(&ledger, job.epochs, job.size, ranks, STEPS_AHEAD);
        self.upcoming_changed |= self.upcoming != upcoming;
        self.upcoming = upcoming;
        ledger
    }
}

/// Number of steps whose records are read ahead.
const STEPS_AHEAD: u64 = 4;

#[cfg(test)]
mod tests {
    use elasticdl_proto::{Generation, WorkerId};

    use super::*;
    use crate::session::evaluation::Evaluation;

    /// The first of two ranks after a step, with the headers of all that lead to the next one, of
    /// which some have looked ahead, and the second needs so many times as long as the first.
    struct Round {
        job: JobPlan,
        state: State,
        group: Group,
        assignment: Assignment,
    }

    impl Round {
        fn new() -> Self {
            let members = vec![WorkerId(1), WorkerId(2)];
            Self {
                job: JobPlan { has_tables: true, ..JobPlan::of_one_epoch(32, 8) },
                state: State {
                    step: 0,
                    ledger: Ledger::new(32),
                    records_trained: 0,
                    evaluation: Evaluation::default(),
                    steps_skipped: 0,
                    row_touches: 0,
                    created: 1,
                },
                group: Group { generation: Generation(1), members, rank: 0, origins: Vec::new() },
                assignment: Assignment::default(),
            }
        }

        /// Commits the next 8 records, and plans the step after them.
        fn next(&mut self, looked_ahead: [bool; 2], slower: u64) -> Vec<RecordRange> {
            let start = 8 * self.state.step;
            self.state.ledger.absorb(RecordRange { epoch: 0, start, end: start + 8 });
            self.state.step += 1;
            self.plan(looked_ahead, slower, self.state.step - 1)
        }

        fn plan(&mut self, looked_ahead: [bool; 2], slower: u64, step: u64) -> Vec<RecordRange> {
            let header = |(has_looked_ahead, cost)| StepHeader {
                step,
                cost,
                has_looked_ahead,
                ..StepHeader::default()
            };
            let headers = looked_ahead.into_iter().zip([1000, 1000 * slower]).map(header);
            let headers: Vec<StepHeader> = headers.collect();
            let Self { job, state, group, assignment } = self;
            assignment.plan((job, state), group, &headers).unwrap()
        }
    }

    fn range(start: u64, end: u64) -> RecordRange {
        RecordRange { epoch: 0, start, end }
    }

    #[test]
    fn a_step_for_which_all_ranks_have_looked_ahead_consists_of_these_records() {
        let mut round = Round::new();
        assert_eq!(round.next([false; 2], 1), [range(8, 12)]);
        assert!(!round.assignment.is_foreseen());
        assert_eq!(round.assignment.next().unwrap().0, [range(16, 20)]);
        // The other rank is slow now, which changes the step after the next one.
        assert_eq!(round.next([true; 2], 3), [range(16, 20)]);
        assert!(round.assignment.is_foreseen());
        let (ranges, micro_batches) = round.assignment.next().unwrap();
        assert_eq!((ranges, micro_batches.len()), (&[range(24, 30)][..], 6));
        assert_eq!(round.next([true; 2], 1), [range(24, 30)]);
        assert_eq!(round.assignment.next(), None, "the data ends");
    }

    #[test]
    fn a_step_that_some_rank_has_not_foreseen_is_planned_anew() {
        let mut round = Round::new();
        round.next([false; 2], 1);
        assert_eq!(round.next([true, false], 3), [range(16, 22)]);
        assert!(!round.assignment.is_foreseen());
        // Nor is one foreseen after an idle round, or in a new group.
        let idle = round.plan([true; 2], 1, round.state.step);
        assert_eq!((idle, round.assignment.is_foreseen()), (vec![range(16, 20)], false));
        let Round { job, state, group, assignment } = &mut round;
        assignment.look_ahead((job, state), group, &[]);
        assert_eq!(assignment.next(), None);
        round.job.has_tables = false;
        round.next([true; 2], 1);
        assert_eq!((round.assignment.next(), round.assignment.is_foreseen()), (None, false));
    }
    #[test]
    fn the_header_of_a_step_has_the_time_of_its_records() {
        let (mut assignment, job) = (Assignment::default(), JobPlan::of_one_epoch(32, 8));
        let costs = [9, 1, 1, 2, 2].map(|compute_us| {
            assignment.pending.ranges = vec![range(0, 8)];
            assignment.computed(Computed { compute_us: 8 * compute_us, ..Computed::default() });
            let mut header = StepHeader::default();
            assignment.write(&mut header);
            assignment.commit(&job, &[]);
            header.cost
        });
        assert_eq!(costs, [0, 1000, 1000, 1250, 2000]);
    }
}
