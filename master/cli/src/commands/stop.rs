//! `elasticdl stop`.

use std::path::PathBuf;

use clap::Args;

use crate::args::ClusterTarget;
use crate::backend;
use crate::process::{Failure, print};

/// Arguments of `elasticdl stop`.
#[derive(Args, Debug)]
pub(crate) struct StopArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,

    /// Do not wait for the end of the step, or for workers that have lost the master: training
    /// since the last checkpoint is lost.
    #[arg(long)]
    pub(crate) force: bool,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Stops a job. Returns the exit code.
pub(super) fn stop(args: &StopArgs) -> Result<u8, Failure> {
    let done = backend::find(&args.job, &args.target.choice())?.stop(args.force)?;
    print(&format!("{done}\n"))
}
