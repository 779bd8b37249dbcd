//! From a step's sum to its commit: whether the step is applied, and what applying it changes.
//!
//! **Invariant:** a membership that arrives between the sum and the commit waits for the commit.
//! Every rank that has a sum therefore has the step.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::{Generation, RecordRange};

use super::phase::{Apply, Outcome, Phase};
use super::{Session, plan};
use crate::session::audited::disputes;
use crate::session::halt::{Halt, Reason};
use crate::session::header::{StepHeader, add_sums};
use crate::session::replicas::StateMismatch;

impl Session {
    /// Takes in the headers of all ranks from a step and whether the reduced gradient is finite.
    /// All ranks have the same bits, so all decide alike.
    ///
    /// # Errors
    /// Replicas differ; see [`StateMismatch`].
    pub fn summed(
        &mut self,
        headers: Vec<StepHeader>,
        sum_is_finite: bool,
    ) -> Result<(), StateMismatch> {
        self.check(&headers)?;
        let is_finite = is_finite(&headers, sum_is_finite);
        let disputes = disputes(&headers);
        if is_withheld(&headers) {
            self.withhold(&headers);
        } else if !self.is_complete(&headers) {
            // Some records could not be read: the next round computes them.
            return self.headers_exchanged(&headers);
        } else if !disputes.is_empty() {
            self.recheck(disputes);
        } else if !is_finite && !self.job.skips_nonfinite {
            self.step.outcome = Some(Outcome::Nonfinite(headers));
        } else {
            self.step.is_confirmed = true;
            self.step.outcome = Some(Outcome::Apply(Apply { headers, is_finite, fetched: None }));
        }
        Ok(())
    }

    /// Number of records of the step that [`summed`](Self::summed) will let the trainer apply,
    /// given these headers and a sum that is finite; `None` if no step will be applied.
    pub fn records_to_apply(&self, headers: &[StepHeader]) -> Option<u64> {
        let is_applied = self.check(headers).is_ok()
            && !is_withheld(headers)
            && self.is_complete(headers)
            && disputes(headers).is_empty()
            && is_finite(headers, true);
        let records = headers.iter().map(StepHeader::records).sum();
        (is_applied && records > 0).then_some(records)
    }

    /// The sums over all ranks, in their order, of what their programs have added to the tally of
    /// the step that is applied next.
    pub fn tally(&self) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        if let Some(Outcome::Apply(Apply { headers, .. })) = &self.step.outcome {
            headers.iter().for_each(|header| add_sums(&mut sums, &header.tally));
        }
        sums
    }

    /// Whether this worker's own gradient is finite, in a step whose sum is not. This worker halts,
    /// and names its records if they are at fault. `records`: those at these positions.
    pub fn inspected(
        &mut self,
        gradient_is_finite: bool,
        records: impl FnOnce(&[RecordRange]) -> Vec<RecordRange>,
    ) {
        let Some(Outcome::Nonfinite(headers)) = self.step.outcome.take() else { return };
        let rank = self.group_rank().map_or(0, |(_, rank)| rank);
        let mine = &headers[rank];
        let is_at_fault = headers.len() == 1 || !mine.loss_sum.is_finite() || !gradient_is_finite;
        let ranges = if is_at_fault { records(&mine.ranges) } else { Vec::new() };
        self.halt(Halt { reason: Reason::Nonfinite, ranges });
        self.withhold(&headers);
        self.handle_deferred();
    }

    /// The step is applied: the ledger absorbs its records. Ends the round, or continues a repair
    /// or a fetch. `now` paces the reports to the master.
    pub fn updated(&mut self, now: Duration) {
        let Some(Outcome::Apply(Apply { headers, is_finite, fetched })) = self.step.outcome.take()
        else {
            return;
        };
        self.commit(headers, now, is_finite);
        if let Some(generation) = fetched {
            self.fetched(generation);
        }
        self.handle_deferred();
    }

    /// A joining worker has received a step's result from its donor, whose group is of
    /// `generation`. Returns `false` if it belongs to another step.
    pub fn result_fetched(
        &mut self,
        generation: Generation,
        headers: Vec<StepHeader>,
        sum_is_finite: bool,
    ) -> bool {
        let fits = self.state.is_some() && headers.iter().all(|h| h.step == self.step());
        if fits {
            self.apply(headers, sum_is_finite, Some(generation));
            self.fetch_advanced();
        }
        fits
    }

    pub(super) fn apply(
        &mut self,
        headers: Vec<StepHeader>,
        sum_is_finite: bool,
        fetched: Option<Generation>,
    ) {
        let is_finite = is_finite(&headers, sum_is_finite);
        self.step.outcome = Some(Outcome::Apply(Apply { headers, is_finite, fetched }));
    }

    /// Whether the headers' records are those of one step.
    fn is_complete(&self, headers: &[StepHeader]) -> bool {
        let ranges: Vec<RecordRange> =
            headers.iter().flat_map(|header| &header.ranges).copied().collect();
        self.state.as_ref().is_some_and(|s| {
            plan::is_window(&s.ledger, self.job.size.batch, self.workers(), &ranges)
        })
    }

    fn commit(&mut self, headers: Vec<StepHeader>, now: Duration, is_finite: bool) {
        let state = self.state.as_mut().expect("a rank without state has no step to commit");
        let records: u64 = headers.iter().map(StepHeader::records).sum();
        let epoch = state.ledger.epoch();
        for range in headers.iter().flat_map(|h| &h.ranges) {
            state.ledger.absorb(*range);
        }
        let completes_epoch = state.ledger.epoch() > epoch;
        state.step += 1;
        state.steps_skipped += u64::from(!is_finite);
        state.records_trained += records;
        state.row_touches += headers.iter().map(|header| header.row_touches).sum::<u64>();
        self.step.is_confirmed = false;
        self.step.is_idle = false;
        self.assignment.read_again();
        self.reports.note_step(state);
        if let Phase::Round { group, .. } = &self.phase {
            // In a round every rank's gradient is part of the step. In a repair the ledger decides
            // (see `repaired`).
            let is_audited = self.assignment.commit(&self.job, &headers);
            if group.rank == 0 {
                self.reports.note_audit(is_audited);
                if completes_epoch {
                    self.reports.note_epoch();
                }
                let (generation, touches) = (group.generation, state.row_touches);
                self.reports.note_progress(generation, &headers, touches, now);
            }
            self.checkpoints.tick(now);
            self.transport.handle_builds(headers.iter().map(|h| h.nccl));
            self.handle_checkpoint_headers(&headers);
            self.end_round(&headers, Some(now));
        } else {
            self.note_evaluations(&headers);
        }
        self.step.last_headers = Some(headers);
    }
}

