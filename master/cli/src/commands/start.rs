//! Starts the job of `train`, `evaluate` or `predict`.

mod background;
mod cluster_job;
mod declared;
mod dry_run;
mod local_job;
mod local_master;
mod outputs;
mod replay;
mod request;

use std::path::Path;

pub(super) use declared::{DeclareArgs, declare};
pub(super) use local_job::find_program;
pub(super) use replay::replay;
pub(super) use request::{StartRequest, WorkOptions};

use crate::args::{JobOptions, OutputOptions};
use crate::process::Failure;

/// Starts a job and shows it until it ends, unless the options ask for less. Returns the exit code.
pub(super) fn start(request: StartRequest) -> Result<u8, Failure> {
    if let Some(image) = request.job.image.clone() {
        return cluster_job::start(&request, &image);
    }
    if request.job.dry_run {
        return dry_run::show(request);
    }
    // The process in the background reads the same file of options.
    if request.job.detach && !background::is_background() {
        return background::start(request);
    }
    background::leave_terminal()?;
    local_master::start(request)
}

/// Like [`start`], for the job of a local master that has died.
pub(super) fn resume(
    job: &Path,
    options: &JobOptions,
    output: &OutputOptions,
) -> Result<u8, Failure> {
    if options.detach && !background::is_background() {
        return background::resume(job, output.quiet);
    }
    background::leave_terminal()?;
    local_master::resume(job, output.console())
}
