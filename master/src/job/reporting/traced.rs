//! What a job has done, as intervals of its time: the spans of its traces.
//!
//! **Invariant:** the newest intervals are kept, whatever becomes of them. Of steps one is taken
//! every ten seconds: its report says what each rank did.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use elasticdl_proto::{
    CheckpointTimes, Evaluated, Generation, MembershipChange, RankStep, StepTimes, WorkerId,
};

use crate::job::event::Committed;
use crate::job::time::Time;

/// Something that took time.
#[derive(Clone, Debug, PartialEq)]
pub struct Interval {
    /// Its number, from 1.
    pub number: u64,
    /// When it ended.
    pub end: Time,
    /// How long it took.
    pub took: Duration,
    /// The group's generation.
    pub generation: Generation,
    /// What it was.
    pub what: Traced,
}

/// What a job did.
#[derive(Clone, Debug, PartialEq)]
pub enum Traced {
    /// A checkpoint was written.
    Checkpoint {
        /// Steps that it contains.
        step: u64,
        /// Its folder.
        name: String,
        /// Size in bytes.
        bytes: u64,
        /// The worker that wrote the manifest.
        worker: WorkerId,
        /// The parts of the time.
        times: CheckpointTimes,
    },
    /// The model was evaluated.
    Evaluation(Evaluated),
    /// The membership changed: from the last commit before the change to the first one after it. Of
    /// a group without a member of the one before, from the change until the group had a state.
    Membership(MembershipChange),
    /// A step.
    Step {
        /// Its number.
        step: u64,
        /// Its all-reduce on the lowest rank.
        reduce: Duration,
        /// What the ranks did, the slowest ones first.
        ranks: Vec<(WorkerId, RankStep)>,
    },
}

/// What has taken time since this master started.
#[derive(Debug, Default)]
pub(crate) struct Intervals {
    newest: Arc<VecDeque<Interval>>,
    /// When a step was noted.
    step_noted: Option<Time>,
}

impl Intervals {
    pub(super) fn newest(&self) -> Arc<VecDeque<Interval>> {
        Arc::clone(&self.newest)
    }

    /// Notes what has taken so long until `end`.
    pub(super) fn note(&mut self, end: Time, took: Duration, generation: Generation, what: Traced) {
        let known = Arc::make_mut(&mut self.newest);
        let number = known.back().map_or(0, |last| last.number) + 1;
        if known.len() == TRACED_MAX {
            known.pop_front();
        }
        known.push_back(Interval { number, end, took, generation, what });
    }

    /// Notes the last step of a report of `members`, unless another one was noted a short time ago.
    pub(crate) fn note_step(&mut self, now: Time, report: &Committed, members: &[WorkerId]) {
        let is_due = self.step_noted.is_none_or(|at| now.since(at) >= STEP_INTERVAL);
        let Some(last) = report.last.as_deref().filter(|_| is_due) else { return };
        let StepTimes { step_us, reduce_us, .. } = *last;
        self.step_noted = Some(now);
        let mut ranks: Vec<_> = members.iter().copied().zip(report.ranks.iter().copied()).collect();
        ranks.sort_by_key(|(_, rank)| Reverse(rank.input_us + rank.compute_us));
        ranks.truncate(RANKS_MAX);
        let (took, reduce) = (Duration::from_micros(step_us), Duration::from_micros(reduce_us));
        let what = Traced::Step { step: report.step, reduce, ranks };
        self.note(now, took, report.generation, what);
    }
}

/// More than an exporter can miss between two snapshots.
const TRACED_MAX: usize = 256;
const STEP_INTERVAL: Duration = Duration::from_secs(10);
/// Ranks whose part of a step is a span.
const RANKS_MAX: usize = 16;
