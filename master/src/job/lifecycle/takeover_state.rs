//! The members that have returned to a new master, and their steps.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::WorkerId;

/// A take-over in progress.
#[derive(Debug, Default)]
pub(super) struct Takeover {
    /// Whether its generation had already formed, so that its report is not logged again.
    pub(super) was_formed: bool,
    /// Reconnected members that have not reported their step.
    awaited: BTreeSet<WorkerId>,
    /// The steps of members that have.
    steps: BTreeMap<WorkerId, u64>,
    /// Whether this master has published a generation, so that older memberships are ignored.
    pub(super) has_published: bool,
}

impl Takeover {
    pub(super) fn new(was_formed: bool) -> Self {
        Self { was_formed, ..Self::default() }
    }

    pub(super) fn await_step(&mut self, member: WorkerId) {
        self.awaited.insert(member);
    }

    pub(super) fn awaits_step_of(&self, member: WorkerId) -> bool {
        self.awaited.contains(&member)
    }

    /// Notes the step that a member has reported.
    pub(super) fn note_step(&mut self, member: WorkerId, step: u64) {
        self.awaited.remove(&member);
        self.steps.insert(member, step);
    }

    /// Whether all members have reported their steps, and the ledger of `step` has reached the
    /// steps of those that live.
    pub(super) fn has_reached(&self, step: u64, lives: impl Fn(WorkerId) -> bool) -> bool {
        let is_behind = |(&id, &its): (&WorkerId, &u64)| its > step && lives(id);
        self.awaited.is_empty() && !self.steps.iter().any(is_behind)
    }

    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.awaited.remove(&worker);
        self.steps.remove(&worker);
    }
}
