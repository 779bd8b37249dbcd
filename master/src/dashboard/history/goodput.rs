//! Goodput: the part of the time since the first group formed that went into steps which the job
//! has kept.
//!
//! Pauses of membership changes, waits for workers, and steps that were repeated from a checkpoint
//! are the rest.

use elasticdl_proto::CheckpointsSummary;
use serde::{Deserialize, Serialize};

use crate::job::Snapshot;

/// Goodput of a job so far. Times are seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Goodput {
    /// Age of the job when its first group was seen to train.
    pub(crate) since_s: Option<f64>,
    /// Age until which the job has trained or waited.
    pub(crate) until_s: f64,
    /// Time of committed steps.
    pub(crate) steps_s: f64,
    /// Number of these steps.
    steps: u64,
    /// Steps that were lost with the state and repeated.
    lost_steps: u64,
    /// The newest value; `None` before the first group.
    pub(crate) value: Option<f64>,
    /// Microseconds and number of steps that this master has counted.
    #[serde(skip)]
    seen: (u64, u64),
    /// Age at the last increase of `steps_s`.
    #[serde(skip)]
    grown_s: f64,
}

impl Goodput {
    /// Continues with the counters of another master.
    pub(super) fn resume(&mut self) {
        self.seen = (0, 0);
        self.grown_s = self.until_s;
    }

    /// Notes the counters of a snapshot.
    pub(super) fn observe(&mut self, snapshot: &Snapshot) {
        let (now_s, status) = (snapshot.at.0.as_secs_f64(), &snapshot.status);
        let (step_us, steps) = (snapshot.counters.times.step_us, snapshot.counters.times.steps);
        let (seen_us, seen) = std::mem::replace(&mut self.seen, (step_us, steps));
        if steps > seen {
            self.steps_s += step_us.saturating_sub(seen_us) as f64 / 1e6;
            self.steps = self.steps.saturating_add(steps - seen);
            self.grown_s = now_s;
        }
        let lost = |known: &CheckpointsSummary| {
            known.restored.iter().fold(0_u64, |sum, one| sum.saturating_add(one.lost_steps))
        };
        let lost = status.checkpoints.as_ref().map_or(0, lost);
        self.lost_steps = self.lost_steps.max(lost);
        let is_active = ["resuming", "running", "stopping", "waiting"].contains(&&*status.state);
        if is_active && (self.since_s.is_some() || status.step > 0) {
            self.since_s.get_or_insert(now_s - self.steps_s);
            self.until_s = now_s;
        }
        let Some(since_s) = self.since_s else { return };
        let mean_s = self.steps_s / self.steps.max(1) as f64;
        // The step that the group makes now is not lost, unless it takes much longer than others.
        let in_progress_s = match &*status.state {
            "running" if is_active => (self.until_s - self.grown_s).clamp(0.0, mean_s * 1.5),
            _ => 0.0,
        };
        let kept_s = self.steps_s + in_progress_s - self.lost_steps as f64 * mean_s;
        let whole_s = self.until_s - since_s;
        let value = (whole_s > 0.0).then(|| (kept_s / whole_s).clamp(0.0, 1.0));
        self.value = value.map(|value| (value * 1e4).round() / 1e4);
    }
}
