//! Other jobs of this machine, whose files a new job must leave alone.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

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
    /// The stores that its addresses are in; see [`stores`].
    pub stores: BTreeSet<String>,
}

/// The turn of a job that starts. Jobs take turns until their records are written, so that each one
/// finds the files of those before it.
#[derive(Debug)]
pub struct Turn {
    /// The folder of jobs, locked. The lock is released with it, however this process ends.
    _jobs: File,
}

/// Waits until no other job starts whose directory, or name, is in the folder `jobs`. `None`: jobs
/// take no turns, because the folder can't be locked, or a start takes very long.
#[must_use]
pub fn take_turn(jobs: &Path) -> Option<Turn> {
    DirBuilder::new().recursive(true).mode(0o700).create(jobs).ok()?;
    let folder = File::open(jobs).ok()?;
    for _ in 0..TURN_ATTEMPTS {
        match folder.try_lock() {
            Ok(()) => return Some(Turn { _jobs: folder }),
            Err(TryLockError::Error(_)) => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(TURN_PAUSE),
        }
    }
    None
}

/// The stores that addresses such as `s3://bucket` are in, as far as the environment of this
/// process says so: endpoints and accounts.
#[must_use]
pub fn stores() -> BTreeSet<String> {
    let is_place = |name: &str| {
        ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|store| name.starts_with(store))
            && ["ENDPOINT", "ACCOUNT_NAME", "BASE_URL"].iter().any(|part| name.contains(part))
    };
    let given = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_place));
    given.filter_map(|(_, place)| place.into_string().ok()).collect()
}

/// The directory of the job in which `path` lies, if it lies in one.
#[must_use]
pub fn job_around(path: &Path) -> Option<PathBuf> {
    path.ancestors().skip(1).find(|folder| is_job_dir(folder)).map(Path::to_owned)
}

/// The running jobs in the folder `jobs`, or with a name there. Without a [`Turn`], one that is
/// just starting may be missing.
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
        Some(RunningJob { spec: record.spec().clone(), summary, stores: start.stores, root })
    };
    roots.into_iter().filter_map(job).collect()
}

/// Attempts within half a minute.
const TURN_ATTEMPTS: u32 = 1500;
const TURN_PAUSE: Duration = Duration::from_millis(20);
