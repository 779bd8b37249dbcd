//! What follows if ranks have computed different gradients of the same records: all compute them
//! again, and find out who is wrong.

use elasticdl_proto::RecordRange;

use super::Session;
use super::outcome::is_withheld;
use super::phase::Phase;
use crate::session::audit::{AuditHeader, Dispute};
use crate::session::halt::{Halt, Reason};
use crate::session::header::StepHeader;
use crate::session::replicas::{Found, StateMismatch, Verdict};

/// What the ranks find about disputes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Judgement {
    /// Several ranks contradict themselves about this dispute.
    Nondeterministic(usize),
    /// Ranks fail, as they have computed other bits.
    Verdict(Verdict),
}

impl Session {
    /// What this rank's header says of the step's audit.
    pub(super) fn audit_header(&self) -> Option<AuditHeader> {
        match &self.phase {
            Phase::Rechecking { again, .. } => {
                let again = again.clone().unwrap_or_default();
                Some(AuditHeader { again, ..AuditHeader::default() })
            }
            // Any headers of a group may lead to its next step, those of a verification too.
            _ => self.assignment.audit.header(),
        }
    }

    /// Ends a [recheck](Phase::Rechecking), if this round was one. `None`: another decision follows
    /// from these headers.
    pub(super) fn end_recheck(
        &mut self,
        headers: &[StepHeader],
    ) -> Option<Result<(), StateMismatch>> {
        let Phase::Rechecking { group, .. } = &self.phase else { return None };
        if !is_withheld(headers) {
            return Some(self.judge(headers));
        }
        let group = group.clone();
        self.phase = Phase::Round { group, assigned: None, computed: false };
        None
    }

    /// Ranks disagree about the gradients of records, so no rank applies the step: all compute
    /// these records again.
    pub(super) fn recheck(&mut self, disputes: Vec<Dispute>) {
        let Phase::Round { group, .. } = &self.phase else { return };
        self.reports.flush();
        self.phase = Phase::Rechecking { group: group.clone(), disputes, again: None };
    }

    /// This rank has computed the disputed records again, with gradients of these digests; empty:
    /// it could not.
    pub fn rechecked(&mut self, digests: Vec<u64>) {
        if let Phase::Rechecking { again, .. } = &mut self.phase {
            *again = Some(digests);
        }
    }

    /// Takes in what all ranks have computed of the disputed records.
    ///
    /// # Errors
    /// Who is wrong.
    fn judge(&mut self, headers: &[StepHeader]) -> Result<(), StateMismatch> {
        let Phase::Rechecking { group, disputes, again } = &mut self.phase else { return Ok(()) };
        let digests = |header: &'_ StepHeader| match &header.audit {
            Some(audit) if audit.again.len() == disputes.len() => Some(audit.again.clone()),
            _ => None,
        };
        let all: Option<Vec<Vec<u64>>> = headers.iter().map(digests).collect();
        let Some(all) = all else {
            // Some rank could not read them.
            *again = None;
            return Ok(());
        };
        let all: Vec<&[u64]> = all.iter().map(Vec::as_slice).collect();
        let records = |index: usize| disputes[index].ranges[0];
        let (step, group) = (self.state.as_ref().map_or(0, |state| state.step), group.clone());
        let of_program = self.job.audit.is_some_and(|plan| plan.of_program);
        match judge(disputes, &all, of_program) {
            Judgement::Verdict(verdict) => {
                Err(group.mismatch(step, Found::Audit(records(0)), verdict))
            }
            Judgement::Nondeterministic(index) => {
                // All ranks find the same, and one says it.
                if group.rank == 0 {
                    let error = nondeterministic(step, records(index), of_program);
                    self.halt(Halt { reason: Reason::Error(error), ranges: Vec::new() });
                }
                self.phase = Phase::Round { group, assigned: None, computed: false };
                Ok(())
            }
        }
    }
}

