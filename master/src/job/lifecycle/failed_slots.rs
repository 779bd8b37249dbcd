//! Where workers have failed since the last progress.
//!
//! Failures without progress end the job, because a program that fails at each start never trains.
//! But if all of them happened in one slot, or on one node, while the workers of other slots can
//! train, the trouble is local: those may still be starting, or compute a long step. The failing
//! slots are tried again from time to time. What the others do decides: they make progress, fail as
//! well, hang, or do not start in time.
//!
//! **Invariant:** failures in two slots that do not share a node end the job as soon as there are
//! too many.

use super::state::Lifecycle;
use crate::job::job::Job;
use crate::job::workers::state::Launch;

/// Slots of failed workers, with their nodes; a node is empty if it is not known.
#[derive(Debug, Default)]
pub(crate) struct FailedSlots(Vec<(u32, String)>);

impl FailedSlots {
    /// The slot and the node of a launch.
    pub(crate) fn place(launch: &Launch) -> (u32, String) {
        (launch.slot(), launch.location().node.clone())
    }

    fn note(&mut self, place: (u32, String)) {
        if !self.0.contains(&place) && self.0.len() < SLOTS_KEPT {
            self.0.push(place);
        }
    }

    /// Whether all workers failed in one slot, or on one node.
    fn are_local(&self) -> bool {
        let Some((first, node)) = self.0.first() else { return false };
        self.0.iter().all(|(slot, _)| slot == first)
            || (!node.is_empty() && self.0.iter().all(|(_, other)| other == node))
    }

    fn contains(&self, slot: u32) -> bool {
        self.0.iter().any(|(failed, _)| *failed == slot)
    }
}

impl Lifecycle {
    /// Notes where a worker has failed; `None` if it is not the trouble of one worker. It was the
    /// `since_progress`th failure without progress.
    pub(super) fn note_failed_slot(&mut self, place: Option<(u32, String)>, since_progress: u32) {
        if since_progress <= 1 {
            self.failed_slots.0.clear();
        }
        match place {
            Some(place) => self.failed_slots.note(place),
            None => self.failed_slots.0.extend(ANYWHERE.map(|slot| (slot, String::new()))),
        }
    }
}

impl Job {
    /// Whether all failures without progress are the trouble of one slot or node, and enough
    /// workers of other slots run or start.
    pub(super) fn can_train_without_failed(&self) -> bool {
        let failed = &self.lifecycle.failed_slots;
        let is_other = |l: &Launch| {
            l.stays() && !l.is_killed() && !l.is_counted() && !failed.contains(l.slot())
        };
        let others = self.workers.launches().filter(|(_, l)| is_other(l)).count();
        failed.are_local() && others >= self.spec.min_workers as usize
    }
}

/// More than the workers of a node.
const SLOTS_KEPT: usize = 64;
/// Two slots that no worker has.
const ANYWHERE: [u32; 2] = [u32::MAX, u32::MAX - 1];
