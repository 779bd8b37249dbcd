//! Time limits of pods that can't start or don't end, and of explanations.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::{
    ActiveLaunch, END_WAIT, NOT_WANTED, PodAction, PodRef, PodTracker, UnexplainedDeletion,
};
use crate::backend_event::BackendEvent;
use crate::job::{Exit, LaunchId, ReclaimCause};
use crate::kube::events;
use crate::kube::verdict::{Cause, End, may_be_explained};

impl PodTracker {
    /// Time at which a [`PodEvent::Tick`](super::PodEvent::Tick) is due at the latest.
    pub(in crate::kube::pods) fn poll_timeout(&self) -> Option<Duration> {
        self.launches.values().filter_map(|launched| launched.kill_at).min()
    }

    pub(super) fn on_tick(&mut self) {
        self.kill_due();
        self.evict_stuck();
        self.evict_unresponsive();
        self.evict_unanswered();
        self.end_unexplained();
        self.investigate_deletions();
        self.ask_for_warnings();
    }

    /// Returns whether to wait for the cluster's explanation of this end.
    pub(super) fn awaits_explanation(&mut self, launch: LaunchId, pod: &Pod, end: &End) -> bool {
        let Some(launched) = self.launches.get_mut(&launch) else { return false };
        if !may_be_explained(pod, end) {
            launched.ending = None;
            return false;
        }
        let since = launched.ending.as_ref().map_or(self.now, |(since, ..)| *since);
        launched.ending = Some((since, Box::new(pod.clone()), end.clone()));
        true
    }

    /// Notes a deletion without a known reason. The scheduler of a server before 1.26 reports a
    /// preemption in an Event only, after the deletion.
    pub(super) fn note_unexplained(&mut self, launch: LaunchId, pod: &Pod) {
        let pod = PodRef::of(pod);
        self.unexplained.push(UnexplainedDeletion { launch, pod, seen: self.now });
    }

    /// Handles the scheduler's messages about deletions without a known reason.
    pub(super) fn on_explained(
        &mut self,
        due: Vec<UnexplainedDeletion>,
        preemptors: &BTreeMap<String, String>,
    ) {
        for UnexplainedDeletion { launch, pod, .. } in due {
            let Some(message) = preemptors.get(&pod.uid) else {
                self.record_event(Cause::Deleted, &pod.name, "it was deleted");
                continue;
            };
            let message = message
                .strip_prefix("Preempted ")
                .map_or_else(|| message.clone(), |preemptor| format!("preempted {preemptor}"));
            self.record_event(Cause::Preempted, &pod.name, &message);
            self.act(PodAction::Report(launch, BackendEvent::Explained(message.clone())));
            if let Some(launched) = self.launches.get_mut(&launch) {
                launched.preempted = Some(message);
            }
        }
    }

    /// Kills the launches that had their time to end by themselves.
    fn kill_due(&mut self) {
        let now = self.now;
        for launch in self.launches_that(|l| l.kill_at.is_some_and(|at| at <= now)) {
            self.kill(launch, NOT_WANTED);
        }
    }

    /// Deletes pods that have been unable to start for too long: a replacement may succeed on
    /// another node. Until a worker of the job has run, this counts as the job's failure;
    /// afterwards it is the cluster's, and the limit doubles with each attempt.
    fn evict_stuck(&mut self) {
        let limit = if self.has_run {
            STUCK_MAX.saturating_mul(1 << self.stuck.min(8)).min(STUCK_MAX_TRAINED)
        } else {
            STUCK_MAX
        };
        let now = self.now;
        let stuck = self.launches_that(|l| {
            l.stuck.as_ref().is_some_and(|(since, _)| now.saturating_sub(*since) >= limit)
        });
        self.stuck = self.stuck.saturating_add(u32::from(!stuck.is_empty()));
        for launch in stuck {
            let stuck = self.launches.get_mut(&launch).and_then(|launched| launched.stuck.take());
            let Some((_, why)) = stuck else { continue };
            if let Some(pod) = self.pod_of(launch) {
                let message = format!("worker pod {}: {why}", pod.name);
                self.act(PodAction::RecordEvent(events::reason_of_start_failure(&why), message));
                self.delete(pod);
            }
            let exit = if self.has_run {
                let detail = format!("it could not start in {} s: {why}", limit.as_secs());
                Exit::reclaimed(ReclaimCause::NotStarted, detail)
            } else {
                Exit::NotStarted(why)
            };
            self.ended(launch, exit);
        }
    }

    /// Ends launches whose pod still exists long after it was to be killed: their node does not
    /// answer.
    fn evict_unresponsive(&mut self) {
        let now = self.now;
        let lost = self.launches_that(|l| {
            l.terminating.as_ref().is_some_and(|(since, termination)| {
                now.saturating_sub(*since) >= termination.grace + GRACE_SLACK
            })
        });
        for launch in lost {
            let terminating = self.launches.get_mut(&launch).and_then(|l| l.terminating.take());
            let Some((_, termination)) = terminating else { continue };
            let state = if termination.ready { "reports that it runs" } else { "does not answer" };
            let message = format!(
                "it was to end in {} s, and its node {state}: {}",
                termination.grace.as_secs(),
                termination.end.detail
            );
            self.record_event(Cause::Lost, &self.factory.name(launch), &message);
            self.ended(launch, Exit::reclaimed(ReclaimCause::NodeLost, message));
        }
    }

    /// Ends launches whose end the cluster has not explained in time.
    fn end_unexplained(&mut self) {
        let now = self.now;
        let due = self.launches_that(|l| {
            l.ending.as_ref().is_some_and(|(since, ..)| now.saturating_sub(*since) >= END_WAIT)
        });
        for launch in due {
            let ending = self.launches.get_mut(&launch).and_then(|l| l.ending.take());
            if let Some((_, pod, end)) = ending {
                self.on_end(launch, &pod, end);
                self.retain(PodRef::of(&pod));
            }
        }
    }

    /// Asks why pods were deleted, once for all deletions that are due.
    fn investigate_deletions(&mut self) {
        let now = self.now;
        let (due, later) = std::mem::take(&mut self.unexplained)
            .into_iter()
            .partition::<Vec<_>, _>(|pod| now.saturating_sub(pod.seen) >= EVENT_DELAY);
        self.unexplained = later;
        if !due.is_empty() {
            self.act(PodAction::Investigate(due));
        }
    }

    pub(super) fn launches_that(&self, is_due: impl Fn(&ActiveLaunch) -> bool) -> Vec<LaunchId> {
        self.launches.iter().filter(|(_, l)| is_due(l)).map(|(&launch, _)| launch).collect()
    }
}

/// Time that the scheduler may take after a deletion to report it as a preemption.
pub(super) const EVENT_DELAY: Duration = Duration::from_secs(2);
/// Time that a node is given beyond a pod's grace period.
pub(super) const GRACE_SLACK: Duration = Duration::from_secs(15);
/// Time for which a pod may be unable to start.
pub(in crate::kube::pods) const STUCK_MAX: Duration = Duration::from_secs(20);
/// Upper limit of that time once a worker of the job has run: kubelets retry after five minutes at
/// the latest.
const STUCK_MAX_TRAINED: Duration = Duration::from_secs(320);
