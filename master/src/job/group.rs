//! The newest generation, and which one should come after it.

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
    /// 0 before the first.
    pub(super) generation: Generation,
    /// Generations up to this one are not to be published, though this job's master may not have
    /// done it.
    pub(super) generation_floor: Generation,
    /// In ring order, whether they live or not.
    pub(super) members: Vec<WorkerId>,
    /// The ring of the generation before, in which members may still be: the switch waits for a
    /// step's end, and the newest group has not formed yet.
    pub(super) previous_ring: Option<Vec<WorkerId>>,
    /// As it was told to the members; `None` before the first.
    pub(super) published: Option<Membership>,
    /// It has agreed on its state.
    pub(super) formed: bool,
    /// When it was published, somebody in it had the state of the group before.
    pub(super) carries_state: bool,
    /// It began from a checkpoint.
    pub(super) restored: bool,
    /// The lowest rank was disconnected, so it is to report the whole ledger again.
    pub(super) report_is_due: bool,
    /// Members that hold the job's final state, in this generation.
    pub(super) finished: BTreeMap<WorkerId, (Finished, Ledger)>,
    /// Members that were lost since it was published.
    pub(super) lost: Vec<WorkerId>,
    /// Members that ended in order since it was published.
    pub(super) left: Vec<WorkerId>,
    /// One of the lost ones did not answer, though its process ran.
    pub(super) hung: bool,
    /// Reports of broken links for which nobody's loss is known.
    pub(super) broken: Option<Broken>,
    /// The wait for a loss is over: the same members go on in a new generation.
    pub(super) relink: bool,
    /// Who was suspected in how many generations in a row, without a commit between.
    pub(super) suspicion: Option<(WorkerId, u32)>,
    /// Who was in links that kept what was sent.
    pub(super) blame: Blame,
}

/// Reports of broken links.
#[derive(Debug, Default)]
pub(super) struct Broken {
    /// When the wait for a loss ends.
    pub(super) until: Time,
    pub(super) suspects: Vec<WorkerId>,
    pub(super) reporters: Vec<WorkerId>,
    /// Somebody knows what broke, and that it was nobody else's link.
    pub(super) is_explained: bool,
    /// Dials that were not answered.
    pub(super) unanswered: Vec<Suspect>,
}

/// Whom a member takes its broken link to be the fault of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspicion {
    pub(super) suspect: WorkerId,
    /// It has answered no dial.
    pub(super) unreachable: bool,
}

/// What the next generation has to keep to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) min: usize,
    pub(super) wanted: usize,
    /// Whether a group that starts from nothing still waits for workers on their way.
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
    /// Whether the members can't go on as they are: one is gone, or their links are.
    pub(super) fn is_broken(&self) -> bool {
        self.relink || !self.lost.is_empty() || !self.left.is_empty()
    }

    /// The generation that should be published now, if any.
    ///
    /// Survivors keep their order, joiners come behind. Leavers stay while nobody else holds the
    /// state, or too few would be left.
    pub(super) fn next(&self, workers: &WorkerTable, limits: Limits) -> Option<Change> {
        let alive = |id: &&WorkerId| workers.connected.get(id).is_some_and(|w| !w.released);
        let survivors: Vec<WorkerId> = self.members.iter().filter(alive).copied().collect();
        let leaving = |id: &WorkerId| workers.connected[id].leaving;
        let holds_state = |id: &WorkerId| workers.connected[id].holds_state;
        let stayers: Vec<WorkerId> = survivors.iter().filter(|id| !leaving(id)).copied().collect();
        let vacancies = if limits.admits { limits.wanted.saturating_sub(stayers.len()) } else { 0 };
        // While a group trains, a newcomer fetches its state first, so that nobody waits for that.
        // Where all wait anyway, or nobody has a state, it comes as it is.
        let caught_up: Vec<WorkerId> = workers.caught_up().take(vacancies).collect();
        let group_waits = self.is_broken() && survivors.len() + caught_up.len() < limits.min;
        let joiners = match group_waits || !survivors.iter().any(holds_state) {
            true => workers.joiners().take(vacancies).collect(),
            false => caught_up,
        };

        if survivors.is_empty() {
            // Who was shut down is on its way out: the group has not ended before it has.
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