/// Whether a rank halts in this round, so that no rank may apply its step.
pub(super) fn is_withheld(headers: &[StepHeader]) -> bool {
    headers.iter().any(|header| header.halt.is_some())
}

/// Whether a step can be applied: its losses and its reduced gradient are finite.
fn is_finite(headers: &[StepHeader], sum_is_finite: bool) -> bool {
    headers.iter().all(|header| header.ranges.is_empty())
        || (sum_is_finite && headers.iter().all(|h| h.loss_sum.is_finite() && !h.has_nonfinite_sum))
}

#[cfg(test)]
mod tests {
    use elasticdl_proto::{MasterMessage, Membership, WorkerId, WorkerMessage};

    use super::super::{Broadcast, Computed, JobPlan, Task, evaluation};
    use super::*;

    fn membership(generation: u64, abort: bool) -> MasterMessage {
        let members = vec![(WorkerId(1), ([127, 0, 0, 1], 1).into())].into();
        let generation = Generation(generation);
        MasterMessage::Membership(Membership { generation, members, abort })
    }

    /// The only member of generation 1, which has the sum of its first step of 4 records.
    fn summed() -> Session {
        summed_step(JobPlan::of_one_epoch(100, 4))
    }

    /// As [`summed`], of a job with this plan.
    fn summed_step(plan: JobPlan) -> Session {
        let mut session = computed(plan);
        session.summed(vec![session.header(0)], true).unwrap();
        session
    }

    /// The only member of generation 1, which has computed its first step.
    fn computed(plan: JobPlan) -> Session {
        let mut session = Session::new(WorkerId(1), plan);
        session.handle(membership(1, true));
        session.connected();
        session.synced(&[session.sync_header(0)]).unwrap();
        session.begin();
        session.bytes_broadcast(&session.broadcast_bytes(Broadcast::StateRecord)).unwrap();
        session.tensors_broadcast(true).unwrap();
        session.repaired();
        session.headers_exchanged(&[session.header(0)]).unwrap();
        assert!(matches!(session.poll(), Task::Compute { .. }));
        session.assignment.computed(Computed {
            loss_sum: 1.0,
            compute_us: 1,
            ..Computed::default()
        });
        session
    }

