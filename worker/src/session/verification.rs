//! Whether all ranks of a group hold the same state. Each round compares a part of it; the state of
//! a model that is to be exported is compared as a whole.
//!
//! ```text
//!   best evaluation, or the job's end ─► idle round: digests of whole states ─► export, report
//! ```

use std::time::Duration;

use super::Session;
use super::phase::Phase;
use crate::session::halt::Ending;
use crate::session::header::StepHeader;
use crate::session::replicas::{Found, StateMismatch, compare_rounds};

impl Session {
    /// Whether the digest of the next [header](Self::header) is that of the whole state.
    pub fn is_verifying(&self) -> bool {
        matches!(self.phase, Phase::Verifying { .. })
    }

    /// Whether all ranks of this group hold the same state, as a whole.
    pub fn is_verified(&self) -> bool {
        let is_alone = match &self.phase {
            Phase::Evaluating { group, .. }
            | Phase::Finished { group, .. }
            | Phase::Round { group, .. } => group.members.len() == 1,
            _ => false,
        };
        is_alone || self.step.verified == Some(self.step())
    }

    /// Compares the headers of all ranks in a round: they must be at the same step with the same
    /// state.
    ///
    /// # Errors
    /// Which ranks must fail. This rank fails, or leaves the links: [`Session::broken`].
    pub(super) fn check(&self, headers: &[StepHeader]) -> Result<(), StateMismatch> {
        let (Phase::Rechecking { group, .. }
        | Phase::Round { group, .. }
        | Phase::Verifying { group, .. }) = &self.phase
        else {
            return Ok(());
        };
        match compare_rounds(headers, self.step()) {
            Some((verdict, Found::Step)) if self.is_verifying() => {
                Err(group.mismatch(self.step(), Found::Whole(self.step()), verdict))
            }
            Some((verdict, found)) => Err(group.mismatch(self.step(), found, verdict)),
            None => Ok(()),
        }
    }

    /// Notes that the headers of a [verification](Phase::Verifying), if this round was one, were
    /// equal. Returns the time of the commit before it.
    pub(super) fn end_verification(&mut self) -> Option<Duration> {
        let Phase::Verifying { group, committed } = &self.phase else { return None };
        let (group, committed) = (group.clone(), *committed);
        self.step.verified = Some(self.step());
        self.phase = Phase::Round { group, assigned: None, computed: false };
        committed
    }

    /// Whether the state must be compared as a whole before the round ends as it would: a model of
    /// it is exported. `ending`: how the group ends, if its last checkpoint does not delay that.
    pub(super) fn is_to_be_verified(&self, ending: Option<&Ending>) -> bool {
        let is_last = ending.is_some_and(|ending| *ending != Ending::Suspended);
        (is_last || (self.job.exports_best && self.is_best())) && !self.is_verified()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use elasticdl_proto::MasterMessage;

    use super::super::{JobPlan, Task, evaluation};
    use super::*;
    use crate::session::evaluation::Scores;
    use crate::session::tests::pair::Pair;

    /// A pair that has committed a step of 4 of 8 records. `stops`: its master stops the job.
    fn pair(plan: JobPlan, stops: bool) -> Pair {
        let mut pair = Pair::new(plan);
        pair.exchange_headers();
        if stops {
            pair.0[1].handle(MasterMessage::Drain);
        }
        pair.commit();
        pair
    }

    /// Exchanges headers with these digests.
    fn exchange(pair: &mut Pair, digests: [u64; 2]) -> [Result<(), StateMismatch>; 2] {
        let headers = [0, 1].map(|rank| pair.0[rank].header(digests[rank]));
        pair.0.each_mut().map(|session| {
            assert_eq!(session.poll(), Task::ExchangeHeaders { pauses: false });
            session.headers_exchanged(&headers)
        })
    }

    #[test]
    fn no_group_ends_before_the_whole_states_of_its_ranks_are_equal() {
        // The end of the data, and a stop in mid-job.
        for (records, stops) in [(4, false), (8, true)] {
            let plan = JobPlan::of_one_epoch(records, 4);
            let mut same = pair(plan.clone(), stops);
            assert_eq!(same.endings(), [None, None]);
            assert!(same.0.iter().all(Session::is_verifying));
            assert_eq!(exchange(&mut same, [7, 7]), [Ok(()), Ok(())]);
            assert_eq!(same.endings(), [Some(Ending::Done), Some(Ending::Done)]);
            let mut other = pair(plan, stops);
            for outcome in exchange(&mut other, [7, 8]) {
                let mismatch = outcome.unwrap_err();
                assert!(mismatch.is_failing() && mismatch.found == Found::Whole(1), "{mismatch:?}");
            }
            assert_eq!(other.endings(), [None, None]);
        }
    }

    #[test]
    fn the_best_state_is_compared_as_a_whole_before_it_is_exported() {
        let evaluation = evaluation::Plan {
            records: 100,
            every: Some(1),
            metric: "loss".into(),
            ..evaluation::Plan::default()
        };
        let blocks = vec![BTreeMap::from([("loss".to_owned(), 1.0)])];
        let score = Scores { records: 100, first_block: 0, blocks, failed: false };
        let scores = [score, Scores { records: 100, first_block: 1, ..Scores::default() }];
        for exports_best in [false, true] {
            let plan = JobPlan {
                evaluation: Some(evaluation.clone()),
                exports_best,
                ..JobPlan::of_one_epoch(8, 4)
            };
            let mut pair = pair(plan, false);
            for session in &mut pair.0 {
                assert!(matches!(session.poll(), Task::Evaluate(_)), "{session:?}");
                session.evaluated(&scores, Duration::ZERO);
                assert!(session.is_best() && !session.is_verified());
                assert_eq!(session.is_verifying(), exports_best);
            }
            if exports_best {
                assert_eq!(exchange(&mut pair, [7, 7]), [Ok(()), Ok(())]);
                assert!(pair.0.iter().all(|session| session.is_best() && session.is_verified()));
            }
            pair.compute();
        }
    }
}
