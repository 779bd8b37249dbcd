//! `elasticdl logs`.

use std::io::{Write as _, stdout};

use clap::Args;
use elasticdl_master::job::LaunchId;

use crate::backend::{JobLog, NamedJob};
use crate::process::{EXIT_OK, Failure};

/// Arguments of `elasticdl logs`.
#[derive(Args, Debug)]
pub(crate) struct LogsArgs {
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
    pub(crate) job: NamedJob,
}

/// Prints logs. Returns the exit code.
pub(super) fn logs(args: &LogsArgs) -> Result<u8, Failure> {
    let job = args.job.find()?;
    let mut write = |bytes: &[u8]| stdout().write_all(bytes).is_ok();
    let log = match args.worker {
        Some(worker) => JobLog::Worker(LaunchId(worker)),
        None if args.all => JobLog::Workers,
        None => JobLog::Master,
    };
    job.logs(log, args.follow, &mut write).map(|()| EXIT_OK)
}
