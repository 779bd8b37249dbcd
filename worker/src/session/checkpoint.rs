//! When a checkpoint is due, and how the ranks agree on one without a message or a barrier of its
//! own.
//!
//! ```text
//!   step s      headers: a rank reports that a checkpoint is due, and none is in progress
//!   commit s ─► all ranks copy their part of the state and write it while they train
//!   step s + k  headers: all parts are written ─► the first rank writes the manifest
//!   step s + m  headers: complete
//! ```
//!
//! Every rank puts what it knows into its headers, every rank receives all headers, and all
//! decisions are derived from them alone. A checkpoint belongs to the ranks that began it: if one
//! of them is lost or has abandoned it, the others abandon it too, and the next one is due at once.
//!
//! **Invariant:** ranks of a group begin the same checkpoint at the same step. **Invariant:** no
//! rank waits for a checkpoint, except at the end of the job.

use std::collections::VecDeque;
use std::time::Duration;

use elasticdl_proto::{CheckpointEvery, Generation, WorkerId};
use serde::{Deserialize, Serialize};

/// Part of a rank's step header that concerns checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointHeader {
    /// Whether the rank finds a checkpoint due at the end of this step.
    pub due: bool,
    /// Whether the rank is still writing, possibly for an abandoned checkpoint.
    pub busy: bool,
    /// Step of the checkpoint that the rank takes part in, and the state of its part.
    pub at: Option<(u64, Part)>,
    /// Step of the newest complete checkpoint.
    pub complete: Option<u64>,
    /// Step of the newest checkpoint that could not be written.
    pub failed: Option<u64>,
    /// Step from which the interval to the next checkpoint is counted.
    pub interval_base: u64,
    /// Time for which the rank's training has stopped to copy its state, in microseconds.
    pub copy_us: u64,
}

/// State of a rank's part of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    Failed,
    Writing,
    Written(Written),
}

/// The written part of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    pub bytes: u64,
    /// XXH3 digest of the file, 128 bits.
    pub digest: u128,
}

/// Task of a rank for a checkpoint, concurrent with its training. Each variant names the call that
/// reports its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// All parts are written; write the manifest: [`Checkpoints::committed`].
    Commit { step: u64, parts: Vec<Written> },
    /// Copy this part of the current state and write it: [`Checkpoints::wrote`].
    Write { step: u64, generation: Generation, rank: usize, world_size: usize },
}

/// Next action of a group, at the end of the job, for the final checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinalCheckpoint {
    /// Begin a checkpoint of the final state.
    Begin,
    /// Nothing is left to do.
    Nothing,
    /// Wait for the checkpoint in progress.
    Wait,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Current {
    step: u64,
    begun: Duration,
    /// Workers that began it, in the order of their ranks at that time.
    members: Vec<WorkerId>,
    parts: Vec<Option<Written>>,
    mine: Part,
    committing: bool,
}

/// One rank's knowledge of the job's checkpoints.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    me: WorkerId,
    every: Option<CheckpointEvery>,
    interval_base: u64,
    /// Start of the current interval; `None` before the first step.
    interval_began: Option<Duration>,
    complete: Option<u64>,
    failed: Option<u64>,
    requested: bool,
    overdue: bool,
    busy: bool,
    current: Option<Current>,
    tasks: VecDeque<Task>,
    copy_us: u64,
}

