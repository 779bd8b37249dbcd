//! What this process does at SIGTERM: the worker leaves its group at the next step boundary, and
//! the process ends if the group does not release it in time.

use std::io;
use std::time::Duration;

use elasticdl_collective::exit_at_once;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::environment::EXIT_TERMINATED;

/// SIGTERM, and the time that it leaves to this process.
#[derive(Debug)]
pub(crate) struct Termination {
    signal: Signal,
    /// Time in which the group must release this worker.
    timeout: Duration,
    has_begun: bool,
}

impl Termination {
    /// From now on SIGTERM does not end this process at once. Nor does a file that exceeds the
    /// user's limit (SIGXFSZ): the write fails.
    ///
    /// # Errors
    /// The system refuses the handler.
    pub(crate) fn new(timeout: Duration) -> io::Result<Self> {
        // A handler stays when its stream is dropped.
        drop(signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?);
        Ok(Self { signal: signal(SignalKind::terminate())?, timeout, has_begun: false })
    }

    /// Replaces the time in which the group must release this worker.
    pub(crate) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Waits for SIGTERM. The first one starts the time that is left.
    pub(crate) async fn received(&mut self) {
        self.signal.recv().await;
        tracing::info!("SIGTERM: leaving at the next step boundary");
        if !self.has_begun {
            self.has_begun = true;
            tokio::spawn(end_after(self.timeout));
        }
    }
}

/// Ends the process unless the group releases the worker by then.
async fn end_after(timeout: Duration) {
    tokio::time::sleep(timeout).await;
    tracing::warn!("the group did not release this worker in time");
    exit_at_once(EXIT_TERMINATED);
}
