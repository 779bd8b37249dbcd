//! Messages between the control stream and the trainer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use elasticdl_proto::{MasterMessage, WorkerMessage};
use tokio::sync::mpsc::UnboundedSender;

use crate::inspection::activity::CurrentActivity;

/// What the control stream passes to the trainer.
#[derive(Clone, Debug, PartialEq)]
pub enum ControlEvent {
    /// A message of the master, and the time of its arrival.
    Message(MasterMessage, Instant),
    /// The stream is open again, possibly to another master.
    Reconnected,
}

/// Channel from the trainer to the master. Sending never blocks; without a master the message is
/// lost.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    pub(crate) messages: UnboundedSender<WorkerMessage>,
    /// Whether this worker's group has agreed on a state.
    pub(crate) holds_state: Arc<AtomicBool>,
    /// What the trainer does, for those who ask.
    pub(crate) activity: Arc<CurrentActivity>,
}

impl Outbox {
    pub(crate) fn new(messages: UnboundedSender<WorkerMessage>) -> Self {
        Self { messages, holds_state: Arc::default(), activity: Arc::default() }
    }

    pub(crate) fn send(&self, message: WorkerMessage) {
        // The thread of the control stream ends the process when it fails, so a closed channel can
        // be ignored.
        let _ = self.messages.send(message);
    }

    /// Lets every later master know that this worker holds a state, whatever its trainer does then.
    pub(crate) fn note_state(&self) {
        self.holds_state.store(true, Ordering::Relaxed);
    }
}
