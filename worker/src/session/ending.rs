//! How a group ends before its work is done: all ranks stop at one step, decided from their
//! headers.

use elasticdl_proto::{Failure, Finished, LedgerReport, RecordRange, RowTouches, WorkerMessage};

use super::after_round::checkpoint_headers;
use super::outcome::is_withheld;
use super::phase::{Group, Phase};
use super::{FinalState, Session};
use crate::session::checkpoint::{FinalCheckpoint, final_checkpoint};
use crate::session::halt::{Ending, Halt, Reason, explain};
use crate::session::header::StepHeader;

impl Session {
    /// This rank cannot continue, and no other worker could, or its program has failed: the newest
    /// state is retained. The headers of the next round tell all ranks. The first reason stays.
    pub fn halt(&mut self, halt: Halt) {
        self.requests.halt.get_or_insert(halt);
    }

    /// Takes in the headers of all ranks for a step that no rank applies. Ends the round. If this
    /// rank alone has just [halted](Self::halt), an idle round exchanges the new headers first.
    pub(super) fn withhold(&mut self, headers: &[StepHeader]) {
        self.reports.flush();
        if is_withheld(headers) {
            self.handle_checkpoint_headers(headers);
            return self.end_round(headers, None);
        }
        if let Phase::Round { assigned, computed, .. } = &mut self.phase {
            (*assigned, *computed) = (None, false);
        }
    }

    /// Ends the job for `group`. No rank starts another round, so a newer group need not wait for
    /// one.
    pub(super) fn end(&mut self, group: Group, ending: Ending) {
        let newer = self
            .memberships
            .latest
            .as_ref()
            .is_some_and(|latest| latest.generation > group.generation);
        self.phase = Phase::Finished { group, reported: false, ending };
        if newer {
            self.join_latest();
        }
    }

    /// Reports the final state of this rank's group, and how the group has ended.
    pub fn finish(&mut self, last: FinalState) {
        let (Phase::Finished { group, reported, ending }, Some(state)) =
            (&mut self.phase, &self.state)
        else {
            return;
        };
        let broken = (!last.parameters_are_finite).then(|| broken_parameters(state.step));
        let ended = match &*ending {
            Ending::Failed(error) => Some(error.clone()),
            Ending::Done | Ending::ProgramFailed | Ending::Suspended => None,
        };
        let errors: Vec<String> =
            [ended, broken, last.export_error].into_iter().flatten().collect();
        let error = (!errors.is_empty()).then(|| errors.join("; "));
        let ranges =
            self.requests.halt.as_ref().map(|halt| halt.ranges.clone()).unwrap_or_default();
        let is_suspended = *ending == Ending::Suspended;
        *reported = true;
        let finished = Finished {
            generation: group.generation,
            step: state.step,
            digest: last.digest,
            ledger: LedgerReport::from(&state.ledger),
            records_trained: state.records_trained,
            stopped_early: self.stops_early(),
            summary: last.summary,
            failure: error.map(|error| Failure { error, ranges }),
            suspended: is_suspended,
            steps_skipped: state.steps_skipped,
            exported: last.is_exported,
            row_touches: last
                .row_touches
                .map(|counted| RowTouches { expected: state.row_touches, counted }),
        };
        self.reports.push(WorkerMessage::Finished(finished));
    }

    /// The error of this rank's program, with its records, if this rank leaves because of it: the
    /// group of these headers goes on without it. If its shards are to be handed over, it leaves
    /// [after that](Self::fails_after_hand_over).
    pub fn fails_alone(&self, headers: &[StepHeader]) -> Option<(String, Vec<RecordRange>)> {
        match &self.phase {
            Phase::Rechecking { group, .. }
            | Phase::Round { group, .. }
            | Phase::Verifying { group, .. }
                if self.ending(group, headers).is_none() =>
            {
                self.program_failure()
            }
            _ => None,
        }
    }

    /// As [`fails_alone`](Self::fails_alone), for a rank whose shards have just been handed over.
    pub fn fails_after_hand_over(&self) -> Option<(String, Vec<RecordRange>)> {
        match &self.phase {
            Phase::HandingOver { group, headers, .. } if self.ending(group, headers).is_none() => {
                self.program_failure()
            }
            _ => None,
        }
    }

    /// The error of this rank's program, with its records, if it has failed.
    pub fn program_failure(&self) -> Option<(String, Vec<RecordRange>)> {
        match self.requests.halt.clone()? {
            Halt { reason: Reason::Program(error), ranges } => Some((error, ranges)),
            Halt { .. } => None,
        }
    }

    /// How the group's work has ended; `None` while it continues.
    pub fn ended(&self) -> Option<&Ending> {
        match &self.phase {
            Phase::Finished { ending, .. } => Some(ending),
            _ => None,
        }
    }

