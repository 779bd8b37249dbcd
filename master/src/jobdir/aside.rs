//! The files of an earlier job, while the job that replaces it starts.
//!
//! A job may turn out to be unable to start: a port is taken, or there is no data at the given
//! path. So the files of the earlier job are moved aside, and removed when the new job's data set
//! is known. A job that ends before leaves the directory as it was, with its own files in a folder
//! of their own.
//!
//! **Invariants:** while there is a folder `earlier`, it has all files of the earlier job, and the
//! files beside it are the new job's. While there is a folder `.earlier`, both are the earlier
//! job's, and are being moved.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use super::contents::stale_files;
use super::files::{EARLIER, LOGS, MASTER, MOVING, REFUSED};

/// Moves the files of the job in `root` aside.
pub(super) fn set_aside(root: &Path) -> io::Result<()> {
    move_files(root, &root.join(MOVING))?;
    fs::rename(root.join(MOVING), root.join(EARLIER))
}

/// Undoes what a job that has not started has done to `root`.
pub(super) fn restore(root: &Path) -> io::Result<Option<PathBuf>> {
    let (earlier, refused) = (root.join(EARLIER), root.join(REFUSED));
    let is_replaced = earlier.is_dir();
    if is_replaced {
        remove(&refused)?;
        // It has the address of this master.
        let _ = fs::remove_file(root.join(MASTER));
        move_files(root, &refused)?;
        fs::rename(&earlier, root.join(MOVING))?;
    }
    if root.join(MOVING).is_dir() {
        move_files(&root.join(MOVING), root)?;
        remove(&root.join(MOVING))?;
    }
    Ok(is_replaced.then_some(refused))
}

/// Removes the files of the earlier job: the one that replaces it has started.
pub(super) fn forget(root: &Path) -> io::Result<()> {
    remove(&root.join(EARLIER))?;
    remove(&root.join(REFUSED))
}

/// Removes a folder of files that were moved, as far as it has no other files.
pub(super) fn remove(folder: &Path) -> io::Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    stale_files(folder)?.iter().try_for_each(fs::remove_file)?;
    for folder in [&folder.join(LOGS), folder] {
        let _ = fs::remove_dir(folder);
    }
    Ok(())
}

/// Moves the files of a job from one folder to another.
fn move_files(from: &Path, to: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(to.join(LOGS))?;
    for file in stale_files(from)? {
        let within = file.strip_prefix(from).expect("it was found below");
        fs::rename(&file, to.join(within))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use crate::job::testing::{largest, spec};
    use crate::jobdir::{JobDir, delete, earlier_job};

    const SUMMARY: &str = r#"{"state": "completed", "steps": 200}"#;

    /// A directory with a finished job, and the new job that replaces it.
    fn replacing() -> (tempfile::TempDir, JobDir) {
        let scratch = tempfile::tempdir().unwrap();
        let dir = JobDir::create(&scratch.path().join("job")).unwrap();
        fs::write(dir.summary_path(), SUMMARY).unwrap();
        fs::write(dir.logs().join("worker-1.log"), "old").unwrap();
        drop(dir);
        let dir = JobDir::create(&scratch.path().join("job")).unwrap();
        (scratch, dir)
    }

    #[test]
    fn a_job_that_could_not_start_leaves_the_earlier_one_as_it_was() {
        let (_scratch, dir) = replacing();
        assert!(!dir.summary_path().exists(), "it is not taken for that of the new job");
        assert_eq!(earlier_job(dir.path()).unwrap().steps, 200);
        fs::write(dir.summary_path(), "new").unwrap();
        fs::write(dir.logs().join("worker-1.log"), "new").unwrap();
        let refused = dir.restore_earlier().unwrap();
        assert_eq!(fs::read_to_string(dir.summary_path()).unwrap(), SUMMARY);
        assert_eq!(fs::read_to_string(dir.logs().join("worker-1.log")).unwrap(), "old");
        assert_eq!(fs::read_to_string(refused.join("summary.json")).unwrap(), "new");
        assert_eq!(fs::read_to_string(refused.join("logs/worker-1.log")).unwrap(), "new");
        assert_eq!(dir.restore_earlier(), None);
        let root = dir.path().to_owned();
        drop(dir);
        assert_eq!(delete(&root).unwrap(), [] as [PathBuf; 0]);
    }

    #[test]
    fn the_earlier_job_is_gone_when_the_data_of_the_new_one_is_known() {
        let (_scratch, dir) = replacing();
        let mut record = dir.persisted_job_file();
        record.write(&Job::new(spec()).to_persisted());
        assert!(earlier_job(dir.path()).is_some());
        record.write(&largest().to_persisted());
        assert_eq!(earlier_job(dir.path()), None);
        assert_eq!(dir.restore_earlier(), None);
        assert!(!dir.path().join(EARLIER).exists());
    }

    #[test]
    fn a_master_that_is_killed_at_its_start_loses_nothing() {
        let (scratch, dir) = replacing();
        drop(dir);
        let root = scratch.path().join("job");
        // While files are moved, and after.
        fs::create_dir(root.join(MOVING)).unwrap();
        fs::rename(root.join(EARLIER).join("summary.json"), root.join(MOVING).join("summary.json"))
            .unwrap();
        fs::rename(root.join(EARLIER).join("logs/worker-1.log"), root.join("logs/worker-1.log"))
            .unwrap();
        remove(&root.join(EARLIER)).unwrap();
        for _ in 0..2 {
            let dir = JobDir::create(&root).unwrap();
            assert_eq!(earlier_job(dir.path()).unwrap().steps, 200);
            drop(dir);
        }
        assert!(root.join(EARLIER).join("logs/worker-1.log").is_file());
    }
}
