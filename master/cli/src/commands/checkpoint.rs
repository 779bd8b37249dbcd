//! `elasticdl checkpoint`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::args::{ClusterTarget, parse_timeout};
use crate::backend;
use crate::process::{Failure, print};

/// Arguments of `elasticdl checkpoint`.
#[derive(Args, Debug)]
pub(crate) struct CheckpointArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,

    /// Longest wait for the checkpoint, from 1s to 30days.
    #[arg(long, value_name = "DURATION", default_value = "10min",
          value_parser = parse_timeout)]
    pub(crate) timeout: Duration,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Writes a checkpoint of a job and prints its location. Returns the exit code.
pub(super) fn checkpoint(args: &CheckpointArgs) -> Result<u8, Failure> {
    let location = backend::find(&args.job, &args.target.choice())?.checkpoint(args.timeout)?;
    print(&format!("{location}\n"))
}
