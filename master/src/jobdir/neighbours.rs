//! Other jobs of this machine, whose files a new job must leave alone.

use std::fs;
use std::path::{Path, PathBuf};

use super::contents::is_job_dir;
use super::persisted_job::{read_newest_record, read_start};
use super::processes::is_running;
use crate::job::JobSpec;

/// A running job of this machine.
#[derive(Debug)]
pub struct RunningJob {
    /// Its directory.
    pub root: PathBuf,
    /// What it does.
    pub spec: JobSpec,
    /// Path of its additional summary.
    pub summary: Option<PathBuf>,
}

/// The directory of the job in which `path` lies, if it lies in one.
#[must_use]
pub fn job_around(path: &Path) -> Option<PathBuf> {
    path.ancestors().skip(1).find(|folder| is_job_dir(folder)).map(Path::to_owned)
}

/// The running jobs in the folder `jobs`, or with a name there. A job that is just starting may be
/// missing.
#[must_use]
pub fn running_jobs(jobs: &Path) -> Vec<RunningJob> {
    let entries = fs::read_dir(jobs).into_iter().flatten().flatten();
    let roots = entries.filter_map(|entry| entry.path().canonicalize().ok());
    let mut roots: Vec<PathBuf> = roots.filter(|root| is_running(root)).collect();
    roots.sort();
    roots.dedup();
    let job = |root: PathBuf| {
        let (start, record) = (read_start(&root).ok()?, read_newest_record(&root).ok()?);
        let summary = start.summary.map(PathBuf::from);
        Some(RunningJob { spec: record.spec().clone(), summary, root })
    };
    roots.into_iter().filter_map(job).collect()
}
