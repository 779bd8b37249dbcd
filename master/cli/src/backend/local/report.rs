//! The report of a job of this machine that has ended.

use std::fmt::Display;
use std::fs;
use std::path::Path;

use elasticdl_master::dashboard::{StoredHistory, report_of};
use elasticdl_master::jobdir::{self, LookupError, quoted};
use elasticdl_proto::Summary;

use crate::process::Failure;

/// The page of the job in `root`.
pub(super) fn report(root: &Path) -> Result<String, Failure> {
    let summary = match jobdir::look_up(root) {
        Err(LookupError::NotRunning { summary: Some(path), .. }) => path,
        Err(error @ LookupError::NotRunning { .. }) => {
            return Err(Failure::failed(format!("{error}, and it has no summary")));
        }
        Err(error) => return Err(Failure::usage(error.to_string())),
        Ok(_) => {
            return Err(Failure::failed(format!(
                "the job in {} is running: `elasticdl dashboard {}` shows it",
                root.display(),
                quoted(root)
            )));
        }
    };
    let unreadable = |path: &Path, error: &dyn Display| {
        Failure::failed(format!("can't read {}: {error}", path.display()))
    };
    let json = fs::read(&summary).map_err(|error| unreadable(&summary, &error))?;
    let read: Summary = serde_json::from_slice(&json).map_err(|e| unreadable(&summary, &e))?;
    let history = jobdir::history_path(root);
    let stored = StoredHistory::read(&history).map_err(|error| unreadable(&history, &error))?;
    Ok(report_of(read, stored))
}
