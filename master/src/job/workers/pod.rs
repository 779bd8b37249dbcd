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

use super::state::{Launch, LaunchState};
use super::table::{WorkerTable, launch_of, worker_of};
use crate::job::event::LaunchId;

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
    fn pod_of(&self, launch: LaunchId) -> PodId {
        PodId::of(launch, self.workers_per_pod)
    }

    /// The launches of this launch's pod, including itself; none if it has ended.
    pub(crate) fn pod(&self, launch: LaunchId) -> Vec<LaunchId> {
        self.launches.range(self.pod_of(launch).launches()).map(|(&id, _)| id).collect()
    }

    /// As [`WorkerTable::pod`].
    pub(crate) fn pod_mut(&mut self, launch: LaunchId) -> impl Iterator<Item = &mut Launch> {
        let launches = self.pod_of(launch).launches();
        self.launches.range_mut(launches).map(|(_, l)| l)
    }

    /// The first launch of each pod.
    pub(crate) fn pods(&self) -> impl Iterator<Item = LaunchId> + '_ {
        self.launches.keys().copied().filter(|&id| self.pod_of(id).first() == id)
    }

    /// Whether `is` holds for any launch of this launch's pod.
    pub(crate) fn any_of_pod(&self, launch: LaunchId, is: impl Fn(&Launch) -> bool) -> bool {
        self.launches.range(self.pod_of(launch).launches()).any(|(_, l)| is(l))
    }

    /// The first launch of each pod without a worker that is or was a member of a group, as far as
    /// this master knows.
    pub(crate) fn idle_pods(&self) -> Vec<LaunchId> {
        let may_have_worked = |launch: &Launch| match &launch.state {
            LaunchState::Starting => false,
            LaunchState::Connected(worker) => worker.is_member() || worker.joined().is_some(),
            LaunchState::Disconnected(d) | LaunchState::Unconfirmed(d) => {
                d.rank.is_some() || d.joined.is_some() || d.last_known.is_none()
            }
            LaunchState::Forgotten => true,
        };
        self.pods().filter(|&pod| !self.any_of_pod(pod, may_have_worked)).collect()
    }

    /// Whether any worker of this launch's pod is connected.
    pub(crate) fn is_heard(&self, launch: LaunchId) -> bool {
        self.any_of_pod(launch, |l| l.worker().is_some())
    }

    /// The connected workers of this launch's pod that have not been released.
    pub(crate) fn workers_of_pod(&self, launch: LaunchId) -> Vec<WorkerId> {
        let launches = self.launches.range(self.pod_of(launch).launches());
        let is_there = |l: &Launch| l.worker().is_some_and(|w| !w.is_released());
        launches.filter(|(_, l)| is_there(l)).map(|(&id, _)| worker_of(id)).collect()
    }

    /// The user-visible name of a worker, with its host if that is known.
    pub(crate) fn name_of(&self, worker: WorkerId) -> String {
        format!("worker {worker}{}", self.on_host(launch_of(worker)))
    }

    fn on_host(&self, launch: LaunchId) -> String {
        match self.get_launch(launch).map(|l| l.location().node.as_str()) {
            None | Some("") => String::new(),
            Some(node) => format!(" on {node}"),
        }
    }

    /// The user-visible name of a launch or its pod, with its host if that is known. A launch's
    /// worker has its number.
    pub(crate) fn name(&self, launch: LaunchId) -> String {
        let PodId { first: LaunchId(first), last: LaunchId(last) } = self.pod_of(launch);
        let host = self.on_host(launch);
        match first == last {
            true => format!("worker {first}{host}"),
            false => format!("the pod of workers {first} to {last}{host}"),
        }
    }
}
