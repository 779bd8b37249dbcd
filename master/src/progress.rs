//! What a running master shows of its job: notices, and its state from time to time.

use std::fmt::Debug;

use elasticdl_proto::Status;
use tokio::sync::watch;

use crate::job::{Snapshot, Time};

/// Shows a job to the user.
///
/// **Invariant:** no method but [`Observer::end`] waits for the user's terminal: the master calls
/// them while it serves workers.
pub trait Observer: Debug + Send {
    /// Shows a notice.
    fn notice(&self, now: Time, text: String);

    /// Shows the state of the job at `now`.
    fn show(&self, now: Time, status: &Status);

    /// Shows what is left, within a time limit.
    fn end(self: Box<Self>);
}

/// The receivers of what a master shows, until the value is dropped.
#[derive(Debug, Default)]
pub struct Progress {
    observer: Option<Box<dyn Observer>>,
    publisher: Option<watch::Sender<Option<Snapshot>>>,
}

impl Progress {
    /// A `Progress` without output.
    #[must_use]
    pub fn quiet() -> Self {
        Self::default()
    }

    /// A `Progress` that `observer` shows.
    #[must_use]
    pub fn shown_by(observer: impl Observer + 'static) -> Self {
        Self { observer: Some(Box::new(observer)), publisher: None }
    }

    /// Also publishes each snapshot to `publisher`.
    #[must_use]
    pub fn publishing(self, publisher: watch::Sender<Option<Snapshot>>) -> Self {
        Self { publisher: Some(publisher), ..self }
    }

    /// Shows the state of the job at `now`.
    pub(crate) fn show(&self, now: Time, snapshot: Snapshot) {
        if let Some(observer) = &self.observer {
            observer.show(now, &snapshot.status);
        }
        if let Some(publisher) = &self.publisher {
            publisher.send_replace(Some(snapshot));
        }
    }

    /// Shows a notice.
    pub(crate) fn notice(&self, now: Time, text: String) {
        if let Some(observer) = &self.observer {
            observer.notice(now, text);
        }
    }

    /// Shows what is left, within a time limit.
    pub(crate) fn end(self) {
        if let Some(observer) = self.observer {
            observer.end();
        }
    }
}
