//! The newest generation, and the choice of the next one.

use std::collections::BTreeMap;

use elasticdl_proto::{Generation, Ledger, WorkerId};

use super::action::Membership;
use super::event::Finished;
use super::stall::{Blame, Suspect};
use super::time::Time;
use super::workers::WorkerTable;

/// The newest generation.
#[derive(Debug, Default)]
pub(super) struct Group {
    /// Number of the generation; 0 before the first.
    pub(super) generation: Generation,
    /// Generations up to this one must not be published (again): another master may have published
    /// them.
    pub(super) generation_floor: Generation,
    /// Members in ring order, including lost ones.
    pub(super) members: Vec<WorkerId>,
    /// The ring of the previous generation, in which members may still be: the switch waits for a
    /// step boundary, and the newest group has not formed yet.
    pub(super) previous_ring: Option<Vec<WorkerId>>,
    /// The published membership; `None` before the first.
    pub(super) published: Option<Membership>,
    /// Whether its members have agreed on its state.
    pub(super) formed: bool,
    /// Whether any member had the previous group's state when it was published.
    pub(super) carries_state: bool,
    /// Whether it started from a checkpoint.
    pub(super) restored: bool,
    /// Whether the lowest rank, after a disconnection, has to report the whole ledger again.
    pub(super) report_is_due: bool,
    /// Final reports of members that hold the job's final state, in this generation.
    pub(super) finished: BTreeMap<WorkerId, (Finished, Ledger)>,
    /// Members lost since it was published.
    pub(super) lost: Vec<WorkerId>,
    /// Members that left in order since it was published.
    pub(super) left: Vec<WorkerId>,
    /// Whether a lost member was unresponsive although its process ran.
    pub(super) hung: bool,
    /// Reports of broken links that no known loss explains.
    pub(super) broken: Option<Broken>,
    /// Whether the same members need new links: the wait for an explaining loss is over.
    pub(super) relink: bool,
    /// The last suspect, and in how many consecutive generations it was suspected without a commit
    /// in between.
    pub(super) suspicion: Option<(WorkerId, u32)>,
    /// How often members were at an end of a link that lost data.
    pub(super) blame: Blame,
}

/// Reports of broken links.
#[derive(Debug, Default)]
pub(super) struct Broken {
    /// When the wait for an explaining loss ends.
    pub(super) until: Time,
    pub(super) suspects: Vec<WorkerId>,
    pub(super) reporters: Vec<WorkerId>,
    /// Whether a reporter knows the cause, which is no other member's link.
    pub(super) is_explained: bool,
    /// Unanswered dials.
    pub(super) unanswered: Vec<Suspect>,
}

/// The member that a reporter suspects of breaking its link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspicion {
    pub(super) suspect: WorkerId,
    /// Whether the suspect answered no dial.
    pub(super) unreachable: bool,
}

/// Constraints on the next generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) min: usize,
    pub(super) wanted: usize,
    /// Whether a group without a state still waits for workers that are starting.
    pub(super) join_window_open: bool,
    /// Whether workers may join.
    pub(super) admits: bool,
}

/// The next generation.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) members: Vec<WorkerId>,
    pub(super) abort: bool,
}

impl Group {
    /// Whether the members can't continue as they are: a member or a link is lost.
    pub(super) fn is_broken(&self) -> bool {
        self.relink || !self.lost.is_empty() || !self.left.is_empty()
    }

    /// The generation that should be published now, if any.
    ///
    /// Survivors keep their order and joiners are appended. Leaving members stay while no other
    /// member holds the state, or while too few members would remain.
    pub(super) fn next(&self, workers: &WorkerTable, limits: Limits) -> Option<Change> {
        let alive = |id: &&WorkerId| workers.connected.get(id).is_some_and(|w| !w.released);
        let survivors: Vec<WorkerId> = self.members.iter().filter(alive).copied().collect();
        let leaving = |id: &WorkerId| workers.connected[id].leaving;
        let holds_state = |id: &WorkerId| workers.connected[id].holds_state;
        let stayers: Vec<WorkerId> = survivors.iter().filter(|id| !leaving(id)).copied().collect();
        let vacancies = if limits.admits { limits.wanted.saturating_sub(stayers.len()) } else { 0 };
        // While a group trains, a joiner fetches its state first, so that no member waits for it.
        // If all wait anyway, or no member has a state, it joins without the state.
        let caught_up: Vec<WorkerId> = workers.caught_up().take(vacancies).collect();
        let group_waits = self.is_broken() && survivors.len() + caught_up.len() < limits.min;
        let joiners = match group_waits || !survivors.iter().any(holds_state) {
            true => workers.joiners().take(vacancies).collect(),
            false => caught_up,
        };

        if survivors.is_empty() {
            // A member that was shut down is still ending, and the group ends only after it.
            if self.members.iter().any(|id| workers.connected.contains_key(id)) {
                return None;
            }
            let enough = joiners.len() >= limits.wanted;
            let start = enough || (joiners.len() >= limits.min && !limits.join_window_open);
            return (start && !joiners.is_empty())
                .then_some(Change { members: joiners, abort: self.is_broken() });
        }
        if !self.is_broken() {
            let settled = self.formed && self.finished.is_empty();
            let changes = !joiners.is_empty() || stayers.len() < survivors.len();
            if !settled || !changes {
                return None;
            }
        }
        let state_stays = stayers.iter().any(holds_state) || !survivors.iter().any(holds_state);
        let without_leavers = stayers.len() + joiners.len();
        let kept = if state_stays && without_leavers >= limits.min { stayers } else { survivors };
        let members = [kept, joiners].concat();
        let same = members == self.members && !self.is_broken();
        (members.len() >= limits.min && !same).then(|| Change { members, abort: self.is_broken() })
    }
}
