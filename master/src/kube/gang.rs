//! Schedulers that place several pods together, and queue them. Pure.
//!
//! Such schedulers know groups of a fixed size, while a job grows and shrinks. So the *core* of a
//! job, the pods of its minimum number of workers, is one gang; further pods are placed, preempted
//! and replaced one by one.
//!
//! | scheduler | the core | further pods |
//! |---|---|---|
//! | Volcano | `minMember` of a PodGroup, not preemptable | members of the same PodGroup above `minMember`, preemptable |
//! | Kueue | a pod group, which is one Workload | a Workload each, so that preemption takes single pods |
//! | Kubernetes (`native`) | a PodGroup of `scheduling.k8s.io` | no group |
//!
//! A gang has a name of its own, which no later gang gets: a group whose pods have all ended is
//! over for its scheduler.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::options::Resources;
use crate::job::LaunchId;

/// How the pods of a job are placed together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GangOptions {
    /// The scheduler.
    pub scheduler: GangScheduler,
    /// Its queue.
    pub queue: Option<String>,
    /// Version of the API that has the PodGroups; empty for Kueue, which has none.
    pub version: String,
    /// Number of pods of the core.
    pub core_pods: u32,
    /// Resources that the core requests.
    pub core_resources: BTreeMap<String, String>,
    /// Priority class of the core.
    pub priority_class: Option<String>,
}

/// A scheduler that places several pods together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GangScheduler {
    /// Kueue admits pods; the cluster's scheduler places them.
    Kueue,
    /// The scheduler of Kubernetes, from 1.36 on.
    Native,
    /// Volcano.
    Volcano,
}

/// The kind of a scheduler's PodGroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupApi {
    /// API group.
    pub group: &'static str,
    /// The versions that this release knows, the newest first.
    pub versions: &'static [&'static str],
}

impl GangScheduler {
    /// The API of its PodGroups. `None`: it has none.
    pub(crate) fn group_api(self) -> Option<GroupApi> {
        let (group, versions): (_, &[&str]) = match self {
            Self::Kueue => return None,
            Self::Native => ("scheduling.k8s.io", &["v1beta1", "v1alpha3", "v1alpha2"]),
            Self::Volcano => ("scheduling.volcano.sh", &["v1beta1"]),
        };
        Some(GroupApi { group, versions })
    }

    /// Whether it has queues that jobs name.
    #[must_use]
    pub fn has_queues(self) -> bool {
        matches!(self, Self::Kueue | Self::Volcano)
    }

    /// As users write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kueue => "kueue",
            Self::Native => "native",
            Self::Volcano => "volcano",
        }
    }

    /// `schedulerName` of its pods. `None`: that of the cluster.
    pub(crate) fn scheduler_name(self) -> Option<&'static str> {
        (self == Self::Volcano).then_some("volcano")
    }

    /// Permissions that a master needs for its PodGroups: API group, resource, verbs.
    #[must_use]
    pub fn master_rule(self) -> Option<(&'static str, &'static str, &'static [&'static str])> {
        self.group_api().map(|GroupApi { group, .. }| (group, POD_GROUPS, GROUP_VERBS))
    }
}

impl GangOptions {
    /// Options for a core of `core_pods`, each with these resources.
    #[must_use]
    pub fn new(
        scheduler: GangScheduler,
        queue: Option<String>,
        core_pods: u32,
        resources: &Resources,
        priority_class: Option<String>,
    ) -> Self {
        let of_core = |(name, amount): (&String, &String)| (name.clone(), times(amount, core_pods));
        let is_request = |(name, _): &(&String, &String)| !name.starts_with(super::options::LIMITS);
        let version = scheduler.group_api().map_or("", |api| api.versions[0]);
        Self {
            scheduler,
            queue,
            version: version.into(),
            core_pods,
            core_resources: resources.iter().filter(is_request).map(of_core).collect(),
            priority_class,
        }
    }

