//! A worker without a master: a thread answers it as the master of a job of one worker would.

use std::net::SocketAddr;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use elasticdl_proto::{Generation, MasterMessage, Membership, Welcome, WorkerId, WorkerMessage};
use tokio::sync::mpsc;

use super::Control;
use crate::messages::{ControlEvent, Outbox};

impl Control {
    /// A control stream without a master. `address`: of this worker.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(crate) fn alone(welcome: Welcome, address: SocketAddr) -> Result<Self, String> {
        let (to_trainer, inbox) = channel();
        let (messages, mut from_trainer) = mpsc::unbounded_channel();
        let outbox = Outbox::new(messages);
        let master = LoneMaster { worker: welcome.worker, address };
        let thread = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || {
                send(&to_trainer, MasterMessage::Describe);
                while let Some(message) = from_trainer.blocking_recv() {
                    if let Some(answer) = master.handle(message) {
                        send(&to_trainer, answer);
                    }
                }
                true
            })
            .map_err(|error| format!("no thread for the control stream: {error}"))?;
        let (fence, progress, joiners) = <(Arc<OnceLock<_>>, Arc<_>, Arc<_>)>::default();
        let stops = Arc::default();
        Ok(Self { welcome, inbox, outbox, fence, progress, joiners, stops, thread })
    }
}

/// The master of a worker that is alone.
#[derive(Debug)]
struct LoneMaster {
    worker: WorkerId,
    address: SocketAddr,
}

impl LoneMaster {
    fn handle(&self, message: WorkerMessage) -> Option<MasterMessage> {
        Some(match message {
            WorkerMessage::Described(Ok(list), _) => MasterMessage::Prepare(list),
            WorkerMessage::Described(Err(error), _) => MasterMessage::release(error),
            WorkerMessage::Finished(_) => MasterMessage::release("the job completed"),
            WorkerMessage::Ready { .. } => MasterMessage::Membership(Membership {
                generation: Generation(1),
                members: vec![(self.worker, self.address)].into(),
                abort: false,
            }),
            // The group has one worker, and it knows.
            _ => return None,
        })
    }
}

fn send(to_trainer: &Sender<ControlEvent>, message: MasterMessage) {
    // A trainer that has ended needs no message.
    let _ = to_trainer.send(ControlEvent::Message(message, Instant::now()));
}