impl Checkpoints {
    /// `every`: `None` if the job writes no checkpoints.
    pub fn new(me: WorkerId, every: Option<CheckpointEvery>) -> Self {
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
            copy_us: 0,
        }
    }

    pub fn are_enabled(&self) -> bool {
        self.every.is_some()
    }

    /// The user has requested a checkpoint.
    pub fn request(&mut self) {
        self.requested = self.are_enabled();
    }

    /// The state comes from a checkpoint of `step`. `complete`: whether that checkpoint belongs to
    /// this job.
    pub fn restored(&mut self, step: u64, complete: bool) {
        self.interval_base = step;
        self.complete = complete.then_some(step);
    }

    /// Header of this rank for the round that makes step number `next`.
    pub fn header(&self, next: u64) -> CheckpointHeader {
        let interval_ends = |steps| next >= self.interval_base.saturating_add(steps);
        let far =
            matches!(self.every, Some(CheckpointEvery::Steps(steps)) if interval_ends(steps.get()));
        CheckpointHeader {
            due: self.current.is_none() && (self.requested || self.overdue || far),
            busy: self.busy,
            at: self.current.as_ref().map(|current| (current.step, current.mine)),
            complete: self.complete,
            failed: self.failed,
            interval_base: self.interval_base,
            copy_us: self.copy_us,
        }
    }

    /// Notes that training has stopped for this time, to copy the state.
    pub fn copied(&mut self, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.copy_us = self.copy_us.saturating_add(took_us);
    }

    /// Takes in the headers of all ranks from a round of `members`.
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
            let at = members.iter().position(|m| m == member).and_then(|rank| headers[rank].at);
            match at.filter(|(step, _)| *step == current.step) {
                Some((step, Part::Failed)) => {
                    self.failed = Some(step);
                    self.interval_base = self.interval_base.max(step);
                    return self.settle();
                }
                Some((_, Part::Writing)) => {}
                Some((_, Part::Written(written))) => *part = Some(written),
                // A written part stays written. Otherwise the member has abandoned this checkpoint
                // or never began it; and without the first rank there is no manifest.
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

    /// Begins a checkpoint of `step`, which the group of `generation` has just committed.
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

    /// Advances the time. To be called at each commit.
    pub fn tick(&mut self, now: Duration) {
        let since = *self.interval_began.get_or_insert(now);
        let is_first = self.complete.is_none() && self.failed.is_none();
        let after = |time: Duration| if is_first { time.min(FIRST_AFTER) } else { time };
        let elapsed = now.saturating_sub(since);
        self.overdue |=
            matches!(self.every, Some(CheckpointEvery::Time(time)) if elapsed >= after(time));
    }

    /// A new group has formed. A checkpoint with a lost member is abandoned, unless only the first
    /// rank's manifest is missing.
    pub fn regrouped(&mut self, members: &[WorkerId]) {
        self.current.take_if(|current| {
            let awaited =
                if current.committing { &current.members[..1] } else { &current.members[..] };
            awaited.iter().any(|member| !members.contains(member))
        });
    }

    /// This rank's part of `step` is written, or could not be.
    pub fn wrote(&mut self, step: u64, part: Result<Written, ()>) {
        self.busy = false;
        if let Some(current) = self.current.as_mut().filter(|current| current.step == step) {
            current.mine = part.map_or(Part::Failed, Part::Written);
        }
    }

    /// The manifest of `step` is written, or could not be.
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

    /// The checkpoint in progress is complete or has failed.
    fn settle(&mut self) {
        if let Some(current) = self.current.take() {
            self.interval_began = Some(current.begun);
            self.overdue = false;
        }
    }
}

/// Whether a checkpoint begins at the end of this step.
pub fn begins(headers: &[&CheckpointHeader]) -> bool {
    headers.iter().any(|w| w.due) && !is_in_progress(headers)
}

/// Next action of a group that has committed its last `step`, before it ends.
pub fn final_checkpoint(headers: &[&CheckpointHeader], step: u64) -> FinalCheckpoint {
    let settled = headers.iter().any(|w| w.complete.max(w.failed) >= Some(step));
    if settled || step == 0 {
        FinalCheckpoint::Nothing
    } else if is_in_progress(headers) {
        FinalCheckpoint::Wait
    } else {
        FinalCheckpoint::Begin
    }
}

fn is_in_progress(headers: &[&CheckpointHeader]) -> bool {
    headers.iter().any(|w| w.busy || w.at.is_some())
}

