//! `elasticdl scale`.

use std::path::PathBuf;

use clap::Args;

use crate::args::{ClusterTarget, parse_workers};
use crate::backend;
use crate::process::{Failure, print};

/// Arguments of `elasticdl scale`.
#[derive(Args, Debug)]
pub(crate) struct ScaleArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,

    /// Number of workers to keep running, between the job's --min-workers and --max-workers.
    #[arg(long, value_name = "N", value_parser = parse_workers, allow_negative_numbers = true)]
    pub(crate) num_workers: u32,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Changes the number of workers of a job. Returns the exit code.
pub(super) fn scale(args: &ScaleArgs) -> Result<u8, Failure> {
    let was = backend::find(&args.job, &args.target.choice())?.scale(args.num_workers)?;
    print(&format!("workers: {was} -> {}\n", args.num_workers))
}