    /// How the group's work ends with these headers; `None` if it continues.
    pub(super) fn ending(&self, group: &Group, headers: &[StepHeader]) -> Option<Ending> {
        let halts: Vec<Option<&Halt>> = headers.iter().map(|header| header.halt.as_ref()).collect();
        if let Some(error) = explain(self.step(), &group.members, &halts) {
            return Some(Ending::Failed(error));
        }
        if self.at_end() || headers.iter().any(|h| h.stop) {
            Some(Ending::Done)
        } else if headers.iter().any(|h| h.suspend) && !self.is_suspended_in_vain(headers) {
            Some(Ending::Suspended)
        } else if halts.iter().all(Option::is_some) {
            Some(Ending::ProgramFailed)
        } else {
            None
        }
    }

    /// Whether the checkpoint of this step could not be written, without which a suspended group
    /// would lose its state: it goes on, unless all of its members leave.
    pub(super) fn is_suspended_in_vain(&self, headers: &[StepHeader]) -> bool {
        let (step, of_checkpoint) = (self.step(), checkpoint_headers(headers));
        let is_written = of_checkpoint.iter().any(|header| header.complete >= Some(step));
        self.checkpoints.are_enabled()
            && step > 0
            && !is_written
            && final_checkpoint(&of_checkpoint, step) == FinalCheckpoint::Nothing
            && headers.iter().any(|header| header.suspend)
            && !headers.iter().all(|header| header.leaves)
    }
}

