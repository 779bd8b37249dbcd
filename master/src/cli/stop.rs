//! `elasticdl stop`.

use std::path::PathBuf;

use clap::Args;

use super::Failure;
use super::client::print;
use super::cluster::ClusterTarget;
use super::lookup::{self, JobLookup};
use crate::jobdir::{self, LookupError, StopError, StopTarget};

/// Arguments of `elasticdl stop`.
#[derive(Args, Debug)]
pub struct StopArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// Stops a job. Returns the exit code.
pub(super) fn stop(args: &StopArgs) -> Result<u8, Failure> {
    match lookup::find(&args.job, &args.target)? {
        JobLookup::Cluster(job) => job.stop(),
        JobLookup::Local(root) => {
            let target = jobdir::stop(&root).map_err(|error| match error {
                StopError::Lookup(LookupError::NotRunning { .. }) => {
                    Failure::failed(error.to_string())
                }
                StopError::Lookup(error) => Failure::usage(error.to_string()),
                error => Failure::failed(error.to_string()),
            })?;
            print(&match target {
                StopTarget::Master => {
                    format!("the job in {} stops at the end of its step\n", root.display())
                }
                StopTarget::Workers(workers) => format!(
                    "the master of the job in {} is gone; SIGTERM was sent to {workers} of its \
                     workers\n",
                    root.display()
                ),
            })
        }
    }
}
