//! Where workers have failed since the last progress.
//!
//! Failures without progress end the job, because a program that fails at each start never trains.
//! But if all of them happened in one slot, or on one node, while the workers of other slots can
//! train, the trouble is local: those may still be starting, or compute a long step. The failing
//! slots are tried again from time to time. What the others do decides: they make progress, fail as
//! well, hang, or do not start in time. A slot that fails again and again while the others make
//! progress (a bad host, a moved image tag) is tried less and less often: a try may interrupt them.
//!
//! So is that of new workers that never join, in any number of slots, while a group trains: it has
//! what the program needs.
//!
//! **Invariant:** failures of workers that have joined, in two slots that do not share a node, end
//! the job as soon as there are too many.

use crate::job::workers::state::Launch;

/// Where a worker has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) slot: u32,
    /// Empty if it is not known.
    pub(crate) node: String,
    /// Whether the worker had joined the job.
    pub(crate) has_joined: bool,
}

/// Slots of failed workers, with their nodes.
#[derive(Debug, Default)]
pub(crate) struct FailedSlots {
    places: Vec<Place>,
    /// The slot of the last failure, and the number of failures since one of another slot.
    repeated: Option<(u32, u32)>,
}

impl FailedSlots {
    /// The place of a launch.
    pub(crate) fn place(launch: &Launch) -> Place {
        Place {
            slot: launch.slot(),
            node: launch.location().node.clone(),
            has_joined: launch.has_registered(),
        }
    }

    /// Notes where a worker has failed; `None` if it is not the trouble of one worker. It was the
    /// `since_progress`th failure without progress.
    pub(crate) fn note(&mut self, place: Option<Place>, since_progress: u32) {
        if since_progress <= 1 {
            self.places.clear();
        }
        let before = self.repeated;
        self.repeated = place.as_ref().map(|place| match before {
            Some((last, times)) if last == place.slot => (last, times.saturating_add(1)),
            _ => (place.slot, 1),
        });
        match place {
            Some(place) if self.places.contains(&place) || self.places.len() >= SLOTS_KEPT => {}
            Some(place) => self.places.push(place),
            None => {
                let anywhere = |slot| Place { slot, node: String::new(), has_joined: true };
                self.places.extend(ANYWHERE.map(anywhere));
            }
        }
    }

    /// The slot in which the last failures were, if they are more than a few.
    pub(crate) fn stubborn(&self) -> Option<u32> {
        self.repeated.filter(|&(_, times)| times > REPEATED_MAX).map(|(slot, _)| slot)
    }

    /// Whether all workers failed in one slot, or on one node, or had never joined.
    pub(crate) fn are_local(&self) -> bool {
        let Some(Place { slot, node, .. }) = self.places.first() else { return false };
        self.places.iter().all(|other| other.slot == *slot)
            || (!node.is_empty() && self.places.iter().all(|other| other.node == *node))
            || !self.places.iter().any(|place| place.has_joined)
    }

    /// Whether a worker of this slot has failed.
    pub(crate) fn contains(&self, slot: u32) -> bool {
        self.places.iter().any(|failed| failed.slot == slot)
    }
}

/// Failures in one slot, one after the other, that are replaced with the usual pauses.
const REPEATED_MAX: u32 = 3;
/// More than the workers of a node.
const SLOTS_KEPT: usize = 64;
/// Two slots that no worker has.
const ANYWHERE: [u32; 2] = [u32::MAX, u32::MAX - 1];
