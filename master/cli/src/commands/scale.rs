//! `elasticdl scale`.

use clap::{ArgGroup, Args};
use elasticdl_master::job::Scaling;
use elasticdl_master::kube::priority_tiers::{Weight, parse_weight};

use crate::args::parse_workers;
use crate::backend::NamedJob;
use crate::process::{Failure, print};

/// Arguments of `elasticdl scale`.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("change").required(true).multiple(true)
    .args(["num_workers", "min_workers", "max_workers", "weight"])))]
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

    /// The job's share of a cluster from now on, as --weight of `train`: from 0.1 to 10.
    ///
    /// New workers have the priority classes that follow from it. Workers that run keep theirs.
    #[arg(long, value_name = "W", value_parser = parse_weight, allow_negative_numbers = true)]
    pub(crate) weight: Option<Weight>,

    #[command(flatten)]
    pub(crate) job: NamedJob,
}

/// Changes the number of workers of a job, its limits or its weight. Returns the exit code.
pub(super) fn scale(args: &ScaleArgs) -> Result<u8, Failure> {
    let ScaleArgs { num_workers, min_workers, max_workers, weight, ref job } = *args;
    let scaling = Scaling { num_workers, min_workers, max_workers };
    let scaled = job.find()?.scale(scaling, weight)?;
    let mut done = String::new();
    if scaling != Scaling::default() {
        done = format!("workers: {} -> {}", scaled.was, scaled.now);
    }
    if min_workers.or(max_workers).is_some() {
        let (min, max) = scaled.limits;
        done += &format!(" (limits: {min} to {max})");
    }
    if let Some(weight) = weight {
        let separator = if done.is_empty() { "" } else { "; " };
        done += &format!("{separator}weight of new workers: {weight}");
    }
    print(&(done + "\n"))
}
