//! What a master in a cluster sends elsewhere: events for TensorBoard, metrics for MLflow.

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::job::Snapshot;
use crate::mlflow::{self, Tracking};
use crate::tensorboard::{self, EventFile};

/// The exporters of a master. They get what the master publishes, and end with the job: the
/// master's own channel stays open until its process ends.
#[derive(Debug)]
pub(super) struct Exporters {
    known: watch::Sender<Option<Snapshot>>,
    forwarding: JoinHandle<()>,
    running: Vec<JoinHandle<()>>,
}

impl Exporters {
    /// Starts those that are configured.
    pub(super) fn start(
        events: Option<EventFile>,
        tracking: Option<(Tracking, mpsc::Sender<Option<String>>)>,
        mut published: watch::Receiver<Option<Snapshot>>,
    ) -> Self {
        let known = watch::Sender::new(None);
        let events = events.map(|file| tokio::spawn(tensorboard::follow(file, known.subscribe())));
        let tracked = tracking.map(|(run, news)| {
            let following = mlflow::follow(run, known.subscribe(), news);
            // What is missing at the end is in the master's log.
            tokio::spawn(async { drop(following.await) })
        });
        let forward = known.clone();
        let forwarding = tokio::spawn(async move {
            while published.changed().await.is_ok() {
                forward.send_replace(published.borrow_and_update().clone());
            }
        });
        Self { known, forwarding, running: events.into_iter().chain(tracked).collect() }
    }

    /// Exports the last values, and waits for the end of the exporters.
    pub(super) async fn finish(self, last: Option<Snapshot>) {
        self.forwarding.abort();
        // Ends by the abort, or because nothing is published any more.
        let _ = self.forwarding.await;
        self.known.send_replace(last);
        drop(self.known);
        for exporter in self.running {
            // An exporter that panicked has said so.
            let _ = exporter.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The channel that a master publishes to outlives the job, as metrics are served until the
    /// process ends.
    #[tokio::test]
    async fn exporters_end_with_the_job_although_the_masters_channel_stays_open() {
        let folder = tempfile::tempdir().unwrap();
        let publish = watch::Sender::new(None);
        let events = EventFile::create(folder.path(), "job").unwrap();
        let exporters = Exporters::start(Some(events), None, publish.subscribe());
        let finished = exporters.finish(publish.borrow().clone());
        // Only a hang takes so long.
        tokio::time::timeout(Duration::from_secs(60), finished).await.unwrap();
        assert_eq!(publish.receiver_count(), 0);
    }
}
