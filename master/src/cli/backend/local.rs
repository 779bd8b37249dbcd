//! A job of this machine, which its directory names.

mod connection;
mod report;
mod watch;

use std::fs;
use std::io::Read as _;
use std::path::PathBuf;
use std::time::Duration;

use elasticdl_proto::wire::{CheckpointRequest, ScaleRequest, SuspendRequest};
use elasticdl_proto::{Status, Summary};

use self::connection::{Connection, to_failure};
use super::checkpoint_wait::CheckpointWait;
use super::handle::{JobHandle, WatchOptions, describe_suspension};
use crate::cli::process::{Failure, new_runtime, print};
use crate::cli::render::{Paths, summary_to_table};
use crate::dashboard::DashboardKey;
use crate::job::LaunchId;
use crate::jobdir::{self, DeleteError, JobDirError, LookupError, StopError, StopTarget, quoted};

/// A job of this machine.
pub(super) struct LocalHandle {
    root: PathBuf,
}

impl LocalHandle {
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root }
    }

    async fn connect(&self) -> Result<Connection, Failure> {
        Connection::open(&self.root).await.map_err(|error| error.to_failure(&self.root))
    }

    fn refused(&self, status: tonic::Status) -> Failure {
        to_failure(&self.root, &status)
    }
}

impl JobHandle for LocalHandle {
    fn status(&self) -> Result<Status, Failure> {
        new_runtime()?.block_on(async {
            self.connect().await?.status().await.map_err(|status| self.refused(status))
        })
    }

    fn ended(&self) -> Result<Option<String>, Failure> {
        let Err(LookupError::NotRunning { summary: Some(path), .. }) = jobdir::look_up(&self.root)
        else {
            return Ok(None);
        };
        let unreadable = |error: &dyn std::fmt::Display| {
            Failure::failed(format!(
                "the job has ended, but its summary {} can't be read: {error}",
                path.display()
            ))
        };
        let json = fs::read(&path).map_err(|error| unreadable(&error))?;
        let summary: Summary = serde_json::from_slice(&json).map_err(|error| unreadable(&error))?;
        let logs = self.root.join("logs");
        let paths = Paths { logs: Some(&logs), summary: Some(&path) };
        Ok(Some(summary_to_table(&summary, paths)))
    }

    fn watch(&self, options: &WatchOptions) -> Result<u8, Failure> {
        new_runtime()?.block_on(watch::watch(&self.root, options))
    }

    fn dashboard(&self, _port: u16) -> Result<u8, Failure> {
        let (endpoint, token) = jobdir::look_up(&self.root).map_err(|error| match error {
            LookupError::NotRunning { .. } => Failure::failed(format!(
                "{error}; `elasticdl report {} --html FILE` writes its page",
                quoted(&self.root)
            )),
            error => Failure::usage(error.to_string()),
        })?;
        let address = endpoint.dashboard.ok_or_else(|| {
            Failure::failed(format!(
                "the job in {} was started with --dashboard-port none",
                self.root.display()
            ))
        })?;
        print(&format!("{}\n", DashboardKey::of(&token).link(address)))
    }

    fn report(&self) -> Result<String, Failure> {
        report::report(&self.root)
    }

    fn scale(&self, num_workers: u32) -> Result<u32, Failure> {
        new_runtime()?.block_on(async {
            let mut connection = self.connect().await?;
            let request = ScaleRequest { num_workers };
            let answer =
                connection.request(request, async |client, request| client.scale(request).await);
            answer.await.map(|reply| reply.was).map_err(|status| self.refused(status))
        })
    }

    fn checkpoint(&self, timeout: Duration) -> Result<String, Failure> {
        new_runtime()?.block_on(async {
            let mut connection = self.connect().await?;
            let answer = connection.request(CheckpointRequest, async |client, request| {
                client.checkpoint(request).await
            });
            let requested_at = answer.await.map_err(|status| self.refused(status))?.step;
            let mut wait = CheckpointWait::new(timeout);
            loop {
                let status = connection.status().await.map_err(|status| self.refused(status))?;
                if let Some(location) = wait.poll(requested_at, status.checkpoints)? {
                    return Ok(location);
                }
                tokio::time::sleep(CHECKPOINT_POLL).await;
            }
        })
    }

