//! The handle to a job.

use std::time::Duration;

use elasticdl_master::job::{LaunchId, Scaling};
use elasticdl_master::kube::priority_tiers::Weight;
use elasticdl_master::lineage::JobFacts;
use elasticdl_proto::{Inspection, Status};

use crate::process::Failure;

/// A handle to a job, which may not exist: then each method fails.
pub(crate) trait JobHandle {
    /// Returns the job's status.
    fn status(&self) -> Result<Status, Failure>;

    /// The summary of the job as a table, if the job has ended.
    fn ended(&self) -> Result<Option<String>, Failure>;

    /// The last status of the job and its summary as JSON, if the job has ended.
    fn ended_json(&self) -> Result<Option<String>, Failure>;

    /// Shows the job until it ends. Returns the exit code.
    fn watch(&self, options: &WatchOptions) -> Result<u8, Failure>;

    /// Opens the dashboard of the running job: prints the link of the page that its master serves,
    /// or serves the page at `port` until the job ends. Returns the exit code.
    fn dashboard(&self, port: u16) -> Result<u8, Failure>;

    /// The dashboard of the job, which has ended, as an HTML file.
    fn report(&self) -> Result<String, Failure>;

    /// Asks the workers what they do. Takes some ten seconds at most.
    fn inspect(&self) -> Result<Inspection, Failure>;

    /// What is known of the job's records, and of its steps.
    fn facts(&self) -> Result<JobFacts, Failure>;

    /// Changes the number of workers to keep running, its limits, or the job's weight.
    fn scale(&self, change: Scaling, weight: Option<Weight>) -> Result<Scaled, Failure>;

    /// Requests a checkpoint and waits for it for at most `timeout`. Returns its location.
    fn checkpoint(&self, timeout: Duration) -> Result<String, Failure>;

    /// Suspends or resumes the job. Returns what was done, as text.
    fn set_suspended(&self, suspend: bool) -> Result<String, Failure>;

    /// Stops the job at the end of its step; with `force` without waiting for its workers. Returns
    /// what was done, as text.
    fn stop(&self, force: bool) -> Result<String, Failure>;

    /// Deletes the job. Returns what was done, as text.
    fn delete(&self) -> Result<String, Failure>;

    /// Passes a log to `write` until it returns false; with `follow`, until the writer of the log
    /// ends.
    fn logs(
        &self,
        log: JobLog,
        follow: bool,
        write: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<(), Failure>;
}

/// The number of workers of a job after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scaled {
    /// The number before.
    pub(crate) was: u32,
    /// The present number.
    pub(crate) now: u32,
    /// Its minimum and its maximum.
    pub(crate) limits: (u32, u32),
}

/// A log of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobLog {
    /// That of its master.
    Master,
    /// That of a worker.
    Worker(LaunchId),
    /// Those of all workers, with their numbers.
    Workers,
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

/// What a request to suspend or resume `job` does, as text.
pub(super) fn describe_suspension(job: &str, suspend: bool, unchanged: bool) -> String {
    match (suspend, unchanged) {
        (true, false) => format!("{job} is being suspended; its status says when it is"),
        (true, true) => format!("{job} is suspended already, or is being suspended"),
        (false, false) => format!("{job} is resumed"),
        (false, true) => format!("{job} is not suspended"),
    }
}

/// What a request to stop `job` does once it is over, as text.
pub(super) fn describe_ending(job: &str) -> String {
    format!("{job} is over, and waits for its programs to end; with --force they are ended at once")
}

/// The state of a job that is over and waits for its programs.
pub(super) const ENDING: &str = "ending";
