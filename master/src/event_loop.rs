//! The master's event loop: one task that owns the job and feeds it events.
//!
//! ```text
//!  streams ─► Server ─┐                            ┌─► WorkerOutbox, one per worker
//!  WorkerBackend ─────┼─► Master::run ─► Job ──────┼─► WorkerBackend: processes or pods
//!  commands, time ────┘    (one task)    actions   └─► Progress
//! ```
//!
//! **Invariants:** only this task accesses the job. The task never waits for a worker or a terminal
//! between an event and the actions that follow from it. The persisted job is handed to the
//! `JobStore` before the actions. A job directory is written at once, a file of some KiB; for the
//! API server the task waits only where a successor could not recover the fact from any other
//! source ([`Job::durable_before`]). When [`Master::run`] returns or is dropped, no process that it
//! started is left.

mod inspection;
mod requests;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::wire::SharedMessage;
use elasticdl_proto::{
    Generation, Hello, Location, MasterMessage, Membership, Welcome, WorkerId, set_log_generation,
};
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::Status;
use tracing::{info, warn};

pub(crate) use self::inspection::Inspector;
use self::inspection::{Inspections, LastMessages};
use crate::backend_event::BackendEvent;
use crate::job::{
    Action, ConnectionId, Event, Job, JobSpec, LaunchId, Outcome, PersistedJob, Scaling, Summary,
    Time,
};
use crate::job_store::JobStore;
use crate::jobdir::ProcessIdentity;
use crate::kube::leader_lease::LeaseGuard;
use crate::kube::objects;
use crate::kube::pods::Pods;
use crate::kube::priority_tiers::Weight;
use crate::kube::verdict::{Verdict, classify};
use crate::listener::ServerConfig;
use crate::local::Launcher;
use crate::progress::Progress;
use crate::service::{Server, ServerEvent, WorkerOutbox};
use crate::worker_backend::WorkerBackend;

/// The master of one job, ready to run.
#[derive(Debug)]
pub struct Master {
    job: Job,
    /// When this master began; moves forward by the time that the job's clock stands still.
    start: Instant,
    /// Age of the job at `start`.
    age: Duration,
    job_store: JobStore,
    /// The newest write to `job_store`.
    last_write: LastWrite,
    backend: WorkerBackend,
    /// The number of workers that was requested last, if the limits did not allow it.
    refused_number: Option<u32>,
    progress: Progress,
    /// Whether the tracking server takes the metrics, and the collector the traces.
    tracked: Option<mpsc::Receiver<Event>>,
    server: Server,
    events: mpsc::Receiver<ServerEvent>,
    /// Streams that this side has not closed.
    peers: BTreeMap<ConnectionId, Peer>,
    workers: BTreeMap<WorkerId, ConnectionId>,
    /// The newest membership: all workers receive the same message, which is long in a large job.
    membership: Option<(Generation, SharedMessage)>,
    /// Fencing token of this master: its number among the job's masters, from 1. A worker rejects a
    /// master whose incarnation is lower than one that it has seen.
    incarnation: u64,
    /// In a cluster: tells whether this master holds the leader Lease.
    lease_guard: Option<LeaseGuard>,
    /// A worker reported a newer master: the API server must confirm that this master still holds
    /// the leader Lease.
    is_lease_doubted: bool,
    inspections: Inspections,
    inspector: Inspector,
}

/// The leadership of a master in a cluster.
#[derive(Debug)]
pub(crate) struct MasterTerm {
    /// Number of this master among the job's masters, from 1.
    pub(crate) incarnation: u64,
    /// Tells whether this master still holds the leader Lease.
    pub(crate) lease_guard: LeaseGuard,
}

/// What a master is made of.
#[derive(Debug)]
pub(crate) struct MasterParts {
    /// A new job, or the one that a former master left.
    pub(crate) job: Job,
    /// Age of the job.
    pub(crate) age: Duration,
    pub(crate) server_config: ServerConfig,
    pub(crate) backend: WorkerBackend,
    /// Where a successor finds what it needs.
    pub(crate) job_store: JobStore,
    /// The leadership, in a cluster.
    pub(crate) term: Option<MasterTerm>,
    pub(crate) progress: Progress,
    /// Tells whether the tracking server takes the metrics, and the collector the traces.
    pub(crate) tracked: Option<mpsc::Receiver<Event>>,
}

