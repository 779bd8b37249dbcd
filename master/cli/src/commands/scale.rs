//! `elasticdl scale`.

use clap::Args;

use crate::args::parse_workers;
use crate::backend::NamedJob;
use crate::process::{Failure, print};

/// Arguments of `elasticdl scale`.
#[derive(Args, Debug)]
pub(crate) struct ScaleArgs {
    /// Number of workers to keep running, between the job's --min-workers and --max-workers.
    #[arg(long, value_name = "N", value_parser = parse_workers, allow_negative_numbers = true)]
    pub(crate) num_workers: u32,

    #[command(flatten)]
    pub(crate) job: NamedJob,
}

/// Changes the number of workers of a job. Returns the exit code.
pub(super) fn scale(args: &ScaleArgs) -> Result<u8, Failure> {
    let was = args.job.find()?.scale(args.num_workers)?;
    print(&format!("workers: {was} -> {}\n", args.num_workers))
}
