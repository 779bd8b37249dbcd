//! `elasticdl logs`.

use std::fs;
use std::io::{Read as _, Write as _, stdout};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::cluster::ClusterTarget;
use super::lookup::{self, JobLookup};
use super::{EXIT_OK, Failure};
use crate::job::LaunchId;
use crate::jobdir::{self, LookupError};
use crate::kube::logs::LogSource;

/// Arguments of `elasticdl logs`.
#[derive(Args, Debug)]
pub struct LogsArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    /// Print the log of the worker of this launch. [default: the master]
    #[arg(long, value_name = "LAUNCH")]
    pub launch: Option<u64>,

    /// Continue to print lines as they are written.
    #[arg(long, short)]
    pub follow: bool,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// Prints logs. Returns the exit code.
pub(super) fn logs(args: &LogsArgs) -> Result<u8, Failure> {
    match lookup::find(&args.job, &args.target)? {
        JobLookup::Cluster(job) => {
            let source =
                args.launch.map_or(LogSource::Master, |launch| LogSource::Worker(LaunchId(launch)));
            job.logs(source, args.follow)
        }
        JobLookup::Local(root) => {
            if let Err(error @ LookupError::NoSuchJob { .. }) = jobdir::look_up(&root) {
                return Err(Failure::usage(error.to_string()));
            }
            let folder = root.join("logs");
            let path = match args.launch {
                Some(launch) => jobdir::worker_log(&folder, LaunchId(launch)),
                None => folder.join("master.log"),
            };
            copy_file(&path, args.follow.then_some(&root))
        }
    }
}

/// Copies a log to standard output; with `follow`, until the job in that directory has ended.
fn copy_file(path: &Path, follow: Option<&PathBuf>) -> Result<u8, Failure> {
    let failed = |e: std::io::Error| Failure::usage(format!("can't read {}: {e}", path.display()));
    let mut file = fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    loop {
        let runs = follow.is_some_and(|root| jobdir::look_up(root).is_ok());
        bytes.clear();
        file.read_to_end(&mut bytes).map_err(failed)?;
        if stdout().write_all(&bytes).is_err() || !runs {
            return Ok(EXIT_OK);
        }
        std::thread::sleep(FOLLOW_INTERVAL);
    }
}

const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);