    /// Whether a pod of the core, or another one, belongs to a gang.
    pub(crate) fn has_gang(&self, is_core: bool) -> bool {
        match self.scheduler {
            GangScheduler::Volcano => true,
            // A pod by itself needs no other.
            _ => is_core && self.core_pods > 1,
        }
    }

    /// The number of pods that a gang never exceeds; `None`: any number. Kueue deletes excess pods,
    /// and counts a pod until it has failed or its object is gone.
    pub(crate) fn gang_pods_max(&self) -> Option<u32> {
        (self.scheduler == GangScheduler::Kueue).then_some(self.core_pods)
    }

    /// Marks what all pods of a job have in common.
    pub(crate) fn mark_template(&self, metadata: &mut ObjectMeta) {
        if let (GangScheduler::Kueue, Some(queue)) = (self.scheduler, &self.queue) {
            let labels = metadata.labels.get_or_insert_default();
            labels.insert("kueue.x-k8s.io/queue-name".into(), queue.clone());
        }
    }

    /// Makes a pod a member of `gang`, or of none.
    pub(crate) fn mark(&self, pod: &mut Pod, gang: Option<&str>, is_core: bool) {
        let labels = pod.metadata.labels.get_or_insert_default();
        let annotations = pod.metadata.annotations.get_or_insert_default();
        let mut label = |key: &str, value: &str| labels.insert(key.into(), value.into());
        if let Some(gang) = gang {
            label(GANG_LABEL, gang);
        }
        match (self.scheduler, gang) {
            (GangScheduler::Kueue, Some(gang)) => {
                label("kueue.x-k8s.io/pod-group-name", gang);
                let count = self.core_pods.to_string();
                annotations.insert("kueue.x-k8s.io/pod-group-total-count".into(), count);
            }
            (GangScheduler::Volcano, Some(gang)) => {
                annotations.insert("scheduling.k8s.io/group-name".into(), gang.into());
                annotations.insert("volcano.sh/preemptable".into(), (!is_core).to_string());
            }
            // The pod's specification names the group: see `pod_to_json`.
            (GangScheduler::Native, _) | (_, None) => {}
        }
        if annotations.is_empty() {
            pod.metadata.annotations = None;
        }
    }

    /// A pod as JSON, with the fields that older servers do not know.
    ///
    /// # Panics
    /// Never: a pod's keys are strings.
    pub(crate) fn pod_to_json(&self, pod: &Pod) -> Value {
        let mut json = serde_json::to_value(pod).expect("a pod's keys are strings");
        if let (GangScheduler::Native, Some(gang)) = (self.scheduler, gang_of(pod)) {
            json["spec"]["schedulingGroup"] = json!({"podGroupName": gang});
        }
        json
    }
}

/// The gang of a pod.
pub(crate) fn gang_of(pod: &Pod) -> Option<&str> {
    pod.metadata.labels.as_ref()?.get(GANG_LABEL).map(String::as_str)
}

/// The name of the gang whose first pod is that of `launch`. It has at most 62 characters.
pub(crate) fn gang_name(job: &str, launch: LaunchId) -> String {
    format!("{job}-g{}", launch.0)
}

/// A quantity, `count` times.
fn times(quantity: &str, count: u32) -> String {
    let end = quantity.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(quantity.len());
    let (number, unit) = quantity.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: u128 = format!("{whole}{fraction}").parse().unwrap_or_default();
    let product = digits.saturating_mul(count.into()).to_string();
    // At least one digit stands before the point.
    let padded = format!("{product:0>width$}", width = fraction.len() + 1);
    let (whole, fraction) = padded.split_at(padded.len() - fraction.len());
    let fraction = fraction.trim_end_matches('0');
    let point = if fraction.is_empty() { "" } else { "." };
    format!("{whole}{point}{fraction}{unit}")
}

/// Label of a pod: its gang.
pub(crate) const GANG_LABEL: &str = "elasticdl/gang";
/// Resource of PodGroups, in all APIs that have them.
pub(crate) const POD_GROUPS: &str = "podgroups";
const GROUP_VERBS: &[&str] = &["create", "delete"];

#[cfg(test)]
mod tests;
