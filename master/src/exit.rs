//! How the process of a master or of a command ends: exit codes, and failures that lead to them.

use std::io;

use crate::job::Summary;
use crate::kube::client::ClusterError;

/// Failure of a command or a master.
#[derive(Debug)]
pub struct Failure {
    /// Exit code of the process.
    pub code: u8,
    /// Error message: what is wrong, where, and what would be right.
    pub text: String,
}

impl Failure {
    /// A failure because of invalid input; nothing was started.
    #[must_use]
    pub fn usage(text: impl Into<String>) -> Self {
        Self { code: EXIT_USAGE, text: text.into() }
    }

    /// A failure of a master that finds the objects of its job missing or damaged.
    pub(crate) fn damaged(text: impl Into<String>) -> Self {
        Self { code: EXIT_DAMAGED, text: text.into() }
    }

    /// A failure with input that may be valid.
    #[must_use]
    pub fn failed(text: impl Into<String>) -> Self {
        Self { code: EXIT_FAILED, text: text.into() }
    }
}

impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        match error {
            ClusterError::Exists(_)
            | ClusterError::Missing { .. }
            | ClusterError::NoSuchJob { .. }
            | ClusterError::NoConfig(_) => Self::usage(error.to_string()),
            error => Self::failed(error.to_string()),
        }
    }
}

/// Exit code of the master of an ended job. A job that the user has stopped is complete for the
/// cluster, unless its state is lost.
#[must_use]
pub fn code_of_summary(summary: &Summary) -> u8 {
    match &*summary.state {
        // A stop that could not wait for the group.
        "stopped" if summary.state_lost.is_some_and(|lost| lost.at_step == summary.steps) => {
            EXIT_FAILED
        }
        "stopped" if unsaved_steps(summary).is_some() && has_failed_checkpoint(summary) => {
            EXIT_FAILED
        }
        "completed" | "stopped" => EXIT_OK,
        "refused" => EXIT_USAGE,
        _ => EXIT_FAILED,
    }
}

/// Whether the last checkpoint could not be written.
fn has_failed_checkpoint(summary: &Summary) -> bool {
    summary.checkpoints.as_ref().is_some_and(|known| known.error.is_some())
}

/// The first and the last step of a job that has ended which no checkpoint contains. A complete job
/// whose model is exported needs none.
#[must_use]
pub fn unsaved_steps(summary: &Summary) -> Option<(u64, u64)> {
    let needs_one = match &*summary.state {
        "failed" | "stopped" => true,
        "completed" => summary.export.is_none(),
        _ => false,
    };
    summary.checkpoints.as_ref().filter(|_| needs_one)?.unsaved(summary.steps)
}

/// Converts an error of the operating system to "can't `what`".
pub fn cannot(what: &str) -> impl Fn(io::Error) -> Failure {
    move |e| Failure::failed(format!("can't {what}: {e}"))
}

/// A master has found the objects of its job missing or damaged.
pub(crate) const EXIT_DAMAGED: u8 = 5;
/// The job or the command has failed.
pub const EXIT_FAILED: u8 = 1;
/// Another master holds the leader Lease of the job.
pub(crate) const EXIT_FENCED: u8 = 3;
/// The terminal was closed.
pub(crate) const EXIT_HUNG_UP: u8 = 129;
/// SIGINT has ended the process.
pub const EXIT_INTERRUPTED: u8 = 130;
/// The command or the job has done what it should.
pub const EXIT_OK: u8 = 0;
/// SIGTERM has ended the process.
pub const EXIT_TERMINATED: u8 = 143;
/// The API server refuses the token of a master; its Job starts one with another token.
pub(crate) const EXIT_UNAUTHORIZED: u8 = 4;
/// The input is invalid. The same code as clap's for usage errors.
pub const EXIT_USAGE: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::testing::spec;
    use crate::job::{CheckpointsSummary, Job, SavedCheckpoint, Time};

    #[test]
    fn a_stop_whose_last_checkpoint_could_not_be_written_has_failed() {
        let newest = Some(SavedCheckpoint { step: 18, name: String::new(), bytes: 1 });
        let dir = Some("/c".into());
        let mut known = CheckpointsSummary { dir, newest, ..CheckpointsSummary::default() };
        let of = |known: &CheckpointsSummary, state: &'static str| Summary {
            state: state.into(),
            steps: 46,
            export: (state == "completed").then(|| "/m".into()),
            checkpoints: Some(known.clone()),
            ..Job::new(spec()).summary(Time::default())
        };
        assert_eq!(code_of_summary(&of(&known, "stopped")), EXIT_OK, "nothing failed");
        assert_eq!(unsaved_steps(&of(&known, "stopped")), Some((19, 46)), "the user ended it");
        known.error = Some("timed out".into());
        assert_eq!(code_of_summary(&of(&known, "stopped")), EXIT_FAILED);
        assert_eq!(unsaved_steps(&of(&known, "stopped")), Some((19, 46)));
        let complete = of(&known, "completed");
        assert_eq!((code_of_summary(&complete), unsaved_steps(&complete)), (EXIT_OK, None));
        let nowhere = Summary { export: None, ..complete };
        assert_eq!(unsaved_steps(&nowhere), Some((19, 46)), "the model is nowhere else");
        assert_eq!(unsaved_steps(&of(&known, "running")), None);
        known.newest.as_mut().unwrap().step = 46;
        assert_eq!(code_of_summary(&of(&known, "stopped")), EXIT_OK);
    }
}
