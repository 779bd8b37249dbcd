//! The choice of the next generation.

use std::cmp::Reverse;
use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::generation::{Change, Formation, Group};
use crate::job::time::Time;

/// Constraints on the next generation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) now: Time,
    /// Members that are no table servers. There is always one member.
    pub(crate) min: usize,
    /// Members that are no table servers, and table servers. Further workers are spares.
    pub(crate) wanted: [usize; 2],
    /// The interval of heartbeats; 0 without any.
    pub(crate) heartbeat: Duration,
    /// A joiner that was not heard since is not waited for.
    pub(crate) heard_since: Time,
    /// Whether a group without a state still waits for workers that are starting.
    pub(crate) join_window_open: bool,
    /// Whether workers may join.
    pub(crate) admits: bool,
    /// Whether each worker may hold a part of the state that others lack, and can't hand it over,
    /// so that those that leave stay for now.
    pub(crate) keeps_leavers: bool,
}

/// The workers to choose from.
pub(crate) trait Candidates {
    /// What the choice depends on, of a connected worker.
    fn get(&self, worker: WorkerId) -> Option<Candidate>;

    /// Workers that can be members and are not, oldest first. Without those that are silent.
    fn joiners(&self, limits: Limits) -> impl Iterator<Item = Joiner>;

    /// Workers that leave without which a membership was published, until its group has formed.
    fn reserve(&self) -> impl Iterator<Item = WorkerId>;
}

/// A connected worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) is_released: bool,
    pub(crate) is_leaving: bool,
    pub(crate) holds_state: bool,
    pub(crate) serves_tables: bool,
}

/// A worker that can be a member and is not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Joiner {
    pub(crate) id: WorkerId,
    /// Whether the group need not wait for it.
    pub(crate) is_caught_up: bool,
    /// Whether its last heartbeats came in time.
    pub(crate) is_heard: bool,
    pub(crate) has_state: bool,
    /// Steps that its state contains, as far as is known.
    pub(crate) step: u64,
    /// Whether it has the group's state, and has stopped to follow it.
    pub(crate) lags: bool,
}

impl Group {
    /// The generation that should be published now, if any.
    ///
    /// Survivors keep their order and joiners are appended; [`arrange`](super::topology::arrange)
    /// brings them to their neighbours. Leaving members stay while no other member holds the state,
    /// or while too few members would remain. If a group is lost before it has formed, those that
    /// the one before went on without are taken back for the same reasons.
    pub(crate) fn next(&self, workers: &impl Candidates, limits: Limits) -> Option<Change> {
        let alive = |&id: &WorkerId| workers.get(id).filter(|w| !w.is_released).map(|w| (id, w));
        let reserve: Vec<WorkerId> = workers.reserve().filter(|_| self.is_broken()).collect();
        let survivors: Vec<(WorkerId, Candidate)> =
            self.members.iter().chain(&reserve).filter_map(alive).collect();
        let ids = |members: &[(WorkerId, Candidate)]| -> Vec<WorkerId> {
            members.iter().map(|(id, _)| *id).collect()
        };
        let holds_state = |(_, w): &(WorkerId, Candidate)| w.holds_state;
        let stayers: Vec<(WorkerId, Candidate)> =
            survivors.iter().filter(|(_, w)| !w.is_leaving).copied().collect();
        let vacancies = [false, true].map(|serves_tables| {
            let taken = stayers.iter().filter(|(_, w)| w.serves_tables == serves_tables).count();
            let wanted = limits.wanted[usize::from(serves_tables)];
            if limits.admits { wanted.saturating_sub(taken) } else { 0 }
        });
        // While a group trains, a joiner fetches its state first, so that no member waits for it.
        // If all wait anyway, or no member has a state, it joins without the state.
        let candidates: Vec<Joiner> = workers.joiners(limits).collect();
        let is_state_safe = survivors.iter().any(holds_state);
        let others_have_state =
            is_state_safe || candidates.iter().any(|joiner| joiner.has_state && !joiner.lags);
        let follows = |joiner: &Joiner| !(joiner.lags && others_have_state);
        let joiners = |may: &dyn Fn(&Joiner) -> bool| -> Vec<WorkerId> {
            let mut left = vacancies;
            let mut has_room = |&id: &WorkerId| {
                let serves_tables = workers.get(id).is_some_and(|w| w.serves_tables);
                let left = &mut left[usize::from(serves_tables)];
                let has_room = *left > 0;
                *left = left.saturating_sub(1);
                has_room
            };
            let mut joiners: Vec<&Joiner> = candidates.iter().filter(|j| may(j)).collect();
            // Those that have the state come first, and of those the ones that certainly run. If
            // all members are lost, they alone have the state, so the newest one comes first.
            let step = |joiner: &Joiner| if is_state_safe { 0 } else { joiner.step };
            joiners.sort_by_key(|joiner| {
                let by_step = [step(joiner), joiner.is_heard.into(), joiner.step];
                (!joiner.is_caught_up, Reverse(by_step))
            });
            joiners.into_iter().map(|joiner| joiner.id).filter(|id| has_room(id)).collect()
        };
        let are_enough = |members: &[WorkerId]| {
            let computes = |id: &&WorkerId| workers.get(**id).is_some_and(|w| !w.serves_tables);
            !members.is_empty() && members.iter().filter(computes).count() >= limits.min
        };
        let are_enough_with =
            |joiners: &[WorkerId]| are_enough(&[&*ids(&survivors), joiners].concat());
        let caught_up = joiners(&|joiner| joiner.is_caught_up && follows(joiner));
        let group_waits = self.is_broken() && !are_enough_with(&caught_up);
        let joiners = if group_waits || !is_state_safe {
            Some(joiners(&follows))
                .filter(|following| are_enough_with(following))
                .unwrap_or_else(|| joiners(&|_| true))
        } else {
            caught_up
        };

        if survivors.is_empty() {
            // A member that was shut down is still ending, and the group ends only after it.
            if self.members.iter().any(|&id| workers.get(id).is_some()) {
                return None;
            }
            let start = joiners.len() >= limits.wanted.iter().sum() || !limits.join_window_open;
            return (start && are_enough(&joiners))
                .then_some(Change { members: joiners, abort: self.is_broken() });
        }
        if !self.is_broken() {
            let settled = self.formation != Formation::Forming && self.finished.is_empty();
            let changes = !joiners.is_empty() || stayers.len() < survivors.len();
            if !settled || !changes {
                return None;
            }
        }
        let state_stays = stayers.iter().any(holds_state) || !survivors.iter().any(holds_state);
        let may_leave = state_stays && !limits.keeps_leavers;
        let without_leavers = [ids(&stayers), joiners.clone()].concat();
        let kept = if may_leave && are_enough(&without_leavers) { &stayers } else { &survivors };
        let members = [ids(kept), joiners].concat();
        let same = members == self.members && !self.is_broken();
        (are_enough(&members) && !same).then(|| Change { members, abort: self.is_broken() })
    }
}
