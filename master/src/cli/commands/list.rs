//! `elasticdl list`.

use clap::Args;

use crate::cli::args::ClusterTarget;
use crate::cli::backend::{cluster_jobs, local_jobs};
use crate::cli::process::{Failure, print};
use crate::cli::render::jobs_to_table;
use crate::jobdir;
use crate::kube::client::Cluster;

/// Arguments of `elasticdl list`.
#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// List only the jobs of this machine.
    #[arg(long, conflicts_with_all = ["namespace", "context"])]
    pub(crate) local: bool,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Lists all jobs. Returns the exit code.
pub(super) fn list(args: &ListArgs) -> Result<u8, Failure> {
    let mut jobs = Vec::new();
    if !args.target.is_given() {
        jobs.extend(local_jobs(&jobdir::default_root()));
    }
    if args.target.is_given() || (!args.local && Cluster::is_configured()) {
        jobs.extend(cluster_jobs(&args.target.choice())?);
    }
    print(&jobs_to_table(&jobs))
}
