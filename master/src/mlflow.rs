//! MLflow: the scalars of a job over its steps, through the REST API of a tracking server.
//!
//! A job is a run. The master of a job that is resumed finds the run by the job's id.
//!
//! **Invariant:** no error of the server affects the job, which says it once. **Invariant:** every
//! evaluation is sent; of the points of curves, the oldest are dropped while the server is away.

mod client;

use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use elasticdl_proto::{Status, shown_sources};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use crate::job::{Batch, Event, JobSpec, Snapshot};
use crate::scalars::{Point, Scalars};

use client::Client;
pub use client::TrackingError;

/// A tracking server, and the experiment that a job's run belongs to.
#[derive(Debug)]
pub struct Tracking {
    client: Client,
    experiment: String,
    /// Parameters of the run: the options of the job that users compare.
    parameters: Vec<(String, String)>,
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
    pub(crate) fn with_parameters(self, parameters: Vec<(String, String)>) -> Self {
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
        let pair = |(key, value): &(String, String)| json!({"key": key, "value": value});
        let parameters: Vec<Value> = self.parameters.iter().map(pair).collect();
        self.client.post("runs/log-batch", &json!({"run_id": id, "params": parameters})).await?;
        info!(run = id, experiment = self.experiment, "the job is tracked by MLflow");
        Ok(id)
    }

    /// Sends the values, and removes those that the server has.
    async fn log(&self, run: &str, queue: &mut Queue) -> Result<(), TrackingError> {
        while !queue.values.is_empty() {
            let sent = queue.values.len().min(VALUES_MAX);
            let metrics: Vec<&Value> =
                queue.values.iter().take(sent).map(|(_, value)| value).collect();
            let batch = json!({"run_id": run, "metrics": metrics});
            self.client.post("runs/log-batch", &batch).await?;
            queue.values.drain(..sent);
        }
        Ok(())
    }

    async fn end(&self, run: &str, status: &Status) -> Result<(), TrackingError> {
        let status = match &*status.state {
            "completed" => "FINISHED",
            // By its deadline or another policy, so as the user wants it.
            "stopped" if status.stop_reason.is_some() => "FINISHED",
            "stopped" => "KILLED",
            "failed" | "refused" => "FAILED",
            // The next master continues the run.
            _ => return Ok(()),
        };
        let update = json!({"run_id": run, "status": status, "end_time": now_ms()});
        self.client.post("runs/update", &update).await.map(drop)
    }
}

/// Values that wait for the server.
#[derive(Debug, Default)]
struct Queue {
    /// Whether it is of an evaluation, and the value, with the time at which it became known: a
    /// value that is sent twice is the same.
    values: VecDeque<(bool, Value)>,
}

impl Queue {
    fn extend(&mut self, points: Vec<Point>) {
        let timestamp = now_ms();
        for Point { step, values, is_evaluation } in points {
            for (key, value) in values.into_iter().filter(|(_, value)| value.is_finite()) {
                let value =
                    json!({"key": key, "value": value, "timestamp": timestamp, "step": step});
                self.values.push_back((is_evaluation, value));
            }
        }
        for (of_evaluations, most) in [(false, CURVE_VALUES_MAX), (true, EVALUATION_VALUES_MAX)] {
            let all = self.values.iter().filter(|(is, _)| *is == of_evaluations).count();
            let mut surplus = all.saturating_sub(most);
            self.values.retain(|(is, _)| {
                let goes = *is == of_evaluations && surplus > 0;
                surplus -= usize::from(goes);
                !goes
            });
        }
    }
}

