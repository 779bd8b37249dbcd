//! How a group ends before its work is done: all ranks stop at one step, decided from their
//! headers.

use super::{Group, Phase, Session};
use crate::core::halt::{Ending, Halt, explain};
use crate::core::header::StepHeader;

impl Session {
    /// This rank cannot continue, and no other worker could: the job ends with the newest state
    /// retained. The headers of the next round tell all ranks. The first reason stays.
    pub fn halt(&mut self, halt: Halt) {
        self.halt.get_or_insert(halt);
    }

    /// The master wants the group to end at the next boundary with a checkpoint, because all of its
    /// members leave.
    pub fn handle_suspend(&mut self) {
        self.suspend = true;
    }

    /// Whether a rank halts in this round, so that no rank may apply its step; see
    /// [`Session::withheld`].
    pub fn is_withheld(headers: &[StepHeader]) -> bool {
        headers.iter().any(|header| header.halt.is_some())
    }

    /// Takes in the headers of all ranks for a step that no rank applies. Ends the round. If this
    /// rank alone has just [halted](Self::halt), an idle round exchanges the new headers first.
    pub fn withheld(&mut self, headers: &[StepHeader]) {
        self.flush_progress();
        if Self::is_withheld(headers) {
            self.handle_checkpoint_headers(headers);
            return self.end_round(headers, None);
        }
        if let Phase::Round { quotas, computed, .. } = &mut self.phase {
            (*quotas, *computed) = (None, false);
        }
    }

    /// How the group's work has ended; `None` while it continues.
    pub fn ended(&self) -> Option<&Ending> {
        match &self.phase {
            Phase::Finished { ending, .. } => Some(ending),
            _ => None,
        }
    }

    /// Why this rank cannot continue, if so.
    pub fn halted(&self) -> Option<&Halt> {
        self.halt.as_ref()
    }

