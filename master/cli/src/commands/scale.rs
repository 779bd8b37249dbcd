//! `elasticdl scale`.

use clap::{ArgGroup, Args};
use elasticdl_master::job::Scaling;

use crate::args::parse_workers;
use crate::backend::NamedJob;
use crate::process::{Failure, print};

/// Arguments of `elasticdl scale`.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("change").args(["num_workers", "min_workers", "max_workers"])
    .required(true).multiple(true)))]
pub(crate) struct ScaleArgs {
    /// Number of workers to keep running, between the job's --min-workers and --max-workers.
    #[arg(long, value_name = "N", value_parser = parse_workers, allow_negative_numbers = true)]
    pub(crate) num_workers: Option<u32>,

    /// Minimum number of workers from now on; with fewer, training pauses.
    ///
    /// A group that trains with fewer goes on until its members change. If the job keeps fewer
    /// workers, it is scaled up to this number.
    #[arg(long, value_name = "N", value_parser = parse_workers, allow_negative_numbers = true)]
    pub(crate) min_workers: Option<u32>,

    /// Maximum number of workers from now on.
    ///
    /// If the job keeps more workers, it is scaled down to this number. A job with table servers
    /// keeps its maximum.
    #[arg(long, value_name = "N", value_parser = parse_workers, allow_negative_numbers = true)]
    pub(crate) max_workers: Option<u32>,

    #[command(flatten)]
    pub(crate) job: NamedJob,
}

/// Changes the number of workers of a job, or its limits. Returns the exit code.
pub(super) fn scale(args: &ScaleArgs) -> Result<u8, Failure> {
    let ScaleArgs { num_workers, min_workers, max_workers, ref job } = *args;
    let scaled = job.find()?.scale(Scaling { num_workers, min_workers, max_workers })?;
    let (min, max) = scaled.limits;
    let limits = match min_workers.or(max_workers) {
        Some(_) => format!(" (limits: {min} to {max})"),
        None => String::new(),
    };
    print(&format!("workers: {} -> {}{limits}\n", scaled.was, scaled.now))
}
