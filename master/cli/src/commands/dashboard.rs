//! `elasticdl dashboard`: the page of a running job.

use clap::Args;

use crate::backend::NamedJob;
use crate::process::Failure;

/// Arguments of `elasticdl dashboard`.
#[derive(Args, Debug)]
pub(crate) struct DashboardArgs {
    /// Port of 127.0.0.1 on which this command serves the page of a job in a cluster; 0 selects a
    /// free port. The master of a local job serves its page.
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub(crate) port: u16,

    #[command(flatten)]
    pub(crate) job: NamedJob,
}

/// Opens the page of a job. Returns the exit code.
pub(super) fn dashboard(args: &DashboardArgs) -> Result<u8, Failure> {
    args.job.find()?.dashboard(args.port)
}
