//! When a checkpoint is due, and how the ranks agree on one, without a message or a barrier of its
//! own.
//!
//! ```text
//!   step s      headers: one rank finds a checkpoint due, none is being written
//!   commit s ─► all ranks copy their part of the state and write it, while they train on
//!   step s + k  headers: all parts are written ─► the first rank writes the manifest
//!   step s + m  headers: complete
//! ```
//!
//! Every rank says in its headers what it knows, all hear all headers, and what follows is decided
//! from them alone. A checkpoint belongs to the ranks that began it: when one is lost, or has given
//! it up, so do the others, and another one is due at once.
//!
//! **Invariant:** ranks of a group begin the same checkpoint at the same step.
//! **Invariant:** nobody waits for a checkpoint, but at the job's end.

use std::collections::VecDeque;
use std::time::Duration;

use elasticdl_proto::{Generation, WorkerId};
use serde::{Deserialize, Serialize};

/// How often a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interval {
    /// After so many steps.
    Steps(u64),
    /// After so much time; the first one of a job comes after [`FIRST_AFTER`] at the latest.
    Time(Duration),
}

/// One rank's word about checkpoints, in its header.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointHeader {
    /// It finds one due at the end of this step.
    pub due: bool,
    /// It still writes something, though that may count no more.
    pub busy: bool,
    /// The step of the one that it takes part in, and how its part is.
    pub at: Option<(u64, Part)>,
    /// Step of the newest that is complete.
    pub complete: Option<u64>,
    /// Step of the newest that could not be written.
    pub failed: Option<u64>,
    /// The step from which the way to the next one is counted.
    pub interval_base: u64,
}

/// How a rank's part of a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    Failed,
    Writing,
    Written(Written),
}

/// A rank's part, as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    pub bytes: u64,
    /// XXH3, 128 bits, of the file.
    pub digest: u128,
}

/// What a rank has to do for a checkpoint, beside its training. The doer answers with the call that
/// stands beside each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// All parts are written: write the manifest. [`Checkpoints::committed`].
    Commit { step: u64, parts: Vec<Written> },
    /// Copy this part of the state as it is now, and write it: [`Checkpoints::wrote`].
    Write { step: u64, generation: Generation, rank: usize, world_size: usize },
}

/// What a group at the job's end has to do first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinalCheckpoint {
    /// Begin a checkpoint of the final state.
    Begin,
    /// Nothing.
    Nothing,
    /// Wait for the one that is being written.
    Wait,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Current {
    step: u64,
    begun: Duration,
    /// Those that began it, in the order of their ranks then.
    members: Vec<WorkerId>,
    parts: Vec<Option<Written>>,
    mine: Part,
    committing: bool,
}

/// One rank's knowledge of the job's checkpoints.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    me: WorkerId,
    every: Option<Interval>,
    interval_base: u64,
    /// When the interval began; `None` before the first step.
    interval_began: Option<Duration>,
    complete: Option<u64>,
    failed: Option<u64>,
    requested: bool,
    overdue: bool,
    busy: bool,
    current: Option<Current>,
    tasks: VecDeque<Task>,
}

impl Checkpoints {
    /// `every`: `None` where the job has no place for checkpoints.
    pub fn new(me: WorkerId, every: Option<Interval>) -> Self {
        Self {
            me,
            every,
            interval_base: 0,
            interval_began: None,
            complete: None,
            failed: None,
            requested: false,
            overdue: false,
            busy: false,
            current: None,
            tasks: VecDeque::new(),
        }
    }

    pub fn are_enabled(&self) -> bool {
        self.every.is_some()
    }

    /// The user wants one now.
    pub fn request(&mut self) {
        self.requested = self.are_enabled();
    }

    /// The state came from a checkpoint of `step`. `complete`: of this job, and not of another one.
    pub fn restored(&mut self, step: u64, complete: bool) {
        self.interval_base = step;
        self.complete = complete.then_some(step);
    }

