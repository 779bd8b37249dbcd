//! Time limits of pods that can't start or don't end.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{ActiveLaunch, PodController};
use crate::job::Exit;
use crate::kube::events;
use crate::kube::verdict::Cause;

impl PodController {
    /// Deletes pods that have been unable to start for too long: a replacement may succeed on
    /// another node. Until a worker of the job has run, this counts as the job's failure;
    /// afterwards it is the cluster's, and the limit doubles with each attempt.
    pub(super) fn evict_stuck(&mut self) {
        let has_run = self.has_run.load(Ordering::Relaxed);
        let limit = if has_run {
            STUCK_MAX.saturating_mul(1 << self.stuck.min(8)).min(STUCK_MAX_TRAINED)
        } else {
            STUCK_MAX
        };
        let is_stuck = |l: &ActiveLaunch| {
            l.stuck.as_ref().filter(|(since, _)| since.elapsed() >= limit).cloned()
        };
        let stuck: Vec<_> =
            self.launches.iter().filter_map(|(&id, l)| Some((id, is_stuck(l)?.1))).collect();
        self.stuck = self.stuck.saturating_add(u32::from(!stuck.is_empty()));
        for (launch, why) in stuck {
            let pod = self.launches.get(&launch).and_then(|launched| launched.pod.clone());
            if let Some((uid, _)) = pod {
                let name = self.name_of_launch(launch);
                self.recorder.record(
                    events::reason_of_start_failure(&why),
                    format!("worker pod {name}: {why}"),
                );
                self.delete(name, uid);
            }
            let exit = if has_run {
                Exit::Reclaimed(format!("it could not start in {} s: {why}", limit.as_secs()))
            } else {
                Exit::NotStarted(why)
            };
            self.ended(launch, exit);
        }
    }

    /// Ends launches whose pod still exists long after it was to be killed: their node does not
    /// answer.
    pub(super) fn evict_unresponsive(&mut self) {
        let is_lost = |l: &ActiveLaunch| {
            l.terminating
                .as_ref()
                .filter(|(since, termination)| since.elapsed() >= termination.grace + GRACE_SLACK)
                .cloned()
        };
        let lost: Vec<_> =
            self.launches.iter().filter_map(|(&id, l)| Some((id, is_lost(l)?.1))).collect();
        for (launch, termination) in lost {
            let state = if termination.ready { "reports that it runs" } else { "does not answer" };
            let message = format!(
                "it was to end in {} s, and its node {state}: {}",
                termination.grace.as_secs(),
                termination.end.detail
            );
            self.record_event(Cause::Lost, &self.name_of_launch(launch), &message);
            self.ended(launch, Exit::Reclaimed(message));
        }
    }
}

/// Time that a node is given beyond a pod's grace period.
const GRACE_SLACK: Duration = Duration::from_secs(15);
/// Time for which a pod may be unable to start.
pub(super) const STUCK_MAX: Duration = Duration::from_secs(20);
/// Upper limit of that time once a worker of the job has run: kubelets retry after five minutes at
/// the latest.
const STUCK_MAX_TRAINED: Duration = Duration::from_secs(320);
