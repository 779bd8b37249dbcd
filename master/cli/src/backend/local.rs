//! A job of this machine, which its directory names.

mod connection;
mod facts;
mod report;
mod watch;

use std::ffi::OsString;
use std::fs;
use std::io::{ErrorKind::NotFound, Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use elasticdl_master::dashboard::{self, StoredHistory};
use elasticdl_master::job::{LaunchId, Scaling};
use elasticdl_master::jobdir::{
    self, DeleteError, JobDirError, LookupError, StopError, StopTarget, quoted,
};
use elasticdl_master::kube::priority_tiers::Weight;
use elasticdl_master::lineage::JobFacts;
use elasticdl_master::worker_output::WorkerOutput;
use elasticdl_proto::wire::{CheckpointRequest, InspectRequest, ScaleRequest, SuspendRequest};
use elasticdl_proto::{Inspection, Status, Summary, log_line_as_text};

use self::connection::{Connection, to_failure};
use super::checkpoint_wait::CheckpointWait;
use super::handle::{
    ENDING, JobHandle, JobLog, Scaled, WatchOptions, describe_ending, describe_suspension,
};
use crate::process::{Failure, new_runtime, print};
use crate::render::{JobEnd, Paths, summary_to_table};

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

    /// Passes the lines of all workers to `write`.
    fn copy_all_logs(&self, folder: PathBuf, follow: bool, write: &mut dyn FnMut(&[u8]) -> bool) {
        let mut output = WorkerOutput::all(folder);
        loop {
            let is_running = follow && jobdir::look_up(&self.root).is_ok();
            let mut is_wanted = true;
            output.poll(!is_running, &mut |worker, line| {
                // A line of its log in JSON names it.
                let prefix = match log_line_as_text(line) {
                    Some(_) => String::new(),
                    None => format!("[worker {worker}] "),
                };
                is_wanted = is_wanted && write(format!("{prefix}{line}\n").as_bytes());
            });
            if !is_wanted || !is_running {
                return;
            }
            std::thread::sleep(LOG_POLL);
        }
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

    fn ended_json(&self) -> Result<Option<String>, Failure> {
        let Err(LookupError::NotRunning { summary: Some(path), .. }) = jobdir::look_up(&self.root)
        else {
            return Ok(None);
        };
        JobEnd::read(&path, stored_status(&self.root)).map(|end| Some(end.to_json()))
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
        if !jobdir::is_running(&self.root) {
            return Err(Failure::failed(format!(
                "the job in {} has no page now: its master (process {}) is gone; `elasticdl report \
                 {} --html FILE` writes what it has left, and `elasticdl train --resume {2}` goes \
                 on with the job",
                self.root.display(),
                endpoint.pid,
                quoted(&self.root)
            )));
        }
        let address = endpoint.dashboard.ok_or_else(|| {
            Failure::failed(format!(
                "the job in {} was started with --dashboard-port none",
                self.root.display()
            ))
        })?;
        print(&format!("{}\n", dashboard::link(&token, address)))
    }

    fn report(&self) -> Result<String, Failure> {
        report::report(&self.root)
    }

    fn inspect(&self) -> Result<Inspection, Failure> {
        new_runtime()?.block_on(async {
            let mut connection = self.connect().await?;
            let answer = connection
                .request(InspectRequest, async |client, request| client.inspect(request).await);
            answer.await.map_err(|status| self.refused(status))
        })
    }

    fn facts(&self) -> Result<JobFacts, Failure> {
        facts::facts(self, &self.root)
    }

    fn scale(&self, change: Scaling, weight: Option<Weight>) -> Result<Scaled, Failure> {
        if weight.is_some() {
            return Err(Failure::usage("--weight: this job runs in no cluster, and shares none"));
        }
        new_runtime()?.block_on(async {
            let mut connection = self.connect().await?;
            let Scaling { num_workers, min_workers, max_workers } = change;
            let request = ScaleRequest { num_workers, min_workers, max_workers };
            let answer =
                connection.request(request, async |client, request| client.scale(request).await);
            let was = answer.await.map_err(|status| self.refused(status))?.was;
            let status = connection.status().await.map_err(|status| self.refused(status))?;
            let limits = (status.workers_min, status.workers_max);
            Ok(Scaled { was, now: status.workers_desired, limits })
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
        // A master that does not answer is stopped all the same.
        let awaits_ends = !force && self.status().is_ok_and(|status| status.state == ENDING);
        let target = jobdir::stop(&self.root, false).map_err(|error| match error {
            StopError::Lookup(LookupError::NotRunning { .. }) => Failure::failed(error.to_string()),
            StopError::Lookup(error) => Failure::usage(error.to_string()),
            error => Failure::failed(error.to_string()),
        })?;
        let root = self.root.display();
        if force && matches!(target, StopTarget::Master) {
            // Two signals in quick succession count as one. The master may have ended after the
            // first.
            std::thread::sleep(SECOND_SIGNAL_AFTER);
            drop(jobdir::stop(&self.root, true));
            return Ok(format!("the job in {root} is ended at once"));
        }
        Ok(match target {
            StopTarget::Master if awaits_ends => describe_ending(&format!("the job in {root}")),
            StopTarget::Master => format!("the job in {root} stops at the end of its step"),
            StopTarget::Workers(workers) => format!(
                "the master of the job in {root} is gone; SIGTERM was sent to {workers} of its \
                 workers, which write a checkpoint and end if no master comes back within half of \
                 the --grace-period"
            ),
        })
    }

    fn delete(&self) -> Result<String, Failure> {
        let left = jobdir::delete(&self.root).map_err(|error| match error {
            DeleteError::Lookup(error) => Failure::usage(error.to_string()),
            DeleteError::InUse(JobDirError::Running { path, pid }) => {
                let process = pid.map(|pid| format!(" (master process {pid})")).unwrap_or_default();
                Failure::failed(format!(
                    "the job in {} is running{process}; first stop it: elasticdl stop {}",
                    path.display(),
                    quoted(&self.root)
                ))
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
        log: JobLog,
        follow: bool,
        write: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<(), Failure> {
        if let Err(error @ LookupError::NoSuchJob { .. }) = jobdir::look_up(&self.root) {
            return Err(Failure::usage(error.to_string()));
        }
        let folder = self.root.join("logs");
        let path = match log {
            JobLog::Worker(launch) => jobdir::worker_log(&folder, launch),
            JobLog::Master => folder.join("master.log"),
            JobLog::Workers => {
                self.copy_all_logs(folder, follow, write);
                return Ok(());
            }
        };
        let failed =
            |e: std::io::Error| Failure::usage(format!("can't read {}: {e}", path.display()));
        let mut file = fs::File::open(&path).map_err(|error| match log {
            JobLog::Worker(launch) if error.kind() == NotFound => {
                Failure::usage(no_such_worker(launch, &folder))
            }
            _ => failed(error),
        })?;
        let mut bytes = Vec::new();
        loop {
            let is_running = follow && jobdir::look_up(&self.root).is_ok();
            bytes.clear();
            if file.metadata().map_err(failed)?.len() < file.stream_position().map_err(failed)? {
                // The log was moved away, and begins anew.
                file.rewind().map_err(failed)?;
            }
            file.read_to_end(&mut bytes).map_err(failed)?;
            if !write(&bytes) || !is_running {
                return Ok(());
            }
            std::thread::sleep(LOG_POLL);
        }
    }
}

/// Says which workers have logs in `folder`.
fn no_such_worker(launch: LaunchId, folder: &Path) -> String {
    let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let number = |name: OsString| {
        name.to_str()?.strip_prefix("worker-")?.strip_suffix(".log")?.parse::<u64>().ok()
    };
    let workers: Vec<u64> = names.filter_map(number).collect();
    let there = match (workers.iter().min(), workers.iter().max()) {
        (Some(first), Some(last)) if first < last => format!("workers {first} to {last} have logs"),
        (Some(only), _) => format!("only worker {only} has one"),
        _ => "no worker has one".to_owned(),
    };
    format!("there is no log of worker {} in {}; {there}", launch.0, folder.display())
}

/// The last status that the master of the job in `root` has stored, if this release can read it.
pub(super) fn stored_status(root: &Path) -> Option<Status> {
    let stored = StoredHistory::read(&jobdir::history_path(root));
    stored.ok().flatten().map(|stored| stored.status)
}

/// Interval between status requests while a checkpoint is awaited.
const CHECKPOINT_POLL: Duration = Duration::from_millis(50);
/// Pause between the two signals that end a job at once.
const SECOND_SIGNAL_AFTER: Duration = Duration::from_secs(3);
/// Interval between reads of a log that is followed.
const LOG_POLL: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_without_a_log_is_told_which_workers_have_logs() {
        let folder = tempfile::tempdir().unwrap();
        let told = |expected: &str| {
            let text = no_such_worker(LaunchId(9), folder.path());
            let begins = format!("there is no log of worker 9 in {}; ", folder.path().display());
            assert_eq!(text, begins + expected);
        };
        told("no worker has one");
        fs::write(folder.path().join("master.log"), "").unwrap();
        fs::write(folder.path().join("worker-2.log"), "").unwrap();
        told("only worker 2 has one");
        fs::write(folder.path().join("worker-11.log"), "").unwrap();
        told("workers 2 to 11 have logs");
    }
}
