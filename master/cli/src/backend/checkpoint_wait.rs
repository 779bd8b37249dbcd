//! The wait for a requested checkpoint.

use std::time::Duration;

use elasticdl_proto::CheckpointsSummary;
use tokio::time::Instant;

use crate::process::Failure;

/// Wait for a requested checkpoint.
pub(super) struct CheckpointWait {
    until: Instant,
    limit: Duration,
    /// Number of failed checkpoints at the first poll.
    failed: Option<u64>,
}

impl CheckpointWait {
    pub(super) fn new(limit: Duration) -> Self {
        Self { until: Instant::now() + limit, limit, failed: None }
    }

    /// Evaluates the newest status of a job that was at step `requested_at` when the checkpoint was
    /// requested. Returns the location of the checkpoint once it is complete.
    pub(super) fn poll(
        &mut self,
        requested_at: u64,
        known: Option<CheckpointsSummary>,
    ) -> Result<Option<String>, Failure> {
        let known = known.unwrap_or_default();
        if let Some(newest) = known.newest.filter(|newest| newest.step > requested_at) {
            let dir = known.dir.unwrap_or_default();
            return Ok(Some(format!("{}/{}", dir.trim_end_matches('/'), newest.name)));
        }
        let failed = *self.failed.get_or_insert(known.failed);
        if let Some(error) = known.error.filter(|_| known.failed > failed) {
            return Err(Failure::failed(format!("the checkpoint could not be written: {error}")));
        }
        if Instant::now() < self.until {
            Ok(None)
        } else {
            Err(Failure::failed(format!(
                "the checkpoint is not complete after {} s; the job continues to write it",
                self.limit.as_secs()
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use elasticdl_master::job::SavedCheckpoint;

    use super::*;

    #[test]
    fn a_wait_ends_with_the_requested_checkpoint_and_not_with_an_older_one() {
        let known = |step, failed, error: Option<&str>| CheckpointsSummary {
            dir: Some("/c".into()),
            newest: Some(SavedCheckpoint { step, name: "n".into(), bytes: 1 }),
            failed,
            error: error.map(Into::into),
            ..CheckpointsSummary::default()
        };
        let mut wait = CheckpointWait::new(Duration::from_secs(60));
        let old = known(10, 1, Some("long ago"));
        assert!(wait.poll(10, Some(old.clone())).is_ok_and(|uri| uri.is_none()));
        assert!(
            wait.poll(10, Some(known(11, 1, None))).is_ok_and(|uri| uri == Some("/c/n".into()))
        );
        let failed = wait.poll(10, Some(known(10, 2, Some("disk full"))));
        assert!(failed.is_err_and(|failure| failure.text.contains("disk full")));
        let late = CheckpointWait::new(Duration::ZERO).poll(10, Some(old));
        assert!(late.is_err_and(|failure| failure.text.contains("after 0 s")));
    }
}