fn broken_parameters(step: u64) -> String {
    format!(
        "the parameters after step {step} hold a NaN or an infinity, so they are neither \
         exported nor in any checkpoint; lower the learning rate, or clip the gradient"
    )
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::time::Duration;

    use elasticdl_proto::{CheckpointEvery, MasterMessage};

    use super::super::{JobPlan, Task};
    use super::*;
    use crate::session::checkpoint::{self, Written};
    use crate::session::tests::pair::Pair;

    #[test]
    fn a_step_that_is_not_finite_is_not_committed_and_ends_all_ranks_with_one_text() {
        let mut pair = Pair::new(JobPlan::of_one_epoch(100, 4));
        pair.exchange_headers();
        let headers = pair.compute();
        for (session, own_is_finite) in pair.0.iter_mut().zip([true, false]) {
            session.summed(headers.clone(), false).unwrap();
            assert_eq!(session.poll(), Task::InspectGradient);
            session.inspected(own_is_finite, <[RecordRange]>::to_vec);
        }
        pair.exchange_headers();
        pair.verify();
        let [Some(Ending::Failed(text)), Some(Ending::Failed(same))] = pair.endings() else {
            panic!("{:?}", pair.endings())
        };
        assert_eq!(text, same);
        assert!(
            text.contains("step 1 is not finite")
                && text.contains("rank 1 (worker 2) with records 2..4"),
            "{text}"
        );
        for session in &mut pair.0 {
            assert_eq!((session.step(), session.state().unwrap().ledger.counted()), (0, 0));
            assert!(matches!(session.poll(), Task::Finish { .. }), "{session:?}");
        }
    }

    #[test]
    fn an_error_of_one_rank_ends_the_job_at_the_step_whose_header_reports_it() {
        let mut pair = Pair::new(JobPlan::of_one_epoch(100, 4));
        pair.exchange_headers();
        pair.compute();
        pair.0[1]
            .halt(Halt { reason: Reason::Error("a.csv has changed".into()), ranges: Vec::new() });
        let headers = pair.headers();
        pair.0.iter_mut().for_each(|session| session.summed(headers.clone(), true).unwrap());
        pair.verify();
        let expected = Some(Ending::Failed("rank 1 (worker 2): a.csv has changed".into()));
        assert_eq!(pair.endings(), [expected.clone(), expected]);
    }

    #[test]
    fn a_rank_that_has_halted_ends_the_next_group_too() {
        let mut pair = Pair::new(JobPlan::of_one_epoch(100, 4));
        pair.exchange_headers();
        let headers = pair.compute();
        // The links break before the second rank has received the whole sum.
        pair.0[0].summed(headers, false).unwrap();
        pair.0[0].inspected(true, <[RecordRange]>::to_vec);
        pair.0.iter_mut().for_each(|session| session.broken(None, "reset".into()));
        pair.regroup(2);
        pair.exchange_headers();
        pair.verify();
        assert!(matches!(pair.endings(), [Some(Ending::Failed(_)), Some(Ending::Failed(_))]));
    }

    /// The pair ends after its first step, once that is in a checkpoint.
    fn write_last_checkpoint(pair: &mut Pair, has_room: bool) {
        assert_eq!(pair.endings(), [None, None], "its checkpoint is not written yet");
        for session in &mut pair.0 {
            let Some(checkpoint::Task::Write { step: 1, is_last: true, .. }) =
                session.poll_checkpoint()
            else {
                panic!("no part is to be written")
            };
            session.copied_for_checkpoint(Duration::ZERO, 0);
            session.wrote_part(1, Ok(Written { bytes: 1, digest: 1, rows: None }));
        }
        pair.exchange_headers();
        assert!(matches!(
            pair.0[0].poll_checkpoint(),
            Some(checkpoint::Task::Commit { step: 1, .. })
        ));
        pair.0[0].committed_checkpoint(1, has_room);
        pair.exchange_headers();
    }

    #[test]
    fn a_group_goes_on_without_a_rank_whose_program_fails_and_stores_its_state_if_all_do() {
        let every = Some(CheckpointEvery::Steps(NonZeroU64::new(1000).unwrap()));
        let mut pair = Pair::new(JobPlan { checkpoints: every, ..JobPlan::of_one_epoch(100, 4) });
        let step = |pair: &mut Pair| {
            pair.commit();
        };
        pair.exchange_headers();
        step(&mut pair);
        pair.compute();
        let ranges = vec![RecordRange { epoch: 0, start: 4, end: 6 }];
        let halt =
            |error: &str| Halt { reason: Reason::Program(error.into()), ranges: ranges.clone() };
        pair.0[1].halt(halt("second"));
        let headers = pair.headers();
        let alone = pair.0.each_ref().map(|session| session.fails_alone(&headers));
        assert_eq!(alone, [None, Some(("second".into(), ranges.clone()))]);
        for session in &mut pair.0 {
            session.summed(headers.clone(), true).unwrap();
            assert_eq!((session.step(), session.ended()), (1, None), "{session:?}");
        }
        pair.0[0].halt(halt("first"));
        let headers = pair.headers();
        pair.0.iter_mut().for_each(|session| session.summed(headers.clone(), true).unwrap());
        write_last_checkpoint(&mut pair, true);
        // What is exported is compared as a whole before.
        pair.verify();
        assert_eq!(pair.endings(), [Some(Ending::ProgramFailed), Some(Ending::ProgramFailed)]);
        let headers = pair.headers();
        assert!(pair.0.iter().all(|session| session.fails_alone(&headers).is_none()));
        assert_eq!(pair.0[0].program_failure(), Some(("first".into(), ranges.clone())));
    }

    #[test]
    fn a_rank_whose_program_fails_ends_when_the_others_have_its_shards() {
        let mut pair = Pair::new(JobPlan::of_one_epoch(100, 4));
        pair.exchange_headers();
        pair.compute();
        pair.0[1].halt(Halt { reason: Reason::Program("no".into()), ranges: Vec::new() });
        let mut headers = pair.headers();
        headers[1].leaves = true;
        for session in &mut pair.0 {
            session.summed(headers.clone(), true).unwrap();
            assert_eq!(session.poll(), Task::HandOver { leaves: vec![false, true] });
        }
        let failed = pair.0.each_ref().map(|session| session.fails_after_hand_over().is_some());
        assert_eq!(failed, [false, true]);
        pair.0.iter_mut().for_each(Session::handed_over);
        assert!(!pair.0[0].is_handing_over() && pair.0[0].ended().is_none(), "{:?}", pair.0[0]);
    }

    #[test]
    fn a_skipped_step_and_its_records_are_counted() {
        let skips = JobPlan { skips_nonfinite: true, ..JobPlan::of_one_epoch(100, 4) };
        let mut pair = Pair::new(skips);
        pair.exchange_headers();
        let headers = pair.compute();
        for session in &mut pair.0 {
            session.summed(headers.clone(), false).unwrap();
            assert_eq!(session.poll(), Task::Update { records: 4, is_applied: false });
            session.updated(Duration::ZERO);
            let state = session.state().unwrap();
            assert_eq!((state.step, state.steps_skipped, state.records_trained), (1, 1, 4));
            assert_eq!((state.ledger.counted(), state.ledger.repeated()), (4, 0));
        }
        // The count is part of the state that is sent and stored.
        assert_eq!(pair.0[0].state().unwrap().record().steps_skipped, 1);
    }

    #[test]
    fn a_group_writes_a_checkpoint_of_its_last_step_before_it_is_suspended() {
        for (has_room, ending) in [(true, Some(Ending::Suspended)), (false, None)] {
            let every = Some(CheckpointEvery::Steps(NonZeroU64::new(1000).unwrap()));
            let plan = JobPlan { checkpoints: every, ..JobPlan::of_one_epoch(100, 4) };
            let mut pair = Pair::new(plan);
            pair.exchange_headers();
            pair.0[1].handle(MasterMessage::Suspend);
            pair.commit();
            write_last_checkpoint(&mut pair, has_room);
            assert_eq!(pair.endings(), [ending.clone(), ending], "without it the group goes on");
        }
    }
}
