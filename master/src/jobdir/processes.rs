//! The processes of a job: whether they run, and how they are signalled.
//!
//! **Invariant:** a process is signalled through a pidfd that was opened before its start time was
//! compared with the noted one. A process id alone may have been reused.

use std::fs;
use std::io;
use std::path::Path;

use rustix::process::Signal;

use super::contents::is_job_dir;
use super::error::JobDirError;
use super::files::{LOCK, SUMMARY};
use super::lock::take_lock;
use super::lookup::{LookupError, look_up};
use super::notes::read_notes;
use super::process_identity::ProcessIdentity;

/// The processes that were signalled to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopTarget {
    /// The master, which lets the job finish its step.
    Master,
    /// This number of workers; their master has died.
    Workers(usize),
}

/// Returns whether a master runs the job in `root`.
#[must_use]
pub fn is_running(root: &Path) -> bool {
    // The lock is taken for a moment and shared: a concurrent check does not see a master.
    let lock = fs::File::open(root.join(LOCK));
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(fs::TryLockError::WouldBlock)))
}

/// Signals the job in `root` to end: its master, or its workers if the master has died. The first
/// time it ends gracefully, and `again`, 2 s later or more, at once.
///
/// # Errors
/// [`StopError`].
pub fn stop(root: &Path, again: bool) -> Result<StopTarget, StopError> {
    // What stops services repeats SIGTERM, so a master takes only a second Ctrl-C for impatience.
    let signal = if again { Signal::INT } else { Signal::TERM };
    let failed = |pid| move |source| StopError::Signal { pid, source };
    if is_running(root) {
        let (endpoint, _) = look_up(root)?;
        let changing = || StopError::Changing { path: root.into() };
        let process = ProcessIdentity { pid: endpoint.pid, start_ticks: endpoint.started };
        let is_signalled = process.signal(signal).map_err(failed(process.pid))?;
        return if is_signalled { Ok(StopTarget::Master) } else { Err(changing()) };
    }
    if !is_job_dir(root) {
        return Err(LookupError::NoSuchJob { path: root.into() }.into());
    }
    // The lock prevents a take-over by another master.
    let _lock = take_lock(root).map_err(|_| StopError::Changing { path: root.into() })?;
    let mut signalled = 0;
    for worker in living_workers(root) {
        signalled += usize::from(worker.signal(Signal::TERM).map_err(failed(worker.pid))?);
    }
    match signalled {
        0 => {
            let summary = Some(root.join(SUMMARY)).filter(|path| path.is_file());
            Err(LookupError::NotRunning { path: root.into(), summary }.into())
        }
        signalled => Ok(StopTarget::Workers(signalled)),
    }
}

/// Refuses to change a job whose master has died while its workers still train.
pub(super) fn refuse_if_workers_live(root: &Path) -> Result<(), JobDirError> {
    match count_workers(root) {
        0 => Ok(()),
        workers => Err(JobDirError::Abandoned { path: root.into(), workers }),
    }
}

/// Number of running workers of the job in `root`.
#[must_use]
pub fn count_workers(root: &Path) -> usize {
    living_workers(root).len()
}

/// Returns the processes that a master in `root` has started and that still run.
fn living_workers(root: &Path) -> Vec<ProcessIdentity> {
    let noted = read_notes(root).unwrap_or_default();
    noted
        .into_values()
        .filter(|started| ProcessIdentity::look_up(started.pid) == Some(*started))
        .collect()
}

