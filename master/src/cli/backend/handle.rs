//! The handle to a job.

use std::time::Duration;

use elasticdl_proto::Status;

use crate::cli::process::Failure;
use crate::job::LaunchId;

/// A handle to a job, which may not exist: then each method fails.
pub(crate) trait JobHandle {
    /// Returns the job's status.
    fn status(&self) -> Result<Status, Failure>;

    /// Shows the job until it ends. Returns the exit code.
    fn watch(&self, options: &WatchOptions) -> Result<u8, Failure>;

    /// Changes the number of workers to keep running. Returns the former one.
    fn scale(&self, num_workers: u32) -> Result<u32, Failure>;

    /// Requests a checkpoint and waits for it for at most `timeout`. Returns its location.
    fn checkpoint(&self, timeout: Duration) -> Result<String, Failure>;

    /// Stops the job at the end of its step. Returns what was done, as text.
    fn stop(&self) -> Result<String, Failure>;

    /// Deletes the job. Returns what was done, as text.
    fn delete(&self) -> Result<String, Failure>;

    /// Passes the log of the worker of `launch`, or of the master, to `write` until it returns
    /// false; with `follow`, until the writer of the log ends.
    fn logs(
        &self,
        launch: Option<LaunchId>,
        follow: bool,
        write: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<(), Failure>;
}

/// How [`JobHandle::watch`] shows a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WatchOptions {
    /// Interval between two statuses.
    pub(crate) interval: Duration,
    /// Longest wait for the next master.
    pub(crate) master_timeout: Duration,
    /// Whether statuses are printed as JSON.
    pub(crate) json: bool,
}
