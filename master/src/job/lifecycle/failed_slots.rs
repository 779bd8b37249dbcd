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

use crate::job::workers::state::Launch;

/// Slots of failed workers, with their nodes; a node is empty if it is not known.
#[derive(Debug, Default)]
pub(crate) struct FailedSlots(Vec<(u32, String)>);

impl FailedSlots {
    /// The slot and the node of a launch.
    pub(crate) fn place(launch: &Launch) -> (u32, String) {
        (launch.slot(), launch.location().node.clone())
    }

    /// Notes where a worker has failed; `None` if it is not the trouble of one worker. It was the
    /// `since_progress`th failure without progress.
    pub(crate) fn note(&mut self, place: Option<(u32, String)>, since_progress: u32) {
        if since_progress <= 1 {
            self.0.clear();
        }
        match place {
            Some(place) if self.0.contains(&place) || self.0.len() >= SLOTS_KEPT => {}
            Some(place) => self.0.push(place),
            None => self.0.extend(ANYWHERE.map(|slot| (slot, String::new()))),
        }
    }

    /// Whether all workers failed in one slot, or on one node.
    pub(crate) fn are_local(&self) -> bool {
        let Some((first, node)) = self.0.first() else { return false };
        self.0.iter().all(|(slot, _)| slot == first)
            || (!node.is_empty() && self.0.iter().all(|(_, other)| other == node))
    }

    /// Whether a worker of this slot has failed.
    pub(crate) fn contains(&self, slot: u32) -> bool {
        self.0.iter().any(|(failed, _)| *failed == slot)
    }
}

/// More than the workers of a node.
const SLOTS_KEPT: usize = 64;
/// Two slots that no worker has.
const ANYWHERE: [u32; 2] = [u32::MAX, u32::MAX - 1];