/// Why a job was not signalled to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StopError {
    /// Its master is just starting or ending. Try again.
    #[error("the master of the job in {} is just starting or ending; try again", path.display())]
    Changing {
        /// Directory of the job.
        path: std::path::PathBuf,
    },
    /// No job runs there. Check the name.
    #[error(transparent)]
    Lookup(#[from] LookupError),
    /// The operating system refuses.
    #[error("can't signal process {pid}: {source}")]
    Signal {
        /// Process id.
        pid: u32,
        /// Error of the operating system.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::super::{Endpoint, JobDir, MASTER, note_process, write_atomically};
    use super::*;
    use crate::job::LaunchId;

    /// A process of this user that belongs to no job.
    struct UnrelatedProcess(std::process::Child);

    impl UnrelatedProcess {
        fn new() -> Self {
            Self(std::process::Command::new("sleep").arg("100000").spawn().unwrap())
        }

        fn started(&self) -> ProcessIdentity {
            ProcessIdentity::look_up(self.0.id()).unwrap()
        }

        /// Returns the signal that ended it.
        fn ended_by(&mut self) -> Option<i32> {
            std::os::unix::process::ExitStatusExt::signal(&self.0.wait().unwrap())
        }
    }

    impl Drop for UnrelatedProcess {
        fn drop(&mut self) {
            drop(self.0.kill());
            drop(self.0.wait());
        }
    }

    fn write_master(root: &Path, pid: u32, started: u64) {
        let endpoint =
            Endpoint { address: "127.0.0.1:1".parse().unwrap(), pid, started, dashboard: None };
        write_atomically(&root.join(MASTER), &serde_json::to_vec(&endpoint).unwrap()).unwrap();
    }

    #[test]
    fn a_process_that_has_a_dead_masters_process_id_is_not_signalled() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("job");
        let mut unrelated = UnrelatedProcess::new();
        let ProcessIdentity { pid, start_ticks: at } = unrelated.started();
        drop(JobDir::create(&root).unwrap());
        write_master(&root, pid, at);
        // No master holds the lock, so the file is stale.
        assert!(matches!(
            stop(&root, false),
            Err(StopError::Lookup(LookupError::NotRunning { .. }))
        ));
        let next = JobDir::create(&root).unwrap();
        // Another master runs and has not published its address yet; the file is its predecessor's.
        write_master(&root, pid, at - 1);
        assert!(matches!(stop(&root, false), Err(StopError::Changing { .. })));
        assert_eq!(ProcessIdentity::look_up(pid), Some(ProcessIdentity { pid, start_ticks: at }));
        write_master(&root, pid, at);
        assert_eq!(stop(&root, false).unwrap(), StopTarget::Master);
        assert_eq!(unrelated.ended_by(), Some(15));
        drop(next);
    }

    #[test]
    fn workers_of_a_dead_master_block_a_new_run_until_they_are_stopped() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("job");
        let (mut worker, mut unrelated) = (UnrelatedProcess::new(), UnrelatedProcess::new());
        let dir = JobDir::create(&root).unwrap();
        note_process(&dir.processes_path(), LaunchId(1), worker.started()).unwrap();
        let ProcessIdentity { pid, start_ticks: at } = unrelated.started();
        note_process(
            &dir.processes_path(),
            LaunchId(2),
            ProcessIdentity { pid, start_ticks: at - 1 },
        )
        .unwrap();
        drop(dir);
        let error = JobDir::create(&root).unwrap_err();
        assert!(matches!(error, JobDirError::Abandoned { workers: 1, .. }), "{error}");
        let path = root.canonicalize().unwrap();
        let line = format!("elasticdl train --resume {}", path.display());
        assert!(error.to_string().contains(&line), "{error}");
        assert!(
            super::super::delete(&root).is_err_and(|error| error.to_string().contains("1 worker"))
        );
        assert!(root.join("token").is_file());
        assert_eq!(stop(&root, false).unwrap(), StopTarget::Workers(1));
        assert_eq!(worker.ended_by(), Some(15));
        assert!(
            unrelated.0.try_wait().unwrap().is_none(),
            "it has another one's process id, and nothing else"
        );
        assert!(JobDir::create(&root).is_ok());
    }

    #[test]
    fn concurrent_checks_of_a_job_do_not_report_it_as_running() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = JobDir::create(scratch.path()).unwrap();
        assert!(is_running(scratch.path()));
        drop(dir);
        let check = fs::File::open(scratch.path().join(LOCK)).unwrap();
        check.try_lock_shared().unwrap();
        assert!(!is_running(scratch.path()));
    }
}