/// Upper bound of a job's first interval: without any checkpoint, the loss of all workers loses all
/// work.
pub const FIRST_AFTER: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    fn steps(steps: u64) -> CheckpointEvery {
        CheckpointEvery::Steps(NonZeroU64::new(steps).unwrap())
    }

    const PART: Written = Written { bytes: 8, digest: 3 };

    /// Some ranks of one job that exchange headers. The test decides when their parts are written.
    struct Ranks {
        ranks: Vec<(WorkerId, Checkpoints)>,
        step: u64,
        begun: Vec<u64>,
    }

    impl Ranks {
        fn new(count: u64, every: CheckpointEvery) -> Self {
            let rank = |id| (WorkerId(id), Checkpoints::new(WorkerId(id), Some(every)));
            Self { ranks: (1..=count).map(rank).collect(), step: 0, begun: Vec::new() }
        }

        fn members(&self) -> Vec<WorkerId> {
            self.ranks.iter().map(|(id, _)| *id).collect()
        }

        /// All ranks make a step that takes one second.
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

        /// Executes the next task of this rank. Returns whether there was one.
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

        /// Steps to `step` and executes all tasks at once.
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
    fn a_checkpoint_begins_every_n_steps_and_is_complete_with_all_parts_and_the_manifest() {
        let mut ranks = Ranks::new(3, steps(10));
        ranks.step_to(10);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10][..], vec![None; 3]));
        // One step in which all ranks report their parts as written, one in which the first rank
        // reports the checkpoint as complete.
        ranks.step_to(11);
        assert_eq!(ranks.complete(), [Some(10), None, None]);
        ranks.step_to(12);
        assert_eq!(ranks.complete(), [Some(10); 3]);
        ranks.step_to(40);
        assert_eq!(ranks.begun, [10, 20, 30, 40]);
    }

    #[test]
    fn the_next_checkpoint_begins_only_and_at_once_after_the_one_in_progress() {
        let mut ranks = Ranks::new(2, steps(10));
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
    fn the_interval_is_counted_from_the_start_of_the_previous_checkpoint() {
        let mut ranks = Ranks::new(2, CheckpointEvery::Time(Duration::from_secs(10)));
        ranks.step_to(40);
        // A checkpoint that becomes due at the end of a step begins at the end of the next one.
        assert_eq!(ranks.begun, [12, 23, 34]);
    }

    #[test]
    fn the_first_checkpoint_of_a_long_interval_comes_early() {
        let mut ranks = Ranks::new(2, CheckpointEvery::Time(Duration::from_secs(100)));
        ranks.step_to(250);
        assert_eq!(ranks.begun, [32, 133, 234]);
    }

    #[test]
    fn a_requested_checkpoint_begins_at_the_next_step_and_once() {
        let mut ranks = Ranks::new(2, steps(1000));
        ranks.step_to(3);
        ranks.ranks[1].1.request();
        ranks.ranks[0].1.request();
        ranks.step_to(20);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[4][..], vec![Some(4); 2]));
    }

    #[test]
    fn a_lost_member_ends_the_checkpoint_and_the_next_begins_at_once() {
        let mut ranks = Ranks::new(3, steps(10));
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
    fn a_worker_that_joins_meanwhile_takes_no_part_and_delays_nothing() {
        let mut ranks = Ranks::new(2, steps(10));
        ranks.step_to(9);
        ranks.step();
        ranks.ranks.push((WorkerId(9), Checkpoints::new(WorkerId(9), Some(steps(10)))));
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
    fn no_rank_waits_for_one_that_never_began_the_checkpoint() {
        // One rank was one step behind when its links broke, and reached the step by a repair.
        let mut ranks = Ranks::new(2, steps(10));
        ranks.step_to(9);
        ranks.step();
        ranks.ranks[1].1.current = None;
        ranks.ranks[1].1.tasks.clear();
        ranks.ranks[1].1.busy = false;
        ranks.step_to(14);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 12][..], vec![Some(12); 2]));
    }

    #[test]
    fn all_ranks_learn_of_a_failed_checkpoint_and_retry_after_an_interval() {
        for failing in [0, 1] {
            let mut ranks = Ranks::new(2, steps(10));
            ranks.step_to(9);
            ranks.step();
            (0..2).for_each(|rank| assert!(ranks.work(rank, rank != failing)));
            ranks.step_to(30);
            assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 20, 30][..], vec![Some(20); 2]));
        }
        // Likewise for the manifest.
        let mut ranks = Ranks::new(1, steps(10));
        ranks.step_to(9);
        ranks.step();
        ranks.work(0, true);
        ranks.step();
        ranks.work(0, false);
        ranks.step_to(21);
        assert_eq!((&*ranks.begun, ranks.complete()), (&[10, 20][..], vec![Some(20)]));
    }

    #[test]
    fn losing_the_first_rank_loses_the_manifest_and_losing_another_does_not() {
        for (lost, complete) in [(0, 12), (1, 10)] {
            let mut ranks = Ranks::new(3, steps(10));
            ranks.step_to(9);
            ranks.step();
            (0..3).for_each(|rank| assert!(ranks.work(rank, true)));
            // All ranks learn that all parts are written.
            ranks.step();
            ranks.ranks.remove(lost);
            let members = ranks.members();
            ranks.ranks.iter_mut().for_each(|(_, c)| c.regrouped(&members));
            ranks.step_to(14);
            assert_eq!(ranks.complete(), [Some(complete); 2]);
        }
    }

    #[test]
    fn a_checkpoint_abandoned_by_the_first_rank_is_abandoned_by_all() {
        // Only one rank has learned that all parts are written when a member is lost.
        let mut ranks = Ranks::new(4, steps(10));
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
    fn the_final_state_is_written_once_at_the_end() {
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
        for (other, expected) in table {
            assert_eq!(
                final_checkpoint(&[&CheckpointHeader::default(), &other], 9),
                expected,
                "{other:?}"
            );
        }
        assert_eq!(
            final_checkpoint(&[&CheckpointHeader::default()], 0),
            FinalCheckpoint::Nothing,
            "there is no state to write"
        );
    }

    #[test]
    fn a_resumed_job_counts_its_interval_from_its_checkpoint() {
        let mut ranks = Ranks::new(2, steps(10));
        ranks.step = 25;
        ranks.ranks[0].1.restored(25, true);
        // The first round of a new group is an idle one.
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