    /// This rank's word in the round that makes step number `next`.
    pub fn header(&self, next: u64) -> CheckpointHeader {
        let far = matches!(self.every, Some(Interval::Steps(steps)) if next >= self.interval_base.saturating_add(steps));
        CheckpointHeader {
            due: self.current.is_none() && (self.requested || self.overdue || far),
            busy: self.busy,
            at: self.current.as_ref().map(|current| (current.step, current.mine)),
            complete: self.complete,
            failed: self.failed,
            interval_base: self.interval_base,
        }
    }

    /// All ranks' headers in a round of `members`.
    pub fn handle_headers(&mut self, members: &[WorkerId], headers: &[&CheckpointHeader]) {
        self.complete = self.complete.max(headers.iter().filter_map(|w| w.complete).max());
        self.failed = self.failed.max(headers.iter().filter_map(|w| w.failed).max());
        let known = headers.iter().map(|w| w.interval_base).chain(self.complete).chain(self.failed);
        self.interval_base = self.interval_base.max(known.max().unwrap_or(0));
        let Some(current) = &mut self.current else { return };
        if self.complete.max(self.failed) >= Some(current.step) {
            return self.settle();
        }
        for (rank, (member, part)) in current.members.iter().zip(&mut current.parts).enumerate() {
            let at = members.iter().position(|m| m == member).and_then(|place| headers[place].at);
            match at.filter(|(step, _)| *step == current.step) {
                Some((step, Part::Failed)) => {
                    self.failed = Some(step);
                    self.interval_base = self.interval_base.max(step);
                    return self.settle();
                }
                Some((_, Part::Writing)) => {}
                Some((_, Part::Written(written))) => *part = Some(written),
                // What is written stays written. Else it has given this checkpoint up, or never
                // began it; and without the first one nobody writes the manifest.
                None if part.is_some() && rank > 0 => {}
                None => return self.current = None,
            }
        }
        let parts: Option<Vec<Written>> = current.parts.iter().copied().collect();
        if let Some(parts) = parts.filter(|_| !current.committing) {
            current.committing = true;
            if current.members[0] == self.me {
                self.busy = true;
                self.tasks.push_back(Task::Commit { step: current.step, parts });
            }
        }
    }

    /// Begins one of `step`, which was just committed by the group of `generation`.
    pub fn begin(
        &mut self,
        step: u64,
        generation: Generation,
        members: &[WorkerId],
        now: Duration,
    ) {
        let Some(rank) = members.iter().position(|m| *m == self.me) else { return };
        (self.requested, self.overdue, self.busy) = (false, false, true);
        self.current = Some(Current {
            step,
            begun: now,
            members: members.to_vec(),
            parts: vec![None; members.len()],
            mine: Part::Writing,
            committing: false,
        });
        self.tasks.push_back(Task::Write { step, generation, rank, world_size: members.len() });
    }

    /// Time passes; to be called at each commit.
    pub fn tick(&mut self, now: Duration) {
        let since = *self.interval_began.get_or_insert(now);
        let is_first = self.complete.is_none() && self.failed.is_none();
        let after = |time: Duration| if is_first { time.min(FIRST_AFTER) } else { time };
        self.overdue |= matches!(self.every, Some(Interval::Time(time)) if now.saturating_sub(since) >= after(time));
    }

    /// A new group has formed. Whose member is lost is not completed any more, unless only the
    /// first one's work is left.
    pub fn regrouped(&mut self, members: &[WorkerId]) {
        self.current.take_if(|current| {
            let awaited = match current.committing {
                true => &current.members[..1],
                false => &current.members[..],
            };
            awaited.iter().any(|member| !members.contains(member))
        });
    }

    /// This rank's part of `step` is written, or can't be.
    pub fn wrote(&mut self, step: u64, part: Result<Written, ()>) {
        self.busy = false;
        if let Some(current) = self.current.as_mut().filter(|current| current.step == step) {
            current.mine = part.map_or(Part::Failed, Part::Written);
        }
    }

