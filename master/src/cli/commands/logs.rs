//! `elasticdl logs`.

use std::io::{Write as _, stdout};
use std::path::PathBuf;

use clap::Args;

use crate::cli::args::ClusterTarget;
use crate::cli::backend;
use crate::cli::process::{EXIT_OK, Failure};
use crate::job::LaunchId;

/// Arguments of `elasticdl logs`.
#[derive(Args, Debug)]
pub(crate) struct LogsArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,

    /// Print the log of the worker of this launch. [default: the master]
    #[arg(long, value_name = "LAUNCH")]
    pub(crate) launch: Option<u64>,

    /// Continue to print lines as they are written.
    #[arg(long, short)]
    pub(crate) follow: bool,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Prints logs. Returns the exit code.
pub(super) fn logs(args: &LogsArgs) -> Result<u8, Failure> {
    let job = backend::find(&args.job, &args.target.choice())?;
    let mut write = |bytes: &[u8]| stdout().write_all(bytes).is_ok();
    job.logs(args.launch.map(LaunchId), args.follow, &mut write).map(|()| EXIT_OK)
}
