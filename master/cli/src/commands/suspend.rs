//! `elasticdl suspend`.

use std::path::PathBuf;

use clap::Args;

use crate::args::ClusterTarget;
use crate::backend;
use crate::process::{Failure, print};

/// Arguments of `elasticdl suspend`.
#[derive(Args, Debug)]
pub(crate) struct SuspendArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Suspends a job. Returns the exit code.
pub(super) fn suspend(args: &SuspendArgs) -> Result<u8, Failure> {
    let done = backend::find(&args.job, &args.target.choice())?.set_suspended(true)?;
    print(&format!("{done}\n"))
}
