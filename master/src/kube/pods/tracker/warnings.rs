//! Why pods that have a node do not start. Kubelets and the attach controller say only in Events
//! that a volume can't be mounted or a sandbox can't be created, and repeat the attempt for ever.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{PodAction, PodTracker};
use crate::backend_event::BackendEvent;
use crate::job::{LaunchId, Wait};
use crate::kube::events::PodWarning;

impl PodTracker {
    /// Asks for the cluster's warnings about some of the pods that have not started for a while.
    pub(super) fn ask_for_warnings(&mut self) {
        let now = self.now;
        if now < self.warnings_due {
            return;
        }
        let is_late = |since: Duration| now.saturating_sub(since) >= WARNED_AFTER;
        let mut late = self.launches_that(|l| {
            l.unanswered_since.is_none() && l.starting_since.is_some_and(is_late)
        });
        late.truncate(ASKED_MAX);
        let uids: Vec<String> =
            late.into_iter().filter_map(|launch| self.pod_of(launch)).map(|pod| pod.uid).collect();
        if !uids.is_empty() {
            self.warnings_due = now + WARNINGS_INTERVAL;
            self.act(PodAction::ReadWarnings(uids));
        }
    }

    /// Handles the answer for these pods: their newest warnings, by uid.
    pub(super) fn on_warned(
        &mut self,
        asked: &[String],
        warnings: &mut BTreeMap<String, PodWarning>,
    ) {
        for launch in self.launches_that(|l| l.starting_since.is_some()) {
            let Some(pod) = self.pod_of(launch).filter(|pod| asked.contains(&pod.uid)) else {
                continue;
            };
            let Some(launched) = self.launches.get_mut(&launch) else { continue };
            let found = warnings.remove(&pod.uid);
            // Texts of one reason differ in numbers and times, which are no news.
            let reason = |warning: &Option<PodWarning>| warning.as_ref().map(|w| w.reason.clone());
            if reason(&found) != reason(&launched.warning) {
                launched.warning = found;
                self.report_starting(launch);
            }
        }
    }

    /// Reports what a pod that has a node waits for.
    pub(super) fn report_starting(&mut self, launch: LaunchId) {
        let Some(launched) = self.launches.get(&launch) else { return };
        let why = launched.node.as_ref().map(|node| match &launched.warning {
            Some(PodWarning { reason, message }) => format!("node {node}: {reason}: {message}"),
            None if launched.unanswered_since.is_some() => {
                format!("node {node} has not acknowledged it yet")
            }
            None => format!("node {node} pulls its image or prepares its volumes"),
        });
        self.report(launch, BackendEvent::Waiting(Wait::Start(why)));
    }
}

/// Number of pods that are asked for at once: most have the same trouble.
const ASKED_MAX: usize = 4;
/// Time that a start usually takes.
const WARNED_AFTER: Duration = Duration::from_secs(10);
const WARNINGS_INTERVAL: Duration = Duration::from_secs(20);
