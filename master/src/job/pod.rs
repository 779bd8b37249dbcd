//! Pods of several workers: launches that are made together, run in one place, and go together.
//!
//! A worker is a worker, whatever its pod holds. But a pod is asked for, waits for room, is taken
//! away, killed and replaced as a whole. So its launches have consecutive numbers and consecutive
//! places; whoever starts and ends them names the first; and when one of them goes, for whatever
//! reason, the others go too: members with the next membership, so that the group changes once. A
//! pod that fails counts as one failure.
//!
//! **Invariants:** launches are made and forgotten in whole pods. A pod keeps its place as long as
//! one of its launches stays. Where a pod holds one worker, nothing here does anything.

use std::ops::RangeInclusive;

use elasticdl_proto::WorkerId;

use super::event::LaunchId;
use super::job::{Job, Phase};
use super::time::Time;
use super::workers::{Launch, WorkerTable};

impl WorkerTable {
    /// The launches of this one's pod, itself among them; none if it has ended.
    pub(super) fn pod(&self, launch: LaunchId) -> Vec<LaunchId> {
        self.launches.range(self.numbers(launch)).map(|(&id, _)| id).collect()
    }

    /// The numbers of the launches of this one's pod.
    fn numbers(&self, launch: LaunchId) -> RangeInclusive<LaunchId> {
        let per_pod = self.workers_per_pod as u64;
        let before = launch.0.saturating_sub(1) / per_pod * per_pod;
        LaunchId(before.saturating_add(1))..=LaunchId(before.saturating_add(per_pod))
    }

    /// The first launch of each pod.
    pub(super) fn pods(&self) -> impl Iterator<Item = LaunchId> + '_ {
        self.launches.keys().copied().filter(|id| self.is_first(*id))
    }

    /// Whether a pod is known by this launch.
    pub(super) fn is_first(&self, launch: LaunchId) -> bool {
        launch.0 % self.workers_per_pod as u64 == 1 % self.workers_per_pod as u64
    }

    /// Whether this holds for a launch of this one's pod.
    pub(super) fn any_of_pod(&self, launch: LaunchId, is: impl Fn(&Launch) -> bool) -> bool {
        self.launches.range(self.numbers(launch)).any(|(_, l)| is(l))
    }

    /// Whether a worker of this launch's pod has its stream open.
    pub(super) fn is_heard(&self, launch: LaunchId) -> bool {
        self.any_of_pod(launch, |l| l.worker.is_some_and(|id| self.connected.contains_key(&id)))
    }

    /// The workers of this launch's pod that have not been let go.
    pub(super) fn workers_of_pod(&self, launch: LaunchId) -> Vec<WorkerId> {
        let workers = self.pod(launch).into_iter().filter_map(|id| self.launches[&id].worker);
        workers.filter(|id| self.connected.get(id).is_some_and(|w| !w.released)).collect()
    }

    /// A launch that stands for its pod, as the user knows it. A launch's worker has its number.
    pub(super) fn name(&self, launch: LaunchId, has_worker: bool) -> String {
        let numbers = self.numbers(launch);
        let (first, last) = (numbers.start().0, numbers.end().0);
        match (first == last, has_worker) {
            (true, true) => format!("worker {first}"),
            (true, false) => format!("launch {first}"),
            (false, true) => format!("the pod of workers {first} to {last}"),
            (false, false) => format!("the pod of launches {first} to {last}"),
        }
    }
}

impl Job {
    /// Lets the workers of this launch's pod go in order: members with the next membership; who is
    /// none, when no member is left that it would take with it.
    pub(super) fn release_pod(&mut self, now: Time, launch: LaunchId, reason: &str) {
        let workers = self.workers.workers_of_pod(launch);
        let is_member = |id: &WorkerId| self.workers.connected[id].rank.is_some();
        if self.spec.work.trains() && workers.iter().any(is_member) {
            for id in workers {
                self.workers.connected.get_mut(&id).expect("it was just found").leaving = true;
            }
            return;
        }
        for id in workers {
            // The one before may have taken it along.
            if !self.workers.connected[&id].released {
                self.release(now, id, reason);
            }
        }
    }

    /// A worker goes, and the others of its pod with it.
    pub(super) fn release_rest_of_pod(&mut self, now: Time, launch: LaunchId) {
        // A group that is to finish its step needs all that it has.
        if self.spec.workers_per_pod > 1 && self.phase == Phase::Running {
            self.release_pod(now, launch, "another worker of its pod goes");
        }
    }

    /// A launch that was let go has not ended in time.
    pub(super) fn on_kill_due(&mut self, launch: LaunchId) {
        let others = self.workers.workers_of_pod(launch).into_iter().any(|id| id.0 != launch.0);
        if others && self.phase == Phase::Stopping {
            // They finish, and write the last checkpoint.
            return;
        }
        self.kill(launch);
    }
}
