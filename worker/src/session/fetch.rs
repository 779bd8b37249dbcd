//! A joining worker fetches the state from a member of a group that trains, and follows it step by
//! step.
//!
//! **Invariant:** a fetched state enters a group only if it belongs to the group's history. Either
//! the donor joins the same generation and confirms it, or the donor was lost and this is the very
//! next group that can form, which repairs ranks that are one step behind.

use std::net::SocketAddr;

use elasticdl_proto::{Generation, WorkerId, WorkerMessage};

use super::Session;
use super::phase::{Fetch, Phase};

impl Session {
    /// Fetches the state from one of `donors` while they train. Replaces an earlier list.
    pub(super) fn handle_fetch(&mut self, donors: Vec<(WorkerId, SocketAddr)>) {
        let may_fetch =
            matches!(self.phase, Phase::Detached | Phase::Fetching) && !self.memberships.was_member;
        if !may_fetch || donors.is_empty() {
            return;
        }
        self.fetch.reported = false;
        if self.job.shards_optimizer {
            // The parameters come with the group, and nothing else is needed to compute.
            return self.join_without_state();
        }
        // A donor that is no longer a member may have continued alone, on a history that the others
        // do not share.
        let donor_is_member = self.phase == Phase::Fetching && donors.contains(&self.fetch.donor());
        let first = if donor_is_member { Some(self.fetch.donor()) } else { None };
        if !donor_is_member {
            self.forget_state();
            (self.fetch.interrupted, self.fetch.broken) = (false, false);
            self.fetch.interruptions = 0;
        }
        self.fetch = Fetch { donors: donors.into(), ..std::mem::take(&mut self.fetch) };
        if let Some(donor) = first {
            while self.fetch.donor() != donor {
                self.fetch.donors.rotate_left(1);
            }
        }
        self.phase = Phase::Fetching;
    }

    /// The state or result that was just installed or committed comes from the donor's group of
    /// `generation`.
    pub fn fetched(&mut self, generation: Generation) {
        self.fetch.generation = Some(generation);
    }

    /// The donor has nothing newer.
    pub fn caught_up(&mut self) {
        if self.phase == Phase::Fetching && self.fetch.generation.is_some() && !self.fetch.reported
        {
            (self.fetch.reported, self.fetch.lost) = (true, 0);
            self.reports.push(WorkerMessage::CaughtUp { step: self.own_step() });
        }
    }

    pub(super) fn report_caught_up_again(&mut self) {
        if self.fetch.reported && !self.memberships.was_member {
            self.reports.push(WorkerMessage::CaughtUp { step: self.own_step() });
        }
    }

    /// The donor joins `generation`, and so does this worker: the stream ends.
    pub fn fetch_ended(&mut self, generation: Generation) {
        if self.phase != Phase::Fetching {
            return;
        }
        self.fetch.ended = Some(generation);
        if self.memberships.latest.as_ref().is_some_and(|latest| latest.generation >= generation) {
            self.leave_fetch();
        } else {
            // The master's message has not arrived yet.
            self.phase = Phase::Detached;
        }
    }

    /// The link to the donor broke. Returns whether to resume the fetch over another link to the
    /// same donor. If not, the caller calls [`Session::fetch_broke`].
    pub fn fetch_interrupted(&mut self) -> bool {
        // A group that waits for this worker must not wait for a transfer.
        let resumes = self.phase == Phase::Fetching
            && self.memberships.latest.is_none()
            && self.fetch.interruptions < INTERRUPTIONS_MAX;
        if resumes {
            self.fetch.interrupted = true;
            self.fetch.interruptions += 1;
        }
        resumes
    }

    /// Whether links have broken without any progress between them.
    pub fn is_interrupted_again(&self) -> bool {
        self.fetch.interruptions > 1
    }

    /// The donor resumes the transfer where the link broke.
    pub fn fetch_resumed(&mut self) {
        self.fetch.interrupted = false;
    }

    /// A part of the state or a step's result has arrived.
    pub fn fetch_advanced(&mut self) {
        self.fetch.interrupted = false;
        self.fetch.interruptions = 0;
    }

    /// The donor sends its state from the start, which overwrites everything fetched before.
    pub fn fetch_begins(&mut self) {
        self.forget_state();
        (self.fetch.interrupted, self.fetch.broken) = (false, false);
    }

