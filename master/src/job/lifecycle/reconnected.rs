//! Workers that have reconnected, to this master or from an earlier one, and what they hold.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::{RecordRange, WorkerId};

/// A worker that reconnected to the same master.
#[derive(Debug)]
pub(super) enum Reconnected {
    /// It has not reported what it holds.
    AwaitingHoldings,
    /// It has reported what it holds.
    Reported {
        /// Steps that its state contains.
        step: u64,
        /// Leases that its report did not name, while it is unknown whether they are absorbed.
        unaccounted: Vec<RecordRange>,
    },
}

/// A take-over in progress.
#[derive(Debug, Default)]
pub(super) struct Takeover {
    /// Whether its generation had already formed, so that its report is not logged again.
    pub(super) was_formed: bool,
    /// Reconnected members that have not reported what they hold.
    awaiting_holdings: BTreeSet<WorkerId>,
    /// The steps of members that have.
    steps: BTreeMap<WorkerId, u64>,
    /// Whether this master has published a generation, so that older memberships are ignored.
    pub(super) has_published: bool,
}

impl Takeover {
    pub(super) fn new(was_formed: bool) -> Self {
        Self { was_formed, ..Self::default() }
    }

    pub(super) fn await_holdings(&mut self, member: WorkerId) {
        self.awaiting_holdings.insert(member);
    }

    pub(super) fn awaits_holdings_of(&self, member: WorkerId) -> bool {
        self.awaiting_holdings.contains(&member)
    }

    /// Notes that a member, at this step, has reported what it holds.
    pub(super) fn note_holdings(&mut self, member: WorkerId, step: u64) {
        self.awaiting_holdings.remove(&member);
        self.steps.insert(member, step);
    }

    /// Whether all members have reported what they hold, and the ledger of `step` has reached the
    /// steps of those that live.
    pub(super) fn has_reached(&self, step: u64, lives: impl Fn(WorkerId) -> bool) -> bool {
        let is_behind = |(&id, &its): (&WorkerId, &u64)| its > step && lives(id);
        self.awaiting_holdings.is_empty() && !self.steps.iter().any(is_behind)
    }

    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.awaiting_holdings.remove(&worker);
        self.steps.remove(&worker);
    }
}
