//! The present speed of a job.
//!
//! **Invariant:** no speed includes time in which workers waited for storage, or time before this
//! master began.

use std::collections::VecDeque;
use std::time::Duration;

use super::history::per_second;
use crate::job::time::Time;

/// What has been committed when, over the last few seconds.
#[derive(Debug, Default)]
pub(crate) struct Speed {
    /// Records committed by the group's reports so far, at these times; the newest last.
    samples: VecDeque<(Time, u64)>,
    pub(super) committed: u64,
    /// Since when, and since which record, the samples count. `None`: since the next report.
    origin: Option<(Time, u64)>,
    /// Whether a worker has waited for storage since the last report.
    has_waited: bool,
}

impl Speed {
    /// The records of the first report were made since `now`.
    pub(crate) fn begin(&mut self, now: Time) {
        self.origin = Some((now, self.committed));
    }

    /// A worker waits, or has waited, for storage.
    pub(crate) fn note_wait(&mut self) {
        self.has_waited = true;
    }

    /// Whether a worker has waited for storage since the last report.
    pub(crate) fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Notes that `records` more are done.
    pub(crate) fn count(&mut self, now: Time, records: u64) {
        self.committed = self.committed.saturating_add(records);
        let has_waited = std::mem::take(&mut self.has_waited);
        // Data that was read ahead is trained during a wait.
        if has_waited && self.samples.back().is_none_or(|&(at, _)| now.since(at) >= WINDOW) {
            self.samples.clear();
            self.origin = None;
        }
        self.origin.get_or_insert((now, self.committed));
        match self.samples.back_mut() {
            Some((at, committed)) if now.since(*at) < SAMPLE_EVERY => *committed = self.committed,
            _ => self.samples.push_back((now, self.committed)),
        }
        while self.samples.len() > 2 && now.since(self.samples[1].0) >= WINDOW {
            self.samples.pop_front();
        }
    }

    /// Records committed per second over the last few seconds; of steps that take longer, over the
    /// last two reports. Falls towards 0 while none come.
    pub(crate) fn records_per_s(&self, now: Time) -> f64 {
        let is_before = |&&(at, _): &&(Time, u64)| now.since(at) >= WINDOW;
        let before = self.samples.iter().rev().skip(1).find(is_before).copied();
        let since = before.or(self.origin);
        since.map_or(0.0, |(since, committed)| {
            per_second(self.committed - committed, now.since(since))
        })
    }
}

const SAMPLE_EVERY: Duration = Duration::from_millis(100);
const WINDOW: Duration = Duration::from_secs(5);