    /// The donor is unreachable, silent, sent invalid data, or has dropped this worker as too slow.
    pub fn fetch_broke(&mut self) {
        if self.phase != Phase::Fetching {
            return;
        }
        if self.memberships.latest.is_some() {
            // Some member has the state. If this worker's is not known to belong to the same
            // history, it is replaced in the repair.
            self.fetch.broken = true;
            return self.leave_fetch();
        }
        if self.fetch.reported && self.fetch.generation.is_some() {
            // All members may be lost. What this worker has is kept until another donor begins.
            self.fetch.broken = true;
        } else {
            self.fetch.lost += u32::from(self.fetch.generation.is_some());
            self.forget_state();
        }
        self.fetch.interrupted = false;
        self.fetch.interruptions = 0;
        self.fetch.donors.rotate_left(1);
        if self.fetch.lost == FETCHES_LOST_MAX {
            // The group commits faster than this worker can follow, so the group has to wait for
            // it.
            self.join_without_state();
        }
    }

    /// A membership arrived while the state was being fetched.
    pub(super) fn leave_fetch(&mut self) {
        let Some(latest) = &self.memberships.latest else { return };
        let Fetch { generation, ended, broken, interrupted, .. } = self.fetch;
        let (donor, _) = self.fetch.donor();
        let donor_joins_too =
            !broken && !interrupted && ended.is_none() && latest.rank_of(donor).is_some();
        let is_next = generation.is_some_and(|of| {
            let unformed = self.fetch.unformed.filter(|unformed| *unformed > of);
            unformed == Some(latest.generation)
                || unformed.unwrap_or(of).next() == latest.generation
        });
        if generation.is_some() && donor_joins_too {
            if is_next && latest.rank_of(self.me).is_some() {
                self.fetch.unformed = Some(latest.generation);
            }
            // The donor sends its group's remaining steps and then ends the stream.
            return;
        }
        // Without the end of the stream, the last result may belong to a step that the donor alone
        // committed. The next group repairs the other ranks with it; a later one has diverged from
        // it.
        let same_history = match ended {
            Some(ended) => ended <= latest.generation,
            None => is_next,
        };
        if !same_history {
            self.forget_state();
        }
        self.join_latest();
    }

    fn join_without_state(&mut self) {
        if !self.fetch.reported {
            self.fetch.reported = true;
            self.reports.push(WorkerMessage::CaughtUp { step: None });
        }
        self.phase = Phase::Detached;
    }

    /// Drops the state.
    pub(super) fn forget_state(&mut self) {
        self.state = None;
        self.step.last_headers = None;
        self.step.outcome = None;
        (self.fetch.generation, self.fetch.unformed) = (None, None);
    }
}

/// After this many lost states, a joining worker joins without one.
const FETCHES_LOST_MAX: u32 = 3;

/// After this many broken links without progress, the next donor is tried.
const INTERRUPTIONS_MAX: u32 = 8;

#[cfg(test)]
mod tests {
    use elasticdl_proto::{Membership, RecordRange};

    use super::super::{JobPlan, Task};
    use super::*;
    use crate::session::evaluation::Evaluation;
    use crate::session::header::{StateRecord, StepHeader};
    use crate::session::origin::{Origin, Program};

    const ME: WorkerId = WorkerId(9);

    fn at(id: u64) -> (WorkerId, SocketAddr) {
        (WorkerId(id), ([127, 0, 0, 1], id as u16).into())
    }

    fn membership(generation: u64, members: &[u64], abort: bool) -> Membership {
        let members = members.iter().map(|id| at(*id)).collect();
        Membership { generation: Generation(generation), members, abort }
    }

    /// Header of the step after `step`, of 4 records.
    fn header(step: u64) -> StepHeader {
        StepHeader {
            step,
            ranges: vec![RecordRange { epoch: 0, start: 4 * step, end: 4 * step + 4 }],
            newest_generation: 1,
            ..StepHeader::default()
        }
    }

    /// A joining worker with a state of step 3 and a result of step 4 from worker 1, of generation
    /// 1.
    fn joiner() -> Session {
        let mut session = Session::new(ME, JobPlan::of_one_epoch(100, 4));
        session.handle_fetch(vec![at(1), at(2)]);
        assert_eq!(session.poll(), Task::Fetch(WorkerId(1), at(1).1));
        let state = StateRecord {
            step: 3,
            records_trained: 12,
            epochs_complete: 0,
            ranges: vec![RecordRange { epoch: 0, start: 0, end: 12 }],
            repeated: 0,
            evaluation: Default::default(),
            steps_skipped: 0,
            row_touches: 0,
            created: 0,
        };
        assert!(session.install(state, None));
        session.fetched(Generation(1));
        assert!(session.result_fetched(Generation(1), vec![header(3)], true));
        assert_eq!(session.poll(), Task::Update { records: 4, is_applied: true });
        session.updated(std::time::Duration::ZERO);
        session
    }