    /// How the group's work ends with these headers; `None` if it continues.
    pub(super) fn ending(&self, group: &Group, headers: &[StepHeader]) -> Option<Ending> {
        let halts: Vec<Option<&Halt>> = headers.iter().map(|header| header.halt.as_ref()).collect();
        if let Some(error) = explain(self.step(), &group.members, &halts) {
            return Some(Ending::Failed(error));
        }
        if self.at_end() || headers.iter().any(|h| h.stop) {
            Some(Ending::Done)
        } else if headers.iter().any(|h| h.suspend) {
            Some(Ending::Suspended)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use std::num::NonZeroU64;

    use elasticdl_proto::{Batch, CheckpointEvery, Generation, Membership, RecordRange, WorkerId};

    use super::super::{JobPlan, Task};
    use super::*;
    use crate::core::checkpoint::{self, Written};
    use crate::core::halt::Reason;

    /// A group of workers 1 and 2, which hold records 0 to 4 and 4 to 8.
    struct Pair([Session; 2]);

    impl Pair {
        fn new(checkpoints: Option<CheckpointEvery>) -> Self {
            let batch = Batch::Global(NonZeroU64::new(4).unwrap());
            let plan = JobPlan {
                records: 100,
                epochs: 1,
                max_steps: None,
                batch,
                checkpoints,
                evaluation: None,
            };
            let mut pair = Self([1, 2].map(|id| Session::new(WorkerId(id), plan.clone())));
            pair.regroup(1);
            for (session, start) in pair.0.iter_mut().zip([0, 4]) {
                session.handle_lease(vec![RecordRange { epoch: 0, start, end: start + 4 }]);
            }
            pair
        }

        /// Both workers form a group of a new generation.
        fn regroup(&mut self, generation: u64) {
            let members =
                [1, 2].map(|id| (WorkerId(id), ([127, 0, 0, 1], id as u16).into())).to_vec();
            let generation = Generation(generation);
            for session in &mut self.0 {
                session.handle_membership(Membership {
                    generation,
                    members: members.clone(),
                    abort: true,
                });
                session.connected();
            }
            let headers = self.0.each_ref().map(|session| session.sync_header(0));
            self.0.iter_mut().for_each(|session| session.synced(&headers).unwrap());
            if self.0[0].state().is_none() {
                self.0[0].begin();
                let record = self.0[0].state().unwrap().record();
                assert!(self.0[1].install(record, None));
            }
            self.0.iter_mut().for_each(Session::repaired);
        }

        fn headers(&self) -> Vec<StepHeader> {
            self.0.iter().map(|session| session.header(0)).collect()
        }

        fn exchange_headers(&mut self) {
            let headers = self.headers();
            for session in &mut self.0 {
                assert_eq!(session.poll(), Task::ExchangeHeaders);
                session.headers_exchanged(&headers).unwrap();
            }
        }

        /// Both workers compute. Returns the headers of their step.
        fn compute(&mut self) -> Vec<StepHeader> {
            for session in &mut self.0 {
                assert!(matches!(session.poll(), Task::Compute(_)), "{session:?}");
                session.computed(1.0, 1);
                assert_eq!(session.poll(), Task::Step);
            }
            self.headers()
        }

        fn endings(&self) -> [Option<Ending>; 2] {
            self.0.each_ref().map(|session| session.ended().cloned())
        }
    }

    fn nonfinite(ranges: &[RecordRange]) -> Halt {
        Halt { reason: Reason::Nonfinite, ranges: ranges.to_vec() }
    }

    #[test]
    fn a_step_that_is_not_finite_is_not_committed_and_ends_all_ranks_with_one_text() {
        let mut pair = Pair::new(None);
        pair.exchange_headers();
        let headers = pair.compute();
        assert!(!Session::is_withheld(&headers));
        let mine = headers[1].ranges.clone();
        pair.0[0].halt(nonfinite(&[]));
        pair.0[1].halt(nonfinite(&mine));
        pair.0.iter_mut().for_each(|session| session.withheld(&headers));
        pair.exchange_headers();
        let [Some(Ending::Failed(text)), Some(Ending::Failed(same))] = pair.endings() else {
            panic!("{:?}", pair.endings())
        };
        assert_eq!(text, same);
        assert!(
            text.contains("step 1 is not finite")
                && text.contains("rank 1 (worker 2) with records 4..6"),
            "{text}"
        );
        for session in &mut pair.0 {
            assert_eq!((session.step(), session.state().unwrap().ledger.counted()), (0, 0));
            assert_eq!(session.poll(), Task::Finish);
        }
    }

    #[test]
    fn an_error_of_one_rank_ends_the_job_at_the_step_whose_header_reports_it() {
        let mut pair = Pair::new(None);
        pair.exchange_headers();
        pair.compute();
        pair.0[1]
            .halt(Halt { reason: Reason::Error("a.csv has changed".into()), ranges: Vec::new() });
        let headers = pair.headers();
        assert!(Session::is_withheld(&headers));
        pair.0.iter_mut().for_each(|session| session.withheld(&headers));
        let expected = Some(Ending::Failed("rank 1 (worker 2): a.csv has changed".into()));
        assert_eq!(pair.endings(), [expected.clone(), expected]);
    }

    #[test]
    fn a_rank_that_has_halted_ends_the_next_group_too() {
        let mut pair = Pair::new(None);
        pair.exchange_headers();
        let headers = pair.compute();
        // The links break before the second rank has received the whole sum.
        pair.0[0].halt(nonfinite(&[]));
        pair.0[0].withheld(&headers);
        pair.0.iter_mut().for_each(|session| session.broken(None, "reset".into()));
        pair.regroup(2);
        pair.exchange_headers();
        assert!(matches!(pair.endings(), [Some(Ending::Failed(_)), Some(Ending::Failed(_))]));
    }

    #[test]
    fn a_skipped_step_and_its_records_are_counted() {
        let mut pair = Pair::new(None);
        pair.exchange_headers();
        let headers = pair.compute();
        for session in &mut pair.0 {
            session.commit_skipped(headers.clone(), Duration::ZERO);
            let state = session.state().unwrap();
            assert_eq!((state.step, state.steps_skipped, state.records_trained), (1, 1, 4));
            assert_eq!((state.ledger.counted(), state.ledger.repeated()), (4, 0));
        }
        // The count is part of the state that is sent and stored.
        assert_eq!(pair.0[0].state().unwrap().record().steps_skipped, 1);
    }

    #[test]
    fn a_group_writes_a_checkpoint_of_its_last_step_before_it_is_suspended() {
        let mut pair = Pair::new(Some(CheckpointEvery::Steps(NonZeroU64::new(1000).unwrap())));
        pair.exchange_headers();
        pair.0[1].handle_suspend();
        let headers = pair.compute();
        pair.0.iter_mut().for_each(|session| session.commit(headers.clone(), Duration::ZERO));
        assert_eq!(pair.endings(), [None, None], "its checkpoint is not written yet");
        for session in &mut pair.0 {
            let Some(checkpoint::Task::Write { step: 1, .. }) = session.poll_checkpoint() else {
                panic!("no part is to be written")
            };
            session.wrote_part(1, Ok(Written { bytes: 1, digest: 1 }));
        }
        pair.exchange_headers();
        assert!(matches!(
            pair.0[0].poll_checkpoint(),
            Some(checkpoint::Task::Commit { step: 1, .. })
        ));
        pair.0[0].committed_checkpoint(1, true);
        pair.exchange_headers();
        assert_eq!(pair.endings(), [Some(Ending::Suspended), Some(Ending::Suspended)]);
    }
}
