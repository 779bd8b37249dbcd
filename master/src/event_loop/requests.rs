//! What users request of a running job, whether by a command or by a signal.

use super::Master;
use crate::job::Event;
use crate::worker_backend::WorkerBackend;

impl Master {
    /// Requests a checkpoint from the group. Returns the newest committed step.
    pub(super) fn checkpoint(&mut self) -> Result<u64, String> {
        if self.job.spec().checkpoints.is_none() {
            return Err(
                "this job writes no checkpoints: it was started without --checkpoint-dir".into()
            );
        }
        if self.job.is_suspended() {
            return Err("this job is suspended: its state is in its newest checkpoint".into());
        }
        if self.job.is_ending() {
            return Err("the job is ending: its last checkpoint is the newest one".into());
        }
        self.job.handle(self.now(), Event::Checkpoint);
        Ok(self.job.step())
    }

    /// Changes the desired number of workers. Returns the previous number.
    pub(super) fn scale(&mut self, num_workers: u32) -> Result<u32, String> {
        self.job.spec().check_scale(num_workers)?;
        let now = self.now();
        let was = self.job.status(now).workers_desired;
        self.job.handle(now, Event::Scale { num_workers });
        Ok(was)
    }

    /// Suspends or resumes the job. Returns whether that was so already.
    pub(super) fn set_suspended(&mut self, suspend: bool) -> Result<bool, String> {
        let unchanged = self.job.is_suspended() == suspend;
        match self.job.obstacle_to_suspension() {
            Some(why) if suspend && !unchanged => return Err(why.into()),
            _ => {}
        }
        self.job.handle(self.now(), if suspend { Event::Suspend } else { Event::Resume });
        Ok(unchanged)
    }

    /// Stops the job at the end of the step.
    pub(super) fn stop(&mut self) {
        let text = match (self.job.unsaved_model(), &self.backend) {
            (_, WorkerBackend::Processes(_)) if self.job.awaits_ends() => {
                "the job is over, and waits for its programs to end; Ctrl-C after 2 s ends them at \
                 once"
                    .into()
            }
            (_, WorkerBackend::Pods(_)) if self.job.awaits_ends() => {
                "the job is over, and waits for its programs to end".into()
            }
            // Such a stop ends the waits of the workers.
            (Some(step), _) => format!(
                "the model of step {step} is not saved yet: the job tries once more, and then ends"
            ),
            (None, WorkerBackend::Processes(_)) => {
                "the job stops at the end of the step; Ctrl-C after 2 s ends it at once".into()
            }
            (None, WorkerBackend::Pods(_)) => "the job stops at the end of the step".into(),
        };
        self.progress.notice(self.now(), text);
        self.job.handle(self.now(), Event::Stop);
    }

    /// Shows why a request was refused.
    pub(super) fn notice_refusal(&self, done: Result<(), String>) {
        if let Err(reason) = done {
            self.progress.notice(self.now(), reason);
        }
    }
}
