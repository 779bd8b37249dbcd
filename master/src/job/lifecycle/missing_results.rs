//! Results that a stopped job does not have, an evaluation or an export: an event says which, and
//! how the user gets them.

use elasticdl_proto::Work;

use crate::job::job::Job;

impl Job {
    /// Says that the final model of a job that was stopped at `step` is not evaluated: that may
    /// take longer than a stop may.
    pub(super) fn log_unevaluated(&mut self, step: u64) {
        let Some(spec) = &self.spec.validation else { return };
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

    /// Says that no worker exports the model of a job that is stopped without its group.
    pub(super) fn log_unexported(&mut self) {
        let Work::Train { export: Some(export) } = &self.spec.work else { return };
        let checkpoints = self.spec.checkpoints.as_ref().map(|spec| &spec.dir);
        let remedy = match (checkpoints, self.reporting.newest_checkpoint()) {
            (Some(dir), Some(newest)) => format!(
                "the model of step {} is in a checkpoint: elasticdl convert {}/{} {export} -- \
                 PROGRAM",
                newest.step,
                dir.trim_end_matches('/'),
                newest.name
            ),
            _ => "there is no checkpoint".into(),
        };
        self.log_event(format!("{export} is not written, as no worker has the state; {remedy}"));
    }
}
