//! The jobs of this machine and of a cluster.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use elasticdl_master::jobdir::{self, LookupError};
use elasticdl_master::kube::anchor::{self, Data, STATUS, SUMMARY};
use elasticdl_master::kube::client::{Cluster, ClusterChoice};
use elasticdl_master::kube::master_pods::{self, MasterHealth};
use elasticdl_master::kube::silence::{Masters, NO_MASTER, Silence};
use elasticdl_proto::Status;
use serde_json::Value;

use super::handle::JobHandle as _;
use super::local::{LocalHandle, stored_status};
use crate::process::{Failure, cannot, new_runtime};
use crate::render::{BestValue, JobRow, LOST};

/// The jobs of a namespace.
pub(crate) fn cluster_jobs(choice: &ClusterChoice) -> Result<Vec<JobRow>, Failure> {
    new_runtime()?.block_on(async {
        let cluster = Cluster::connect(choice).await?;
        let anchors = anchor::list_all(&cluster).await?;
        let mut failed = master_pods::failed_jobs(&cluster).await;
        let masters = Masters::read(&cluster, None).await;
        let mut rows = Vec::new();
        for anchor in anchors {
            let age_s = Some(anchor::age(&anchor.metadata, masters.now).as_secs_f64());
            let Some(name) = anchor.metadata.name else { continue };
            let data = anchor.data.unwrap_or_default();
            let (mut health, mut silence) = (MasterHealth::default(), None);
            health.failed = failed.remove(&name);
            if data.contains_key(SUMMARY) {
                // It has ended, and needs no master.
            } else if data.contains_key(STATUS) {
                silence = masters.silence(&cluster, &name, &data).await;
            } else {
                health = master_pods::inspect(&cluster, &name).await;
            }
            let namespace = Some(cluster.namespace.clone());
            let row = JobRow { namespace, age_s, job: name, ..JobRow::default() };
            rows.push(cluster_row(row, &data, health, silence));
        }
        // Of these only the Job is left: their anchors were deleted.
        rows.extend(failed.into_keys().map(|job| JobRow {
            namespace: Some(cluster.namespace.clone()),
            job,
            state: FAILED.into(),
            has_ended: true,
            ..JobRow::default()
        }));
        Ok(rows)
    })
}

/// The jobs of this machine.
///
/// # Errors
/// The folder is there and can't be read.
pub(crate) fn local_jobs(root: &Path) -> Result<Vec<JobRow>, Failure> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(cannot(&format!("read {}", root.display())))?,
    };
    Ok(entries.flatten().filter_map(|entry| local_row(entry.path())).collect())
}

fn local_row(path: PathBuf) -> Option<JobRow> {
    let job = path.file_name()?.to_str()?.to_owned();
    let age_s = jobdir::started_at(&path).map(age_s);
    let row = JobRow { state: LOST.into(), age_s, job, ..JobRow::default() };
    match jobdir::look_up(&path) {
        Ok(_) if jobdir::is_running(&path) => Some(match LocalHandle::new(path).status() {
            Ok(status) => with_status(row, status),
            // It has ended, or its master is stopped.
            Err(_) => JobRow { state: "running".into(), ..row },
        }),
        Err(LookupError::NoSuchJob { .. }) => {
            jobdir::forget_deleted(&path);
            None
        }
        Err(LookupError::NotRunning { summary: Some(summary), .. }) => {
            // Another release may have written it.
            let summary = fs::read(summary).unwrap_or_default();
            let summary: Value = serde_json::from_slice(&summary).unwrap_or_default();
            let number = |key: &str| summary["records"][key].as_f64();
            let progress = number("counted").zip(number("expected").filter(|all| *all > 0.0));
            let best = &summary["evaluations"]["best"];
            let metric = best["metric"].as_str().map(str::to_owned);
            Some(JobRow {
                state: summary["state"].as_str().unwrap_or("ended").into(),
                has_ended: true,
                progress: progress.map(|(counted, expected)| counted / expected),
                step: summary["steps"].as_u64(),
                loss: summary["loss"]["last"].as_f64(),
                best: metric
                    .zip(best["value"].as_f64())
                    .map(|(metric, value)| BestValue { metric, value }),
                ..row
            })
        }
        // Its master does not listen yet.
        _ if jobdir::is_running(&path) => Some(JobRow { state: "starting".into(), ..row }),
        _ => Some(lost_row(row, stored_status(&path))),
    }
}

/// A job without its master is as far as it was when that has stored its status last.
fn lost_row(row: JobRow, stored: Option<Status>) -> JobRow {
    match stored.map(|status| with_status(row.clone(), status)) {
        Some(known) => JobRow { state: row.state, workers: None, workers_desired: None, ..known },
        None => row,
    }
}

fn cluster_row(row: JobRow, data: &Data, health: MasterHealth, silence: Option<Silence>) -> JobRow {
    let is_over = data.contains_key(SUMMARY);
    let failed = health.failed.is_some() && !is_over;
    let row = JobRow {
        state: if failed { FAILED.into() } else { "submitted".into() },
        reason: health.obstacle.filter(|_| !failed),
        has_ended: is_over || failed,
        ..row
    };
    let status = anchor::status(data);
    match status {
        Some(status) if failed => {
            JobRow { state: FAILED.into(), workers: None, ..with_status(row, status) }
        }
        Some(status) => {
            let row = with_status(row, status);
            match silence {
                Some(silence) => JobRow {
                    state: NO_MASTER.into(),
                    reason: Some(silence.to_string()),
                    workers: None,
                    ..row
                },
                None => row,
            }
        }
        None => row,
    }
}

fn with_status(row: JobRow, status: Status) -> JobRow {
    JobRow {
        progress: Some(status.progress),
        workers: Some(status.members().filter(|m| !m.serves_tables).count() as u64),
        workers_desired: Some(status.workers_desired),
        step: Some(status.step),
        loss: status.loss,
        best: status
            .evaluated_best
            .map(|best| BestValue { metric: best.metric, value: best.value }),
        state: status.state.into_owned(),
        ..row
    }
}

/// Seconds since `time`; 0 if the clock was set back.
fn age_s(time: SystemTime) -> f64 {
    SystemTime::now().duration_since(time).unwrap_or_default().as_secs_f64()
}

const FAILED: &str = "failed (no master)";

#[cfg(test)]
mod tests {
    use elasticdl_master::jobdir::JobDir;

    use super::*;

    #[test]
    fn a_job_whose_master_does_not_listen_yet_is_starting_and_one_without_a_master_is_lost() {
        let jobs = tempfile::tempdir().unwrap();
        let dir = JobDir::create(&jobs.path().join("a")).unwrap();
        let state = || local_jobs(jobs.path()).unwrap().remove(0).state;
        assert_eq!(state(), "starting");
        drop(dir);
        assert_eq!(state(), "lost");
    }

    #[test]
    fn a_lost_job_is_as_far_as_it_was_when_its_master_stored_its_status() {
        let row = || JobRow { state: LOST.into(), ..JobRow::default() };
        let status = Status { state: "running".into(), progress: 0.5, ..Status::default() };
        let known = lost_row(row(), Some(status));
        assert_eq!((&*known.state, known.progress, known.workers), ("lost", Some(0.5), None));
        assert_eq!(lost_row(row(), None).progress, None);
    }
}
