//! `elasticdl report`: the page of a job that has ended, as one file.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::Args;
use elasticdl_master::jobdir::write_output;

use crate::backend::NamedJob;
use crate::process::{Failure, cannot, print};

/// Arguments of `elasticdl report`.
#[derive(Args, Debug)]
pub(crate) struct ReportArgs {
    /// File to write, or `-` for standard output. The file is self-contained.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: PathBuf,

    #[command(flatten)]
    pub(crate) job: NamedJob,
}

/// Writes the report of a job. Returns the exit code.
pub(super) fn report(args: &ReportArgs) -> Result<u8, Failure> {
    let report = args.job.find()?.report()?;
    if args.html == Path::new("-") {
        return print(&report);
    }
    let path = args.html.display();
    if replaces_another(&args.html) {
        return Err(Failure::usage(format!(
            "--html {path}: a file that is no page is there; choose another name, or remove it"
        )));
    }
    write_output(&args.html, report.as_bytes()).map_err(cannot(&format!("write {path}")))?;
    print(&format!("the report is in {path}\n"))
}

/// Whether a file is at `path` that is not the page of a job.
fn replaces_another(path: &Path) -> bool {
    let is_file = path.metadata().is_ok_and(|found| found.is_file() && found.len() > 0);
    let mut begin = [0; BEGIN.len()];
    // Opening a pipe would wait.
    if !is_file {
        return false;
    }
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut begin));
    read.is_err() || begin != *BEGIN.as_bytes()
}

/// What each page begins with.
const BEGIN: &str = "<!doctype html>";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_replaces_an_earlier_report_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        assert!(!replaces_another(&folder.path().join("new")));
        assert!(!replaces_another(&path("empty", "")));
        assert!(!replaces_another(&path("page", "<!doctype html>\n<title>a job</title>")));
        assert!(replaces_another(&path("data.csv", "x,y\n")));
        assert!(!replaces_another(Path::new("/dev/null")), "it is written to");
    }
}
