//! What a new job would replace in its directory.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::contents::{is_job_dir, job_checkpoints};
use super::files::{CHECKPOINTS, EARLIER, RECORD, SUMMARY};

/// The result of an earlier job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EarlierJob {
    /// `completed`, for example; `None`: its master has died.
    pub state: Option<String>,
    /// Steps that it has made, as far as they are known.
    pub steps: u64,
    /// Folder of its checkpoints, if it has whole ones there.
    pub checkpoints: Option<PathBuf>,
}

/// Returns the job in `root`, if it has trained anything.
#[must_use]
pub fn earlier_job(root: &Path) -> Option<EarlierJob> {
    if !is_job_dir(root) {
        return None;
    }
    let folder = root.join(CHECKPOINTS);
    let checkpoints = job_checkpoints(&folder).unwrap_or_default();
    let has_whole = checkpoints.iter().any(|path| path.join("manifest.json").is_file());
    // Another release may have written the summary.
    // It is set aside while a job that was to replace it has not started.
    let read = |folder: &Path| fs::read(folder.join(SUMMARY)).ok();
    let summary = read(&root.join(EARLIER)).or_else(|| read(root));
    let summary: Option<Value> = summary.map(|s| serde_json::from_slice(&s).unwrap_or_default());
    let steps = summary.as_ref().and_then(|summary| summary["steps"].as_u64()).unwrap_or_default();
    let state = summary.map(|summary| summary["state"].as_str().unwrap_or("ended").to_owned());
    let checkpoints = has_whole.then_some(folder);
    (steps > 0 || checkpoints.is_some()).then_some(EarlierJob { state, steps, checkpoints })
}

/// Whether a master has begun a job in `root`: there is more than what the start of one leaves.
#[must_use]
pub fn has_begun(root: &Path) -> bool {
    root.join(RECORD).is_file() || root.join(SUMMARY).is_file()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobdir::JobDir;

    #[test]
    fn only_a_job_that_has_trained_something_is_in_the_way() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("job");
        assert_eq!(earlier_job(&root), None);
        drop(JobDir::create(&root).unwrap());
        assert!(earlier_job(&root).is_none() && !has_begun(&root));
        let summary = |text: &str| fs::write(root.join(SUMMARY), text).unwrap();
        summary(r#"{"state": "refused", "steps": 0}"#);
        assert!(earlier_job(&root).is_none() && has_begun(&root));
        summary(r#"{"state": "completed", "steps": 200}"#);
        let completed =
            EarlierJob { state: Some("completed".into()), steps: 200, checkpoints: None };
        assert_eq!(earlier_job(&root), Some(completed));
        // Its master has died.
        fs::remove_file(root.join(SUMMARY)).unwrap();
        let checkpoint = root.join(CHECKPOINTS).join("step-000000000007-0123abcd-g1");
        fs::create_dir_all(&checkpoint).unwrap();
        assert_eq!(earlier_job(&root), None, "it is not whole");
        fs::write(checkpoint.join("manifest.json"), "{}").unwrap();
        let found = earlier_job(&root).unwrap();
        assert_eq!((found.state, found.checkpoints), (None, Some(root.join(CHECKPOINTS))));
    }
}