    /// The manifest of `step` is written, or can't be.
    pub fn committed(&mut self, step: u64, is_written: bool) {
        self.busy = false;
        let newest = if is_written { &mut self.complete } else { &mut self.failed };
        *newest = (*newest).max(Some(step));
        self.interval_base = self.interval_base.max(step);
        if self.current.as_ref().is_some_and(|current| current.step <= step) {
            self.settle();
        }
    }

    pub fn poll(&mut self) -> Option<Task> {
        self.tasks.pop_front()
    }

    /// The current one has come to its end.
    fn settle(&mut self) {
        if let Some(current) = self.current.take() {
            self.interval_began = Some(current.begun);
            self.overdue = false;
        }
    }
}

/// Whether a checkpoint begins at the end of the step of these headers.
pub fn begins(headers: &[&CheckpointHeader]) -> bool {
    headers.iter().any(|w| w.due) && !is_in_progress(headers)
}

/// What a group that has made its last `step` has to do before it ends.
pub fn final_checkpoint(headers: &[&CheckpointHeader], step: u64) -> FinalCheckpoint {
    let settled = headers.iter().any(|w| w.complete.max(w.failed) >= Some(step));
    match settled || step == 0 {
        true => FinalCheckpoint::Nothing,
        false if is_in_progress(headers) => FinalCheckpoint::Wait,
        false => FinalCheckpoint::Begin,
    }
}

fn is_in_progress(headers: &[&CheckpointHeader]) -> bool {
    headers.iter().any(|w| w.busy || w.at.is_some())
}

