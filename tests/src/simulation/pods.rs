//! Pods of several workers: the supervisor, modelled after `elasticdl`'s, and what happens
//! to a pod as a whole.

use std::ops::Range;

use elasticdl_master::job::Exit;

use super::clock::Micros;
use super::state::event::Event;
use super::trace::trace;
use super::world::World;

impl World {
    /// The processes of the pod that `p` is in.
    pub(super) fn pod(&self, p: usize) -> Range<usize> {
        let per_pod = self.setting.spec.workers_per_pod as usize;
        // Pods are started whole, and ended processes stay in the list.
        let first = p / per_pod * per_pod;
        first..first + per_pod
    }

    /// Whether a process of `p`'s pod is alive.
    pub(super) fn pod_lives(&self, p: usize) -> bool {
        self.pod(p).any(|q| self.processes[q].is_alive())
    }

    /// `p` has ended. If it failed, the other processes of its pod get SIGTERM, and SIGKILL if they
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
            trace!(self, "{}: the others of its pod are to leave", self.name(p));
            self.oracle.coverage.pods_failed += 1;
        }
        for q in others {
            let delay = self.thread_delay();
            self.clock.after(delay, Event::Terminate { p: q });
            self.clock.after(LEAVE_TIMEOUT_US, Event::Die { p: q, signal: 9 });
        }
    }

    /// Exit of the pod that `p` is in; `None` while one of its processes is alive.
    pub(super) fn end_of_pod(&self, p: usize) -> Option<Exit> {
        let failure = &self.processes[self.pod(p).start].pod_failure;
        (!self.pod_lives(p)).then(|| failure.clone().unwrap_or(Exit::Code(0)))
    }

    /// The processes that a fault at `p` hits: the whole pod, or `p` alone.
    pub(super) fn processes_hit_with(&mut self, p: usize) -> Range<usize> {
        let pod = self.pod(p);
        if pod.len() > 1 && self.rng.chance(1, 2) { pod } else { p..p + 1 }
    }
}

const LEAVE_TIMEOUT_US: Micros = 2_000_000;
