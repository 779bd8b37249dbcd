//! Deletion of the directory of a job.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::aside;
use super::contents::{is_job_dir, is_job_file, job_checkpoints, job_logs, names};
use super::error::JobDirError;
use super::files::{CHECKPOINTS, EARLIER, LOCK, LOGS, MOVING, REFUSED};
use super::lock::take_lock;
use super::lookup::LookupError;
use super::processes::refuse_if_workers_live;

/// Removes the files of the job in `root`, and `root` itself if it is then empty. Returns the
/// remaining paths.
///
/// # Errors
/// [`DeleteError`]; then some files may have been removed already.
pub fn delete(root: &Path) -> Result<Vec<PathBuf>, DeleteError> {
    if !is_job_dir(root) {
        return Err(LookupError::NoSuchJob { path: root.into() }.into());
    }
    let lock = take_lock(root)?;
    refuse_if_workers_live(root)?;
    let remove = |path: PathBuf| match fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(DeleteError::Remove { path, source })
        }
        _ => Ok(()),
    };
    let failed = |path: &Path, source| DeleteError::Remove { path: path.into(), source };
    let logs = root.join(LOGS);
    for log in job_logs(&logs).map_err(|e| failed(&logs, e))? {
        remove(log)?;
    }
    let checkpoints = root.join(CHECKPOINTS);
    for checkpoint in job_checkpoints(&checkpoints).map_err(|e| failed(&checkpoints, e))? {
        fs::remove_dir_all(&checkpoint).map_err(|e| failed(&checkpoint, e))?;
    }
    for folder in [EARLIER, MOVING, REFUSED].map(|name| root.join(name)) {
        aside::remove(&folder).map_err(|e| failed(&folder, e))?;
    }
    for folder in [logs, checkpoints] {
        // The folder stays if it contains other files.
        let _ = fs::remove_dir(folder);
    }
    let mut files: Vec<OsString> = names(root).map_err(|e| failed(root, e))?;
    // The lock is removed last: until then no other master starts here.
    files.retain(|name| is_job_file(name) && name != LOCK);
    files.push(LOCK.into());
    for name in files {
        remove(root.join(name))?;
    }
    drop(lock);
    let mut left: Vec<PathBuf> =
        names(root).map_err(|e| failed(root, e))?.into_iter().map(|name| root.join(name)).collect();
    left.sort();
    if left.is_empty() {
        fs::remove_dir(root).map_err(|e| failed(root, e))?;
    }
    Ok(left)
}

/// Why a job's directory was not removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeleteError {
    /// There is no job in it. Check the name.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// The job, or one of its workers, still runs.
    #[error(transparent)]
    InUse(#[from] JobDirError),
    /// The operating system refuses.
    #[error("can't remove {}: {source}", path.display())]
    Remove {
        /// Path that could not be removed.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}
