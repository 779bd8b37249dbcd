//! Distinguishes the files that a job writes into its directory from others.
//!
//! **Invariant:** only files with names that a job writes are removed; a directory that is not a
//! job's is neither used nor removed.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::JobDirError;
use super::files::{
    CA, CERTIFICATE, CHECKPOINTS, EARLIER, EXPORTS, FILES, HISTORY, JOB, KEY, LOCK, LOGS, MASTER,
    MASTER_LOG, MOVING, PROCESSES, PROGRAM, RECORD, REFUSED, SPARE, SUMMARY, TOKEN,
};
use crate::lineage::CompleteCheckpoint;

/// Checks that a job may use `root`: that it does not exist, is empty, or is a job's directory.
/// Writes nothing.
///
/// # Errors
/// [`JobDirError::Foreign`], [`JobDirError::Nested`], or [`JobDirError::Create`] if it can't be
/// read.
pub(super) fn check_usable(root: &Path) -> Result<(), JobDirError> {
    let whole = std::path::absolute(root).unwrap_or_else(|_| root.to_owned());
    if let Some(outer) = whole.ancestors().skip(1).find(|folder| is_job_dir(folder)) {
        return Err(JobDirError::Nested { path: root.into(), outer: outer.into() });
    }
    let entries = match names(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|source| JobDirError::Create { path: root.into(), source })?,
    };
    if entries.is_empty() || is_job_dir(root) {
        return Ok(());
    }
    let foreign = entries.iter().find(|name| !is_known(name)).unwrap_or(&entries[0]);
    Err(JobDirError::Foreign { path: root.into(), found: root.join(foreign) })
}

/// Returns whether a job has run in `root`: it contains the lock, an empty file, and otherwise
/// nothing or what a job writes.
pub(super) fn is_job_dir(root: &Path) -> bool {
    let is_file =
        |name: &str| fs::symlink_metadata(root.join(name)).is_ok_and(|found| found.is_file());
    let has_lock =
        fs::symlink_metadata(root.join(LOCK)).is_ok_and(|lock| lock.is_file() && lock.len() == 0);
    let is_sole = || names(root).is_ok_and(|names| names.iter().all(|name| is_known(name)));
    has_lock && (is_file(TOKEN) || is_sole())
}

/// Returns the files of an earlier run that would be taken for the next one's.
pub(super) fn stale_files(root: &Path) -> io::Result<Vec<PathBuf>> {
    let retained = [LOCK, TOKEN];
    let mut stale: Vec<PathBuf> = names(root)?
        .into_iter()
        .filter(|name| is_job_file(name) && !retained.iter().any(|retained| name == retained))
        .map(|name| root.join(name))
        .collect();
    stale.extend(job_logs(&root.join(LOGS))?);
    Ok(stale)
}

/// Returns the logs of jobs in the folder at `path`; none if there is no such folder.
pub(super) fn job_logs(path: &Path) -> io::Result<Vec<PathBuf>> {
    let is_log = |name: &OsString| {
        let launch = name.to_str().and_then(|name| {
            name.strip_suffix(".1").unwrap_or(name).strip_prefix("worker-")?.strip_suffix(".log")
        });
        name == MASTER_LOG || launch.is_some_and(is_number)
    };
    Ok(names_or_none(path)?.into_iter().filter(is_log).map(|name| path.join(name)).collect())
}

/// Returns the checkpoints in the folder at `path`; none if there is no such folder.
pub(super) fn job_checkpoints(path: &Path) -> io::Result<Vec<PathBuf>> {
    let is_checkpoint = |name: &OsString| {
        let step = name.to_str().and_then(|name| name.strip_prefix("step-")?.split('-').next());
        step.is_some_and(is_number)
    };
    let named = names_or_none(path)?.into_iter().filter(is_checkpoint).map(|name| path.join(name));
    // A user may have put a file beside them, such as a converted model.
    Ok(named.filter(|path| path.is_dir()).collect())
}

/// The complete checkpoints in the folder at `path`; none if it can't be read.
#[must_use]
pub fn complete_checkpoints(path: &Path) -> Vec<CompleteCheckpoint> {
    let folders = job_checkpoints(path).unwrap_or_default().into_iter();
    let complete = folders.filter(|folder| folder.join("manifest.json").is_file());
    let named = |folder: PathBuf| CompleteCheckpoint::parse(folder.file_name()?.to_str()?);
    complete.filter_map(named).collect()
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_known(name: &OsStr) -> bool {
    is_job_file(name) || [LOGS, CHECKPOINTS, EARLIER, MOVING, REFUSED].iter().any(|n| name == *n)
}

/// Returns whether it is a file of a job, or a temporary file for an atomic replacement of one.
pub(super) fn is_job_file(name: &OsStr) -> bool {
    let staged = |name: &str| {
        let (file, _) = name.strip_prefix('.')?.strip_suffix(".tmp")?.rsplit_once('.')?;
        Some(file.to_owned())
    };
    let staged = name.to_str().and_then(staged);
    JOB_FILES.iter().any(|file| name == *file || staged.as_deref() == Some(file))
}

/// Whether it is the name of a file that a job keeps in its directory for itself.
pub fn is_own_file(name: &OsStr) -> bool {
    is_job_file(name) && !EXPORTS.iter().any(|export| name == *export)
}

pub(super) fn names(folder: &Path) -> io::Result<Vec<OsString>> {
    fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.file_name())).collect()
}