/// A job that has no checkpoint yet loses everything with its workers, so that it does not wait for
/// a long interval's end.
pub const FIRST_AFTER: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    const PART: Written = Written { bytes: 8, digest: 3 };

    /// Some ranks of one job that hear one another, whose parts are written when the test says so.
    struct Ranks {
        ranks: Vec<(WorkerId, Checkpoints)>,
        step: u64,
        begun: Vec<u64>,
    }

    impl Ranks {
        fn new(count: u64, every: Interval) -> Self {
            let rank = |id| (WorkerId(id), Checkpoints::new(WorkerId(id), Some(every)));
            Self { ranks: (1..=count).map(rank).collect(), step: 0, begun: Vec::new() }
        }

        fn members(&self) -> Vec<WorkerId> {
            self.ranks.iter().map(|(id, _)| *id).collect()
        }

        /// All make a step, a second long.
        fn step(&mut self) {
            let headers: Vec<CheckpointHeader> =
                self.ranks.iter().map(|(_, c)| c.header(self.step + 1)).collect();
            let headers: Vec<&CheckpointHeader> = headers.iter().collect();
            self.step += 1;
            let (members, step, now) = (self.members(), self.step, Duration::from_secs(self.step));
            for (_, checkpoints) in &mut self.ranks {
                checkpoints.tick(now);
                checkpoints.handle_headers(&members, &headers);
                if begins(&headers) {
                    checkpoints.begin(step, Generation(1), &members, now);
                }
            }
            self.begun.extend(begins(&headers).then_some(step));
        }

        /// Does what is to be done, on the rank of this number; whether there was something.
        fn work(&mut self, rank: usize, succeeds: bool) -> bool {
            let checkpoints = &mut self.ranks[rank].1;
            let task = checkpoints.poll();
            match &task {
                Some(Task::Write { step, .. }) => {
                    checkpoints.wrote(*step, succeeds.then_some(PART).ok_or(()))
                }
                Some(Task::Commit { step, parts }) => {
                    assert!(rank == 0 && parts.iter().all(|part| *part == PART));
                    checkpoints.committed(*step, succeeds);
                }
                None => {}
            }
            task.is_some()
        }

        /// Steps to `step`, with all work done at once.
        fn step_to(&mut self, step: u64) {
            while self.step < step {
                self.step();
                (0..self.ranks.len()).for_each(|rank| while self.work(rank, true) {});
            }
        }

        fn complete(&self) -> Vec<Option<u64>> {
            self.ranks.iter().map(|(_, c)| c.complete).collect()
        }
    }

    #[test]
    fn one_begins_every_so_many_steps_and_is_complete_when_all_parts_and_the_manifest_are() {
        let mut ranks = Ranks::new(3, Interval::Steps(10));
        ranks.step_to(10);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10][..], vec![None; 3]));
        // One step in which all say that they are done, one in which the first says that it is
        // complete.
        ranks.step_to(11);
        assert_eq!(ranks.complete(), [Some(10), None, None]);
        ranks.step_to(12);
        assert_eq!(ranks.complete(), [Some(10); 3]);
        ranks.step_to(40);
        assert_eq!(ranks.begun, [10, 20, 30, 40]);
    }

    #[test]
    fn while_one_is_written_no_other_begins_and_then_at_once() {
        let mut ranks = Ranks::new(2, Interval::Steps(10));
        ranks.step_to(9);
        while ranks.step < 25 {
            ranks.step();
            ranks.work(0, true);
        }
        assert_eq!(ranks.begun, [10]);
        ranks.step_to(30);
        assert_eq!(ranks.begun, [10, 29]);
    }

    #[test]
    fn time_counts_from_the_beginning_of_the_one_before() {
        let mut ranks = Ranks::new(2, Interval::Time(Duration::from_secs(10)));
        ranks.step_to(40);
        // Found due at the end of a step, it begins at the end of the next one.
        assert_eq!(ranks.begun, [12, 23, 34]);
    }

    #[test]
    fn the_first_one_of_a_long_interval_comes_early() {
        let mut ranks = Ranks::new(2, Interval::Time(Duration::from_secs(100)));
        ranks.step_to(250);
        assert_eq!(ranks.begun, [32, 133, 234]);
    }

    #[test]
    fn one_that_is_asked_for_begins_at_the_next_step_and_once() {
        let mut ranks = Ranks::new(2, Interval::Steps(1000));
        ranks.step_to(3);
        ranks.ranks[1].1.request();
        ranks.ranks[0].1.request();
        ranks.step_to(20);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[4][..], vec![Some(4); 2]));
    }

    #[test]
    fn a_lost_member_ends_it_and_the_next_begins_at_once() {
        let mut ranks = Ranks::new(3, Interval::Steps(10));
        ranks.step_to(9);
        ranks.step();
        assert!(ranks.work(0, true) && ranks.work(2, true));
        ranks.ranks.remove(1);
        let members = ranks.members();
        ranks.ranks.iter_mut().for_each(|(_, c)| c.regrouped(&members));
        ranks.step_to(12);
        assert_eq!(ranks.begun, [10, 11]);
        ranks.step_to(14);
        assert_eq!(ranks.complete(), [Some(11); 2]);
    }

    #[test]
    fn who_joins_meanwhile_takes_no_part_and_disturbs_nothing() {
        let mut ranks = Ranks::new(2, Interval::Steps(10));
        ranks.step_to(9);
        ranks.step();
        ranks.ranks.push((WorkerId(9), Checkpoints::new(WorkerId(9), Some(Interval::Steps(10)))));
        let members = ranks.members();
        ranks.ranks.iter_mut().for_each(|(_, c)| c.regrouped(&members));
        ranks.step();
        ranks.step();
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10][..], vec![None; 3]));
        ranks.step_to(16);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10][..], vec![Some(10); 3]));
        ranks.step_to(20);
        assert_eq!(ranks.begun, [10, 20]);
    }

    #[test]
    fn who_never_began_it_is_not_waited_for() {
        // One rank was a step behind when its links broke, and came to the step by a repair.
        let mut ranks = Ranks::new(2, Interval::Steps(10));
        ranks.step_to(9);
        ranks.step();
        ranks.ranks[1].1.current = None;
        ranks.ranks[1].1.tasks.clear();
        ranks.ranks[1].1.busy = false;
        ranks.step_to(14);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 12][..], vec![Some(12); 2]));
    }

    #[test]
    fn one_that_can_not_be_written_is_known_to_all_and_tried_again_after_an_interval() {
        for failing in [0, 1] {
            let mut ranks = Ranks::new(2, Interval::Steps(10));
            ranks.step_to(9);
            ranks.step();
            (0..2).for_each(|rank| assert!(ranks.work(rank, rank != failing)));
            ranks.step_to(30);
            assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 20, 30][..], vec![Some(20); 2]));
        }
        // Nor the manifest.
        let mut ranks = Ranks::new(1, Interval::Steps(10));
        ranks.step_to(9);
        ranks.step();
        ranks.work(0, true);
        ranks.step();
        ranks.work(0, false);
        ranks.step_to(21);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 20][..], vec![Some(20)]));
    }

    #[test]
    fn a_lost_first_rank_takes_the_manifest_with_it_and_another_may_go() {
        for (lost, complete) in [(0, 12), (1, 10)] {
            let mut ranks = Ranks::new(3, Interval::Steps(10));
            ranks.step_to(9);
            ranks.step();
            (0..3).for_each(|rank| assert!(ranks.work(rank, true)));
            // All hear that all parts are written.
            ranks.step();
            ranks.ranks.remove(lost);
            let members = ranks.members();
            ranks.ranks.iter_mut().for_each(|(_, c)| c.regrouped(&members));
            ranks.step_to(14);
            assert_eq!(ranks.complete(), [Some(complete); 2]);
        }
    }

    #[test]
    fn what_the_first_rank_has_given_up_is_given_up_by_all() {
        // One rank alone has heard that all parts are written, when a member is lost.
        let mut ranks = Ranks::new(4, Interval::Steps(10));
        ranks.step_to(9);
        ranks.step();
        (0..4).for_each(|rank| assert!(ranks.work(rank, true)));
        let headers: Vec<CheckpointHeader> =
            ranks.ranks.iter().map(|(_, c)| c.header(11)).collect();
        let members = ranks.members();
        ranks.ranks[3].1.handle_headers(&members, &headers.iter().collect::<Vec<_>>());
        ranks.ranks.remove(1);
        let members = ranks.members();
        ranks.ranks.iter_mut().for_each(|(_, c)| c.regrouped(&members));
        assert!(ranks.ranks[2].1.current.is_some());
        ranks.step_to(15);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 12][..], vec![Some(12); 3]));
    }

    #[test]
    fn at_the_end_the_final_state_is_kept_once() {
        let header = |busy, complete, failed| CheckpointHeader {
            busy,
            complete,
            failed,
            ..CheckpointHeader::default()
        };
        let table = [
            (header(false, None, None), FinalCheckpoint::Begin),
            (header(false, Some(8), Some(7)), FinalCheckpoint::Begin),
            (header(true, Some(8), None), FinalCheckpoint::Wait),
            (header(false, Some(9), None), FinalCheckpoint::Nothing),
            (header(false, None, Some(9)), FinalCheckpoint::Nothing),
        ];
        for (said, expected) in table {
            assert_eq!(
                final_checkpoint(&[&CheckpointHeader::default(), &said], 9),
                expected,
                "{said:?}"
            );
        }
        assert_eq!(
            final_checkpoint(&[&CheckpointHeader::default()], 0),
            FinalCheckpoint::Nothing,
            "there is nothing to keep"
        );
    }

    #[test]
    fn a_job_goes_on_counting_where_its_checkpoint_was() {
        let mut ranks = Ranks::new(2, Interval::Steps(10));
        ranks.step = 25;
        ranks.ranks[0].1.restored(25, true);
        // A new group's first round is a talk.
        let headers: Vec<CheckpointHeader> =
            ranks.ranks.iter().map(|(_, c)| c.header(26)).collect();
        let members = ranks.members();
        ranks
            .ranks
            .iter_mut()
            .for_each(|(_, c)| c.handle_headers(&members, &headers.iter().collect::<Vec<_>>()));
        ranks.step_to(36);
        assert_eq!(ranks.begun, [35]);
    }
}
