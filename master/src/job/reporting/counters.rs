//! Counters of a master, for its metrics: numbers that only grow.
//!
//! A master that takes a job over starts from 0 again, as scrapers expect of a restarted process.
//!
//! **Invariant:** nothing here influences the job, and a membership change is counted once.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::{Cause, MembershipChange};

use crate::job::event::{Committed, Exit, StepTimes};

/// Counters since the master started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters {
    /// Steps committed.
    pub steps: u64,
    /// Records of these steps.
    pub records: u64,
    /// Durations of steps, on the lowest rank.
    pub times: StepTimes,
    /// Membership changes by cause: the longest pause of a member, and its parts.
    pub recoveries: BTreeMap<Cause, Recoveries>,
    /// Worker processes that have ended.
    pub ends: BTreeMap<End, u64>,
    /// Failures that count against `max_worker_restarts`.
    pub failures: u64,
    /// Workers started to replace one that had ended.
    pub restarts: u64,
    /// Total time that workers have waited for storage that did not answer.
    pub storage_wait: Duration,
    /// States lost with all workers, without a checkpoint.
    pub state_losses: u64,
    /// Number of times that all members of a group waited for each other.
    pub stalls: u64,
}

/// Pauses of the membership changes of one cause.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recoveries {
    /// From the last commit before the change to the first one after it.
    pub gap: Histogram,
    /// Its parts, in the order of [`MembershipChange::phases`].
    pub phases: [Histogram; 6],
}

/// A histogram with fixed buckets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Observations in each bucket; the last bucket is above all `BOUNDS_MS`.
    pub buckets: [u64; Self::BOUNDS_MS.len() + 1],
    /// Sum of all observations, milliseconds.
    pub sum_ms: f64,
}

/// Why a worker's process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// It crashed: a signal by its own doing.
    Crashed,
    /// It exited by itself, unexpectedly.
    Exited,
    /// The user's code failed, or it never said hello.
    Failed,
    /// It was killed from outside.
    Killed,
    /// It could not be started.
    NotStarted,
    /// It used more than it may.
    OverLimit,
    /// The cluster took it away: preempted, evicted, its node drained or lost.
    Reclaimed,
    /// It was asked to end, by the job or by SIGTERM.
    Terminated,
    /// The reason is unknown.
    Unknown,
}

impl Counters {
    /// Counts a commit of `steps` new steps.
    pub(crate) fn commit(&mut self, steps: u64, report: &Committed) {
        let Committed { records, times, .. } = *report;
        self.steps += steps;
        self.records = self.records.saturating_add(records);
        self.times.steps += times.steps;
        self.times.step_us = self.times.step_us.saturating_add(times.step_us);
        self.times.reduce_us = self.times.reduce_us.saturating_add(times.reduce_us);
    }

    /// Counts a shard of an inference job.
    pub(crate) fn shard(&mut self, records: u64) {
        self.steps += 1;
        self.records = self.records.saturating_add(records);
    }

    /// Counts a membership change with its pause.
    pub(crate) fn recover(&mut self, record: &MembershipChange) {
        let Some(gap_ms) = record.gap_ms else { return };
        let recoveries = self.recoveries.entry(record.cause).or_default();
        recoveries.gap.observe(gap_ms);
        for (histogram, (_, ms)) in recoveries.phases.iter_mut().zip(record.phases()) {
            histogram.observe(ms.unwrap_or_default());
        }
    }

    pub(crate) fn end(&mut self, end: End) {
        *self.ends.entry(end).or_default() += 1;
    }
}

impl Histogram {
    /// Upper bounds of the buckets.
    pub(crate) const BOUNDS_MS: [f64; 14] = [
        1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0,
        60_000.0,
    ];

    fn observe(&mut self, ms: f64) {
        let bucket = Self::BOUNDS_MS.iter().position(|&bound| ms <= bound);
        self.buckets[bucket.unwrap_or(Self::BOUNDS_MS.len())] += 1;
        self.sum_ms += ms;
    }

    /// Observations.
    pub(crate) fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

impl End {
    /// All reasons.
    pub(crate) const ALL: [Self; 9] = [
        Self::Crashed,
        Self::Exited,
        Self::Failed,
        Self::Killed,
        Self::NotStarted,
        Self::OverLimit,
        Self::Reclaimed,
        Self::Terminated,
        Self::Unknown,
    ];

    /// The name of the reason in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Crashed => "crashed",
            Self::Exited => "exited",
            Self::Failed => "failed",
            Self::Killed => "killed",
            Self::NotStarted => "start_failed",
            Self::OverLimit => "limit_exceeded",
            Self::Reclaimed => "evicted",
            Self::Terminated => "terminated",
            Self::Unknown => "unknown",
        }
    }

    /// The reason of an unexpected exit, derived from its status.
    pub(crate) fn of(exit: &Exit, is_own_fault: bool) -> Self {
        match exit {
            Exit::Code(_) => Self::Exited,
            Exit::NotStarted(_) => Self::NotStarted,
            Exit::OverLimit(_) => Self::OverLimit,
            Exit::Signal(_) if is_own_fault => Self::Crashed,
            Exit::Signal(_) => Self::Killed,
            Exit::Reclaimed { .. } => Self::Reclaimed,
            Exit::Unknown => Self::Unknown,
        }
    }
}
