//! The files of a running job that a user has removed, or renamed with their directory, are written
//! again: without them no worker can be started, and no command finds the job.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use super::files::{CA, CERTIFICATE, JOB, KEY, LOCK, LOGS, MASTER, PROCESSES, TOKEN, replace};
use super::lock::take_lock;

/// Watches the directory of a running job.
#[derive(Debug)]
pub(super) struct Guard {
    root: PathBuf,
    /// Device and inode of the lock.
    lock: Option<(u64, u64)>,
    /// The lock of a directory that this master has written again.
    taken: Option<File>,
    /// Open files: they can be read after they are removed.
    held: BTreeMap<&'static str, File>,
}

impl Guard {
    /// A guard of the directory `root`, whose lock this process holds.
    pub(super) fn new(root: &Path) -> Self {
        let held = BTreeMap::new();
        Self { root: root.into(), lock: identity(&root.join(LOCK)), taken: None, held }
    }

    /// Writes the directory again if it is gone. Returns whether it was.
    ///
    /// # Errors
    /// It can't be written again.
    pub(super) fn restore(&mut self) -> io::Result<bool> {
        let found = identity(&self.root.join(LOCK));
        if found.is_some() && found == self.lock {
            self.hold();
            return Ok(false);
        }
        if found.is_some() {
            let text = "another directory has its name";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
        DirBuilder::new().recursive(true).mode(0o700).create(self.root.join(LOGS))?;
        fs::set_permissions(&self.root, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
        for (name, file) in &self.held {
            let path = self.root.join(name);
            if !path.exists() {
                replace(&path, &contents(file)?)?;
            }
        }
        self.held.clear();
        self.taken = Some(take_lock(&self.root).map_err(io::Error::other)?);
        self.lock = identity(&self.root.join(LOCK));
        self.hold();
        Ok(true)
    }

    /// Opens the files that are there.
    fn hold(&mut self) {
        for name in [CA, CERTIFICATE, KEY, JOB, MASTER, PROCESSES, TOKEN] {
            if !self.held.contains_key(name)
                && let Ok(file) = File::open(self.root.join(name))
            {
                self.held.insert(name, file);
            }
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

fn contents(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::notes::{note_process, read_notes};
    use super::super::process_identity::ProcessIdentity;
    use super::super::{JobDir, is_running, look_up};
    use super::*;
    use crate::job::LaunchId;

    #[test]
    fn a_directory_that_is_removed_or_renamed_while_the_job_runs_is_written_again() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("job");
        let dir = JobDir::create(&root).unwrap();
        dir.publish("127.0.0.1:1".parse().unwrap(), None).unwrap();
        let mut guard = Guard::new(&root);
        assert!(!guard.restore().unwrap());
        let process = ProcessIdentity { pid: 70, start_ticks: 9 };
        note_process(&root.join(PROCESSES), LaunchId(1), process).unwrap();
        assert!(!guard.restore().unwrap());
        for rename in [true, false] {
            match rename {
                true => fs::rename(&root, scratch.path().join("other")).unwrap(),
                false => fs::remove_dir_all(&root).unwrap(),
            }
            assert!(guard.restore().unwrap());
            assert!(!guard.restore().unwrap());
            assert!(is_running(&root) && look_up(&root).is_ok());
            assert_eq!(read_notes(&root).unwrap(), [(LaunchId(1), process)].into());
        }
    }

    #[test]
    fn a_directory_with_the_name_of_a_renamed_one_is_left_alone() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("job");
        let dir = JobDir::create(&root).unwrap();
        let mut guard = Guard::new(dir.path());
        fs::rename(&root, scratch.path().join("other")).unwrap();
        let other = JobDir::create(&root).unwrap();
        let error = guard.restore().unwrap_err().to_string();
        assert!(error.contains("another directory has its name"), "{error}");
        assert!(is_running(other.path()));
        assert!(dir.owner().is_replaced() && !other.owner().is_replaced());
        other.publish("127.0.0.1:1".parse().unwrap(), None).unwrap();
        drop(dir);
        assert!(look_up(&root).is_ok(), "the address of the other job's master stays");
    }
}
