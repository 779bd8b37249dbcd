//! Nodes that don't answer. A cluster takes most of a minute to notice the loss of a node, and
//! schedules pods to it meanwhile.
//!
//! * New pods prefer other nodes than one whose running worker was just given up.
//! * A pod that its node has not acknowledged, as kubelets do within a second or two, is given up
//!   after 30 s, and its launch is replaced.

use std::time::Duration;

use k8s_openapi::api::core::v1::{
    NodeSelectorRequirement, NodeSelectorTerm, Pod, PreferredSchedulingTerm,
};

use super::{PodAction, PodTracker};
use crate::job::{Exit, LaunchId, ReclaimCause};
use crate::kube::verdict::Cause;

impl PodTracker {
    /// Handles a pod that has a node and does not run yet.
    pub(super) fn on_starting(&mut self, launch: LaunchId, pod: &Pod) {
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        let has_answered = pod.status.as_ref().is_some_and(|status| {
            status.start_time.is_some() || status.container_statuses.is_some()
        });
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        launched.unanswered_since =
            (!has_answered).then(|| launched.unanswered_since.unwrap_or(self.now));
        launched.starting_since.get_or_insert(self.now);
        launched.node = node;
        self.report_starting(launch);
    }

    /// Makes new pods prefer other nodes than that of a launch.
    pub(super) fn avoid_node_of(&mut self, launch: LaunchId) {
        if let Some(node) = self.launches.get(&launch).and_then(|launched| launched.node.clone()) {
            self.avoid(node);
        }
    }

    /// Makes new pods prefer other nodes than `node`.
    pub(super) fn avoid(&mut self, node: String) {
        self.avoided_nodes.insert(node, self.now + AVOIDED_FOR);
    }

    /// Gives up the launches whose nodes have not acknowledged them in time.
    pub(super) fn evict_unanswered(&mut self) {
        let now = self.now;
        let is_due = |since: Duration| now.saturating_sub(since) >= UNANSWERED_MAX;
        for launch in self.launches_that(|l| l.unanswered_since.is_some_and(is_due)) {
            self.avoid_node_of(launch);
            let node = self.launches.get(&launch).and_then(|l| l.node.clone()).unwrap_or_default();
            let seconds = UNANSWERED_MAX.as_secs();
            let why = format!("its node {node} has not acknowledged it in {seconds} s");
            self.record_event(Cause::Lost, &self.factory.name(launch), &why);
            if let Some(pod) = self.pod_of(launch) {
                self.act(PodAction::Delete(pod));
            }
            self.ended(launch, Exit::reclaimed(ReclaimCause::NodeLost, why));
        }
    }

    /// Adds the preference for other nodes to a new pod.
    pub(super) fn prefer_other_nodes(&mut self, pod: &mut Pod) {
        let now = self.now;
        self.avoided_nodes.retain(|_, until| now < *until);
        if self.avoided_nodes.is_empty() {
            return;
        }
        let other = NodeSelectorRequirement {
            key: "kubernetes.io/hostname".into(),
            operator: "NotIn".into(),
            values: Some(self.avoided_nodes.keys().cloned().collect()),
        };
        let term = NodeSelectorTerm { match_expressions: Some(vec![other]), match_fields: None };
        let affinity = pod.spec.get_or_insert_default().affinity.get_or_insert_default();
        let of_nodes = affinity.node_affinity.get_or_insert_default();
        let preferred = &mut of_nodes.preferred_during_scheduling_ignored_during_execution;
        preferred
            .get_or_insert_default()
            .push(PreferredSchedulingTerm { preference: term, weight: 100 });
    }
}

/// Time that a node is given to acknowledge a pod.
pub(super) const UNANSWERED_MAX: Duration = Duration::from_secs(30);
/// Time after which a cluster has noticed the loss of a node.
const AVOIDED_FOR: Duration = Duration::from_secs(60);