/// A request of the user to a running job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserCommand {
    /// Write a checkpoint.
    Checkpoint,
    /// As [`UserCommand::Stop`], by Ctrl-C, which can be repeated.
    Interrupt,
    /// Kill the workers and end at once.
    Kill,
    /// Start workers again.
    Resume,
    /// Change the number of workers, or its limits.
    Scale(Scaling),
    /// Finish the step, then stop.
    Stop,
    /// Write a checkpoint, end all workers, and wait for [`UserCommand::Resume`].
    Suspend,
    /// Give new workers the priority classes of a job of this weight.
    Weigh(Weight),
}

/// How a job ended.
#[derive(Clone, Debug)]
pub struct JobResult {
    /// The outcome.
    pub outcome: Outcome,
    /// The full summary.
    pub summary: Summary,
    /// What is persisted of it.
    pub record: PersistedJob,
}

/// What the persisted job contained at its newest write.
#[derive(Debug)]
struct LastWrite {
    revision: u64,
    step: u64,
    at: Instant,
}

/// One open stream.
struct Peer {
    outbox: WorkerOutbox,
    /// `None` until the worker is admitted.
    worker: Option<WorkerId>,
    pid: u32,
    address: SocketAddr,
    last_messages: LastMessages,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("worker", &self.worker).finish_non_exhaustive()
    }
}

