//! `elasticdl checkpoint`.

use std::time::Duration;

use clap::Args;

use crate::args::parse_timeout;
use crate::backend::NamedJob;
use crate::process::{Failure, print};

/// Arguments of `elasticdl checkpoint`.
#[derive(Args, Debug)]
pub(crate) struct CheckpointArgs {
    /// Longest wait for the checkpoint, from 1s to 30days.
    #[arg(long, value_name = "DURATION", default_value = "10min",
          value_parser = parse_timeout)]
    pub(crate) timeout: Duration,

    #[command(flatten)]
    pub(crate) job: NamedJob,
}

/// Writes a checkpoint of a job and prints its location. Returns the exit code.
pub(super) fn checkpoint(args: &CheckpointArgs) -> Result<u8, Failure> {
    let location = args.job.find()?.checkpoint(args.timeout)?;
    print(&format!("{location}\n"))
}