/// Finds out who is wrong. `again`: for each rank the digests of all disputes. `of_program`: see
/// [`AuditPlan`](crate::session::audit::AuditPlan).
fn judge(disputes: &[Dispute], again: &[&[u64]], of_program: bool) -> Judgement {
    let mut failing = vec![false; again.len()];
    let mut is_open = false;
    for (index, dispute) in disputes.iter().enumerate() {
        // A rank that contradicts itself has no result, and so no vote.
        let result = |rank: usize| {
            let digest = again[rank][index];
            let before = dispute.votes.iter().filter(|vote| vote.0 == rank);
            before.map(|vote| vote.1).all(|other| other == digest).then_some(digest)
        };
        let results: Vec<Option<u64>> = (0..again.len()).map(result).collect();
        let votes = || results.iter().flatten();
        let is_new = |digest| dispute.votes.iter().all(|(_, other)| *other != digest);
        let is_blamed = of_program && again.len() == 1 && is_new(again[0][index]);
        if is_blamed || results.len() - votes().count() > 1 {
            return Judgement::Nondeterministic(index);
        }
        let count = |digest: &u64| votes().filter(|&other| other == digest).count();
        match votes().find(|&digest| 2 * count(digest) > votes().count()) {
            None => is_open = true,
            majority => {
                let is_wrong = results.iter().map(|result| result.as_ref() != majority);
                failing.iter_mut().zip(is_wrong).for_each(|(fails, is_wrong)| *fails |= is_wrong);
            }
        }
    }
    let is_decided = !is_open && failing.contains(&false);
    let failing = (0..again.len()).filter(|&rank| failing[rank] || !is_decided).collect();
    Judgement::Verdict(Verdict { failing, has_majority: is_decided })
}

