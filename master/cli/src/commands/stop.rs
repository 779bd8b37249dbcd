//! `elasticdl stop`.

use clap::Args;

use crate::backend::NamedJob;
use crate::process::{Failure, print};

/// Arguments of `elasticdl stop`.
#[derive(Args, Debug)]
pub(crate) struct StopArgs {
    /// Do not wait for the end of the step, or for workers that have lost the master: training
    /// since the last checkpoint is lost.
    #[arg(long)]
    pub(crate) force: bool,

    #[command(flatten)]
    pub(crate) job: NamedJob,
}

/// Stops a job. Returns the exit code.
pub(super) fn stop(args: &StopArgs) -> Result<u8, Failure> {
    let done = args.job.find()?.stop(args.force)?;
    print(&format!("{done}\n"))
}
