//! Pods of several workers: launches that are created, run and removed together.
//!
//! The group treats every worker alike. But a pod is created, scheduled, removed, killed and
//! replaced as a whole. So its launches have consecutive numbers and consecutive slots; actions and
//! events name its first launch; and when one of its workers goes, for any reason, the others go
//! too: members with the next membership, so that the group changes once. A pod that fails counts
//! as one failure.
//!
//! **Invariants:** launches are added and forgotten in whole pods. A pod keeps its slot as long as
//! one of its launches stays. For pods of one worker, this module has no effect.

use std::ops::RangeInclusive;

use elasticdl_proto::WorkerId;

use crate::job::event::LaunchId;
use crate::job::job::{Job, Phase};
use crate::job::time::Time;
use crate::job::workers::table::{Launch, WorkerTable};

/// A pod, identified by its first launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PodId {
    first: LaunchId,
    last: LaunchId,
}

impl PodId {
    /// The pod of `launch`, where each pod has `workers_per_pod` launches. Launches are numbered
    /// from 1 on, those of a pod consecutively.
    pub(crate) fn of(launch: LaunchId, workers_per_pod: u32) -> Self {
        let per_pod = u64::from(workers_per_pod.max(1));
        let before = launch.0.saturating_sub(1) / per_pod * per_pod;
        let last = LaunchId(before.saturating_add(per_pod));
        Self { first: LaunchId(before.saturating_add(1)), last }
    }

    /// Its first launch, which names it.
    pub(crate) fn first(self) -> LaunchId {
        self.first
    }

    /// All of its launches.
    pub(crate) fn launches(self) -> RangeInclusive<LaunchId> {
        self.first..=self.last
    }
}

impl WorkerTable {
    /// The launches of this launch's pod, including itself; none if it has ended.
    pub(crate) fn pod(&self, launch: LaunchId) -> Vec<LaunchId> {
        self.launches.range(self.numbers(launch)).map(|(&id, _)| id).collect()
    }

    /// The ids of the launches of this launch's pod.
    fn numbers(&self, launch: LaunchId) -> RangeInclusive<LaunchId> {
        PodId::of(launch, self.workers_per_pod as u32).launches()
    }

    /// The first launch of each pod.
    pub(crate) fn pods(&self) -> impl Iterator<Item = LaunchId> + '_ {
        self.launches.keys().copied().filter(|id| self.is_first(*id))
    }

    /// Whether this is the first launch of its pod.
    pub(crate) fn is_first(&self, launch: LaunchId) -> bool {
        *self.numbers(launch).start() == launch
    }

    /// Whether `is` holds for any launch of this launch's pod.
    pub(crate) fn any_of_pod(&self, launch: LaunchId, is: impl Fn(&Launch) -> bool) -> bool {
        self.launches.range(self.numbers(launch)).any(|(_, l)| is(l))
    }

    /// Whether any worker of this launch's pod is connected.
    pub(crate) fn is_heard(&self, launch: LaunchId) -> bool {
        self.any_of_pod(launch, |l| l.worker.is_some_and(|id| self.connected.contains_key(&id)))
    }

    /// The connected workers of this launch's pod that have not been released.
    pub(crate) fn workers_of_pod(&self, launch: LaunchId) -> Vec<WorkerId> {
        let workers = self.pod(launch).into_iter().filter_map(|id| self.launches[&id].worker);
        workers.filter(|id| self.connected.get(id).is_some_and(|w| !w.released)).collect()
    }

    /// The user-visible name of a launch or its pod. A launch's worker has its number.
    pub(crate) fn name(&self, launch: LaunchId, has_worker: bool) -> String {
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
    /// Releases the workers of this launch's pod in order: members leave with the next membership;
    /// workers that are not members leave when no member of the pod remains.
    pub(crate) fn release_pod(&mut self, now: Time, launch: LaunchId, reason: &str) {
        let workers = self.workers.workers_of_pod(launch);
        let is_member = |id: &WorkerId| self.workers.connected[id].rank.is_some();
        if self.spec.work.trains() && workers.iter().any(is_member) {
            for id in workers {
                self.workers.connected.get_mut(&id).expect("it was just found").leaving = true;
            }
            return;
        }
        for id in workers {
            // The previous release may have released it too.
            if !self.workers.connected[&id].released {
                self.release(now, id, reason);
            }
        }
    }

    /// Releases the other workers of a worker's pod.
    pub(crate) fn release_rest_of_pod(&mut self, now: Time, launch: LaunchId) {
        // A group that is finishing its step needs all of its members.
        if self.spec.workers_per_pod > 1 && self.phase == Phase::Running {
            self.release_pod(now, launch, "another worker of its pod goes");
        }
    }

    /// Kills a released launch that has not ended in time.
    pub(crate) fn on_kill_due(&mut self, launch: LaunchId) {
        let others = self.workers.workers_of_pod(launch).into_iter().any(|id| id.0 != launch.0);
        if others && self.phase == Phase::Stopping {
            // The others finish, and write the last checkpoint.
            return;
        }
        self.kill(launch);
    }
}
