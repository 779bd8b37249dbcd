//! What a master sends elsewhere: events for TensorBoard, metrics for MLflow.

use std::path::Path;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tracing::warn;

use crate::exit::Failure;
use crate::job::Snapshot;
use crate::mlflow::{self, Tracking};
use crate::panics::dispensable;
use crate::tensorboard::{self, EventFile};

/// The exporters of a master. They get what it publishes, and end when it publishes no more.
#[derive(Debug)]
pub(crate) struct Exporters {
    events: Option<JoinHandle<()>>,
    tracking: Option<JoinHandle<Option<String>>>,
}

impl Exporters {
    /// Starts those that are configured: events of `job` in a folder, and a run with `parameters`
    /// at the tracking server that the variables of the environment name. Also returns whether that
    /// server takes the metrics: an error, or none. A job runs without one.
    ///
    /// # Errors
    /// The folder can't be written to.
    pub(crate) fn start(
        job: &str,
        folder: Option<&Path>,
        parameters: Vec<(String, String)>,
        variable: impl Fn(&str) -> Option<String>,
        published: &watch::Receiver<Option<Snapshot>>,
    ) -> Result<(Self, mpsc::Receiver<Option<String>>), Failure> {
        let create = |folder: &Path| {
            EventFile::create(folder, job).map_err(|e| {
                let wanted = "give --tensorboard-dir a writable folder, or one that can be created";
                Failure::usage(format!("can't write events to {}: {e}; {wanted}", folder.display()))
            })
        };
        let events = folder.map(create).transpose()?;
        let events = events
            .map(|file| tokio::spawn(dispensable(tensorboard::follow(file, published.clone()))));
        let (news, tracked) = mpsc::channel(NEWS_MAX);
        let tracking = Tracking::read(variable).unwrap_or_else(|error| {
            warn!(%error, "the job is not tracked");
            let _ = news.try_send(Some(error.to_string()));
            None
        });
        let tracking = tracking.map(|run| {
            let run = run.with_parameters(parameters);
            tokio::spawn(dispensable(mlflow::follow(run, published.clone(), news)))
        });
        Ok((Self { events, tracking }, tracked))
    }

    /// Waits until the last values are exported. Returns why the tracking server does not have all;
    /// without one what is `known` of that.
    pub(crate) async fn finish(self, known: Option<String>) -> Option<String> {
        // An exporter that panicked has said so.
        if let Some(events) = self.events {
            let _ = events.await;
        }
        match self.tracking {
            Some(tracking) => tracking.await.unwrap_or_default(),
            None => known,
        }
    }
}

const NEWS_MAX: usize = 16;
