//! Pods of several workers: their supervisor, after `elasticdl_worker`'s, and what the system does
//! with a pod as a whole.

use std::ops::Range;

use elasticdl_master::job::Exit;

use super::clock::{Dice, Micros};
use super::story::tell;
use super::world::{Event, World};

/// How many workers each pod of a run has.
pub(super) fn draw(dice: &mut Dice) -> u64 {
    if dice.chance(1, 5) { dice.between(2, 3) } else { 1 }
}

impl World {
    /// The processes of the pod that `p` is in.
    pub(super) fn pod(&self, p: usize) -> Range<usize> {
        let per_pod = self.setting.spec.workers_per_pod as usize;
        // They are started in whole pods, and all are kept.
        let first = p / per_pod * per_pod;
        first..first + per_pod
    }

    /// Whether one of its pod lives.
    pub(super) fn pod_lives(&self, p: usize) -> bool {
        self.pod(p).any(|q| self.processes[q].is_alive())
    }

    /// `p` has ended. If it failed, the others of its pod are told to leave, and killed if they
    /// take too long.
    pub(super) fn supervise(&mut self, p: usize) {
        let pod = self.pod(p);
        let failed = self.processes[p].exit.clone().filter(|exit| *exit != Exit::Code(0));
        let Some(exit) = failed.filter(|_| self.processes[pod.start].pod_failure.is_none()) else {
            return;
        };
        self.processes[pod.start].pod_failure = Some(exit);
        let others: Vec<usize> = pod.filter(|&q| self.processes[q].is_alive()).collect();
        if !others.is_empty() {
            tell!(self, "{}: the others of its pod are to leave", self.name(p));
            self.books.tally.pods_failed += 1;
        }
        for q in others {
            let delay = self.thread_delay();
            self.clock.after(delay, Event::Terminate { p: q });
            self.clock.after(LEAVE_TIMEOUT_US, Event::Die { p: q, signal: 9 });
        }
    }

    /// How the pod that `p` is in has ended; `None` while one of it lives.
    pub(super) fn end_of_pod(&self, p: usize) -> Option<Exit> {
        let failure = &self.processes[self.pod(p).start].pod_failure;
        (!self.pod_lives(p)).then(|| failure.clone().unwrap_or(Exit::Code(0)))
    }

    /// Whom a fault hits that hits `p`: a pod can go as a whole, or one of it.
    pub(super) fn hit_with(&mut self, p: usize) -> Range<usize> {
        let pod = self.pod(p);
        if pod.len() > 1 && self.dice.chance(1, 2) { pod } else { p..p + 1 }
    }
}

const LEAVE_TIMEOUT_US: Micros = 2_000_000;
