//! What the workers do: asked for by users, and noted when a worker is evicted.
//!
//! ```text
//!  command, page ──► Master ──Inspect──► workers
//!                ◄── all have answered, or TIMEOUT: what is known ◄──Report──┘
//! ```
//!
//! **Invariant:** no decision depends on it. One request at a time is sent to the workers; those
//! that come meanwhile get the same answer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::{self, Debug, Write as _};
use std::time::Duration;

use elasticdl_proto::limits::REPORT_BYTES_MAX;
use elasticdl_proto::{
    InspectedWorker, Inspection, MasterMessage, SeenMessage, WorkerId, WorkerMessage, WorkerReport,
    WorkerStatus,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::warn;

use super::{Master, Peer};
use crate::job::{LaunchId, Time};
use crate::process_state;
use crate::service::ServerEvent;

/// Asks a running master what its workers do.
#[derive(Clone, Debug)]
pub(crate) struct Inspector {
    pub(super) events: mpsc::Sender<ServerEvent>,
}

impl Inspector {
    /// One that gets no answer.
    #[cfg(test)]
    pub(crate) fn without_master() -> Self {
        Self { events: mpsc::channel(1).0 }
    }

    /// What the workers do; `None` if the job ends meanwhile. Takes some seconds at most.
    pub(crate) async fn inspect(&self) -> Option<Inspection> {
        let (reply, answer) = oneshot::channel();
        self.events.send(ServerEvent::Inspect { reply }).await.ok()?;
        answer.await.ok()
    }
}

/// The requests of users.
#[derive(Debug, Default)]
pub(super) struct Inspections {
    /// Number of the newest request.
    newest: u64,
    pending: Option<Pending>,
    /// When a worker has last reported committed steps.
    committed: Option<Time>,
}

/// A request that the workers have got.
#[derive(Debug)]
struct Pending {
    due: Instant,
    awaited: BTreeSet<WorkerId>,
    reports: BTreeMap<WorkerId, WorkerReport>,
    replies: Vec<oneshot::Sender<Inspection>>,
}

impl Inspections {
    /// Completes when the pending request is to be answered, with or without all reports. Cancel
    /// safe.
    pub(super) async fn due(&self) {
        match &self.pending {
            Some(pending) if pending.awaited.is_empty() => {}
            Some(pending) => tokio::time::sleep_until(pending.due).await,
            None => std::future::pending().await,
        }
    }
}

/// The last messages of a stream, without heartbeats.
#[derive(Debug, Default)]
pub(super) struct LastMessages(VecDeque<NotedMessage>);

/// Messages of one kind in succession.
#[derive(Debug)]
struct NotedMessage {
    last: Time,
    count: u64,
    from_master: bool,
    kind: String,
}

impl LastMessages {
    pub(super) fn note(&mut self, now: Time, from_master: bool, message: &impl Debug) {
        let kind = variant_name(message);
        if ["Heartbeat", "Report"].contains(&&*kind) {
            return;
        }
        match self.0.back_mut() {
            Some(same) if same.kind == kind && same.from_master == from_master => {
                (same.last, same.count) = (now, same.count + 1);
            }
            _ => self.0.push_back(NotedMessage { last: now, count: 1, from_master, kind }),
        }
        self.0.drain(..self.0.len().saturating_sub(MESSAGES_MAX));
    }

    fn seen(&self, now: Time) -> Vec<SeenMessage> {
        let seen = |noted: &NotedMessage| SeenMessage {
            ago_s: seconds(now.since(noted.last)),
            count: noted.count,
            from_master: noted.from_master,
            kind: noted.kind.clone(),
        };
        self.0.iter().map(seen).collect()
    }
}

impl Master {
    /// Notes a message to a worker.
    pub(super) fn note_sent(&mut self, worker: WorkerId, message: &MasterMessage) {
        let now = self.now();
        let peer = self.workers.get(&worker).and_then(|connection| self.peers.get_mut(connection));
        if let Some(peer) = peer {
            peer.last_messages.note(now, true, message);
        }
    }

    /// Asks all workers what they do, unless they are being asked.
    pub(super) fn on_inspect(&mut self, reply: oneshot::Sender<Inspection>) {
        if let Some(pending) = &mut self.inspections.pending {
            pending.replies.push(reply);
            return;
        }
        self.inspections.newest += 1;
        let awaited: BTreeSet<WorkerId> = self.workers.keys().copied().collect();
        let bytes_max = REPORTS_BYTES / (awaited.len() as u64).max(1);
        let bytes_max = bytes_max.clamp(REPORT_BYTES_MIN, REPORT_BYTES_MAX / 2);
        let request = self.inspections.newest;
        let message = self.share(MasterMessage::Inspect { request, bytes_max });
        let workers = awaited.clone();
        let (due, reports) = (Instant::now() + TIMEOUT, BTreeMap::new());
        self.inspections.pending = Some(Pending { due, awaited, reports, replies: vec![reply] });
        for worker in workers {
            let message = message.clone();
            self.send(worker, |outbox| outbox.send(message));
        }
    }

    /// Notes what users may ask for, and takes the reports that they have asked for. The other
    /// messages are the job's.
    pub(super) fn take_report(
        &mut self,
        worker: WorkerId,
        message: WorkerMessage,
    ) -> Option<WorkerMessage> {
        match message {
            WorkerMessage::Report { request: HANGS, ref report } => {
                warn!("worker {worker} hangs\n{report}");
                Some(message)
            }
            WorkerMessage::Report { request, report } => {
                if let Some(pending) = &mut self.inspections.pending
                    && request == self.inspections.newest
                    && pending.awaited.remove(&worker)
                {
                    pending.reports.insert(worker, *report);
                }
                None
            }
            WorkerMessage::Committed(_) => {
                self.inspections.committed = Some(self.now());
                Some(message)
            }
            message => Some(message),
        }
    }

    /// Answers the pending request.
    pub(super) fn end_inspection(&mut self) {
        let Some(Pending { mut reports, replies, .. }) = self.inspections.pending.take() else {
            return;
        };
        let inspection = self.inspection(&mut reports);
        for reply in replies {
            // The client may have disconnected.
            let _ = reply.send(inspection.clone());
        }
    }

    /// Logs what is known of a worker that is evicted.
    pub(super) fn log_evicted(&self, worker: WorkerId) {
        let peer = self.workers.get(&worker).and_then(|connection| self.peers.get(connection));
        if let Some(Peer { pid, address, last_messages, .. }) = peer {
            let evicted = InspectedWorker {
                pid: Some(*pid),
                address: Some(*address),
                messages: last_messages.seen(self.now()),
                process: process_state::read(*pid).filter(|_| self.backend.are_processes()),
                ..self.not_connected(LaunchId(worker.0), "evicted", None)
            };
            warn!("{}", evicted.to_string().trim());
        }
    }

    fn inspection(&self, reports: &mut BTreeMap<WorkerId, WorkerReport>) -> Inspection {
        let now = self.now();
        let status = self.job.status(now);
        let connected: BTreeSet<WorkerId> = status.workers.iter().map(|w| w.worker).collect();
        let of_connected = status.workers.iter().map(|worker| {
            let report = reports.remove(&worker.worker);
            self.inspected(now, worker, report)
        });
        let mut workers: Vec<InspectedWorker> = of_connected.collect();
        let away = status.workers_disconnected.iter().filter(|w| !connected.contains(&w.worker));
        workers.extend(away.map(|worker| InspectedWorker {
            rank: worker.rank,
            heard_s: Some(worker.disconnected_s),
            ..self.not_connected(LaunchId(worker.worker.0), "disconnected", None)
        }));
        workers.extend(status.workers_pending.iter().map(|pending| {
            self.not_connected(pending.launch, &pending.state, pending.reason.clone())
        }));
        workers.sort_by_key(|worker| worker.worker);
        Inspection {
            job: status.job,
            state: status.state.into_owned(),
            generation: status.generation,
            step: status.step,
            committed_s: self.inspections.committed.map(|at| seconds(now.since(at))),
            allreduce_transport: status.allreduce_transport,
            workers,
        }
    }

    /// A worker with an open stream.
    fn inspected(
        &self,
        now: Time,
        status: &WorkerStatus,
        report: Option<WorkerReport>,
    ) -> InspectedWorker {
        let worker = status.worker;
        let peer = self.workers.get(&worker).and_then(|connection| self.peers.get(connection));
        let is_here = report.is_none() && self.backend.are_processes();
        InspectedWorker {
            worker,
            rank: status.rank,
            pid: Some(status.pid),
            address: peer.map(|peer| peer.address),
            state: status.state.clone().into_owned(),
            reason: None,
            pod: status.pod.clone(),
            node: status.node.clone(),
            heard_s: self.job.silence(now, worker).map(seconds),
            messages: peer.map(|peer| peer.last_messages.seen(now)).unwrap_or_default(),
            report,
            process: if is_here { process_state::read(status.pid) } else { None },
        }
    }

    /// A worker without a stream.
    fn not_connected(
        &self,
        launch: LaunchId,
        state: &str,
        reason: Option<String>,
    ) -> InspectedWorker {
        let pid = self.backend.pid(launch);
        InspectedWorker {
            worker: WorkerId(launch.0),
            rank: None,
            pid,
            address: None,
            state: state.into(),
            reason,
            pod: None,
            node: None,
            heard_s: None,
            messages: Vec::new(),
            report: None,
            process: pid.and_then(process_state::read),
        }
    }
}

/// The name of an enum's variant, of which no field is formatted.
fn variant_name(value: &impl Debug) -> String {
    /// Takes the first piece of text that is written.
    struct First(String);

    impl fmt::Write for First {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let is_name = |c: char| c.is_ascii_alphanumeric();
            if !self.0.is_empty() || !text.starts_with(is_name) {
                return Err(fmt::Error);
            }
            self.0.push_str(text);
            Ok(())
        }
    }

    let mut first = First(String::new());
    // It ends with an error unless the variant has no fields.
    let _ = write!(first, "{value:?}");
    first.0
}

fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

/// Number of the report of a worker that hangs.
const HANGS: u64 = 0;
/// Messages of a stream that are kept.
const MESSAGES_MAX: usize = 8;
/// Bytes of the reports of all workers.
const REPORTS_BYTES: u64 = 4 << 20;
const REPORT_BYTES_MIN: u64 = 4 << 10;
/// Workers need up to three seconds; clients wait five.
const TIMEOUT: Duration = Duration::from_secs(4);

#[cfg(test)]
mod tests {
    use elasticdl_proto::{Generation, Membership};

    use super::*;

    #[test]
    fn the_last_messages_have_their_kinds_and_no_heartbeats() {
        let mut last = LastMessages::default();
        let at = |s| Time(Duration::from_secs(s));
        let generation = Generation(3);
        let membership = Membership { generation, members: Vec::new().into(), abort: false };
        for second in 0..9 {
            last.note(at(second), false, &WorkerMessage::Leaving);
        }
        last.note(at(9), true, &MasterMessage::Membership(membership));
        last.note(at(9), false, &WorkerMessage::Heartbeat(Default::default()));
        last.note(at(10), false, &WorkerMessage::Ready { parameters: 7 });
        let kinds = |seen: &[SeenMessage]| -> Vec<(f64, u64, bool, String)> {
            let kind = |m: &SeenMessage| (m.ago_s, m.count, m.from_master, m.kind.clone());
            seen.iter().map(kind).collect()
        };
        let newest =
            [(4.0, 9, false, "Leaving"), (3.0, 1, true, "Membership"), (2.0, 1, false, "Ready")];
        assert_eq!(kinds(&last.seen(at(12))), newest.map(|(a, c, m, k)| (a, c, m, k.to_owned())));
        for second in 20..40 {
            last.note(at(second), second % 2 == 0, &WorkerMessage::Leaving);
        }
        assert_eq!(last.seen(at(40)).len(), MESSAGES_MAX);
    }
}
