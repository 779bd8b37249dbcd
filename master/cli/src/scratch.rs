//! Folders that live as long as this process.

use std::fs::{self, DirBuilder, DirEntry, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use crate::process::{Failure, cannot};

/// A folder that is removed in the end.
pub(crate) struct Scratch {
    pub(crate) path: PathBuf,
    /// Locked while the folder is in use, however this process ends.
    _lock: File,
}

impl Scratch {
    /// Creates a folder in `parent` whose name begins so, and removes those of this name whose
    /// processes were killed.
    pub(crate) fn create(parent: &Path, prefix: &str) -> Result<Self, Failure> {
        remove_abandoned(parent, prefix);
        loop {
            let mut random = [0; 6];
            getrandom::fill(&mut random)
                .map_err(|e| Failure::failed(format!("the system gives no random bytes: {e}")))?;
            let digits: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
            let path = parent.join(format!("{prefix}{digits}"));
            let doing = format!("create {}", path.display());
            let failed = cannot(&doing);
            DirBuilder::new().mode(0o700).create(&path).map_err(&failed)?;
            let lock = File::open(&path).and_then(|lock| lock.lock().map(|()| lock));
            // Another process may have taken it for an abandoned one before it was locked.
            match lock {
                Ok(lock) if path.is_dir() => return Ok(Self { path, _lock: lock }),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Removes the folders in `parent` that no process uses any more.
fn remove_abandoned(parent: &Path, prefix: &str) {
    let is_scratch = |entry: &DirEntry| {
        let name = entry.file_name();
        let digits = name.to_str().and_then(|name| name.strip_prefix(prefix));
        digits.is_some_and(|digits| digits.len() == 12)
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
    };
    let all = fs::read_dir(parent).into_iter().flatten().flatten();
    for folder in all.filter(is_scratch).map(|entry| entry.path()) {
        // Those of other users can't be opened.
        if let Ok(lock) = File::open(&folder)
            && lock.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(&folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_killed_processes_are_removed_and_those_in_use_are_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let [killed, other] = ["elasticdl-replay-0123456789ab", "elasticdl-replay-mine"]
            .map(|n| parent.path().join(n));
        fs::create_dir_all(killed.join("job/logs")).unwrap();
        fs::create_dir(&other).unwrap();
        let first = Scratch::create(parent.path(), "elasticdl-replay-").unwrap();
        assert!(!killed.exists() && other.exists());
        let second = Scratch::create(parent.path(), "elasticdl-replay-").unwrap();
        assert!(first.path.is_dir() && second.path.is_dir());
        let path = first.path.clone();
        drop(first);
        assert!(!path.exists() && second.path.is_dir());
    }
}
