//! Stalls: all members wait, and none fails.
//!
//! A network that drops the packets between two workers breaks no link and stops no heartbeat: both
//! workers reach the master, and the whole ring waits. Each member then reports where it waits.
//! While one member computes, the others wait for it; when all wait, some link has lost data, and
//! the reports of its two ends show which.
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
use std::time::Duration;

use elasticdl_proto::{Generation, WorkerId};

use super::liveness::is_fresh;
use crate::job::event::Stall;
use crate::job::group::choose::Broken;
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::time::Time;

/// A worker's stall as the master sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stalled {
    stall: Stall,
    /// Since when all its heartbeats report that it waits.
    since: Time,
    /// Time of the last such heartbeat.
    last: Time,
}

/// How often workers were at an end of a link that lost data, since the last commit.
#[derive(Debug, Default)]
pub(crate) struct Blame(BTreeMap<WorkerId, usize>);

/// A link that lost data, from one member to the next.
pub(crate) type Suspect = (WorkerId, WorkerId);

impl Stalled {
    /// `before` is the worker's previous report. A long silence since then does not count as
    /// waiting: all workers may have been stopped.
    pub(crate) fn after(
        before: Option<Self>,
        now: Time,
        stall: Stall,
        heartbeat: Duration,
    ) -> Self {
        let since = before.filter(|b| is_fresh(b.last, now, heartbeat)).map_or(now, |b| b.since);
        Self { stall, since, last: now }
    }

    /// Time without a moved byte, by its last heartbeat.
    pub(crate) fn since_last_byte(&self) -> Duration {
        self.stall.since
    }

    /// Time of its last heartbeat.
    pub(crate) fn last(&self) -> Time {
        self.last
    }

    /// Restarts the wait: what the worker waited for has arrived, as far as other reports show.
    pub(crate) fn restart_wait(&mut self, now: Time) {
        self.since = now;
    }
}

impl Blame {
    /// Clears all counts.
    pub(crate) fn clear(&mut self) {
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

impl Job {
    /// Evicts workers that the network has cut off from their neighbours, if all members wait for
    /// longer than the timeout and all were heard recently. (Silent members are judged by the
    /// heartbeat check.)
    pub(crate) fn check_for_stalls(&mut self, now: Time, timeout: Duration) {
        // A disconnected member can't report where it waits.
        let is_judged = self.workers.disconnected_members().next().is_none();
        if self.group.is_broken() || self.group.broken.is_some() || !is_judged {
            return;
        }
        let Some(suspects) = self.suspects(now, timeout) else { return };
        self.history.counters.stalls += 1;
        self.log_event(format!(
            "generation {}: all members have waited for each other for {} ms",
            self.group.generation,
            timeout.as_millis()
        ));
        self.evict_suspects(now, suspects);
    }

    /// Handles a heartbeat, which reports whether the worker waits for its neighbours, and where.
    pub(crate) fn on_alive(&mut self, now: Time, worker: WorkerId, stall: Option<Stall>) {
        let heartbeat = self.spec.heartbeat().unwrap_or_default();
        if let Some(w) = self.workers.connected.get_mut(&worker) {
            w.stalled = stall.map(|stall| Stalled::after(w.stalled, now, stall, heartbeat));
        }
    }

    /// Handles dials that members have not answered.
    pub(crate) fn on_unanswered(&mut self, now: Time, broken: Broken) {
        let heartbeat = self.spec.heartbeat().unwrap_or_default();
        if self.taking_part().any(|id| {
            heartbeat > Duration::ZERO
                && !is_fresh(self.workers.connected[&id].heard, now, heartbeat)
        }) {
            // A silent member may be at fault; the heartbeat check decides first.
            let until = now + heartbeat;
            self.out.set_timer(until, Timer::Broken(self.group.generation));
            self.group.broken = Some(Broken { until, ..broken });
            return;
        }
        self.evict_suspects(now, broken.unanswered);
        self.reconcile(now);
    }

    /// Evicts the members chosen for these links. If none may be evicted, the next generation gets
    /// new links.
    fn evict_suspects(&mut self, now: Time, suspects: Vec<Suspect>) {
        let ring: Vec<WorkerId> = self.taking_part().collect();
        let Self { group, workers, .. } = self;
        group.relink = true;
        let may_go = |id| workers.connected.contains_key(&id) && !group.finished.contains_key(&id);
        for worker in group.blame.choose_evictions(suspects, &ring, may_go) {
            self.evict(now, worker, "can't be reached by its neighbours");
        }
    }

    /// The links that stall the group; `None` while it may still make progress.
    fn suspects(&self, now: Time, timeout: Duration) -> Option<Vec<Suspect>> {
        let heartbeat = self.spec.heartbeat()?;
        let is_long = |s: &&Stalled| {
            let seen = s.last.0.saturating_sub(s.since.0);
            s.stall.since >= timeout && seen >= timeout / 2 && is_fresh(s.last, now, heartbeat)
        };
        let finished = |id: &WorkerId| self.group.finished.contains_key(id);
        let mut waiting: BTreeMap<WorkerId, Stall> = BTreeMap::new();
        for id in self.taking_part().filter(|id| !finished(id)) {
            let stalled = self.workers.connected[&id].stalled.as_ref().filter(is_long)?;
            self.is_of_group(stalled).then(|| waiting.insert(id, stalled.stall))?;
        }
        if waiting.is_empty() {
            return None;
        }
        let newest = self.group.generation;
        let rings = [
            Some((newest, &self.group.members)),
            self.group.previous_ring.as_ref().map(|b| (Generation(newest.0 - 1), b)),
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
                    Some(sender) => has_bytes_in_flight(sender, receiver),
                    // It has received all that it needed, so it has sent all that the others need.
                    None => finished(&from),
                };
                if keeps {
                    suspects.push((from, to));
                }
            }
        }
        Some(suspects)
    }