/// The options by which users compare runs, and the arguments of the program.
pub(crate) fn parameters<'a>(
    spec: &JobSpec,
    args: impl IntoIterator<Item = &'a str>,
) -> Vec<(String, String)> {
    let (batch, records) = match spec.options.batch {
        Batch::Global(records) => ("global-batch-size", records),
        Batch::PerWorker(records) => ("minibatch-size", records),
    };
    let mut all: Vec<(String, String)> = [
        ("training-data", shown_sources(&spec.options.training_data)),
        ("num-epochs", spec.options.epochs.to_string()),
        (batch, records.to_string()),
        ("num-workers", spec.num_workers.to_string()),
        ("seed", spec.options.seed.to_string()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into();
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        let Some(option) = arg.strip_prefix("--").filter(|name| !name.is_empty()) else { continue };
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, value),
            None => (option, args.next_if(|next| !next.starts_with("--")).unwrap_or("true")),
        };
        let allowed = |c: char| c.is_ascii_alphanumeric() || "_-. /".contains(c);
        let mut name: String = name.chars().filter(|c| allowed(*c)).collect();
        if all.iter().any(|(known, _)| *known == name) {
            name = format!("program/{name}");
        }
        let is_new = all.iter().all(|(known, _)| *known != name);
        if is_new && !name.is_empty() && all.len() < PARAMETERS_MAX {
            all.push((name, value.chars().take(PARAMETER_CHARS_MAX).collect()));
        }
    }
    all
}

/// Sends the scalars of a job to the server until the job ends, and then the job's state. `news`
/// gets each failure, and the first success after it. Returns why the server does not have all.
pub(crate) async fn follow(
    tracking: Tracking,
    mut known: watch::Receiver<Option<Snapshot>>,
    news: mpsc::Sender<Event>,
) -> Option<String> {
    let (mut run, mut trouble) = (None, None);
    let mut scalars = Scalars::default();
    let mut queue = Queue::default();
    // A wrong address is found at the beginning.
    let mut is_open = known.changed().await.is_ok();
    loop {
        let snapshot = known.borrow_and_update().clone();
        if let Some(snapshot) = &snapshot {
            queue.extend(scalars.next(snapshot));
            let sent = send(&tracking, &mut run, &mut queue, &snapshot.status, !is_open);
            let limit = if is_open { SEND_TIMEOUT } else { END_TIMEOUT };
            let sent = tokio::time::timeout(limit, sent).await;
            let error = sent.unwrap_or(Err(TrackingError::Slow)).err();
            let error = error.map(|error| format!("{}: {error}", tracking.client.address()));
            if error.is_some() != trouble.is_some() {
                match &error {
                    Some(error) => warn!(error, "MLflow does not take the job's metrics"),
                    None => info!("MLflow takes the job's metrics again"),
                }
                let _ = news.try_send(Event::Tracked { error: error.clone() });
            }
            trouble = error;
        }
        if !is_open {
            return trouble;
        }
        is_open = wait(&mut known, SEND_INTERVAL).await;
    }
}

/// Waits until what is known is to be sent again. Returns whether the job goes on.
pub(crate) async fn wait<T>(known: &mut watch::Receiver<T>, interval: Duration) -> bool {
    let due = Instant::now() + interval;
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
    queue: &mut Queue,
    status: &Status,
    has_ended: bool,
) -> Result<(), TrackingError> {
    let id = match run {
        Some(id) => id.clone(),
        None => run.insert(tracking.run(status).await?).clone(),
    };
    tracking.log(&id, queue).await?;
    if has_ended { tracking.end(&id, status).await } else { Ok(()) }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Experiment of jobs for which no other is named.
const EXPERIMENT: &str = "elasticdl";
/// Time that the end of a job may be delayed by a server that does not answer.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// A server takes at most 1000 values at once, and 100 parameters of at least 500 characters.
const VALUES_MAX: usize = 999;
const PARAMETERS_MAX: usize = 100;
const PARAMETER_CHARS_MAX: usize = 500;
/// Values that wait for a server: of curves, and of evaluations.
const CURVE_VALUES_MAX: usize = 600;
const EVALUATION_VALUES_MAX: usize = 100_000;
pub(crate) const SEND_INTERVAL: Duration = Duration::from_secs(5);
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// Tag with the id that all masters of a job share.
const TAG: &str = "elasticdl.run_id";

#[cfg(test)]
mod tests;
