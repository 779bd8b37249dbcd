//! Lookup of a job by its name.
//!
//! A job with a `/` is a directory. With --namespace or --context it is a job of that cluster. Any
//! other name is looked up among the jobs of this machine first, and then in the configured
//! cluster.

use std::path::{Path, PathBuf};

use clap::Args;
use elasticdl_master::jobdir::directory_of;
use elasticdl_master::kube::client::{Cluster, ClusterChoice};

use super::cluster::ClusterHandle;
use super::handle::JobHandle;
use super::local::LocalHandle;
use crate::args::ClusterTarget;
use crate::process::Failure;

/// The job that a command is about.
#[derive(Args, Debug)]
pub(crate) struct NamedJob {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    job: PathBuf,

    #[command(flatten)]
    target: ClusterTarget,
}

impl NamedJob {
    /// Returns a handle to the job.
    pub(crate) fn find(&self) -> Result<Box<dyn JobHandle>, Failure> {
        find(&self.job, &self.target.choice())
    }
}

/// Returns a handle to the job that the user names.
pub(crate) fn find(job: &Path, choice: &ClusterChoice) -> Result<Box<dyn JobHandle>, Failure> {
    Ok(match locate(job, choice)? {
        JobLocation::Cluster(name) => Box::new(ClusterHandle::connect(choice, name)?),
        JobLocation::Local(root) => Box::new(LocalHandle::new(root)),
    })
}

/// Location of a job.
enum JobLocation {
    /// Name of a job in a cluster.
    Cluster(String),
    /// A directory of this machine.
    Local(PathBuf),
}

fn locate(job: &Path, choice: &ClusterChoice) -> Result<JobLocation, Failure> {
    let directory = directory_of(job);
    let is_path = directory == job;
    let is_given = choice.namespace.is_some() || choice.context.is_some();
    if is_path && is_given {
        return Err(Failure::usage(
            "a path can't be combined with --namespace and --context; a job in a cluster is given \
             by its name",
        ));
    }
    if is_path || (!is_given && (directory.is_dir() || !Cluster::is_configured())) {
        return Ok(JobLocation::Local(directory));
    }
    let name = job.to_str().ok_or_else(|| Failure::usage("the job's name is not UTF-8"))?;
    Ok(JobLocation::Cluster(name.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_never_names_a_job_of_a_cluster() {
        let choice = ClusterChoice { namespace: Some("ml".into()), context: None };
        assert!(locate(Path::new("./job"), &choice).is_err());
        assert!(matches!(locate(Path::new("./job"), &ClusterChoice::default()),
                     Ok(JobLocation::Local(path)) if path == Path::new("./job")));
    }
}
