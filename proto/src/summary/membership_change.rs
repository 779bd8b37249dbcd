//! A change of the members of a group.

use serde::{Deserialize, Serialize};

use super::Cause;
use crate::ids::{Generation, WorkerId};

/// A membership change: its cause, and the pause that it caused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MembershipChange {
    /// The generation.
    pub generation: Generation,
    /// Cause of the change.
    pub cause: Cause,
    /// Number of members.
    pub world_size: u32,
    /// Steps committed when it formed (or, if it never did, when it was published).
    pub at_step: u64,
    /// From the last commit before to the first one in it, on the member that lost the most time.
    /// `None` for the first generation, and for one that was replaced before it committed a step.
    /// All in milliseconds.
    pub gap_ms: Option<f64>,
    /// Part of the gap: until that member detected the failure (a link's error, or the arrival of a
    /// membership that aborts the step), or until the switch was agreed.
    pub detect_ms: Option<f64>,
    /// Part of the gap: until its training thread was out of the collective call or the user's
    /// code, and its links were down.
    pub abort_ms: Option<f64>,
    /// Part of the gap: until the new membership was known.
    pub agree_ms: Option<f64>,
    /// Part of the gap: until the new links were connected.
    pub connect_ms: Option<f64>,
    /// Part of the gap: until all ranks held the same state.
    pub state_ms: Option<f64>,
    /// Part of the gap: until the first step was committed.
    pub first_step_ms: Option<f64>,
    /// Members of the previous generation that were lost.
    pub lost: Vec<WorkerId>,
    /// Members of the previous generation that left in order.
    pub left: Vec<WorkerId>,
    /// Members that were not in the previous generation.
    pub joined: Vec<WorkerId>,
    /// Those of them that were spares, and have taken the places of lost or leaving ones.
    #[serde(default)]
    pub promoted: Vec<WorkerId>,
}

impl MembershipChange {
    /// The parts of the gap in order, with their names.
    #[must_use]
    pub fn phases(&self) -> [(&'static str, Option<f64>); 6] {
        [
            ("detect", self.detect_ms),
            ("abort", self.abort_ms),
            ("agree", self.agree_ms),
            ("connect", self.connect_ms),
            ("state", self.state_ms),
            ("first step", self.first_step_ms),
        ]
    }

    /// The workers that it names, by what became of them.
    #[must_use]
    pub fn workers(&self) -> [(&'static str, &[WorkerId]); 4] {
        let Self { lost, left, joined, promoted, .. } = self;
        [("lost", lost), ("left", left), ("joined", joined), ("promoted", promoted)]
    }

    /// Number of their names.
    #[must_use]
    pub fn named(&self) -> usize {
        self.workers().iter().map(|(_, workers)| workers.len()).sum()
    }
}