fn nondeterministic(step: u64, records: RecordRange, of_program: bool) -> String {
    let RecordRange { epoch, start, end } = records;
    let (what, remedy) = if of_program {
        (
            "program",
            "what its loop computes of a batch must depend on the batch and the model alone, not \
             on what it computed before; random numbers of generators of its own are those of \
             job.generator(record=...), and those of a data set those of record.seed_for()",
        )
    } else {
        (
            "model",
            "its methods must depend on their arguments alone (for random numbers, on \
             Gradients::record_key)",
        )
    };
    format!(
        "--audit: in step {}, the workers computed another gradient or loss each time they \
         computed records {start}..{end} of epoch {epoch}, so the {what} is not deterministic and \
         can't be audited: {remedy}; correct it, or train without --audit",
        step.saturating_add(1)
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use elasticdl_proto::{Generation, MasterMessage, Membership, WorkerId};

    use super::super::{Computed, JobPlan, Task};
    use super::*;
    use crate::session::audit::AuditPlan;
    use crate::session::tests::pair::Pair;

    const ALL: AuditPlan = AuditPlan { seed: 7, per_million: 1_000_000, of_program: false };

    fn range(start: u64, end: u64) -> RecordRange {
        RecordRange { epoch: 0, start, end }
    }

    fn fails(failing: &[usize], has_majority: bool) -> Judgement {
        Judgement::Verdict(Verdict { failing: failing.to_vec(), has_majority })
    }

    #[test]
    fn who_is_alone_with_its_result_fails_and_who_alone_contradicts_itself_as_well() {
        const RIGHT: u64 = 1;
        let nondeterministic = Judgement::Nondeterministic(0);
        // The results of the rank whose part it is and of the auditor, and those of all ranks.
        type Votes<'a> = &'a [(usize, u64)];
        let table: &[(Votes<'_>, &[u64], Judgement)] = &[
            // A rank is wrong once, or always; the rank whose part it is, or its auditor.
            (&[(0, 9), (1, RIGHT)], &[RIGHT; 3], fails(&[0], true)),
            (&[(0, 9), (1, RIGHT)], &[9, RIGHT, RIGHT], fails(&[0], true)),
            (&[(0, RIGHT), (1, 9)], &[RIGHT; 3], fails(&[1], true)),
            (&[(2, RIGHT), (0, 9)], &[9, RIGHT, RIGHT], fails(&[0], true)),
            // So is another one.
            (&[(0, 9), (1, RIGHT)], &[9, RIGHT, RIGHT, RIGHT, 5], fails(&[0, 4], true)),
            // Of two, the one that contradicts itself; if both stand by their results, both.
            (&[(0, 9), (1, RIGHT)], &[RIGHT; 2], fails(&[0], true)),
            (&[(0, RIGHT), (1, 9)], &[RIGHT; 2], fails(&[1], true)),
            (&[(0, 9), (1, RIGHT)], &[9, RIGHT], fails(&[0, 1], false)),
            // Two kinds of hosts.
            (&[(0, 9), (2, RIGHT)], &[9, 9, RIGHT, RIGHT], fails(&[0, 1, 2, 3], false)),
            // Also if it has another result each time, in its part or as the auditor.
            (&[(0, 9), (1, RIGHT)], &[5, RIGHT], fails(&[0], true)),
            (&[(1, RIGHT), (0, 9)], &[5, RIGHT], fails(&[0], true)),
            (&[(0, 9), (1, RIGHT)], &[5, RIGHT, RIGHT], fails(&[0], true)),
            // One contradicts itself, and the others disagree.
            (&[(0, 9), (1, RIGHT)], &[5, RIGHT, 7], fails(&[0, 1, 2], false)),
            // One alone, whether a result is had twice or not.
            (&[(0, 9), (0, RIGHT)], &[RIGHT], fails(&[0], false)),
            (&[(0, 9), (0, RIGHT)], &[5], fails(&[0], false)),
            // Several contradict themselves.
            (&[(0, 1), (1, 2)], &[3, 4], nondeterministic.clone()),
            (&[(0, 1), (1, 2)], &[3, 4, 5], nondeterministic.clone()),
            // Some are, by chance.
            (&[(0, 1), (1, 2)], &[2, 1, 1, 1], nondeterministic),
        ];
        for (votes, again, expected) in table {
            let dispute = Dispute { ranges: vec![range(0, 4)], votes: votes.to_vec() };
            let again: Vec<&[u64]> = again.iter().map(std::slice::from_ref).collect();
            assert_eq!(judge(&[dispute], &again, false), *expected, "{votes:?} {again:?}");
        }
        // A rank that is always wrong is at fault in its part, and in the one that it audits.
        let dispute =
            |votes: [(usize, u64); 2]| Dispute { ranges: vec![range(0, 4)], votes: votes.to_vec() };
        let disputes = [dispute([(0, 9), (1, RIGHT)]), dispute([(2, RIGHT), (0, 9)])];
        let again: [&[u64]; 3] = [&[9, 9], &[RIGHT; 2], &[RIGHT; 2]];
        assert_eq!(judge(&disputes, &again, false), fails(&[0], true));
    }

    /// A pair whose steps have 4 of 100 records and are audited.
    fn pair() -> Pair {
        let mut pair = Pair::new(JobPlan { audit: Some(ALL), ..JobPlan::of_one_epoch(100, 4) });
        pair.exchange_headers();
        pair
    }

    /// The rank computes its part, with a gradient of this digest.
    fn compute(session: &mut Session, digest: u64) {
        assert!(matches!(session.poll(), Task::Compute { is_first: true, .. }), "{session:?}");
        session.assignment.computed(Computed { compute_us: 1, ..Computed::default() });
        assert!(session.assignment.needs_own_digest());
        session.assignment.set_own_digest(digest);
    }

    /// The rank computes the part of the other one.
    fn audit(session: &mut Session, part: RecordRange, digest: u64) {
        assert_eq!(session.poll(), Task::Audit(vec![part]));
        session.assignment.audited(Some(digest));
        assert_eq!(session.poll(), Task::Step { is_empty: false });
    }

    /// Both ranks compute their parts, and that of the other: gradients of these digests.
    fn compute_twice(pair: &mut Pair, own: [u64; 2], of_other: [u64; 2]) {
        for rank in 0..2 {
            compute(&mut pair.0[rank], own[rank]);
            audit(&mut pair.0[rank], [range(2, 4), range(0, 2)][rank], of_other[rank]);
        }
    }

    /// All ranks get the headers of the step.
    fn sum(pair: &mut Pair) {
        let headers = pair.headers();
        pair.0.iter_mut().for_each(|session| session.summed(headers.clone(), true).unwrap());
    }

    /// All ranks compute the first part again.
    fn recheck(pair: &mut Pair, digests: [u64; 2]) -> [Result<(), StateMismatch>; 2] {
        for (session, digest) in pair.0.iter_mut().zip(digests) {
            assert_eq!(session.poll(), Task::Recheck(vec![vec![range(0, 2)]]));
            session.rechecked(vec![digest]);
            assert_eq!(session.poll(), Task::ExchangeHeaders { pauses: false });
        }
        let headers = pair.headers();
        pair.0.each_mut().map(|session| session.headers_exchanged(&headers))
    }

    #[test]
    fn a_step_is_applied_if_all_parts_are_computed_twice_with_equal_results() {
        let mut pair = pair();
        compute_twice(&mut pair, [1, 2], [2, 1]);
        sum(&mut pair);
        for session in &mut pair.0 {
            assert_eq!(session.poll(), Task::Update { records: 4, is_applied: true });
            session.updated(Duration::ZERO);
            assert!(session.header(0).audit.is_none(), "{session:?}");
        }
    }

    #[test]
    fn a_step_with_different_results_is_not_applied_and_who_contradicts_itself_fails() {
        let mut pair = pair();
        compute_twice(&mut pair, [9, 2], [2, 1]);
        assert_eq!(pair.0[0].records_to_apply(&pair.headers()), None);
        sum(&mut pair);
        let [Err(wrong), Err(right)] = recheck(&mut pair, [1, 1]) else { panic!("{:?}", pair.0) };
        assert!(wrong.is_failing() && !right.is_failing(), "{wrong:?}");
        let text = wrong.to_string();
        let expected = "wrong arithmetic: worker 1 computed another gradient or loss of records \
                        0..2 of epoch 0 in step 1 than the other worker, which has not applied it";
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn two_that_stand_by_their_results_fail_and_a_model_without_one_ends_the_job() {
        let mut stands = pair();
        compute_twice(&mut stands, [9, 2], [2, 1]);
        sum(&mut stands);
        for outcome in recheck(&mut stands, [9, 1]) {
            let mismatch = outcome.unwrap_err();
            assert!(mismatch.is_failing() && !mismatch.verdict.has_majority, "{mismatch:?}");
            assert!(mismatch.to_string().contains("none can tell which is right"), "{mismatch}");
        }
        let mut random = pair();
        compute_twice(&mut random, [9, 2], [2, 1]);
        sum(&mut random);
        assert_eq!(recheck(&mut random, [3, 4]), [Ok(()), Ok(())]);
        random.exchange_headers();
        random.verify();
        for ending in random.endings() {
            let text = format!("{ending:?}");
            assert!(text.contains("records 0..2 of epoch 0, so the model is not"), "{text}");
        }
        assert!(random.0.iter().all(|session| session.step() == 0));
    }

    #[test]
    fn the_first_step_of_a_program_is_audited() {
        let audit = Some(AuditPlan { per_million: 1, of_program: true, ..ALL });
        let mut pair = Pair::new(JobPlan { audit, ..JobPlan::of_one_epoch(100, 4) });
        pair.exchange_headers();
        compute_twice(&mut pair, [1, 2], [2, 1]);
        sum(&mut pair);
        for session in &mut pair.0 {
            session.updated(Duration::ZERO);
            assert!(matches!(session.poll(), Task::Compute { .. }), "{session:?}");
            assert!(!session.assignment.is_audited());
        }
    }

    #[test]
    fn a_program_that_alone_has_three_results_is_not_deterministic() {
        let votes = vec![(0, 9), (0, 1)];
        let dispute = [Dispute { ranges: vec![range(0, 4)], votes }];
        let judged = |digest, of_program| judge(&dispute, &[&[digest]], of_program);
        assert_eq!(judged(5, true), Judgement::Nondeterministic(0));
        for (digest, of_program) in [(5, false), (9, true), (1, true)] {
            assert_eq!(judged(digest, of_program), fails(&[0], false), "{digest} {of_program}");
        }
    }

    #[test]
    fn a_rank_that_cannot_read_the_records_again_is_waited_for() {
        let mut pair = pair();
        compute_twice(&mut pair, [9, 2], [2, 1]);
        sum(&mut pair);
        for (session, digests) in pair.0.iter_mut().zip([vec![1], Vec::new()]) {
            assert!(matches!(session.poll(), Task::Recheck(_)));
            session.rechecked(digests);
        }
        let headers = pair.headers();
        for session in &mut pair.0 {
            assert_eq!(session.headers_exchanged(&headers), Ok(()));
        }
        assert!(recheck(&mut pair, [1, 1]).iter().all(Result::is_err));
    }

    #[test]
    fn what_is_audited_when_a_group_breaks_is_audited_in_the_next_one() {
        // Whether the second worker has computed the part of the first before the links broke, and
        // whether the next group compares whole states first.
        for (has_audited, verifies) in [(false, false), (false, true), (true, false), (true, true)]
        {
            let mut pair = pair();
            compute(&mut pair.0[0], 9);
            compute(&mut pair.0[1], 2);
            audit(&mut pair.0[0], range(2, 4), 2);
            if has_audited {
                audit(&mut pair.0[1], range(0, 2), 1);
            }
            pair.0.iter_mut().for_each(|session| session.broken(None, "reset".into()));
            pair.regroup(2);
            for session in pair.0.iter_mut().filter(|_| verifies) {
                let Phase::Round { group, .. } = &session.phase else { panic!("{session:?}") };
                session.phase = Phase::Verifying { group: group.clone(), committed: None };
            }
            pair.exchange_headers();
            if !has_audited {
                audit(&mut pair.0[1], range(0, 2), 1);
            }
            for session in &mut pair.0 {
                assert_eq!(session.poll(), Task::Step { is_empty: false });
            }
            sum(&mut pair);
            assert!(recheck(&mut pair, [1, 1]).iter().all(Result::is_err));
        }
    }

    #[test]
    fn a_rank_whose_auditor_is_lost_audits_itself_and_what_it_computes_later_is_owed() {
        let mut pair = pair();
        compute(&mut pair.0[0], 1);
        let session = &mut pair.0[0];
        session.broken(None, "reset".into());
        let members = vec![(WorkerId(1), ([127, 0, 0, 1], 1).into())].into();
        let membership = Membership { generation: Generation(2), members, abort: true };
        session.handle(MasterMessage::Membership(membership));
        session.connected();
        session.synced(&[session.sync_header(0)]).unwrap();
        session.repaired();
        let headers = [session.header(0)];
        session.headers_exchanged(&headers).unwrap();
        assert!(matches!(session.poll(), Task::Compute { is_first: false, .. }), "{session:?}");
        session.assignment.computed(Computed { compute_us: 1, ..Computed::default() });
        assert!(!session.assignment.needs_own_digest());
        audit(session, range(0, 2), 1);
        session.summed(vec![session.header(0)], true).unwrap();
        session.updated(Duration::ZERO);
        assert!(session.assignment.audit.is_owed);
    }

    #[test]
    fn what_a_member_owes_is_audited_by_a_worker_that_joins() {
        let audit = Some(AuditPlan { per_million: 1, ..ALL });
        let mut pair = Pair::new(JobPlan { audit, ..JobPlan::of_one_epoch(100, 4) });
        pair.0[0].assignment.audit.is_owed = true;
        pair.exchange_headers();
        compute_twice(&mut pair, [1, 2], [2, 1]);
        sum(&mut pair);
        for session in &mut pair.0 {
            session.updated(Duration::ZERO);
            assert!(!session.assignment.audit.is_owed, "{session:?}");
        }
    }
}