    fn set_suspended(&self, suspend: bool) -> Result<String, Failure> {
        let answer = new_runtime()?.block_on(async {
            let mut connection = self.connect().await?;
            let request = SuspendRequest { suspend };
            let answer =
                connection.request(request, async |client, request| client.suspend(request).await);
            answer.await.map_err(|status| self.refused(status))
        })?;
        Ok(describe_suspension(
            &format!("the job in {}", self.root.display()),
            suspend,
            answer.unchanged,
        ))
    }

    fn stop(&self, force: bool) -> Result<String, Failure> {
        let target = jobdir::stop(&self.root).map_err(|error| match error {
            StopError::Lookup(LookupError::NotRunning { .. }) => Failure::failed(error.to_string()),
            StopError::Lookup(error) => Failure::usage(error.to_string()),
            error => Failure::failed(error.to_string()),
        })?;
        let root = self.root.display();
        if force && matches!(target, StopTarget::Master) {
            // A second signal ends the job at once; two in quick succession count as one. The
            // master may have ended after the first.
            std::thread::sleep(SECOND_SIGNAL_AFTER);
            drop(jobdir::stop(&self.root));
            return Ok(format!("the job in {root} is ended at once"));
        }
        Ok(match target {
            StopTarget::Master => format!("the job in {root} stops at the end of its step"),
            StopTarget::Workers(workers) => format!(
                "the master of the job in {root} is gone; SIGTERM was sent to {workers} of its \
                 workers"
            ),
        })
    }

    fn delete(&self) -> Result<String, Failure> {
        let left = jobdir::delete(&self.root).map_err(|error| match error {
            DeleteError::Lookup(error) => Failure::usage(error.to_string()),
            DeleteError::InUse(error @ JobDirError::Running { .. }) => {
                Failure::failed(format!("{error}, or run `elasticdl stop {}`", quoted(&self.root)))
            }
            error => Failure::failed(error.to_string()),
        })?;
        let root = self.root.display();
        let Some(first) = left.first() else { return Ok(format!("{root} is deleted")) };
        let more = match left.len() {
            1 => String::new(),
            len => format!(" and {} more", len - 1),
        };
        Ok(format!(
            "the job in {root} is deleted; the folder stays, because it has files that no job has \
             written: {}{more}",
            first.display()
        ))
    }

    fn logs(
        &self,
        launch: Option<LaunchId>,
        follow: bool,
        write: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<(), Failure> {
        if let Err(error @ LookupError::NoSuchJob { .. }) = jobdir::look_up(&self.root) {
            return Err(Failure::usage(error.to_string()));
        }
        let folder = self.root.join("logs");
        let path = match launch {
            Some(launch) => jobdir::worker_log(&folder, launch),
            None => folder.join("master.log"),
        };
        let failed =
            |e: std::io::Error| Failure::usage(format!("can't read {}: {e}", path.display()));
        let mut file = fs::File::open(&path).map_err(failed)?;
        let mut bytes = Vec::new();
        loop {
            let is_running = follow && jobdir::look_up(&self.root).is_ok();
            bytes.clear();
            file.read_to_end(&mut bytes).map_err(failed)?;
            if !write(&bytes) || !is_running {
                return Ok(());
            }
            std::thread::sleep(LOG_POLL);
        }
    }
}

/// Interval between status requests while a checkpoint is awaited.
const CHECKPOINT_POLL: Duration = Duration::from_millis(50);
/// Pause between the two signals that end a job at once.
const SECOND_SIGNAL_AFTER: Duration = Duration::from_secs(3);
/// Interval between reads of a log that is followed.
const LOG_POLL: Duration = Duration::from_millis(200);
