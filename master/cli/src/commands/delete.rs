//! `elasticdl delete`.

use std::path::PathBuf;

use clap::Args;
use elasticdl_master::jobdir;

use crate::args::ClusterTarget;
use crate::backend::{self, cluster_jobs, local_jobs};
use crate::process::{EXIT_OK, Failure, print, print_error};

/// Arguments of `elasticdl delete`.
#[derive(Args, Debug)]
pub(crate) struct DeleteArgs {
    /// Names of the jobs, or paths of their directories (with a `/`).
    #[arg(value_name = "JOB", required_unless_present = "ended")]
    pub(crate) jobs: Vec<PathBuf>,

    /// Delete all ended jobs: those of this machine, or those in the given namespace.
    ///
    /// Jobs with a --job-dir are excluded. A local job is deleted with the checkpoints in its
    /// directory.
    #[arg(long, conflicts_with = "jobs")]
    pub(crate) ended: bool,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Deletes jobs. Returns the exit code of the first failure.
pub(super) fn delete(args: &DeleteArgs) -> Result<u8, Failure> {
    let jobs = if args.ended { ended_jobs(&args.target)? } else { args.jobs.clone() };
    if jobs.is_empty() {
        return print("no job has ended\n");
    }
    let mut code = EXIT_OK;
    for job in jobs {
        let deleted = backend::find(&job, &args.target.choice()).and_then(|found| found.delete());
        match deleted {
            Ok(done) => drop(print(&format!("{done}\n"))?),
            Err(failure) => {
                print_error(&failure.text);
                code = if code == EXIT_OK { failure.code } else { code };
            }
        }
    }
    Ok(code)
}

/// Names of the jobs that have ended.
fn ended_jobs(target: &ClusterTarget) -> Result<Vec<PathBuf>, Failure> {
    let rows = if target.is_given() {
        cluster_jobs(&target.choice())?
    } else {
        local_jobs(&jobdir::default_root())?
    };
    Ok(rows.into_iter().filter(|row| row.has_ended).map(|row| row.job.into()).collect())
}
