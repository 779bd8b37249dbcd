//! `elasticdl resume`.

use std::path::PathBuf;

use clap::Args;

use crate::args::ClusterTarget;
use crate::backend;
use crate::process::{Failure, print};

/// Arguments of `elasticdl resume`.
#[derive(Args, Debug)]
pub(crate) struct ResumeArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Resumes a suspended job. Returns the exit code.
pub(super) fn resume(args: &ResumeArgs) -> Result<u8, Failure> {
    let done = backend::find(&args.job, &args.target.choice())?.set_suspended(false)?;
    print(&format!("{done}\n"))
}
