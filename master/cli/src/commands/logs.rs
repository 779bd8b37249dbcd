//! `elasticdl logs`.

use std::io::{Write as _, stdout};
use std::path::PathBuf;

use clap::Args;
use elasticdl_master::job::LaunchId;

use crate::args::ClusterTarget;
use crate::backend::{self, JobLog};
use crate::process::{EXIT_OK, Failure};

/// Arguments of `elasticdl logs`.
#[derive(Args, Debug)]
pub(crate) struct LogsArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,

    /// Print the log of this worker, with PROGRAM's output. [default: the master]
    ///
    /// `elasticdl status` and the events of a job show the numbers.
    #[arg(long, value_name = "N")]
    pub(crate) worker: Option<u64>,

    /// Print the logs of all workers, with the worker on each line (`[worker 2] …`).
    #[arg(long, conflicts_with = "worker")]
    pub(crate) all: bool,

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
    let log = match args.worker {
        Some(worker) => JobLog::Worker(LaunchId(worker)),
        None if args.all => JobLog::Workers,
        None => JobLog::Master,
    };
    job.logs(log, args.follow, &mut write).map(|()| EXIT_OK)
}
