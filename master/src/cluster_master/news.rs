//! Events about the Job for what an on-call engineer has to know of a job: its group has changed,
//! it waits, is suspended, or has ended. `kubectl describe job` shows them.

use elasticdl_proto::Generation;

use crate::job::{Cause, Snapshot, Status};
use crate::kube::events::EventRecorder;

/// What is recorded already.
#[derive(Debug, Default)]
pub(super) struct News {
    state: String,
    generation: Generation,
    /// Losses of the state since this master started.
    state_losses: u64,
}

impl News {
    /// All that `snapshot` says is recorded already.
    pub(super) fn known(Snapshot { status, counters, .. }: &Snapshot) -> Self {
        Self {
            state: status.state.clone().into_owned(),
            generation: status.generation,
            state_losses: counters.state_losses,
        }
    }

    /// Records what is new in `snapshot`.
    pub(super) fn record(&mut self, snapshot: &Snapshot, recorder: &EventRecorder) {
        for (reason, message) in self.take(&snapshot.status, snapshot.counters.state_losses) {
            recorder.record(reason, message);
        }
    }

    fn take(&mut self, status: &Status, state_losses: u64) -> Vec<(&'static str, String)> {
        let mut news = Vec::new();
        if state_losses > self.state_losses {
            self.state_losses = state_losses;
            let message = "all workers were lost, and no checkpoint had their state".to_owned();
            news.push(("StateLost", message));
        }
        let changes = status.memberships.iter().filter(|m| m.generation > self.generation);
        for change in changes {
            let reason = match change.cause {
                Cause::Hung | Cause::Lost => "WorkersLost",
                Cause::Join | Cause::Leave | Cause::Start => "MembershipChanged",
            };
            let mut message = format!(
                "generation {} from step {}: {} workers ({})",
                change.generation,
                change.at_step,
                change.world_size,
                change.cause.name()
            );
            for (what, workers) in change.workers() {
                if !workers.is_empty() {
                    let named = workers.iter().take(NAMED_MAX).map(ToString::to_string);
                    let named = named.collect::<Vec<_>>().join(", ");
                    let more = workers.len().saturating_sub(NAMED_MAX);
                    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                    message.push_str(&format!("; {what}: {named}{more}"));
                }
            }
            news.push((reason, message));
        }
        self.generation = status.generation.max(self.generation);
        if self.state != status.state {
            self.state = status.state.clone().into_owned();
            let reason = match &*self.state {
                "completed" => Some("JobCompleted"),
                "failed" | "refused" => Some("JobFailed"),
                "stopped" => Some("JobStopped"),
                "suspended" => Some("JobSuspended"),
                "waiting" => Some("JobWaits"),
                _ => None,
            };
            // What is logged later may be of something else.
            let has_cause = !matches!(&*self.state, "completed" | "suspended");
            let last = status.events.last().filter(|_| has_cause);
            let last = last.map(|line| format!(": {line}")).unwrap_or_default();
            let message = format!("the job is {} at step {}{last}", self.state, status.step);
            news.extend(reason.map(|reason| (reason, message)));
        }
        news
    }
}

/// Workers that one message names of each kind.
const NAMED_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use elasticdl_proto::WorkerId;

    use super::*;
    use crate::job::testing::spec;
    use crate::job::{Job, MembershipChange, Time};

    #[test]
    fn each_change_of_the_group_and_each_stop_is_told_once() {
        let mut status = Job::new(spec()).snapshot(Time::default()).status;
        let mut news = News::default();
        assert_eq!(news.take(&status, 0), []);
        let change = |generation, cause, lost: &[u64]| MembershipChange {
            generation: Generation(generation),
            cause,
            world_size: 3,
            at_step: 84,
            lost: lost.iter().copied().map(WorkerId).collect(),
            ..MembershipChange::default()
        };
        status.memberships = vec![change(1, Cause::Start, &[]), change(2, Cause::Lost, &[2, 5])];
        (status.generation, status.state) = (Generation(2), "running".into());
        let told = [
            ("MembershipChanged", "generation 1 from step 84: 3 workers (start)".to_owned()),
            ("WorkersLost", "generation 2 from step 84: 3 workers (lost); lost: 2, 5".to_owned()),
        ];
        assert_eq!(news.take(&status, 0), told);
        assert_eq!(news.take(&status, 0), []);
        (status.state, status.step) = ("suspended".into(), 90);
        status.events = vec!["worker 3 has left".into()];
        let told = "the job is suspended at step 90".to_owned();
        assert_eq!(news.take(&status, 0), [("JobSuspended", told)]);
        assert_eq!(news.take(&status, 0), []);
        (status.state, status.events) = ("waiting".into(), vec!["its data are missing".into()]);
        let told = "the job is waiting at step 90: its data are missing".to_owned();
        assert_eq!(news.take(&status, 0), [("JobWaits", told)]);
        assert_eq!(news.take(&status, 1)[0].0, "StateLost");
        assert_eq!(news.take(&status, 1), []);
    }
}