    #[test]
    fn a_membership_that_arrives_after_the_sum_waits_for_the_commit() {
        for newest in [None, Some(membership(3, false))] {
            let mut session = summed();
            session.handle(membership(2, true));
            let expected = newest.as_ref().map_or(2, |_| 3);
            newest.into_iter().for_each(|newest| session.handle(newest));
            assert_eq!(session.poll(), Task::Update { records: 4, is_applied: true });
            session.updated(Duration::ZERO);
            let Task::Connect(joins) = session.poll() else { panic!("{session:?}") };
            assert_eq!((session.step(), joins.generation), (1, Generation(expected)));
        }
    }

    #[test]
    fn a_step_with_unread_records_is_not_applied() {
        let mut session = computed(JobPlan::of_one_epoch(100, 4));
        let mut header = session.header(0);
        header.ranges = vec![RecordRange { epoch: 0, start: 0, end: 3 }];
        session.summed(vec![header], true).unwrap();
        assert!(!matches!(session.poll(), Task::Update { .. }), "{session:?}");
        assert_eq!((session.step(), session.state().unwrap().ledger.counted()), (0, 0));
    }

    #[test]
    fn what_a_finite_sum_lets_the_trainer_apply_is_known_before_it() {
        let change = |change: fn(&mut StepHeader)| {
            let mut session = computed(JobPlan::of_one_epoch(100, 4));
            let mut header = session.header(0);
            change(&mut header);
            let known = session.records_to_apply(std::slice::from_ref(&header));
            let summed = session.summed(vec![header], true);
            let applied = match session.poll() {
                Task::Update { records, is_applied: true } => Some(records),
                _ => None,
            };
            assert_eq!(known, applied.filter(|_| summed.is_ok()));
            known
        };
        const HALT: Halt = Halt { reason: Reason::Nonfinite, ranges: Vec::new() };
        assert_eq!(change(|_| {}), Some(4));
        assert_eq!(change(|header| header.loss_sum = f64::NAN), None);
        assert_eq!(change(|header| header.ranges[0].end = 3), None);
        assert_eq!(change(|header| header.ranges.clear()), None);
        assert_eq!(change(|header| header.halt = Some(HALT)), None);
    }

    #[test]
    fn a_step_is_reported_before_it_is_evaluated() {
        let evaluation = evaluation::Plan {
            records: 100,
            every: Some(1),
            metric: "loss".into(),
            ..evaluation::Plan::default()
        };
        let plan = JobPlan { evaluation: Some(evaluation), ..JobPlan::of_one_epoch(100, 4) };
        let mut session = summed_step(plan);
        while session.reports.poll().is_some() {}
        // So soon after the last report that a step without an evaluation is not yet reported.
        session.updated(Duration::ZERO);
        assert!(matches!(session.poll(), Task::Evaluate(_)), "{session:?}");
        let Some(WorkerMessage::Committed(progress)) = session.reports.poll() else {
            panic!("{session:?}")
        };
        assert_eq!((progress.step, progress.records), (1, 4));
        // Its time, and that of the copy for a checkpoint, is none of the next step.
        let seconds = Duration::from_secs;
        let blocks = vec![[("loss".to_owned(), 1.0)].into()];
        let scores = evaluation::Scores { records: 100, first_block: 0, blocks, failed: false };
        session.evaluated(&[scores], seconds(60));
        session.copied_for_checkpoint(seconds(5), 0);
        assert!(matches!(session.poll(), Task::Compute { .. }), "{session:?}");
        session.assignment.computed(Computed { loss_sum: 1.0, ..Computed::default() });
        assert!(matches!(session.poll(), Task::Step { .. }), "{session:?}");
        session.summed(vec![session.header(0)], true).unwrap();
        session.updated(seconds(67));
        let progress = std::iter::from_fn(|| session.reports.poll()).find_map(|report| {
            if let WorkerMessage::Committed(progress) = report { Some(progress) } else { None }
        });
        assert_eq!(progress.map(|progress| progress.times.step_us), Some(2_000_000));
    }

    #[test]
    fn a_state_is_served_only_while_all_ranks_are_known_to_hold_its_step() {
        let mut session = summed();
        let at = |session: &Session| session.confirmed().map(|(_, state)| state.step);
        assert_eq!(at(&session), Some(0));
        session.updated(Duration::ZERO);
        assert_eq!(at(&session), None);
        assert!(matches!(session.poll(), Task::Compute { .. }));
        session.assignment.computed(Computed {
            loss_sum: 1.0,
            compute_us: 1,
            ..Computed::default()
        });
        session.summed(vec![session.header(0)], true).unwrap();
        assert_eq!(at(&session), Some(1));
        session.broken(None, "reset".into());
        assert_eq!(at(&session), None);
    }
}
