//! The pods of the cluster, as the API server reports them: who they belong to, and whether they
//! run.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use k8s_openapi::api::core::v1::Pod;

/// Pods by uid, and what became of the jobs.
#[derive(Debug, Default)]
pub(crate) struct Observed {
    pods: BTreeMap<String, Seen>,
    /// When so many workers of a job ran for the first time, by job: the first, the second, …
    first_runs: BTreeMap<String, Vec<Instant>>,
    /// Worker pods that were deleted while they ran.
    pub(crate) workers_taken: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    namespace: String,
    owner: Owner,
    stage: Stage,
}

/// What a pod belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The master of a job.
    Master(String),
    Placeholder,
    Service,
    /// The workers of a job.
    Worker(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// It has ended, or is being deleted.
    Ending,
    /// It has no node.
    Pending,
    Running,
    /// It has a node, and does not run yet.
    Starting,
}

/// Numbers of pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) running: usize,
    pub(crate) pending: usize,
}

impl Observed {
    /// A pod is new, or has changed.
    pub(crate) fn apply(&mut self, pod: &Pod, now: Instant) {
        let Some(uid) = pod.metadata.uid.clone() else { return };
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let seen = Seen { namespace, owner: owner_of(pod), stage: stage_of(pod) };
        let before = self.pods.insert(uid, seen.clone()).map(|seen| seen.stage);
        let Owner::Worker(job) = seen.owner else { return };
        match (before, seen.stage) {
            (Some(Stage::Running), Stage::Ending) => self.workers_taken += 1,
            (_, Stage::Running) => {
                let running = self.workers(&job).running;
                let runs = self.first_runs.entry(job).or_default();
                if runs.len() < running {
                    runs.push(now);
                }
            }
            _ => {}
        }
    }

    /// A pod is deleted.
    pub(crate) fn remove(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Only these pods exist.
    pub(crate) fn retain(&mut self, uids: &BTreeSet<String>) {
        self.pods.retain(|uid, _| uids.contains(uid));
    }

    /// When `count` workers of a job ran for the first time; from 1.
    pub(crate) fn ran_at(&self, job: &str, count: usize) -> Option<Instant> {
        self.first_runs.get(job)?.get(count - 1).copied()
    }

    pub(crate) fn workers(&self, job: &str) -> Counts {
        self.count(|seen| matches!(&seen.owner, Owner::Worker(of) if of == job))
    }

    pub(crate) fn service(&self) -> Counts {
        self.count(|seen| seen.owner == Owner::Service)
    }

    /// Number of pods of a namespace, in any stage.
    pub(crate) fn pods_of(&self, namespace: &str) -> usize {
        self.pods.values().filter(|seen| seen.namespace == namespace).count()
    }

    fn count(&self, is_counted: impl Fn(&Seen) -> bool) -> Counts {
        let mut counts = Counts::default();
        for seen in self.pods.values().filter(|seen| is_counted(seen)) {
            counts.running += usize::from(seen.stage == Stage::Running);
            counts.pending += usize::from(seen.stage == Stage::Pending);
        }
        counts
    }
}

pub(crate) fn owner_of(pod: &Pod) -> Owner {
    let label = |name: &str| pod.metadata.labels.as_ref()?.get(name).cloned();
    let job = || label("elasticdl/job").unwrap_or_default();
    match label("elasticdl/role").as_deref() {
        Some("master") => Owner::Master(job()),
        Some("worker") => Owner::Worker(job()),
        _ if label(SERVICE_LABEL).is_some() => Owner::Service,
        _ => Owner::Placeholder,
    }
}

pub(crate) fn stage_of(pod: &Pod) -> Stage {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let has_node = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    match phase {
        _ if pod.metadata.deletion_timestamp.is_some() => Stage::Ending,
        Some("Failed" | "Succeeded") => Stage::Ending,
        Some("Running") => Stage::Running,
        _ if has_node => Stage::Starting,
        _ => Stage::Pending,
    }
}

/// Label of the service's pods.
pub(crate) const SERVICE_LABEL: &str = "elasticdl-tests/service";
