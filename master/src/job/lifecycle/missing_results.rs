//! Results that a job does not have at its end, an evaluation, an export or a checkpoint: an event
//! says which, and how the user gets them.

use elasticdl_proto::Work;

use crate::job::job::Job;
use crate::job::text::clip;

impl Job {
    /// Says that the final model of a job that was stopped at `step` is not evaluated: that may
    /// take longer than a stop may.
    pub(super) fn log_unevaluated(&mut self, step: u64) {
        let Some(spec) = &self.spec.options.validation else { return };
        let last = self.reporting.last_evaluated();
        if last >= step {
            return;
        }
        let known = match (last, &spec.export_best) {
            (0, Some(best)) => format!("none was evaluated before, so {best} is not written"),
            (0, None) => "none was evaluated before".into(),
            (last, Some(best)) => {
                format!("the last evaluation was that of step {last}, and {best} is as it was then")
            }
            (last, None) => format!("the last evaluation was that of step {last}"),
        };
        self.log_event(format!("the model of step {step}, at the stop, is not evaluated: {known}"));
    }

    /// Notes why the last steps of a job that ends are in no checkpoint, if they are in none.
    pub(super) fn note_unsaved(&mut self, why: String) {
        if self.checkpoints().is_some_and(|known| known.unsaved(self.data.step()).is_some()) {
            self.reporting.explain_unsaved(why);
        }
    }

    /// Why the model of a job that has trained all it should is in no file: it is not exported, and
    /// the last checkpoint in the user's folder could not be written.
    pub(super) fn unwritten_model(&self) -> Option<String> {
        let spec = self.spec.options.checkpoints.as_ref().filter(|spec| !spec.exclusive)?;
        let known = self.checkpoints().filter(|_| !self.spec.exports())?;
        let (_, last) = known.unsaved(self.data.step())?;
        // Of one that had failed before, a later one may have been written unnoticed.
        self.reporting.unwritten_checkpoint.filter(|&step| step >= last)?;
        let error = clip(known.error.as_ref()?).to_owned();
        Some(format!("no checkpoint in {} has the model of step {last}: {error}", spec.dir))
    }

    /// Says which steps of a job that has ended are in no checkpoint, and where it can be resumed.
    pub(super) fn log_unsaved(&mut self) {
        let Some(known) = self.checkpoints() else { return };
        let Some((first, last)) = known.unsaved(self.data.step()) else { return };
        let why = known.error.as_ref().map(|error| format!(" ({})", clip(error)));
        let from = match known.newest_address() {
            Some(newest) => format!("the job can be resumed from {newest}"),
            None => "there is none to resume from".into(),
        };
        let why = why.unwrap_or_default();
        self.log_event(format!("steps {first} to {last} are in no checkpoint{why}; {from}"));
    }

    /// Says that no worker exports the model of a job that is stopped without its group.
    pub(super) fn log_unexported(&mut self) {
        let Work::Train { export: Some(export) } = &self.spec.options.work else { return };
        let newest = self.checkpoints().and_then(|known| known.newest_address());
        let remedy = match (newest, self.reporting.newest_checkpoint()) {
            (Some(address), Some(newest)) => format!(
                "the model of step {} is in a checkpoint: elasticdl convert {address} {export} -- \
                 PROGRAM",
                newest.step
            ),
            _ => "there is no checkpoint".into(),
        };
        let why = match self.may_hold_state() {
            true => "the job has ended before its export was complete",
            false => "no worker has the state",
        };
        self.log_event(format!("{export} is not written by this job: {why}; {remedy}"));
    }
}
