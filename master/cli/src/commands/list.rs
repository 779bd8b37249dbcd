//! `elasticdl list`.

use clap::Args;
use elasticdl_master::jobdir;
use elasticdl_master::kube::client::Cluster;

use crate::args::ClusterTarget;
use crate::backend::{cluster_jobs, local_jobs};
use crate::process::{Failure, print};
use crate::render::{arrange_jobs, jobs_to_json, jobs_to_table};

/// Arguments of `elasticdl list`.
#[derive(Args, Debug)]
#[command(after_long_help = AFTER_HELP)]
pub(crate) struct ListArgs {
    /// List all ended jobs, not only the newest 10.
    #[arg(long)]
    pub(crate) all: bool,

    /// Print the list as JSON.
    #[arg(long)]
    pub(crate) json: bool,

    /// List only the jobs of this machine.
    #[arg(long, conflicts_with_all = ["namespace", "context"])]
    pub(crate) local: bool,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Lists running jobs, and jobs that have ended. Returns the exit code.
pub(super) fn list(args: &ListArgs) -> Result<u8, Failure> {
    let mut jobs = Vec::new();
    if !args.target.is_given() {
        jobs.extend(local_jobs(&jobdir::default_root())?);
    }
    if args.target.is_given() || (!args.local && Cluster::is_configured()) {
        jobs.extend(cluster_jobs(&args.target.choice())?);
    }
    let hidden = arrange_jobs(&mut jobs, if args.all { usize::MAX } else { ENDED_MAX });
    if args.json {
        return print(&jobs_to_json(&jobs));
    }
    let more = match hidden {
        0 => String::new(),
        1 => "1 older job that has ended is not shown: elasticdl list --all\n".into(),
        hidden => {
            format!("{hidden} older jobs that have ended are not shown: elasticdl list --all\n")
        }
    };
    print(&(jobs_to_table(&jobs) + &more))
}

/// Number of ended jobs in a list that is not complete.
const ENDED_MAX: usize = 10;

const AFTER_HELP: &str = "\
JSON: an array with an object per job, running ones first, newer ones before older ones:
  namespace             of the cluster; null for a job of this machine
  job, state, has_ended its name; its state, as in `elasticdl status --json`, or `lost` if
                        its master has died, up to 10 s after what is shown; whether it is over
  reason                what a job without a master waits for, in a cluster; or null
  progress              0 to 1; null if unknown
  workers, workers_desired
                        size of the group; number of workers to keep running; or null
  age_s                 seconds since the job was started";