    /// Step of the state that the worker brings into the group that it is about to join.
    fn brings(session: &mut Session, generation: u64) -> Option<u64> {
        let Task::Connect(joins) = session.poll() else {
            panic!("the worker does not join: {session:?}")
        };
        assert_eq!(joins.generation, Generation(generation));
        session.sync_header(0).state.map(|state| state.step)
    }

    #[test]
    fn a_joining_worker_checks_its_build_before_it_fetches_the_state() {
        let program = |executable| Program { executable, ..Program::default() };
        let joiner = |allows_mixed_builds| {
            let plan = JobPlan { allows_mixed_builds, ..JobPlan::of_one_epoch(100, 4) };
            Session::new(ME, plan).of(Origin {
                host: "a".into(),
                program: program(2),
                ..Origin::default()
            })
        };
        assert!(joiner(false).check_program(&program(1)).is_err());
        assert_eq!(joiner(false).check_program(&program(2)), Ok(()));
        assert_eq!(joiner(true).check_program(&program(1)), Ok(()));
    }

    #[test]
    fn a_joining_worker_applies_the_result_of_its_next_step_only() {
        for step in [3, 5] {
            let mut session = joiner();
            assert!(!session.result_fetched(Generation(1), vec![header(step)], true));
            assert!(matches!(session.poll(), Task::Fetch(..)), "{session:?}");
            assert_eq!(session.step(), 4);
        }
        let mut session = joiner();
        assert!(session.result_fetched(Generation(1), vec![header(4)], true));
        assert_eq!(session.poll(), Task::Update { records: 4, is_applied: true });
    }

    #[test]
    fn a_joining_worker_knows_the_evaluations_that_precede_the_results_it_receives() {
        let mut session = joiner();
        let best = Some((4, 0.5));
        let evaluation = Evaluation { at: 4, best, ..Evaluation::default() };
        let after = StepHeader { evaluation, ..header(4) };
        assert!(session.result_fetched(Generation(1), vec![after], true));
        session.updated(std::time::Duration::ZERO);
        assert_eq!((session.step(), session.evaluation()), (5, evaluation));
    }

    #[test]
    fn a_joining_worker_reports_once_that_it_has_caught_up() {
        let mut session = joiner();
        session.caught_up();
        session.caught_up();
        assert_eq!(session.reports.poll(), Some(WorkerMessage::CaughtUp { step: Some(4) }));
        assert_eq!(session.reports.poll(), None);
    }

    #[test]
    fn a_joining_worker_follows_its_donor_until_both_enter_the_same_generation() {
        let mut session = joiner();
        session.handle_membership(membership(3, &[1, 2, 9], false));
        assert_eq!(session.poll(), Task::Fetch(WorkerId(1), at(1).1));
        session.fetch_ended(Generation(3));
        assert_eq!(brings(&mut session, 3), Some(4));
        // The donor's message may arrive before the master's.
        let mut session = joiner();
        session.fetch_ended(Generation(3));
        assert_eq!(session.poll(), Task::Wait);
        session.handle_membership(membership(3, &[1, 2, 9], false));
        assert_eq!(brings(&mut session, 3), Some(4));
    }

    #[test]
    fn commits_of_a_lost_donor_count_only_in_the_very_next_group() {
        for (generation, brought) in [(2, Some(4)), (3, None)] {
            let mut session = joiner();
            session.handle_membership(membership(generation, &[2, 9], true));
            assert_eq!(brings(&mut session, generation), brought);
            // Likewise if the link ends first.
            let mut session = joiner();
            session.handle_membership(membership(generation, &[1, 2, 9], true));
            session.fetch_broke();
            assert_eq!(brings(&mut session, generation), brought);
        }
    }

