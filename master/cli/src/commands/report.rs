//! `elasticdl report`: the page of a job that has ended, as one file.

use std::path::{Path, PathBuf};

use clap::Args;
use elasticdl_master::jobdir::write_atomically;

use crate::args::ClusterTarget;
use crate::backend;
use crate::process::{Failure, cannot, print};

/// Arguments of `elasticdl report`.
#[derive(Args, Debug)]
pub(crate) struct ReportArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub(crate) job: PathBuf,

    /// File to write, or `-` for standard output. The file is self-contained.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: PathBuf,

    #[command(flatten)]
    pub(crate) target: ClusterTarget,
}

/// Writes the report of a job. Returns the exit code.
pub(super) fn report(args: &ReportArgs) -> Result<u8, Failure> {
    let report = backend::find(&args.job, &args.target.choice())?.report()?;
    if args.html == Path::new("-") {
        return print(&report);
    }
    let path = args.html.display();
    write_atomically(&args.html, report.as_bytes()).map_err(cannot(&format!("write {path}")))?;
    print(&format!("the report is in {path}\n"))
}
