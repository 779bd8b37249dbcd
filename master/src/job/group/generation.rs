//! The newest generation: its members, what became of them, and their final reports.

use std::collections::BTreeMap;

use elasticdl_proto::{Cause, Generation, Ledger, WorkerId};

use super::broken::{Broken, Suspicions};
use super::stall::Blame;
use crate::job::action::Membership;
use crate::job::event::Finished;
use crate::job::time::Time;

/// The newest generation.
#[derive(Debug, Default)]
pub(crate) struct Group {
    /// Number of the generation; 0 before the first.
    pub(super) generation: Generation,
    /// Generations up to this one must not be published (again): another master may have published
    /// them.
    floor: Generation,
    /// Members in ring order, including lost ones.
    pub(super) members: Vec<WorkerId>,
    /// The ring of the previous generation, in which members may still be: the switch waits for a
    /// step boundary, and the newest group has not formed yet.
    pub(super) previous_ring: Option<Vec<WorkerId>>,
    /// Workers of that ring that have left it and are in no other.
    left_ring: Vec<WorkerId>,
    /// The published membership; `None` before the first.
    published: Option<Membership>,
    pub(super) formation: Formation,
    /// Whether any member had the previous group's state when it was published.
    carries_state: bool,
    /// Whether it started from a checkpoint.
    is_restored: bool,
    /// Final reports of members that hold the job's final state, in this generation.
    pub(super) finished: BTreeMap<WorkerId, (Finished, Ledger)>,
    /// When the first of them came.
    finishing_since: Time,
    /// Members lost since it was published.
    lost: Vec<WorkerId>,
    /// Members that left in order since it was published.
    left: Vec<WorkerId>,
    /// Whether a lost member was unresponsive although its process ran.
    is_hung: bool,
    /// Whether the same members need new links: the wait for an explaining loss is over.
    pub(super) needs_links: bool,
    /// Reports of broken links that no known loss explains.
    pub(super) broken: Option<Broken>,
    pub(super) suspicions: Suspicions,
    /// When the group last formed, committed a step or evaluated its model.
    progressed: Time,
    /// How often members were at an end of a link that lost data.
    pub(super) blame: Blame,
}

/// Whether the members have agreed on their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Formation {
    #[default]
    Forming,
    Formed,
    /// Formed, and the lowest rank, after a disconnection, has to report the whole ledger again.
    ReportDue,
}

/// The next generation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Its members, in ring order.
    pub(crate) members: Vec<WorkerId>,
    /// Whether members abort their step.
    pub(crate) abort: bool,
}

/// A generation that has begun: what distinguishes it from the one before.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) cause: Cause,
    pub(crate) survivors: Vec<WorkerId>,
    pub(crate) lost: Vec<WorkerId>,
    pub(crate) left: Vec<WorkerId>,
    pub(crate) joined: Vec<WorkerId>,
}

impl Group {
    /// The group of an earlier master, whose `published` membership is the newest known one.
    /// `lost` are those of its members that can't reconnect.
    pub(crate) fn restored(
        published: Option<Membership>,
        floor: Generation,
        previous_ring: Option<Vec<WorkerId>>,
        is_lost: impl Fn(WorkerId) -> bool,
    ) -> Self {
        let members: Vec<WorkerId> =
            published.iter().flat_map(|m| &m.members).map(|(id, _)| *id).collect();
        Self {
            generation: published.as_ref().map_or_else(Generation::default, |m| m.generation),
            floor,
            previous_ring,
            lost: members.iter().copied().filter(|&id| is_lost(id)).collect(),
            members,
            published,
            ..Self::default()
        }
    }

    /// Adopts a membership that an earlier master has published after the one that this master
    /// knows.
    pub(crate) fn adopt(&mut self, theirs: &Membership, is_lost: impl Fn(WorkerId) -> bool) {
        let before = std::mem::take(&mut self.members);
        let previous_ring = (!theirs.abort && !before.is_empty()).then_some(before);
        *self = Self::restored(Some(theirs.clone()), self.floor, previous_ring, is_lost);
    }

    /// Begins the next generation. `excluded` are live members that are not in it.
    pub(crate) fn begin(&mut self, change: Change, excluded: &[WorkerId]) -> Begun {
        let before = std::mem::replace(&mut self.members, change.members);
        let (survivors, joined) = self.members.iter().partition(|id| before.contains(id));
        self.previous_ring = (!change.abort && !before.is_empty()).then_some(before);
        self.left_ring.clear();
        self.generation = self.generation.max(self.floor).next();
        let (lost, mut left) = (std::mem::take(&mut self.lost), std::mem::take(&mut self.left));
        left.extend(excluded);
        let is_hung = std::mem::take(&mut self.is_hung);
        let needs_links = std::mem::take(&mut self.needs_links);
        let cause = if self.generation.0 == 1 {
            Cause::Start
        } else if is_hung {
            Cause::Hung
        } else if needs_links || !lost.is_empty() {
            Cause::Lost
        } else if !left.is_empty() {
            Cause::Leave
        } else {
            Cause::Join
        };
        self.formation = Formation::Forming;
        self.is_restored = false;
        self.finished.clear();
        self.broken = None;
        Begun { cause, survivors, lost, left, joined }
    }

    /// Notes the membership that was sent to the members, and whether any of them had the previous
    /// group's state.
    pub(crate) fn note_published(&mut self, membership: Membership, carries_state: bool) {
        self.published = Some(membership);
        self.carries_state = carries_state;
    }

