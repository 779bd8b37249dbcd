//! A newcomer on its way into a group that trains: it fetches the state from a member, and follows
//! it step by step.
//!
//! **Invariant:** a fetched state goes into a group only if it is of the group's history: the donor
//! came along and said so, or it was lost and this is the very next group, which repairs whoever is
//! a step behind.

use std::collections::VecDeque;
use std::net::SocketAddr;

use elasticdl_proto::{Generation, WorkerId};

use super::{Phase, Report, Session};

/// How a newcomer comes by the state.
#[derive(Clone, Debug, Default)]
pub(super) struct Fetch {
    /// Whom to ask, the current one first.
    donors: VecDeque<(WorkerId, SocketAddr)>,
    /// The donor's group when it committed what was fetched last.
    generation: Option<Generation>,
    /// The donor's stream came to its end, on its way into this generation.
    ended: Option<Generation>,
    /// It came to an end otherwise.
    broken: bool,
    /// The link to the donor broke, and nothing has come over another one yet.
    interrupted: bool,
    /// Links to the donor that broke since something new came over one.
    interruptions: u32,
    /// The master knows that the state is here.
    reported: bool,
    /// Streams that broke after they had brought the state.
    lost: u32,
}

impl Fetch {
    pub(super) fn donor(&self) -> (WorkerId, SocketAddr) {
        *self.donors.front().expect("nobody fetches from no one")
    }
}

