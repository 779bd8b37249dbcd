//! A job, as its nodes know it: where its master is, and the group of its simulated workers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use elasticdl_proto::wire::JoinRequest;
use elasticdl_proto::{MasterMessage, WorkerId};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;

use crate::group::{Group, Order, STEP_US, Totals};
use crate::worker::Target;

/// What happens to a worker of the group.
#[derive(Debug)]
pub(crate) enum GroupEvent {
    Ended(WorkerId),
    /// The master has welcomed the worker: its stream, and its release.
    Joined(WorkerId, mpsc::UnboundedSender<JoinRequest>, oneshot::Sender<()>),
    Received(WorkerId, MasterMessage),
    /// The master has welcomed the worker again, on this stream.
    Returned(WorkerId, mpsc::UnboundedSender<JoinRequest>),
}

/// A job whose master has been started.
#[derive(Debug)]
pub(crate) struct Job {
    /// Where its newest master is.
    pub(crate) target: watch::Sender<Option<Target>>,
    pub(crate) group: mpsc::UnboundedSender<GroupEvent>,
    /// Records of its data set.
    pub(crate) records: u64,
    totals: Arc<Mutex<Totals>>,
}

impl Job {
    /// Starts the group of a job with so many records, on this runtime.
    pub(crate) fn start(records: u64, runtime: &Handle) -> Self {
        let (group, events) = mpsc::unbounded_channel();
        let totals = Arc::default();
        runtime.spawn(conduct(Group::new(records), events, Arc::clone(&totals)));
        Self { target: watch::Sender::new(None), group, totals, records }
    }

    /// Records of the job so far.
    pub(crate) fn totals(&self) -> Totals {
        *self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the group for as long as the job has a sender of its events.
async fn conduct(
    mut group: Group,
    mut events: mpsc::UnboundedReceiver<GroupEvent>,
    totals: Arc<Mutex<Totals>>,
) {
    let mut streams = BTreeMap::new();
    let mut steps = tokio::time::interval(Duration::from_micros(STEP_US));
    steps.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let orders = tokio::select! {
            _ = steps.tick() => group.tick(),
            event = events.recv() => match event {
                None => return,
                Some(GroupEvent::Ended(worker)) => {
                    streams.remove(&worker);
                    group.end(worker)
                }
                Some(GroupEvent::Joined(worker, stream, release)) => {
                    streams.insert(worker, (stream, Some(release)));
                    group.join(worker);
                    Vec::new()
                }
                Some(GroupEvent::Received(worker, message)) => {
                    group.receive(worker, message);
                    Vec::new()
                }
                Some(GroupEvent::Returned(worker, stream)) => {
                    if let Some((known, _)) = streams.get_mut(&worker) {
                        *known = stream;
                    }
                    group.reconnect(worker)
                }
            },
        };
        for order in orders {
            let (Order::Exit(worker) | Order::Send(worker, _)) = &order;
            let Some((stream, release)) = streams.get_mut(worker) else { continue };
            // The worker may have ended meanwhile, which its own event will say.
            match order {
                Order::Exit(_) => drop(release.take().map(|release| release.send(()))),
                Order::Send(_, message) => drop(stream.send(JoinRequest::Message(message))),
            }
        }
        *totals.lock().unwrap_or_else(PoisonError::into_inner) = group.totals();
    }
}
