//! MLflow: the scalars of a job over its steps, through the REST API of a tracking server.
//!
//! A job is a run. The master of a job that is resumed finds the run by the job's id.
//!
//! **Invariant:** no error of the server affects the job; the first one is logged.

mod client;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use elasticdl_proto::Status;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::job::{Batch, JobSpec, Snapshot};
use crate::scalars::{Point, Scalars};

use client::Client;
pub use client::TrackingError;

/// A tracking server, and the experiment that a job's run belongs to.
#[derive(Debug)]
pub struct Tracking {
    client: Client,
    experiment: String,
    /// Parameters of the run: the options of the job that users compare.
    parameters: Vec<(&'static str, String)>,
}

impl Tracking {
    /// Reads `MLFLOW_TRACKING_URI` and the other variables of MLflow through `variable`; `None` if
    /// no server is named.
    ///
    /// # Errors
    /// A variable has a value that can't be used.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, TrackingError> {
        let variable = |name: &str| variable(name).filter(|text| !text.is_empty());
        let Some(client) = Client::read(variable)? else { return Ok(None) };
        let experiment = variable("MLFLOW_EXPERIMENT_NAME");
        let experiment = experiment.unwrap_or_else(|| EXPERIMENT.into());
        Ok(Some(Self { client, experiment, parameters: Vec::new() }))
    }

    /// Adds parameters of the run.
    #[must_use]
    pub fn with_parameters(self, parameters: Vec<(&'static str, String)>) -> Self {
        Self { parameters, ..self }
    }

    /// The id of the experiment, which is created if it does not exist.
    async fn experiment(&self) -> Result<String, TrackingError> {
        let query = [("experiment_name", self.experiment.as_str())];
        match self.client.get("experiments/get-by-name", &query).await {
            Ok(found) => client::text(&found, "/experiment/experiment_id"),
            Err(error) if error.is_absent() => {
                let name = json!({"name": self.experiment});
                let created = self.client.post("experiments/create", &name).await?;
                client::text(&created, "/experiment_id")
            }
            Err(error) => Err(error),
        }
    }

    /// The id of the job's run, which is created if it does not exist.
    async fn run(&self, status: &Status) -> Result<String, TrackingError> {
        let experiment = self.experiment().await?;
        let filter = format!("tags.`{TAG}` = '{}'", status.run_id);
        let search = json!({"experiment_ids": [experiment], "filter": filter, "max_results": 1});
        let found = self.client.post("runs/search", &search).await?;
        if let Ok(id) = client::text(&found, "/runs/0/info/run_id") {
            return Ok(id);
        }
        let run = json!({
            "experiment_id": experiment, "run_name": status.job, "start_time": now_ms(),
            "tags": [
                {"key": "mlflow.source.name", "value": "elasticdl"},
                {"key": TAG, "value": status.run_id},
            ],
        });
        let created = self.client.post("runs/create", &run).await?;
        let id = client::text(&created, "/run/info/run_id")?;
        let pair = |(key, value): &(&str, String)| json!({"key": key, "value": value});
        let parameters: Vec<Value> = self.parameters.iter().map(pair).collect();
        self.client.post("runs/log-batch", &json!({"run_id": id, "params": parameters})).await?;
        info!(run = id, experiment = self.experiment, "the job is tracked by MLflow");
        Ok(id)
    }

    async fn log(&self, run: &str, points: &[Point]) -> Result<(), TrackingError> {
        let timestamp = now_ms();
        let metrics: Vec<Value> = points
            .iter()
            .flat_map(|point| point.values.iter().map(|value| (point.step, value)))
            .filter(|(_, (_, value))| value.is_finite())
            .map(|(step, (key, value))| {
                json!({"key": key, "value": value, "timestamp": timestamp, "step": step})
            })
            .collect();
        if metrics.is_empty() {
            return Ok(());
        }
        let batch = json!({"run_id": run, "metrics": metrics});
        self.client.post("runs/log-batch", &batch).await.map(drop)
    }

    async fn end(&self, run: &str, state: &str) -> Result<(), TrackingError> {
        let status = match state {
            "completed" => "FINISHED",
            "stopped" => "KILLED",
            "failed" | "refused" => "FAILED",
            // The next master continues the run.
            _ => return Ok(()),
        };
        let update = json!({"run_id": run, "status": status, "end_time": now_ms()});
        self.client.post("runs/update", &update).await.map(drop)
    }
}

/// The options by which users compare runs.
pub(crate) fn parameters(spec: &JobSpec) -> Vec<(&'static str, String)> {
    let (batch, records) = match spec.batch {
        Batch::Global(records) => ("global-batch-size", records),
        Batch::PerWorker(records) => ("minibatch-size", records),
    };
    vec![
        ("training-data", spec.training_data.clone()),
        ("num-epochs", spec.epochs.to_string()),
        (batch, records.to_string()),
        ("num-workers", spec.num_workers.to_string()),
        ("seed", spec.seed.to_string()),
    ]
}

/// Sends the scalars of a job to the server until the job ends, and then the job's state.
pub(crate) async fn follow(tracking: Tracking, mut known: watch::Receiver<Option<Snapshot>>) {
    let (mut run, mut has_warned) = (None, false);
    let mut scalars = Scalars::default();
    let mut points = Vec::new();
    loop {
        let is_open = wait(&mut known).await;
        let snapshot = known.borrow_and_update().clone();
        if let Some(snapshot) = &snapshot {
            points.extend(scalars.next(snapshot));
            let surplus = points.len().saturating_sub(POINTS_MAX);
            points.drain(..surplus);
            let sent = send(&tracking, &mut run, &mut points, &snapshot.status, !is_open);
            let limit = if is_open { SEND_TIMEOUT } else { END_TIMEOUT };
            let sent = tokio::time::timeout(limit, sent).await;
            if let Err(error) = sent.unwrap_or(Err(TrackingError::Slow))
                && !std::mem::replace(&mut has_warned, true)
            {
                warn!(%error, "MLflow does not take the job's metrics; they are sent later");
            }
        }
        if !is_open {
            return;
        }
    }
}

/// Waits until the next points are due. Returns whether the job goes on.
async fn wait(known: &mut watch::Receiver<Option<Snapshot>>) -> bool {
    let due = Instant::now() + SEND_INTERVAL;
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(due) => return known.has_changed().is_ok(),
            changed = known.changed() => if changed.is_err() { return false },
        }
    }
}

async fn send(
    tracking: &Tracking,
    run: &mut Option<String>,
    points: &mut Vec<Point>,
    status: &Status,
    has_ended: bool,
) -> Result<(), TrackingError> {
    let id = match run {
        Some(id) => id.clone(),
        None => run.insert(tracking.run(status).await?).clone(),
    };
    tracking.log(&id, points).await?;
    points.clear();
    if has_ended { tracking.end(&id, &status.state).await } else { Ok(()) }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Experiment of jobs for which no other is named.
const EXPERIMENT: &str = "elasticdl";
/// Time that the end of a job may be delayed by a server that does not answer.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Points that wait for a server; a batch has at most 1000 values.
const POINTS_MAX: usize = 100;
const SEND_INTERVAL: Duration = Duration::from_secs(5);
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Tag with the id that all masters of a job share.
const TAG: &str = "elasticdl.run_id";

#[cfg(test)]
mod tests;