    #[test]
    fn a_generation_that_waits_for_the_joiner_does_not_come_between() {
        // Without worker 9, generation 2 may have formed, and made steps.
        for (second, brought) in [(&[1, 9][..], Some(4)), (&[1, 2], None)] {
            let mut session = joiner();
            session.handle_membership(membership(2, second, false));
            assert_eq!(session.poll(), Task::Fetch(WorkerId(1), at(1).1));
            session.handle_membership(membership(3, &[9], true));
            assert_eq!(brings(&mut session, 3), brought);
        }
        let mut session = joiner();
        for generation in 2..5 {
            session.handle_membership(membership(generation, &[1, 2, 9], false));
        }
        session.handle_membership(membership(5, &[2, 9], true));
        assert_eq!(brings(&mut session, 5), Some(4));
        let mut session = joiner();
        session.handle_membership(membership(2, &[1, 9], false));
        session.handle_membership(membership(4, &[9], true));
        assert_eq!(brings(&mut session, 4), None);
    }

    #[test]
    fn a_fetch_whose_link_broke_resumes_with_the_same_donor_and_keeps_its_state() {
        let mut session = joiner();
        for _ in 0..INTERRUPTIONS_MAX {
            assert!(session.fetch_interrupted());
            assert_eq!((session.step(), session.poll()), (4, Task::Fetch(WorkerId(1), at(1).1)));
        }
        session.fetch_resumed();
        assert!(!session.fetch_interrupted(), "too many links broke without progress");
        session.fetch_advanced();
        assert!(session.fetch_interrupted());
        session.fetch_begins();
        assert_eq!(session.step(), 0);
    }

    #[test]
    fn no_group_waits_for_a_fetch_whose_link_broke() {
        for (generation, brought) in [(2, Some(4)), (3, None)] {
            let mut session = joiner();
            assert!(session.fetch_interrupted());
            session.handle_membership(membership(generation, &[1, 2, 9], false));
            assert_eq!(brings(&mut session, generation), brought);
            // Likewise if the membership arrives first.
            let mut session = joiner();
            session.handle_membership(membership(generation, &[1, 2, 9], false));
            assert!(!session.fetch_interrupted());
            session.fetch_broke();
            assert_eq!(brings(&mut session, generation), brought);
            // Unless the donor resumes in time.
            let mut session = joiner();
            assert!(session.fetch_interrupted());
            session.fetch_resumed();
            session.handle_membership(membership(generation, &[1, 2, 9], false));
            assert_eq!(session.poll(), Task::Fetch(WorkerId(1), at(1).1));
        }
    }

    #[test]
    fn a_fetch_starts_over_when_the_donor_leaves_or_the_link_breaks() {
        let mut session = joiner();
        session.fetch_broke();
        assert_eq!((session.step(), session.poll()), (0, Task::Fetch(WorkerId(2), at(2).1)));
        let mut session = joiner();
        session.handle_fetch(vec![at(2), at(1)]);
        assert_eq!((session.step(), session.poll()), (4, Task::Fetch(WorkerId(1), at(1).1)));
        session.handle_fetch(vec![at(2), at(3)]);
        assert_eq!((session.step(), session.poll()), (0, Task::Fetch(WorkerId(2), at(2).1)));
        session.fetch_broke();
        assert_eq!(session.poll(), Task::Fetch(WorkerId(3), at(3).1));
        // Without a complete state there is nothing to wait for.
        session.handle_membership(membership(3, &[2, 3, 9], true));
        assert_eq!(brings(&mut session, 3), None);
    }

    #[test]
    fn one_that_has_caught_up_keeps_its_state_until_another_donor_begins() {
        for (generation, brought) in [(2, Some(4)), (3, None)] {
            let mut session = joiner();
            session.caught_up();
            for donor in [2, 1, 2, 1] {
                session.fetch_broke();
                let step = session.step();
                assert_eq!((step, session.poll()), (4, Task::Fetch(WorkerId(donor), at(donor).1)));
            }
            session.handle_membership(membership(generation, &[9, 10], true));
            assert_eq!(brings(&mut session, generation), brought);
        }
        let mut session = joiner();
        session.caught_up();
        session.fetch_broke();
        session.fetch_begins();
        assert_eq!(session.step(), 0);
    }

    #[test]
    fn a_worker_that_is_too_slow_repeatedly_joins_without_a_state() {
        let mut session = joiner();
        for _ in 1..FETCHES_LOST_MAX {
            session.fetch_broke();
            assert_eq!(session.reports.poll(), None);
            session.fetched(Generation(1));
        }
        session.fetch_broke();
        assert_eq!(session.reports.poll(), Some(WorkerMessage::CaughtUp { step: None }));
        assert_eq!(session.poll(), Task::Wait);
    }
}
