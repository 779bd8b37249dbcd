//! Workers that give up their state because replicas differ.
//!
//! The ranks decide that themselves, from headers that they share: the minority fails, or all do,
//! if no majority is equal. Then no state of the group is trusted, and the next group starts from
//! the newest checkpoint.
//!
//! **Invariant:** however many workers give up their states at once, that is one failure. Failures
//! without progress end the job.

use elasticdl_proto::WorkerId;

use crate::job::event::LaunchId;
use crate::job::job::Job;
use crate::job::lifecycle::removal::FAILED_GRACE;
use crate::job::text::clip;
use crate::job::time::Time;
use crate::job::workers::state::{Stage, Worker};
use crate::job::workers::table::launch_of;

impl Job {
    pub(crate) fn on_diverged(
        &mut self,
        now: Time,
        worker: WorkerId,
        error: &str,
        has_majority: bool,
    ) -> WorkersReplaced {
        self.out.mark_dirty();
        let was_released = self.workers.get(worker).is_some_and(Worker::is_released);
        let mut workers = u64::from(!was_released);
        self.count_exit(worker);
        if has_majority {
            self.avoid_node_of(now, worker);
            let what = "had another state or result than all others";
            self.note_fault_of_node(now, launch_of(worker), what);
        }
        // A failed worker ends by itself.
        self.forget_with_pod(now, worker, FAILED_GRACE);
        let known = self.lifecycle.note_divergence(self.data.step());
        match known {
            Some(again) => {
                let again = if again { AGAIN } else { "" };
                let what = format!("worker {worker} failed: {}{again}", clip(error));
                // Another worker may be the one at fault.
                self.count_failure(now, None, &what, &[]);
            }
            None => self.log_event(format!("worker {worker} gives up its state, too")),
        }
        if !has_majority && self.lifecycle.is_running() {
            workers += self.distrust_states(now);
        }
        self.reconcile(now);
        WorkersReplaced { workers, is_first: known.is_some() }
    }

    /// Replaces all workers that have the group's state, or a copy: some may not have learned that
    /// it cannot be trusted. Returns their number.
    fn distrust_states(&mut self, now: Time) -> u64 {
        let has_state = |w: &Worker| w.has_state() || w.stage() == Stage::Fetching;
        let connected = self.workers.select(|w| has_state(w) && !w.is_released());
        for &id in &connected {
            self.release(now, id, "replicas differ, and its state may be wrong");
        }
        let disconnected = self.workers.disconnected().filter(|(_, d)| d.holds_state);
        let disconnected: Vec<LaunchId> = disconnected.map(|(launch, _)| launch).collect();
        for &launch in &disconnected {
            self.forget_disconnected(launch);
            self.kill(launch);
        }
        self.launch_missing(now);
        (connected.len() + disconnected.len()) as u64
    }
}

/// What has followed from the report of a worker that gives up its state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkersReplaced {
    /// Number of workers that are replaced.
    pub(crate) workers: u64,
    /// Whether the report is the first one of this difference.
    pub(crate) is_first: bool,
}

/// What a difference shows that follows another one without progress.
const AGAIN: &str = "; replicas have differed before, without progress since, so the model is not \
                     deterministic: its methods must depend on their arguments alone";
