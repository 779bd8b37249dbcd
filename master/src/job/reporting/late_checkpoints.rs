//! Checkpoints that are due and neither written nor failed: a write that hangs ends late, or never.

use std::time::Duration;

use elasticdl_proto::CheckpointEvery;

use crate::job::Time;

/// What was heard of the last checkpoint.
#[derive(Debug, Default)]
pub(crate) struct LateCheckpoints {
    /// When it was written, had failed, or a group began from it, and the step then; `None` before
    /// the first step.
    heard: Option<(Time, u64)>,
    /// Since when the next one is late: a group that was paused begins it with its first step.
    late_since: Option<Time>,
    is_reported: bool,
}

impl LateCheckpoints {
    /// A checkpoint is written, has failed, or is that from which a group begins. Returns whether
    /// it was reported as late.
    pub(super) fn heard(&mut self, now: Time, step: u64) -> bool {
        std::mem::replace(self, Self { heard: Some((now, step)), ..Self::default() }).is_reported
    }

    /// How long nothing was heard of a checkpoint; `None` before the first step.
    pub(super) fn waited(&self, now: Time) -> Option<Duration> {
        self.heard.map(|(at, _)| now.since(at))
    }

    /// `step` is committed: the time since the last checkpoint, if the next one is to be reported
    /// as late, once.
    pub(super) fn late(
        &mut self,
        now: Time,
        step: u64,
        every: CheckpointEvery,
    ) -> Option<Duration> {
        let (time, at) = *self.heard.get_or_insert((now, step));
        let waited = now.since(time);
        let is_late = match every {
            CheckpointEvery::Steps(steps) => {
                step.saturating_sub(at) >= steps.get().saturating_mul(2)
            }
            CheckpointEvery::Time(every) => waited >= every.saturating_mul(2),
        };
        if !is_late || now.since(*self.late_since.get_or_insert(now)) < LATE_MIN {
            return None;
        }
        let is_reported = std::mem::replace(&mut self.is_reported, true);
        (!is_reported).then_some(waited)
    }
}

/// A large checkpoint may take as long.
const LATE_MIN: Duration = Duration::from_secs(30);
