//! `elasticdl suspend` and `elasticdl resume`.

use crate::backend::NamedJob;
use crate::process::{Failure, print};

/// Suspends or resumes a job. Returns the exit code.
pub(super) fn set_suspended(job: &NamedJob, suspend: bool) -> Result<u8, Failure> {
    print(&format!("{}\n", job.find()?.set_suspended(suspend)?))
}
