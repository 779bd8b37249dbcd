//! `elasticdl delete`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::args::ClusterTarget;
use crate::cli::backend;
use crate::cli::process::{Failure, print};

/// Arguments of `elasticdl delete`.
#[derive(Args, Debug)]
pub(crate) struct DeleteArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Deletes a job. Returns the exit code.
pub(super) fn delete(args: &DeleteArgs) -> Result<u8, Failure> {
    let done = backend::find(&args.job, &args.target.choice())?.delete()?;
    print(&format!("{done}\n"))
}
