//! The newest generation, and the choice of the next one.

use std::collections::BTreeMap;

use elasticdl_proto::{Generation, Ledger, WorkerId};

use crate::job::action::Membership;
use crate::job::event::Finished;
use crate::job::handlers::stall::{Blame, Suspect};
use crate::job::time::Time;
use crate::job::workers::table::WorkerTable;

/// The newest generation.
#[derive(Debug, Default)]
pub(crate) struct Group {
    /// Number of the generation; 0 before the first.
    pub(crate) generation: Generation,
    /// Generations up to this one must not be published (again): another master may have published
    /// them.
    pub(crate) generation_floor: Generation,
    /// Members in ring order, including lost ones.
    pub(crate) members: Vec<WorkerId>,
    /// The ring of the previous generation, in which members may still be: the switch waits for a
    /// step boundary, and the newest group has not formed yet.
    pub(crate) previous_ring: Option<Vec<WorkerId>>,
    /// The published membership; `None` before the first.
    pub(crate) published: Option<Membership>,
    /// Whether its members have agreed on its state.
    pub(crate) formed: bool,
    /// Whether any member had the previous group's state when it was published.
    pub(crate) carries_state: bool,
    /// Whether it started from a checkpoint.
    pub(crate) restored: bool,
    /// Whether the lowest rank, after a disconnection, has to report the whole ledger again.
    pub(crate) report_is_due: bool,
    /// Final reports of members that hold the job's final state, in this generation.
    pub(crate) finished: BTreeMap<WorkerId, (Finished, Ledger)>,
    /// Members lost since it was published.
    pub(crate) lost: Vec<WorkerId>,
    /// Members that left in order since it was published.
    pub(crate) left: Vec<WorkerId>,
    /// Whether a lost member was unresponsive although its process ran.
    pub(crate) hung: bool,
    /// Reports of broken links that no known loss explains.
    pub(crate) broken: Option<Broken>,
    /// Whether the same members need new links: the wait for an explaining loss is over.
    pub(crate) relink: bool,
    /// The last suspect, and in how many consecutive generations it was suspected without a commit
    /// in between.
    pub(crate) suspicion: Option<(WorkerId, u32)>,
    /// How often members were at an end of a link that lost data.
    pub(crate) blame: Blame,
}

/// Reports of broken links.
#[derive(Debug, Default)]
pub(crate) struct Broken {
    /// When the wait for an explaining loss ends.
    pub(crate) until: Time,
    pub(crate) suspects: Vec<WorkerId>,
    pub(crate) reporters: Vec<WorkerId>,
    /// Whether a reporter knows the cause, which is no other member's link.
    pub(crate) is_explained: bool,
    /// Unanswered dials.
    pub(crate) unanswered: Vec<Suspect>,
}

/// The member that a reporter suspects of breaking its link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Suspicion {
    pub(crate) suspect: WorkerId,
    /// Whether the suspect answered no dial.
    pub(crate) unreachable: bool,
}

/// Constraints on the next generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) min: usize,
    pub(crate) wanted: usize,
    /// Whether a group without a state still waits for workers that are starting.
    pub(crate) join_window_open: bool,
    /// Whether workers may join.
    pub(crate) admits: bool,
}

/// The next generation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) members: Vec<WorkerId>,
    pub(crate) abort: bool,
}

impl Group {
    /// Whether the members can't continue as they are: a member or a link is lost.
    pub(crate) fn is_broken(&self) -> bool {
        self.relink || !self.lost.is_empty() || !self.left.is_empty()
    }

    /// The generation that should be published now, if any.
    ///
    /// Survivors keep their order and joiners are appended. Leaving members stay while no other
    /// member holds the state, or while too few members would remain.
    pub(crate) fn next(&self, workers: &WorkerTable, limits: Limits) -> Option<Change> {
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
        let joiners = if group_waits || !survivors.iter().any(holds_state) {
            workers.joiners().take(vacancies).collect()
        } else {
            caught_up
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
