//! `elasticdl delete`.

use std::path::PathBuf;

use clap::Args;

use super::Failure;
use super::client::print;
use super::cluster::ClusterTarget;
use super::lookup::{self, JobLookup};
use crate::jobdir::{self, DeleteError, JobDirError, quoted};

/// Arguments of `elasticdl delete`.
#[derive(Args, Debug)]
pub struct DeleteArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// Deletes a job. Returns the exit code.
pub(super) fn delete(args: &DeleteArgs) -> Result<u8, Failure> {
    match lookup::find(&args.job, &args.target)? {
        JobLookup::Cluster(job) => job.delete(),
        JobLookup::Local(root) => {
            let left = jobdir::delete(&root).map_err(|error| match error {
                DeleteError::Lookup(error) => Failure::usage(error.to_string()),
                DeleteError::InUse(error @ JobDirError::Running { .. }) => {
                    Failure::failed(format!("{error}, or run `elasticdl stop {}`", quoted(&root)))
                }
                error => Failure::failed(error.to_string()),
            })?;
            match left.as_slice() {
                [] => print(&format!("{} is deleted\n", root.display())),
                [first, ..] => print(&format!(
                    "the job in {} is deleted; the folder stays, because it has files that no job \
                     has written: {}{}\n",
                    root.display(),
                    first.display(),
                    if left.len() > 1 {
                        format!(" and {} more", left.len() - 1)
                    } else {
                        String::new()
                    }
                )),
            }
        }
    }
}
