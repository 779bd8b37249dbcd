//! `elasticdl status --watch`: polls the status of a job until the job ends.
//!
//! A master that does not answer may have been killed and may be replaced, so the command waits for
//! the next one. A job has ended when its directory names no master and holds a summary.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elasticdl_master::jobdir::LookupError;
use elasticdl_proto::Status;
use tokio::time::Instant;

use super::connection::{Connection, OpenError, to_failure};
use crate::backend::handle::WatchOptions;
use crate::process::{EXIT_OK, Failure};
use crate::render::{Display, JobEnd};

/// Shows the job in `root` until it ends. Returns the exit code.
pub(super) async fn watch(root: &Path, options: &WatchOptions) -> Result<u8, Failure> {
    let mut display = Display::new(options.json);
    let mut connection = None;
    let (mut missed, mut answered) = (0_u32, Instant::now());
    loop {
        match query(root, &mut connection).await {
            StatusQuery::Ended(path) => {
                display.end(&JobEnd::read(&path, super::stored_status(root))?)?;
                return Ok(EXIT_OK);
            }
            StatusQuery::Failed(failure) => return Err(failure),
            // The job may be ending: the next query decides.
            StatusQuery::NoMaster(_) if missed == 0 => missed = 1,
            StatusQuery::NoMaster(why) => {
                if answered.elapsed() >= options.master_timeout {
                    return Err(Failure {
                        text: format!("{}; no other has come", why.text),
                        ..why
                    });
                }
                display.no_master(missed)?;
                missed = missed.saturating_add(1);
            }
            StatusQuery::Status(status) => {
                (missed, answered) = (0, Instant::now());
                display.show(*status)?;
            }
        }
        tokio::time::sleep(if missed == 1 { options.interval.min(SOON) } else { options.interval })
            .await;
    }
}

/// Result of one status query.
enum StatusQuery {
    /// The job has ended; path of its summary.
    Ended(PathBuf),
    /// There is no job to wait for.
    Failed(Failure),
    /// No master answers.
    NoMaster(Failure),
    Status(Box<Status>),
}

async fn query(root: &Path, connection: &mut Option<Connection>) -> StatusQuery {
    if connection.is_none() {
        match Connection::open(root).await {
            Ok(opened) => *connection = Some(opened),
            Err(OpenError::Lookup(LookupError::NotRunning { summary: Some(path), .. })) => {
                return StatusQuery::Ended(path);
            }
            Err(error) => {
                let failure = error.to_failure(root);
                return if is_transient(&error) {
                    StatusQuery::NoMaster(failure)
                } else {
                    StatusQuery::Failed(failure)
                };
            }
        }
    }
    let Some(open) = connection else {
        unreachable!("it was just opened");
    };
    match open.status().await {
        Ok(status) => StatusQuery::Status(Box::new(status)),
        Err(status) => {
            *connection = None;
            StatusQuery::NoMaster(to_failure(root, &status))
        }
    }
}

/// Whether a later query may succeed.
fn is_transient(error: &OpenError) -> bool {
    match error {
        OpenError::NoAnswer(_) | OpenError::Lookup(LookupError::NotRunning { .. }) => true,
        // The token file is replaced when a new master starts, and is absent for a moment.
        OpenError::Lookup(LookupError::Unreadable { source, .. }) => {
            source.kind() == io::ErrorKind::NotFound
        }
        OpenError::Lookup(_) => false,
    }
}

/// Pause after the first unanswered query: the job may be ending.
const SOON: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_master_is_awaited_and_a_missing_job_is_not() {
        let unreadable = |kind: io::ErrorKind| {
            OpenError::Lookup(LookupError::Unreadable { path: "token".into(), source: kind.into() })
        };
        assert!(is_transient(&unreadable(io::ErrorKind::NotFound)));
        assert!(!is_transient(&unreadable(io::ErrorKind::InvalidData)));
        assert!(!is_transient(&OpenError::Lookup(LookupError::NoSuchJob { path: "j".into() })));
        assert!(is_transient(&OpenError::Lookup(LookupError::NotRunning {
            path: "j".into(),
            summary: None
        })));
    }
}
