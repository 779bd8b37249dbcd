//! Names of jobs whose directories the user has chosen: symbolic links in the folder of jobs'
//! directories, so that commands find such jobs by name, and `elasticdl list` shows them.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

use super::processes::is_running;

/// Makes `name` in the folder `jobs` the name of the job in `root`, an absolute path. A link of an
/// earlier job is replaced.
///
/// # Errors
/// For the user, what the name means instead.
pub(super) fn register(jobs: &Path, name: &str, root: &Path) -> Result<(), String> {
    let link = jobs.join(name);
    let failed = |error: io::Error| {
        format!("commands find this job by its directory only: {}: {error}", link.display())
    };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(jobs).map_err(failed)?;
    if link.canonicalize().is_ok_and(|found| found == root) {
        return Ok(());
    }
    match fs::read_link(&link) {
        Ok(other) if is_running(&link) => {
            return Err(format!(
                "the name {name} is that of a running job in {}; commands find this job by its \
                 directory",
                other.display()
            ));
        }
        Ok(_) => fs::remove_file(&link).map_err(failed)?,
        Err(_) if link.exists() => {
            return Err(format!(
                "the name {name} is that of the job in {}; commands find this job by its directory",
                link.display()
            ));
        }
        Err(_) => {}
    }
    symlink(root, &link).map_err(failed)
}

/// The directory of the job with this name in the folder `jobs`.
pub(super) fn resolve(jobs: &Path, name: &Path) -> PathBuf {
    let path = jobs.join(name);
    fs::read_link(&path).unwrap_or(path)
}

/// Removes the name at `link` if its job is gone.
pub(super) fn forget_deleted(link: &Path) {
    if fs::read_link(link).is_ok_and(|root| !root.exists()) {
        // Another command may have removed it.
        let _ = fs::remove_file(link);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobdir::{JobDir, delete};

    #[test]
    fn a_job_in_a_folder_of_the_users_has_a_name_until_it_is_deleted() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().canonicalize().unwrap();
        let (jobs, root) = (path.join("jobs"), path.join("here"));
        let dir = JobDir::create(&root).unwrap();
        register(&jobs, "mnist", dir.path()).unwrap();
        register(&jobs, "mnist", dir.path()).unwrap();
        assert_eq!(resolve(&jobs, Path::new("mnist")), root);
        assert_eq!(resolve(&jobs, Path::new("other")), jobs.join("other"));
        // A running job keeps its name; one that has ended gives it away.
        let next = path.join("there");
        dir.publish("127.0.0.1:1".parse().unwrap(), None).unwrap();
        let refused = register(&jobs, "mnist", &next).unwrap_err();
        assert!(refused.contains("running job in") && refused.contains("here"), "{refused}");
        drop(dir);
        register(&jobs, "mnist", &next).unwrap();
        assert_eq!(resolve(&jobs, Path::new("mnist")), next);
        // The directory of a job that has the name by default is never replaced.
        JobDir::create(&jobs.join("old")).unwrap();
        assert!(register(&jobs, "old", &next).unwrap_err().contains("jobs/old"));
        register(&jobs, "mnist", &root).unwrap();
        forget_deleted(&jobs.join("mnist"));
        assert!(jobs.join("mnist").is_symlink());
        assert!(delete(&root).unwrap().is_empty());
        forget_deleted(&jobs.join("mnist"));
        assert!(!jobs.join("mnist").is_symlink());
    }
}