    /// Notes that its members have agreed on its state. Returns whether that is news.
    pub(crate) fn form(&mut self) -> bool {
        self.previous_ring = None;
        std::mem::replace(&mut self.formation, Formation::Formed) == Formation::Forming
    }

    /// Raises the generation floor: no generation is used twice. Returns whether it was lower.
    pub(crate) fn raise_floor(&mut self, generation: Generation) -> bool {
        let is_lower = self.floor < generation;
        self.floor = self.floor.max(generation);
        is_lower
    }

    /// Number of the generation; 0 before the first.
    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    /// The newest generation that any master may have published.
    pub(crate) fn newest_published(&self) -> Generation {
        self.generation.max(self.floor)
    }

    /// Members in ring order, including lost ones.
    pub(crate) fn members(&self) -> &[WorkerId] {
        &self.members
    }

    /// The lowest rank, which reports for the group.
    pub(crate) fn reporter(&self) -> Option<WorkerId> {
        self.members.first().copied()
    }

    /// Whether `worker` reports for the group, and about this generation.
    pub(crate) fn is_reporter(&self, worker: WorkerId, generation: Generation) -> bool {
        generation == self.generation && self.reporter() == Some(worker)
    }

    pub(crate) fn published(&self) -> Option<&Membership> {
        self.published.as_ref()
    }

    /// Notes that a worker that the newest group does without has left its ring.
    pub(crate) fn note_left_ring(&mut self, worker: WorkerId) {
        if !self.has_left_ring(worker) {
            self.left_ring.push(worker);
        }
    }

    /// Whether a worker that the newest group does without has left its ring.
    pub(super) fn has_left_ring(&self, worker: WorkerId) -> bool {
        self.left_ring.contains(&worker)
    }

    pub(crate) fn previous_ring(&self) -> Option<&[WorkerId]> {
        self.previous_ring.as_deref()
    }

    /// Whether its members have agreed on its state.
    pub(crate) fn is_formed(&self) -> bool {
        self.formation != Formation::Forming
    }

    /// Whether the lowest rank has to report the ledger.
    pub(crate) fn awaits_report(&self) -> bool {
        self.formation != Formation::Formed
    }

    /// Notes that reports of `worker` may have been lost.
    pub(crate) fn note_lost_reports(&mut self, worker: WorkerId) {
        if self.is_formed() && self.reporter() == Some(worker) {
            self.formation = Formation::ReportDue;
        }
    }

    /// Whether any member had the previous group's state when it was published.
    pub(crate) fn carries_state(&self) -> bool {
        self.carries_state
    }

    /// Whether it started from a checkpoint.
    pub(crate) fn is_restored(&self) -> bool {
        self.is_restored
    }

    pub(crate) fn note_restored(&mut self) {
        self.is_restored = true;
    }

    /// When the group last made progress: it formed, committed a step or evaluated its model.
    pub(crate) fn progressed(&self) -> Time {
        self.progressed
    }

    /// Notes that the group makes progress, or that this master could not see whether it does.
    pub(crate) fn note_progress(&mut self, now: Time) {
        self.progressed = self.progressed.max(now);
    }

    // ---- losses ----

    /// Whether the members can't continue as they are: a member or a link is lost.
    pub(crate) fn is_broken(&self) -> bool {
        self.needs_links || !self.lost.is_empty() || !self.left.is_empty()
    }

    /// Notes that a member is gone, in order or not.
    pub(crate) fn note_gone(&mut self, member: WorkerId, in_order: bool) {
        if in_order { &mut self.left } else { &mut self.lost }.push(member);
    }

    /// Notes that the members that are gone have ended in order.
    pub(crate) fn excuse_losses(&mut self) {
        self.left.append(&mut self.lost);
    }

    /// Notes that a lost member was unresponsive although its process ran.
    pub(crate) fn note_hung(&mut self) {
        self.is_hung = true;
    }

    /// Forgets the losses: an inference job has no generations.
    pub(crate) fn clear_losses(&mut self) {
        self.lost.clear();
        self.left.clear();
    }

    // ---- the end ----

    /// Notes a member's final report; its first one counts.
    pub(crate) fn finish(&mut self, now: Time, worker: WorkerId, report: Finished, ledger: Ledger) {
        if self.finished.is_empty() {
            self.finishing_since = now;
        }
        self.finished.entry(worker).or_insert((report, ledger));
    }

    pub(crate) fn has_finished(&self, worker: WorkerId) -> bool {
        self.finished.contains_key(&worker)
    }

    /// When the first member finished, if any has.
    pub(crate) fn finishing_since(&self) -> Option<Time> {
        (!self.finished.is_empty()).then_some(self.finishing_since)
    }

    /// The final reports, by worker.
    pub(crate) fn final_reports(&self) -> impl Iterator<Item = (WorkerId, &Finished, &Ledger)> {
        self.finished.iter().map(|(&id, (report, ledger))| (id, report, ledger))
    }

    /// Whether every member has finished.
    pub(crate) fn is_finished(&self) -> bool {
        !self.members.is_empty() && self.members.iter().all(|&id| self.has_finished(id))
    }

    /// Takes the final reports of members that leave for another group, if all of them do. Returns
    /// the steps that their checkpoint holds.
    pub(crate) fn take_suspended(&mut self) -> Option<u64> {
        let all = self.finished.values().all(|(report, _)| report.suspended);
        let steps = self.finished.values().map(|(report, _)| report.step).max();
        all.then(|| self.finished.clear()).and(steps)
    }
}
