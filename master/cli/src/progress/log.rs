//! Progress as lines of a master's log.

use std::cell::Cell;

use elasticdl_master::job::Time;
use elasticdl_master::progress::Observer;
use elasticdl_proto::Status;

use super::line::ProgressLine;

/// Writes a job's progress to this process's log, at most every 5 seconds.
#[derive(Debug, Default)]
pub(crate) struct ProgressLog {
    /// Time of the newest line.
    last: Cell<Option<Time>>,
}

impl Observer for ProgressLog {
    /// The log has it.
    fn notice(&self, _: Time, _: String) {}

    fn show(&self, now: Time, status: &Status) {
        let line = ProgressLine::of(status);
        if line.is_due(now, self.last.get()) {
            self.last.set(Some(now));
            line.log();
        }
    }

    fn end(self: Box<Self>) {}
}
