//! What a master sends elsewhere: events for TensorBoard, metrics for MLflow, traces by OTLP.

use std::path::Path;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tracing::warn;

use crate::exit::Failure;
use crate::job::{Event, Snapshot};
use crate::mlflow::{self, Tracking};
use crate::otlp::{self, Traces};
use crate::panics::dispensable;
use crate::tensorboard::{self, EventFile};

/// The exporters of a master. They get what it publishes, and end when it publishes no more.
#[derive(Debug)]
pub(crate) struct Exporters {
    events: Option<JoinHandle<()>>,
    tracking: Option<JoinHandle<Option<String>>>,
    traces: Option<JoinHandle<Option<String>>>,
}

impl Exporters {
    /// Starts those that are configured: events of `job` in a folder, and a run with `parameters`
    /// at the tracking server and traces at the collector that the variables of the environment
    /// name. Also returns events that tell whether these take what they are sent. A job runs
    /// without them.
    ///
    /// # Errors
    /// The folder can't be written to.
    pub(crate) fn start(
        job: &str,
        folder: Option<&Path>,
        parameters: Vec<(String, String)>,
        variable: impl Fn(&str) -> Option<String>,
        published: &watch::Receiver<Option<Snapshot>>,
    ) -> Result<(Self, mpsc::Receiver<Event>), Failure> {
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
        let tracking = Tracking::read(&variable).unwrap_or_else(|error| {
            warn!(%error, "the job is not tracked");
            let _ = news.try_send(Event::Tracked { error: Some(error.to_string()) });
            None
        });
        let tracking = tracking.map(|run| {
            let run = run.with_parameters(parameters);
            tokio::spawn(dispensable(mlflow::follow(run, published.clone(), news.clone())))
        });
        let traces = Traces::read(&variable).unwrap_or_else(|error| {
            warn!(error, "the job's traces are not exported");
            let _ = news.try_send(Event::Traced { error: Some(error) });
            None
        });
        let traces = traces
            .map(|traces| tokio::spawn(dispensable(otlp::follow(traces, published.clone(), news))));
        Ok((Self { events, tracking, traces }, tracked))
    }

    /// Waits until the last values are exported. Returns why the tracking server or the collector
    /// does not have all; without a server what is `known` of that.
    pub(crate) async fn finish(self, known: Option<String>) -> Option<String> {
        // An exporter that panicked has said so.
        if let Some(events) = self.events {
            let _ = events.await;
        }
        let untracked = match self.tracking {
            Some(tracking) => tracking.await.unwrap_or_default(),
            None => known,
        };
        let untraced = match self.traces {
            Some(traces) => traces.await.unwrap_or_default(),
            None => None,
        };
        let untraced = untraced.map(|error| format!("traces: {error}"));
        let lost: Vec<String> = untracked.into_iter().chain(untraced).collect();
        (!lost.is_empty()).then(|| lost.join("; "))
    }
}

const NEWS_MAX: usize = 16;