fn names_or_none(folder: &Path) -> io::Result<Vec<OsString>> {
    match names(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        names => names,
    }
}

/// All files that a job writes at the top of its directory. A file that is not listed here is never
/// removed.
const JOB_FILES: [&str; 16] = [
    CA,
    CERTIFICATE,
    KEY,
    EXPORTS[0],
    EXPORTS[1],
    FILES,
    HISTORY,
    JOB,
    LOCK,
    MASTER,
    PROCESSES,
    PROGRAM,
    RECORD,
    SPARE,
    SUMMARY,
    TOKEN,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::LaunchId;
    use crate::jobdir::{DeleteError, JobDir, LookupError, delete, worker_log};

    fn scratch() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn files(root: &Path) -> Vec<String> {
        let mut found = Vec::new();
        let mut folders = vec![root.to_path_buf()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
                if entry.path().is_dir() {
                    folders.push(entry.path());
                } else {
                    found.push(
                        entry.path().strip_prefix(root).unwrap().to_str().unwrap().to_owned(),
                    );
                }
            }
        }
        found.sort();
        found
    }

    /// Creates a directory in which a job has run to its end.
    fn ended(root: &Path) {
        let dir = JobDir::create(root).unwrap();
        dir.publish("127.0.0.1:1".parse().unwrap(), None).unwrap();
        for file in
            JOB_FILES.into_iter().chain([".record.json.0123abcd.tmp"]).filter(|&file| file != LOCK)
        {
            fs::write(root.join(file), "").unwrap();
        }
        for log in [dir.master_log(), worker_log(&dir.logs(), LaunchId(12))] {
            fs::write(log, "output").unwrap();
        }
        let checkpoint = root.join(CHECKPOINTS).join("step-000000000007-0123abcd-g1");
        fs::create_dir_all(&checkpoint).unwrap();
        fs::write(checkpoint.join("manifest.json"), "{}").unwrap();
    }

    #[test]
    fn a_jobs_directory_is_removed_as_a_whole() {
        let scratch = scratch();
        let root = scratch.path().join("job");
        ended(&root);
        assert_eq!(delete(&root).unwrap(), [] as [PathBuf; 0]);
        assert!(!root.exists());
    }

    #[test]
    fn files_that_no_job_has_written_are_kept_and_reported() {
        let scratch = scratch();
        let root = scratch.path().join("job");
        ended(&root);
        let foreign = [
            ".git/config",
            "logs/app.log",
            "logs/worker-.log",
            "logs/worker-x.log",
            "src/main.rs",
            "checkpoints/mine/step",
            "checkpoints/step-000000000007-0123abcd-g1.safetensors",
            "lock.rs",
            ".summary.json.tmp",
        ];
        for file in foreign {
            fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
            fs::write(root.join(file), "mine").unwrap();
        }
        // A new run leaves files that are not the job's in place.
        drop(JobDir::create(&root).unwrap());
        let left = delete(&root).unwrap();
        let mut expected = foreign.map(str::to_owned).to_vec();
        expected.sort();
        assert_eq!(files(&root), expected);
        let named = [".git", ".summary.json.tmp", "checkpoints", "lock.rs", "logs", "src"];
        assert_eq!(left, named.map(|name| root.join(name)));
        // It is no longer a job's directory.
        assert!(matches!(delete(&root), Err(DeleteError::Lookup(LookupError::NoSuchJob { .. }))));
        assert_eq!(files(&root), expected);
    }

    #[test]
    fn a_directory_that_is_not_a_jobs_is_neither_used_nor_removed() {
        for own in [
            &["main.rs"][..],
            &["lock", "main.rs"],
            &["token", "lock", "x"],
            &["logs/app.log", "x"],
        ] {
            let scratch = scratch();
            for file in own {
                fs::create_dir_all(scratch.path().join(file).parent().unwrap()).unwrap();
                fs::write(scratch.path().join(file), "mine").unwrap();
            }
            let before = files(scratch.path());
            let error = JobDir::create(scratch.path()).unwrap_err();
            assert!(matches!(error, JobDirError::Foreign { .. }), "{own:?}: {error}");
            assert!(error.to_string().contains("--job-dir"), "{error}");
            assert!(matches!(delete(scratch.path()), Err(DeleteError::Lookup(_))), "{own:?}");
            assert_eq!(files(scratch.path()), before);
        }
    }

    #[test]
    fn a_run_that_was_killed_at_its_start_does_not_block_the_next() {
        let scratch = scratch();
        fs::write(scratch.path().join(LOCK), "").unwrap();
        fs::create_dir(scratch.path().join(LOGS)).unwrap();
        assert!(JobDir::create(scratch.path()).is_ok());
    }

    #[test]
    fn a_running_job_is_not_removed() {
        let scratch = scratch();
        let root = scratch.path().join("job");
        let running = JobDir::create(&root).unwrap();
        assert!(matches!(delete(&root), Err(DeleteError::InUse(JobDirError::Running { .. }))));
        assert!(running.token_path().is_file());
    }
}
