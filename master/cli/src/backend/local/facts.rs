//! What the directory of a job of this machine says of its records.

use std::fs;
use std::path::Path;

use elasticdl_master::jobdir::{self, LookupError, complete_checkpoints};
use elasticdl_master::lineage::{JobFacts, JobProgress};
use elasticdl_proto::Summary;

use super::stored_status;
use crate::backend::handle::JobHandle;
use crate::process::Failure;

/// What is known of the job in `root`, which may run, have ended, or have lost its master.
pub(super) fn facts(job: &dyn JobHandle, root: &Path) -> Result<JobFacts, Failure> {
    let progress: JobProgress = match jobdir::look_up(root) {
        Err(LookupError::NotRunning { summary: Some(path), .. }) => {
            let unreadable = |why: &dyn std::fmt::Display| {
                Failure::failed(format!("can't read {}: {why}", path.display()))
            };
            let json = fs::read(&path).map_err(|error| unreadable(&error))?;
            let summary: Summary = serde_json::from_slice(&json).map_err(|e| unreadable(&e))?;
            summary.into()
        }
        Err(error @ LookupError::NoSuchJob { .. }) => {
            return Err(Failure::usage(error.to_string()));
        }
        // A job without its master is as far as it was.
        _ => match job.status() {
            Ok(status) => status.into(),
            Err(failure) => stored_status(root).ok_or(failure)?.into(),
        },
    };
    let record = jobdir::read_record(root).map_err(|error| Failure::failed(error.to_string()))?;
    let mut facts = JobFacts::of_record(&record, progress).ok_or_else(|| {
        Failure::failed(format!("no worker of {} has described its data", root.display()))
    })?;
    if let Some(own) = facts.spec.options.checkpoints.as_mut().filter(|spec| spec.exclusive) {
        // The job's directory may have been moved.
        let there = root.join(jobdir::CHECKPOINTS);
        if let Some(there) = there.to_str().filter(|there| Path::new(there).is_dir()) {
            own.dir = there.to_owned();
        }
    }
    facts.folder = jobdir::working_folder(root);
    let folder = facts.checkpoint_dir().filter(|folder| folder.is_dir());
    facts.checkpoints = folder.map(|folder| complete_checkpoints(&folder));
    Ok(facts)
}
