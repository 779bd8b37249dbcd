//! `elasticdl scale`.

use std::path::PathBuf;

use clap::Args;
use elasticdl_proto::wire::ScaleRequest;

use super::client::{Connection, print, to_failure};
use super::cluster::ClusterTarget;
use super::lookup::{self, JobLookup};
use super::{Failure, job_options, new_runtime};

/// Arguments of `elasticdl scale`.
#[derive(Args, Debug)]
pub struct ScaleArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    /// Number of workers to keep running, between the job's --min-workers and --max-workers.
    #[arg(long, value_name = "N", value_parser = job_options::parse_workers)]
    pub num_workers: u32,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// Changes the number of workers of a job. Returns the exit code.
pub(super) fn scale(args: &ScaleArgs) -> Result<u8, Failure> {
    let root = match lookup::find(&args.job, &args.target)? {
        JobLookup::Cluster(job) => return job.scale(args.num_workers),
        JobLookup::Local(root) => root,
    };
    let runtime = new_runtime()?;
    let mut connection =
        runtime.block_on(Connection::open(&root)).map_err(|error| error.to_failure(&root))?;
    let request = ScaleRequest { num_workers: args.num_workers };
    let answer = connection.request(request, async |client, request| client.scale(request).await);
    let reply = runtime.block_on(answer).map_err(|status| to_failure(&root, &status))?;
    print(&format!("workers: {} -> {}\n", reply.was, args.num_workers))
}
