//! What users request of a running job, whether by a command or by a signal.

use super::Master;
use crate::job::{Event, Scaling};

impl Master {
    /// Requests a checkpoint from the group. Returns the newest committed step.
    pub(super) fn checkpoint(&mut self) -> Result<u64, String> {
        if self.job.spec().options.checkpoints.is_none() {
            return Err(
                "this job writes no checkpoints: it was started without --checkpoint-dir".into()
            );
        }
        if self.job.is_suspended() {
            let why = match (self.job.step(), self.job.is_suspending()) {
                (0, _) => "is suspended, and has not trained yet: there is no state to store",
                (_, true) => "is being suspended: its workers end with a checkpoint",
                (_, false) => "is suspended: its state is in its newest checkpoint",
            };
            return Err(format!("this job {why}"));
        }
        if self.job.is_ending() {
            return Err("the job is ending: its last checkpoint is the newest one".into());
        }
        self.job.handle(self.now(), Event::Checkpoint);
        Ok(self.job.step())
    }

    /// What users have changed of the number of workers, and of its limits.
    pub(crate) fn requested(&self) -> Scaling {
        self.job.requested()
    }

    /// Changes the desired number of workers, or its limits, as something keeps requesting it: a
    /// number that was refused is tried again with new limits.
    pub(super) fn scale_as_requested(&mut self, change: Scaling) -> Result<u32, String> {
        let again = change.or(Scaling { num_workers: self.refused_number, ..Scaling::default() });
        let done = self.scale(again);
        self.refused_number = again.num_workers.filter(|_| done.is_err());
        if again == change { done } else { done.or_else(|_| self.scale(change)) }
    }

    /// Changes the desired number of workers, or its limits. Returns the previous number.
    pub(super) fn scale(&mut self, change: Scaling) -> Result<u32, String> {
        let now = self.now();
        if self.job.is_ending() {
            return Err(Scaling::ENDING.into());
        }
        let was = self.job.status(now).workers_desired;
        self.job.spec().scaled(was, change)?;
        self.job.handle(now, Event::Scale(change));
        self.backend.set_core(self.job.spec().min_workers);
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

    /// Stops the job at the end of the step. `is_typed`: by Ctrl-C, which can be repeated.
    pub(super) fn stop(&mut self, is_typed: bool) {
        let at_once = match is_typed {
            true => "Ctrl-C after 2 s",
            false => "`elasticdl stop --force`",
        };
        let spec = self.job.spec();
        let text = match self.job.unsaved_model() {
            _ if self.job.awaits_ends() => {
                format!("the job is over, and waits for its programs to end; {at_once} ends them")
            }
            // Such a stop ends the waits of the workers.
            Some(step) if spec.exports() => format!(
                "the model of step {step} is not saved yet: the job tries once more, and then \
                 ends; {at_once} ends it at once"
            ),
            Some(step) if spec.options.checkpoints.is_some() => format!(
                "the checkpoint of step {step}, the last one, is not written yet: the job waits \
                 for up to {} s, and then ends; {at_once} ends it at once",
                self.job.stop_wait().as_secs()
            ),
            _ => format!("the job stops at the end of the step; {at_once} ends it at once"),
        };
        self.log(text);
        self.job.handle(self.now(), Event::Stop);
    }

    /// Shows why a request was refused.
    pub(super) fn notice_refusal(&self, done: Result<(), String>) {
        if let Err(reason) = done {
            self.log(reason);
        }
    }
}