/// Restores a persisted job of this age.
///
/// # Errors
/// The persisted job is inconsistent.
pub(crate) fn restore(record: PersistedJob, age: Duration) -> io::Result<Job> {
    Job::restore(record, Time(age)).map_err(|reason| {
        let text = format!("the persisted job can't be true: {reason}");
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// Restores a persisted job of this age, with those of the pods that former masters have `left`
/// that belong to it.
///
/// # Errors
/// The persisted job is inconsistent.
pub(crate) fn restore_with_pods(
    mut record: PersistedJob,
    age: Duration,
    left: Vec<Pod>,
    pods: &Pods,
) -> io::Result<Job> {
    let mut left: BTreeMap<LaunchId, Pod> =
        left.into_iter().filter_map(|pod| Some((objects::launch_and_slot(&pod)?.0, pod))).collect();
    let lives = |pod: &&Pod| !matches!(classify(pod), Verdict::Ended(_));
    let there = left.values().filter(lives).filter_map(objects::launch_and_slot).collect();
    let strays = record.observe_pods(&there);
    let launches: Vec<LaunchId> = record.launches().collect();
    let job = restore(record, age)?;
    for launch in launches {
        pods.adopt(launch, left.remove(&launch));
    }
    strays.iter().filter_map(|launch| left.remove(launch)).for_each(|pod| pods.remove(pod));
    Ok(job)
}

impl Master {
    /// A master of a new job that serves with `server_config` and starts its workers with
    /// `launcher`. Must be called within a tokio runtime. No worker is started before
    /// [`Master::run`].
    ///
    /// `spec` has passed [`JobSpec::check`].
    ///
    /// # Errors
    /// The listener has no address, or the server can't be started.
    pub fn new(
        spec: JobSpec,
        server_config: ServerConfig,
        launcher: Launcher,
        progress: Progress,
    ) -> io::Result<Self> {
        Self::assemble(MasterParts {
            backend: WorkerBackend::processes(launcher, &spec.name, &server_config)?,
            job: Job::new(spec),
            age: Duration::ZERO,
            server_config,
            job_store: JobStore::Nothing,
            term: None,
            progress,
            tracked: None,
        })
    }

    /// Takes over a process that a former master started.
    pub(crate) fn adopt(&mut self, launch: LaunchId, process: Option<ProcessIdentity>) {
        self.backend.adopt(launch, process);
    }

    /// Otherwise as [`Master::new`].
    ///
    /// # Errors
    /// The server can't be started.
    pub(crate) fn assemble(parts: MasterParts) -> io::Result<Self> {
        let MasterParts { job, age, server_config, backend, .. } = parts;
        let (spec, run_id) = (job.spec(), server_config.token.run_id());
        info!(job = spec.name, %run_id, "run of the job");
        let (sender, events) = mpsc::channel(SERVER_EVENTS_MAX);
        let inspector = Inspector { events: sender.clone() };
        let server = Server::start(server_config, &spec.name, spec.options.worker_timeout, sender)?;
        let (incarnation, lease_guard) = match parts.term {
            Some(term) => (term.incarnation, Some(term.lease_guard)),
            None => (job.masters(), None),
        };
        Ok(Self {
            incarnation,
            lease_guard,
            is_lease_doubted: false,
            job: job.with_run_id(run_id),
            start: Instant::now(),
            age,
            job_store: parts.job_store,
            last_write: LastWrite { revision: 0, step: 0, at: Instant::now() },
            backend,
            refused_number: None,
            progress: parts.progress,
            tracked: parts.tracked,
            server,
            events,
            peers: BTreeMap::new(),
            workers: BTreeMap::new(),
            membership: None,
            inspections: Inspections::default(),
            inspector,
        })
    }

    /// Asks this master, once it runs, what its workers do.
    pub(crate) fn inspector(&self) -> Inspector {
        self.inspector.clone()
    }

    /// Runs the job to its end. The sender of `commands` may be dropped.
    pub async fn run(mut self, mut commands: mpsc::Receiver<UserCommand>) -> JobResult {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let outcome = loop {
            if std::mem::take(&mut self.is_lease_doubted) {
                self.suspend().await;
            }
            if let Some(outcome) = self.act() {
                break outcome;
            }
            let timeout = self.job.poll_timeout();
            let due = timeout.unwrap_or_default().since(Time(self.age));
            let due = tokio::time::sleep_until(self.start + due);
            tokio::select! {
                Some(event) = self.events.recv() => self.on_server_event(event),
                (launch, event) = self.backend.next() => {
                    self.job.handle(self.now(), match event {
                        BackendEvent::Busy => Event::LaunchIsBusy { launch },
                        BackendEvent::Ended(exit) => Event::ProcessEnded { launch, exit },
                        BackendEvent::Explained(explanation) => {
                            Event::LaunchExplained { launch, explanation }
                        }
                        BackendEvent::Terminating(cause, reason) => {
                            Event::LaunchLeaves { launch, cause, reason }
                        }
                        BackendEvent::Created(class) => Event::LaunchMade { launch, class },
                        BackendEvent::Located(location) => {
                            Event::LaunchLocated { launch, location }
                        }
                        BackendEvent::Noted(note) => Event::LaunchNoted { launch, note },
                        BackendEvent::OutputTail(lines) => Event::LaunchPrinted { launch, lines },
                        BackendEvent::Running => Event::LaunchRuns { launch },
                        BackendEvent::Waiting(wait) => Event::LaunchWaits { launch, wait },
                    });
                }
                Some(command) = commands.recv() => match command {
                    UserCommand::Checkpoint => self.job.handle(self.now(), Event::Checkpoint),
                    UserCommand::Kill => {
                        info!("killed by the user");
                        self.job.handle(self.now(), Event::StopNow);
                        // The other actions that follow are not awaited: a store that does not
                        // answer would delay them.
                        while let Some(action) = self.job.poll_action() {
                            if let Action::Log(text) = action {
                                self.log(text);
                            }
                        }
                        break self.job.outcome().unwrap_or(Outcome::Stopped);
                    }
                    UserCommand::Scale(change) => {
                        let done = self.scale_as_requested(change).map(drop);
                        self.notice_refusal(done);
                    }
                    UserCommand::Resume | UserCommand::Suspend => {
                        let done = self.set_suspended(command == UserCommand::Suspend);
                        self.notice_refusal(done.map(drop));
                    }
                    UserCommand::Weigh(weight) => self.backend.set_weight(weight),
                    UserCommand::Interrupt => self.stop(true),
                    UserCommand::Stop => self.stop(false),
                },
                Some(event) = next_of(&mut self.tracked) => self.job.handle(self.now(), event),
                event = self.job_store.changed() => if let Some(event) = event {
                    self.job.handle(self.now(), event);
                },
                () = lease_has_expired(&mut self.lease_guard) => self.suspend().await,
                () = self.inspections.due() => self.end_inspection(),
                () = due, if timeout.is_some() => self.job.handle_timeout(self.now()),
                _ = ticks.tick() => self.show(),
            }
        };
        let now = self.now();
        self.progress.show(now, self.job.snapshot(now));
        let summary = self.job.summary(now);
        info!(?outcome, steps = summary.steps, "job ended");
        self.peers.clear();
        self.backend.end().await;
        self.server.end().await;
        self.progress.end();
        JobResult { outcome, summary, record: self.job.to_persisted() }
    }

    /// Suspends the master while the leader Lease is not renewed, because another master may hold
    /// it: disconnects all workers and closes the listener until the API server answers. Workers
    /// continue to train and search for a master. The job's clock stands still, because no event
    /// that the job waits for can arrive.
    async fn suspend(&mut self) {
        let since = Instant::now();
        warn!(
            "the leader Lease is not renewed: workers are disconnected, and none is admitted until \
             it is"
        );
        self.server.close();
        let workers: Vec<WorkerId> = self.workers.keys().copied().collect();
        for worker in workers {
            if self.disconnect(worker) {
                self.job.handle(self.now(), Event::Disconnected { worker });
            }
        }
        self.peers.clear();
        match &mut self.lease_guard {
            Some(lease_guard) => lease_guard.renewed().await,
            None => return,
        }
        // These events belong to streams that are closed.
        while self.events.try_recv().is_ok() {}
        let away = since.elapsed();
        self.start += away;
        self.job.note_away(away);
        self.server.reopen();
        info!(
            suspended_s = away.as_secs(),
            "the leader Lease is renewed: workers are admitted again"
        );
    }

    fn now(&self) -> Time {
        Time(self.age + self.start.elapsed())
    }

    fn show(&mut self) {
        let snapshot = self.job.snapshot(self.now());
        let status = &snapshot.status;
        // The persisted step lags behind the job's by `PERSISTED_STEP_AGE_MAX` at most.
        let is_behind = self.job_store.saves_steps() && status.step != self.last_write.step;
        let is_old = self.last_write.at.elapsed() >= PERSISTED_STEP_AGE_MAX;
        if is_old && (is_behind || self.job_store.has_failed()) {
            self.last_write.revision = 0;
        }
        self.progress.show(self.now(), snapshot);
    }

    fn log(&self, text: String) {
        info!("{text}");
        self.progress.notice(self.now(), text);
    }

    /// Persists what a successor must know about the actions that follow.
    fn persist(&mut self) {
        let revision = self.job.version();
        if revision != self.last_write.revision {
            let news = self.job_store.save(&self.job);
            news.into_iter().for_each(|text| self.progress.notice(self.now(), text));
            let step = self.job.step();
            self.last_write = LastWrite { revision, step, at: Instant::now() };
        }
    }

    /// Performs the actions of the job. Returns the outcome when the job ends.
    fn act(&mut self) -> Option<Outcome> {
        set_log_generation(self.job.generation());
        loop {
            self.persist();
            if !self.job_store.allows_actions(&self.job) {
                return None;
            }
            let action = self.job.poll_action()?;
            match action {
                Action::Admit { connection, worker } => self.admit(connection, worker),
                Action::Disconnect { worker } => {
                    self.log_evicted(worker);
                    self.disconnect(worker);
                }
                Action::End(outcome) => return Some(outcome),
                Action::Kill { launch } => self.backend.kill(launch),
                Action::Launch { launch, slot, avoid } => self.backend.start(launch, slot, avoid),
                Action::Refuse { connection, reason } => {
                    warn!(connection = connection.0, reason, "worker refused");
                    if let Some(peer) = self.peers.remove(&connection) {
                        peer.outbox.refuse(reason);
                    }
                }
                Action::Log(text) => self.log(text),
                Action::Send { worker, message } => {
                    self.note_sent(worker, &message);
                    let message = self.share(message);
                    self.send(worker, |outbox| outbox.send(message));
                }
            }
        }
    }

    fn admit(&mut self, connection: ConnectionId, worker: WorkerId) {
        // The stream may have closed before this action; its `Closed` event is then queued.
        if let Some(peer) = self.peers.get_mut(&connection) {
            peer.worker = Some(worker);
            if let Some(dead) = self.workers.insert(worker, connection) {
                self.peers.remove(&dead);
            }
            let options = self.job.spec().options.clone();
            let serves_tables = self.job.serves_tables(worker);
            let incarnation = self.incarnation;
            let welcome = Welcome { worker, incarnation, serves_tables, options };
            self.send(worker, |outbox| outbox.welcome(welcome));
        }
    }

    /// Shares a membership with the other workers that it is sent to.
    fn share(&mut self, message: MasterMessage) -> SharedMessage {
        let MasterMessage::Membership(Membership { generation, .. }) = message else {
            return message.into();
        };
        match &self.membership {
            Some((known, shared)) if *known == generation => shared.clone(),
            _ => {
                let shared = SharedMessage::from(message);
                self.membership = Some((generation, shared.clone()));
                shared
            }
        }
    }

    fn send(&mut self, worker: WorkerId, queue: impl FnOnce(&WorkerOutbox) -> bool) {
        let peer = self.workers.get(&worker).and_then(|connection| self.peers.get(connection));
        if peer.is_some_and(|peer| !queue(&peer.outbox)) && self.disconnect(worker) {
            warn!(%worker, "worker does not read its messages: disconnected");
            self.job.handle(self.now(), Event::Disconnected { worker });
        }
    }

    /// Closes the stream of `worker` from this side. Returns whether it was open.
    fn disconnect(&mut self, worker: WorkerId) -> bool {
        self.workers.remove(&worker).and_then(|connection| self.peers.remove(&connection)).is_some()
    }

    fn on_server_event(&mut self, event: ServerEvent) {
        let now = self.now();
        match event {
            ServerEvent::Checkpoint { reply } => {
                // The client may have disconnected.
                let _ = reply.send(self.checkpoint().map_err(Status::invalid_argument));
            }
            ServerEvent::Closed { connection } => {
                if let Some(worker) = self.peers.remove(&connection).and_then(|peer| peer.worker) {
                    self.workers.remove(&worker);
                    self.job.handle(now, Event::Disconnected { worker });
                }
            }
            ServerEvent::Connected { connection, hello, outbox } => {
                let Hello { job: _, launch, address, pid, resume, incarnation, location } = *hello;
                if incarnation > self.incarnation {
                    // The stream closes without a message; the worker continues its search.
                    warn!(
                        launch = launch.0,
                        incarnation, "a worker has been welcomed by a newer master of this job"
                    );
                    return self.doubt_lease(incarnation);
                }
                self.backend.on_hello(launch);
                let last_messages = LastMessages::default();
                self.peers
                    .insert(connection, Peer { outbox, worker: None, pid, address, last_messages });
                if location != Location::default() {
                    self.job.handle(now, Event::LaunchLocated { launch, location });
                }
                self.job.handle(now, Event::Connected { connection, launch, address, pid, resume });
            }
            ServerEvent::Message { connection, message } => {
                let Some(peer) = self.peers.get_mut(&connection) else { return };
                let Some(worker) = peer.worker else { return };
                peer.last_messages.note(now, false, &message);
                if let Some(message) = self.take_report(worker, message) {
                    self.job.handle(now, Event::Message { worker, message });
                }
            }
            ServerEvent::Inspect { reply } => self.on_inspect(reply),
            ServerEvent::Scale { change, reply } => {
                // The client may have disconnected.
                let _ = reply.send(self.scale(change).map_err(Status::invalid_argument));
            }
            ServerEvent::Status { reply } => {
                // The client may have disconnected.
                let _ = reply.send(self.job.status(now));
            }
            ServerEvent::Suspend { suspend, reply } => {
                // The client may have disconnected.
                let _ = reply.send(self.set_suspended(suspend).map_err(Status::invalid_argument));
            }
        }
    }

    /// A master with a higher `incarnation` exists or existed.
    fn doubt_lease(&mut self, incarnation: u64) {
        self.incarnation = incarnation;
        self.is_lease_doubted = self.lease_guard.is_some();
    }
}

/// The next message; waits for ever if there is no channel.
async fn next_of<T>(received: &mut Option<mpsc::Receiver<T>>) -> Option<T> {
    match received {
        Some(received) => received.recv().await,
        None => std::future::pending().await,
    }
}

/// Waits until a master with a leader Lease no longer holds it.
async fn lease_has_expired(lease_guard: &mut Option<LeaseGuard>) {
    match lease_guard {
        Some(lease_guard) => lease_guard.expired().await,
        None => std::future::pending().await,
    }
}

/// Capacity of the server's event queue; streams wait while it is full.
const SERVER_EVENTS_MAX: usize = 1024;
/// Longest time that the persisted step of a job that makes progress may lag behind.
const PERSISTED_STEP_AGE_MAX: Duration = Duration::from_secs(1);
/// Interval at which progress is published.
const TICK: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