impl Session {
    /// Fetch the state from one of `donors` while they train; replaces an earlier list.
    pub fn handle_fetch(&mut self, donors: Vec<(WorkerId, SocketAddr)>) {
        let in_time = matches!(self.phase, Phase::Detached | Phase::Fetching) && !self.was_member;
        if !in_time || donors.is_empty() {
            return;
        }
        // A donor that is no member any more may have gone on alone, on a way that the others did
        // not take.
        let still_there = self.phase == Phase::Fetching && donors.contains(&self.fetch.donor());
        let first = if still_there { Some(self.fetch.donor()) } else { None };
        if !still_there {
            self.forget_state();
            self.fetch.interrupted = false;
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

    /// What was just installed or committed came from the donor, which is in a group of
    /// `generation`.
    pub fn fetched(&mut self, generation: Generation) {
        self.fetch.generation = Some(generation);
    }

    /// The donor has nothing newer.
    pub fn caught_up(&mut self) {
        if self.phase == Phase::Fetching && self.fetch.generation.is_some() && !self.fetch.reported
        {
            self.fetch.reported = true;
            self.reports.push_back(Report::CaughtUp { step: self.step() });
        }
    }

    pub(super) fn report_caught_up_again(&mut self) {
        if self.fetch.reported && !self.was_member {
            self.reports.push_back(Report::CaughtUp { step: self.step() });
        }
    }

    /// The donor goes into `generation`, and this worker with it: there is no more to come.
    pub fn fetch_ended(&mut self, generation: Generation) {
        if self.phase != Phase::Fetching {
            return;
        }
        self.fetch.ended = Some(generation);
        match self.latest.as_ref().is_some_and(|latest| latest.generation >= generation) {
            true => self.leave_fetch(),
            // The master's word is on its way.
            false => self.phase = Phase::Detached,
        }
    }

    /// The link to the donor broke. Whether the fetch is to go on where it was, over another link
    /// to the same donor; if not, this is followed by [`Session::fetch_broke`].
    pub fn fetch_interrupted(&mut self) -> bool {
        // A group that waits for this worker waits for no transfer.
        let goes_on = self.phase == Phase::Fetching
            && self.latest.is_none()
            && self.fetch.interruptions < INTERRUPTIONS_MAX;
        if goes_on {
            self.fetch.interrupted = true;
            self.fetch.interruptions += 1;
        }
        goes_on
    }

    /// The donor goes on where the link broke.
    pub fn fetch_resumed(&mut self) {
        self.fetch.interrupted = false;
    }

    /// A part of the state has come, or a step's result.
    pub fn fetch_advanced(&mut self) {
        self.fetch.interrupted = false;
        self.fetch.interruptions = 0;
    }

    /// The donor sends its state from the beginning: what was fetched before is overwritten.
    pub fn fetch_begins(&mut self) {
        self.forget_state();
        self.fetch.interrupted = false;
    }

    /// The donor could not be reached, or fell silent, or sent nonsense, or found this worker too
    /// slow.
    pub fn fetch_broke(&mut self) {
        if self.phase != Phase::Fetching {
            return;
        }
        if self.latest.is_some() {
            // Some member has the state; if this worker's is not known to be of the same history,
            // it takes that.
            self.fetch.broken = true;
            return self.leave_fetch();
        }
        if self.fetch.generation.is_some() {
            self.fetch.lost += 1;
        }
        self.forget_state();
        self.fetch.interrupted = false;
        self.fetch.interruptions = 0;
        self.fetch.donors.rotate_left(1);
        if self.fetch.lost == FETCHES_LOST_MAX {
            // The group is faster than this worker can follow: it has to wait for it.
            self.join_without_state();
        }
    }

    /// A membership has come while the state was fetched.
    pub(super) fn leave_fetch(&mut self) {
        let Some(latest) = &self.latest else { return };
        let Fetch { generation, ended, broken, interrupted, .. } = self.fetch;
        let (donor, _) = self.fetch.donor();
        let comes_along =
            !broken && !interrupted && ended.is_none() && latest.rank_of(donor).is_some();
        if generation.is_some() && comes_along {
            // It sends what is left of its group's steps, and then the end.
            return;
        }
        // Without an end, what came may be of a last step that the donor made alone; then the very
        // next group repairs the others with it, but a later one has gone another way.
        let same_history = match ended {
            Some(ended) => ended <= latest.generation,
            None => generation.is_some_and(|of| of.next() == latest.generation),
        };
        if !same_history {
            self.forget_state();
        }
        self.join_latest();
    }

    fn join_without_state(&mut self) {
        if !self.fetch.reported {
            self.fetch.reported = true;
            self.reports.push_back(Report::CaughtUp { step: 0 });
        }
        self.phase = Phase::Detached;
    }

    /// Drops what was fetched.
    fn forget_state(&mut self) {
        self.state = None;
        self.last_headers = None;
        self.fetch.generation = None;
    }
}

/// After so many states that came and were lost again, a newcomer joins without one.
const FETCHES_LOST_MAX: u32 = 3;

/// After so many links that broke and brought nothing new, the next donor is asked.
const INTERRUPTIONS_MAX: u32 = 8;

#[cfg(test)]
mod tests {
    use elasticdl_proto::RecordRange;

    use super::super::{JobPlan, Membership, Task};
    use super::*;
    use crate::core::header::{StateRecord, StepHeader};
    use crate::core::plan::Batch;

    const ME: WorkerId = WorkerId(9);

    fn at(id: u64) -> (WorkerId, SocketAddr) {
        (WorkerId(id), ([127, 0, 0, 1], id as u16).into())
    }

    fn membership(generation: u64, members: &[u64], abort: bool) -> Membership {
        let members = members.iter().map(|id| at(*id)).collect();
        Membership { generation: Generation(generation), members, abort }
    }

    /// A newcomer that has a state of step 3 and a result of step 4 from worker 1, of generation 1.
    fn newcomer() -> Session {
        let plan = JobPlan {
            records: 100,
            epochs: 1,
            max_steps: None,
            batch: Batch::Global(4),
            checkpoints: None,
            evaluation: None,
        };
        let mut session = Session::new(ME, plan);
        session.handle_fetch(vec![at(1), at(2)]);
        assert_eq!(session.poll(), Task::Fetch(WorkerId(1), at(1).1));
        let range = |start, end| RecordRange { epoch: 0, start, end };
        let state = StateRecord {
            step: 3,
            records_trained: 12,
            epochs_complete: 0,
            ranges: vec![range(0, 12)],
            repeated: 0,
            evaluation: Default::default(),
            steps_skipped: 0,
        };
        assert!(session.install(state, None));
        session.fetched(Generation(1));
        let header = StepHeader {
            step: 3,
            ranges: vec![range(12, 16)],
            loss_sum: 0.0,
            compute_us: 0,
            held: Vec::new(),
            newest_generation: 1,
            stop: false,
            suspend: false,
            halt: None,
            digest: 0,
            checkpoint: Default::default(),
            evaluation: Default::default(),
            nccl: Default::default(),
        };
        session.commit(vec![header], std::time::Duration::ZERO);
        session.fetched(Generation(1));
        session
    }

    /// The step that it would bring into the group that it is about to join.
    fn brings(session: &mut Session, generation: u64) -> Option<u64> {
        let Task::Connect(joins) = session.poll() else { panic!("it doesn't join: {session:?}") };
        assert_eq!(joins.generation, Generation(generation));
        session.sync_header(0).state.map(|state| state.step)
    }

    #[test]
    fn a_newcomer_says_once_that_it_has_caught_up() {
        let mut session = newcomer();
        session.caught_up();
        session.caught_up();
        assert_eq!(session.poll_report(), Some(Report::CaughtUp { step: 4 }));
        assert_eq!(session.poll_report(), None);
    }

    #[test]
    fn it_follows_its_donor_until_that_one_goes_into_the_same_generation() {
        let mut session = newcomer();
        session.handle_membership(membership(3, &[1, 2, 9], false));
        assert_eq!(session.poll(), Task::Fetch(WorkerId(1), at(1).1));
        session.fetch_ended(Generation(3));
        assert_eq!(brings(&mut session, 3), Some(4));
        // The donor's word may be quicker than the master's.
        let mut session = newcomer();
        session.fetch_ended(Generation(3));
        assert_eq!(session.poll(), Task::Wait);
        session.handle_membership(membership(3, &[1, 2, 9], false));
        assert_eq!(brings(&mut session, 3), Some(4));
    }

    #[test]
    fn what_a_lost_donor_committed_counts_in_the_very_next_group_alone() {
        for (generation, brought) in [(2, Some(4)), (3, None)] {
            let mut session = newcomer();
            session.handle_membership(membership(generation, &[2, 9], true));
            assert_eq!(brings(&mut session, generation), brought);
            // The same where the link ends first.
            let mut session = newcomer();
            session.handle_membership(membership(generation, &[1, 2, 9], true));
            session.fetch_broke();
            assert_eq!(brings(&mut session, generation), brought);
        }
    }

    #[test]
    fn a_fetch_whose_link_broke_goes_on_with_the_same_donor_and_keeps_what_it_has() {
        let mut session = newcomer();
        for _ in 0..INTERRUPTIONS_MAX {
            assert!(session.fetch_interrupted());
            assert_eq!((session.step(), session.poll()), (4, Task::Fetch(WorkerId(1), at(1).1)));
        }
        session.fetch_resumed();
        assert!(!session.fetch_interrupted(), "nothing new has come for a long time");
        session.fetch_advanced();
        assert!(session.fetch_interrupted());
        session.fetch_begins();
        assert_eq!(session.step(), 0);
    }

    #[test]
    fn no_group_waits_for_a_fetch_whose_link_broke() {
        for (generation, brought) in [(2, Some(4)), (3, None)] {
            let mut session = newcomer();
            assert!(session.fetch_interrupted());
            session.handle_membership(membership(generation, &[1, 2, 9], false));
            assert_eq!(brings(&mut session, generation), brought);
            // The same where the membership comes first.
            let mut session = newcomer();
            session.handle_membership(membership(generation, &[1, 2, 9], false));
            assert!(!session.fetch_interrupted());
            session.fetch_broke();
            assert_eq!(brings(&mut session, generation), brought);
            // Unless the donor goes on in time.
            let mut session = newcomer();
            assert!(session.fetch_interrupted());
            session.fetch_resumed();
            session.handle_membership(membership(generation, &[1, 2, 9], false));
            assert_eq!(session.poll(), Task::Fetch(WorkerId(1), at(1).1));
        }
    }

    #[test]
    fn it_begins_again_where_the_donor_is_no_member_any_more_or_the_link_breaks() {
        let mut session = newcomer();
        session.handle_fetch(vec![at(2), at(1)]);
        assert_eq!((session.step(), session.poll()), (4, Task::Fetch(WorkerId(1), at(1).1)));
        session.handle_fetch(vec![at(2), at(3)]);
        assert_eq!((session.step(), session.poll()), (0, Task::Fetch(WorkerId(2), at(2).1)));
        session.fetch_broke();
        assert_eq!(session.poll(), Task::Fetch(WorkerId(3), at(3).1));
        // Without a whole state there is nothing to wait for.
        session.handle_membership(membership(3, &[2, 3, 9], true));
        assert_eq!(brings(&mut session, 3), None);
    }

    #[test]
    fn who_is_too_slow_again_and_again_joins_without_a_state() {
        let mut session = newcomer();
        for _ in 1..FETCHES_LOST_MAX {
            session.fetch_broke();
            assert_eq!(session.poll_report(), None);
            session.fetched(Generation(1));
        }
        session.fetch_broke();
        assert_eq!(session.poll_report(), Some(Report::CaughtUp { step: 0 }));
        assert_eq!(session.poll(), Task::Wait);
    }
}
