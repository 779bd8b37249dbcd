//! Checkpoints that are due and neither written nor failed: a write that hangs ends late, or never.

use std::time::Duration;

use elasticdl_proto::CheckpointEvery;

use crate::job::Time;

/// Since when no checkpoint was heard of.
#[derive(Debug, Default)]
pub(crate) struct LateCheckpoints {
    /// `None` before the first step.
    since: Option<(Time, u64)>,
    is_told: bool,
}

impl LateCheckpoints {
    /// A checkpoint is written, has failed, or is that from which a group begins. Returns whether
    /// users were told that it is late.
    pub(super) fn heard(&mut self, now: Time, step: u64) -> bool {
        self.since = Some((now, step));
        std::mem::take(&mut self.is_told)
    }

    /// `step` is committed: how long no checkpoint was heard of, if it is time to tell, once.
    pub(crate) fn late(
        &mut self,
        now: Time,
        step: u64,
        every: CheckpointEvery,
    ) -> Option<Duration> {
        let (time, at) = *self.since.get_or_insert((now, step));
        let waited = now.since(time);
        let is_late = waited >= LATE_MIN
            && match every {
                CheckpointEvery::Steps(steps) => step.saturating_sub(at) >= 2 * steps.get(),
                CheckpointEvery::Time(every) => waited >= 2 * every,
            };
        let tells = is_late && !self.is_told;
        self.is_told |= is_late;
        tells.then_some(waited)
    }
}

/// A large checkpoint takes as long.
const LATE_MIN: Duration = Duration::from_secs(30);
