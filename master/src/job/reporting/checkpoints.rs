//! Information about a job's checkpoints. The group schedules and writes them; nothing here
//! influences the job.
//!
//! **Invariant:** a checkpoint holds ledger and parameters of one step, so records are counted
//! exactly once whichever checkpoint a group starts from. The master learns the starting step from
//! the group's report.

use elasticdl_proto::WorkerId;
pub use elasticdl_proto::{CheckpointsSummary, RestoredCheckpoint, SavedCheckpoint};

use crate::job::action::ToWorker;
use crate::job::event::CheckpointNews;
use crate::job::job::{Job, Phase};
use crate::job::reporting::history::clip;

impl Job {
    /// The checkpoints, if the job writes or restores any.
    pub(crate) fn checkpoints(&self) -> Option<CheckpointsSummary> {
        let dir = self.spec.checkpoints.as_ref().map(|spec| spec.dir.clone());
        let known = dir.is_some() || self.spec.resume_from.is_some();
        known.then(|| CheckpointsSummary { dir, ..self.history.totals.checkpoints.clone() })
    }

    /// Handles the user's request for a checkpoint.
    pub(crate) fn on_checkpoint_requested(&mut self) {
        if self.phase != Phase::Running || self.spec.checkpoints.is_none() {
            return;
        }
        self.log_event("a checkpoint is asked for".into());
        self.checkpoint_requested = true;
        self.request_checkpoint();
    }

    /// Forwards the user's request to the lowest rank, which informs the others. Called again for
    /// each new group.
    pub(crate) fn request_checkpoint(&mut self) {
        if let Some(&first) = self.group.members.first().filter(|_| self.checkpoint_requested) {
            self.send(first, ToWorker::KeepCheckpoint);
        }
    }

    pub(crate) fn on_checkpoint_news(&mut self, worker: WorkerId, news: CheckpointNews) {
        let step = self.step;
        let known = &mut self.history.totals.checkpoints;
        let is_written =
            matches!(news, CheckpointNews::Saved { .. } | CheckpointNews::Failed { .. });
        let line = match news {
            CheckpointNews::Damaged { name, reason } => {
                known.damaged += 1;
                Some(format!("checkpoint {name} is damaged and passed over: {}", clip(&reason)))
            }
            CheckpointNews::Failed { step, error } => {
                known.failed += 1;
                let error = clip(&error).to_owned();
                known.error = Some(error.clone());
                Some(format!("worker {worker} can't write the checkpoint of step {step}: {error}"))
            }
            CheckpointNews::Restored { step: from, name } => {
                let lost_steps = step.saturating_sub(from);
                let again = match lost_steps {
                    0 => String::new(),
                    steps => format!("; {steps} steps are made again"),
                };
                self.group.restored = true;
                let line =
                    format!("the group begins at step {from}, from checkpoint {name}{again}");
                known.restored.push(RestoredCheckpoint { step: from, name, lost_steps });
                let surplus = known.restored.len().saturating_sub(RESTORED_MAX);
                known.restored.drain(..surplus);
                Some(line)
            }
            // Shown in the status only: there may be very many.
            CheckpointNews::Saved { step, name, bytes } => {
                known.saved += 1;
                known.error = None;
                known.newest = Some(SavedCheckpoint { step, name, bytes });
                None
            }
        };
        // Success or failure: the next one is written on schedule.
        self.checkpoint_requested &= !is_written;
        self.out.mark_dirty();
        line.into_iter().for_each(|line| self.log_event(line));
    }
}

const RESTORED_MAX: usize = 100;