    /// Whether a worker waits in the newest group, or in the previous one that it has not left yet.
    pub(crate) fn is_of_group(&self, stalled: &Stalled) -> bool {
        let (of, newest) = (stalled.stall.generation, self.group.generation);
        of == newest || (self.group.previous_ring.is_some() && of.next() == newest)
    }

    /// Connected workers that are in the newest group's ring, or still in the previous one's.
    pub(crate) fn taking_part(&self) -> impl Iterator<Item = WorkerId> + '_ {
        let before =
            self.group.previous_ring.iter().flatten().filter(|id| !self.group.members.contains(id));
        let live = |id: &&WorkerId| self.workers.connected.contains_key(id);
        self.group.members.iter().chain(before).filter(live).copied()
    }
}

/// Whether bytes are in flight from `sender` to its next worker, `receiver`.
fn has_bytes_in_flight(sender: &Stall, receiver: &Stall) -> bool {
    if sender.generation != receiver.generation {
        return sender.generation > receiver.generation;
    }
    match sender.operation.cmp(&receiver.operation) {
        // A worker in a later operation has received all that it needed, and has sent what the
        // others need.
        Ordering::Less => sender.waits_for_next,
        Ordering::Greater => !receiver.waits_for_next,
        // A worker that waits before the first operation has dialled.
        Ordering::Equal => sender.operation == 0 || sender.sent > receiver.received,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_used_both_ways_keeps_bytes_either_way() {
        let stall = |operation, sent, received, waits_for_next| Stall {
            generation: Generation(3),
            operation,
            received,
            sent,
            waits_for_next,
            since: Duration::ZERO,
        };
        // Of 100 bytes that were sent, 60 have come; or all have, and of 40 that were sent back
        // none.
        assert!(has_bytes_in_flight(&stall(7, 1100, 1000, true), &stall(7, 1000, 1060, false)));
        assert!(!has_bytes_in_flight(&stall(7, 1060, 1000, true), &stall(7, 1000, 1060, false)));
        // The next one is done, and must have sent what is awaited from it.
        assert!(has_bytes_in_flight(&stall(7, 1000, 1000, true), &stall(8, 0, 0, false)));
        assert!(!has_bytes_in_flight(&stall(7, 1000, 1000, false), &stall(8, 0, 0, false)));
        // The next one awaits something from its own next one.
        assert!(!has_bytes_in_flight(&stall(8, 0, 0, false), &stall(7, 1000, 1000, true)));
        assert!(has_bytes_in_flight(&stall(8, 0, 0, false), &stall(7, 1000, 1000, false)));
    }
}
