//! Which links have lost data, when all members wait and none fails.
//!
//! Each member reports where it waits. While one member computes, the others wait for it; when all
//! wait, some link has lost data, and the reports of its two ends show which.
//!
//! ```text
//!      P ── sent 40 bytes of operation 7 ──▶ M      M has received 32 of these, for longer than
//!                                                   the timeout: the link lost 8 bytes
//! ```
//!
//! The faulty end of a link can't be determined. The worker at most such links is evicted; a worker
//! that was spared is evicted at once if it is at such a link again before the next commit.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use elasticdl_proto::{Generation, WorkerId};

use super::generation::Group;
use crate::job::event::Stall;

/// How often workers were at an end of a link that lost data, since the last commit.
#[derive(Debug, Default)]
pub(super) struct Blame(BTreeMap<WorkerId, usize>);

/// A link that lost data, from one member to the next.
pub(crate) type Suspect = (WorkerId, WorkerId);

impl Blame {
    /// Clears all counts.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Chooses the members to evict so that none of the links `suspects` remains: those at most
    /// links first, including links of earlier generations; among equals the highest rank. `may_go`
    /// excludes members that have finished.
    fn choose_evictions(
        &mut self,
        mut suspects: Vec<Suspect>,
        ring: &[WorkerId],
        may_go: impl Fn(WorkerId) -> bool,
    ) -> Vec<WorkerId> {
        self.0.retain(|id, _| ring.contains(id));
        let past = self.0.clone();
        for &(from, to) in &suspects {
            [from, to].iter().for_each(|id| *self.0.entry(*id).or_default() += 1);
        }
        let mut out = Vec::new();
        loop {
            let links = |id: WorkerId| {
                suspects.iter().filter(|(from, to)| *from == id || *to == id).count()
            };
            let worst = (0_usize..)
                .zip(ring)
                .map(|(rank, &id)| (id, rank, links(id)))
                .filter(|&(id, _, links)| links > 0 && may_go(id))
                .max_by_key(|&(id, rank, links)| {
                    (links + past.get(&id).copied().unwrap_or(0), rank)
                });
            let Some((worst, ..)) = worst else { return out };
            suspects.retain(|(from, to)| *from != worst && *to != worst);
            self.0.remove(&worst);
            out.push(worst);
        }
    }
}

impl Group {
    /// The links that stall the group, if all members that have not finished wait as in `waiting`.
    pub(crate) fn stalling_links(&self, waiting: &BTreeMap<WorkerId, Stall>) -> Vec<Suspect> {
        let newest = self.generation;
        let rings = [
            Some((newest, &self.members)),
            self.previous_ring.as_ref().map(|b| (Generation(newest.0 - 1), b)),
        ];
        let mut suspects = Vec::new();
        for (generation, ring) in rings.into_iter().flatten() {
            let links =
                ring.iter().zip(ring.iter().cycle().skip(1)).filter(|(from, to)| from != to);
            for (&from, &to) in links {
                let Some(receiver) = waiting.get(&to).filter(|s| s.generation == generation) else {
                    continue;
                };
                let keeps = match waiting.get(&from) {
                    Some(sender) => has_more_on_the_way(sender, receiver),
                    // It has received all that it needed, so it has sent all that the others need.
                    None => self.has_finished(from),
                };
                if keeps {
                    suspects.push((from, to));
                }
            }
        }
        suspects.extend(far_suspects(waiting));
        suspects
    }

    /// Chooses the members to evict so that none of the links `suspects` remains. `live` excludes
    /// members that are gone.
    pub(crate) fn choose_evictions(
        &mut self,
        suspects: Vec<Suspect>,
        live: impl Fn(WorkerId) -> bool,
    ) -> Vec<WorkerId> {
        let ring: Vec<WorkerId> = self.taking_part(&live).collect();
        let may_go = |id| live(id) && !self.finished.contains_key(&id);
        self.blame.choose_evictions(suspects, &ring, may_go)
    }

    /// Whether a worker that waits does so in this generation, or in the previous one that it has
    /// not left yet.
    pub(crate) fn is_stall_of(&self, stall: &Stall) -> bool {
        stall.generation == self.generation
            || (self.previous_ring.is_some() && stall.generation.next() == self.generation)
    }

    /// Live workers that are in the newest ring, or still in the previous one.
    pub(crate) fn taking_part(
        &self,
        live: impl Fn(WorkerId) -> bool,
    ) -> impl Iterator<Item = WorkerId> {
        let is_there = |id: &&WorkerId| !self.members.contains(id) && !self.has_left_ring(**id);
        let before = self.previous_ring.iter().flatten().filter(is_there);
        self.members.iter().chain(before).copied().filter(move |&id| live(id))
    }
}

/// Links beside those of the ring that have lost data. The two ends of such a link never wait for
/// each other, nor does one wait for another that is in a later operation: it has sent first.
fn far_suspects(waiting: &BTreeMap<WorkerId, Stall>) -> impl Iterator<Item = Suspect> + '_ {
    let awaited = |stall: &Stall| stall.far.into_iter().flatten();
    waiting.iter().flat_map(move |(&to, receiver)| {
        awaited(receiver).filter_map(move |from| {
            let sender = waiting.get(&from)?;
            let position = |stall: &Stall| (stall.generation, stall.operation);
            let keeps = match position(sender).cmp(&position(receiver)) {
                Ordering::Less => false,
                // Both name the link, which counts once.
                Ordering::Equal => from < to && awaited(sender).any(|other| other == to),
                Ordering::Greater => true,
            };
            keeps.then_some((from, to))
        })
    })
}

/// Whether bytes are in flight between a worker and its next one, `receiver`.
fn has_more_on_the_way(sender: &Stall, receiver: &Stall) -> bool {
    if sender.generation != receiver.generation {
        return sender.generation > receiver.generation;
    }
    match sender.operation.cmp(&receiver.operation) {
        // A worker in a later operation has received all that it needed, and has sent what the
        // others need.
        Ordering::Less => sender.waits_for_next,
        Ordering::Greater => !receiver.waits_for_next && receiver.far == [None; 2],
        // A worker that waits before the first operation has dialled.
        Ordering::Equal => sender.operation == 0 || sender.sent > receiver.received,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_link_used_both_ways_keeps_bytes_either_way() {
        let stall = |operation, sent, received, waits_for_next| Stall {
            generation: Generation(3),
            operation,
            received,
            sent,
            waits_for_next,
            far: [None; 2],
            since: Duration::ZERO,
        };
        // Of 100 bytes that were sent, 60 have come; or all have, and of 40 that were sent back
        // none.
        assert!(has_more_on_the_way(&stall(7, 1100, 1000, true), &stall(7, 1000, 1060, false)));
        assert!(!has_more_on_the_way(&stall(7, 1060, 1000, true), &stall(7, 1000, 1060, false)));
        // The next one is done, and must have sent what is awaited from it.
        assert!(has_more_on_the_way(&stall(7, 1000, 1000, true), &stall(8, 0, 0, false)));
        assert!(!has_more_on_the_way(&stall(7, 1000, 1000, false), &stall(8, 0, 0, false)));
        // The next one awaits something from its own next one.
        assert!(!has_more_on_the_way(&stall(8, 0, 0, false), &stall(7, 1000, 1000, true)));
        assert!(has_more_on_the_way(&stall(8, 0, 0, false), &stall(7, 1000, 1000, false)));
    }
}
