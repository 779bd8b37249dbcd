//! The master at work: one task that owns the job, and everything that feeds it.
//!
//! ```text
//!  streams ─► Server ─┐                            ┌─► WorkerOutbox (a worker's outbox)
//!  launches ──────────┼─► Master::run ─► Job ──────┼─► WorkerBackend: processes, or pods
//!  commands, time ──┘    (one task)    actions   └─► Progress
//! ```
//!
//! **Invariants:** the job is touched by this task alone. The task never waits for a worker, a
//! terminal or a disk between an event and the actions that follow from it; the job's record, which
//! comes before the actions, is handed on and not waited for, but for what nobody else could tell.
//! When [`Master::run`] returns, or is dropped, no process that it started is left.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use elasticdl_proto::v1::MasterMessage;
use elasticdl_proto::{Generation, WorkerId};
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::Status;
use tracing::{info, warn};

use crate::job::{
    Action, ConnectionId, Event, Job, JobRecord, JobSpec, LaunchId, Membership, Outcome, Summary,
    Time, ToWorker,
};
use crate::job_store::JobStore;
use crate::jobdir::{AbandonedJob, PersistedJobFile};
use crate::kube::leader_lease::LeaseGuard;
use crate::kube::objects;
use crate::kube::persisted_job::PersistedJobWriter;
use crate::kube::pods::Pods;
use crate::kube::verdict::{Verdict, classify};
use crate::listener::ServerConfig;
use crate::local::{Launcher, Processes};
use crate::progress::Progress;
use crate::service::{self, Server, ServerEvent, WorkerOutbox};
use crate::worker_backend::{BackendEvent, WorkerBackend};

/// A master that is about to run one job.
#[derive(Debug)]
pub struct Master {
    spec: JobSpec,
    job: Job,
    start: Instant,
    /// How old the job was then.
    age: Duration,
    job_store: JobStore,
    /// What the record's file holds, and when it was written.
    last_write: LastWrite,
    backend: WorkerBackend,
    progress: Progress,
    server: Server,
    events: mpsc::Receiver<ServerEvent>,
    /// Streams that are open on this side.
    peers: BTreeMap<ConnectionId, Peer>,
    workers: BTreeMap<WorkerId, ConnectionId>,
    /// The newest membership as it is sent: the same to all, and long where these are many.
    membership: Option<(Generation, Arc<MasterMessage>)>,
    /// Which of the job's masters this is, from 1. Workers accept none that is older than one that
    /// they know.
    incarnation: u64,
    /// In a cluster: whether this master holds the job's lease.
    lease_guard: Option<LeaseGuard>,
    /// A worker has told of a newer master: the server is to say whether this one still holds the
    /// lease.
    is_lease_doubted: bool,
}

/// Who a master in a cluster is.
#[derive(Debug)]
pub(crate) struct MasterTerm {
    /// Which of the job's masters.
    pub(crate) incarnation: u64,
    /// Whether it holds the job's lease.
    pub(crate) lease_guard: LeaseGuard,
}

/// What the user can do to a running job from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserCommand {
    /// Write a checkpoint.
    Checkpoint,
    /// End at once: kill the workers.
    Kill,
    /// Keep this many workers.
    Scale(u32),
    /// Finish the step, then stop.
    Stop,
}

/// How a job ended.
#[derive(Clone, Debug)]
pub struct JobResult {
    /// In a word.
    pub outcome: Outcome,
    /// In full.
    pub summary: Summary,
}

#[derive(Debug)]
struct LastWrite {
    revision: u64,
    step: u64,
    at: Instant,
}

struct Peer {
    outbox: WorkerOutbox,
    /// `None` until it is admitted.
    worker: Option<WorkerId>,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("worker", &self.worker).finish_non_exhaustive()
    }
}

impl Master {
    /// A master at `server_config`, whose workers are started by `launcher`. Must be called within a
    /// tokio runtime; nothing is started before [`Master::run`].
    ///
    /// `spec` has passed [`JobSpec::check`].
    ///
    /// # Errors
    /// The listener has no address.
    pub fn new(
        spec: JobSpec,
        server_config: ServerConfig,
        launcher: Launcher,
        progress: Progress,
    ) -> io::Result<Self> {
        let job = Job::new(spec.clone());
        Self::with(job, spec, Duration::ZERO, server_config, launcher, progress)
    }

    /// A master that goes on with a job whose master died, `age` after the job began. `server_config` is
    /// where its workers look for it; the rest as for [`Master::new`].
    ///
    /// # Errors
    /// The listener has no address, or no job can be made of the record.
    pub fn resume(
        abandoned: AbandonedJob,
        age: Duration,
        server_config: ServerConfig,
        launcher: Launcher,
        progress: Progress,
    ) -> io::Result<Self> {
        let AbandonedJob { record, mut processes, .. } = abandoned;
        let launches: Vec<LaunchId> = record.launches().collect();
        let spec = record.spec().clone();
        let job = Job::restore(record, Time(age)).map_err(|reason| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the job's record can't be true: {reason}"),
            )
        })?;
        let mut master = Self::with(job, spec, age, server_config, launcher, progress)?;
        for launch in launches {
            master.backend.adopt(launch, processes.remove(&launch));
        }
        Ok(master)
    }

    /// Keeps what another master would need in `record`.
    #[must_use]
    pub fn with_persisted_job_file(self, file: PersistedJobFile) -> Self {
        Self { job_store: JobStore::File(file), ..self }
    }

    fn with(
        job: Job,
        spec: JobSpec,
        age: Duration,
        server_config: ServerConfig,
        mut launcher: Launcher,
        progress: Progress,
    ) -> io::Result<Self> {
        let address = server_config.listener.local_addr()?;
        launcher.env.push(("ELASTICDL_MASTER".into(), address.to_string().into()));
        launcher.env.push(("ELASTICDL_JOB".into(), spec.name.clone().into()));
        info!(job = spec.name, %address, "master listens");
        let backend = WorkerBackend::Processes(Processes::new(launcher));
        Ok(Self::assemble(job, spec, age, server_config, backend, progress))
    }

    /// A master whose workers are `pods`, and which keeps what another one would need with
    /// `keeper`.
    pub(crate) fn with_pods(
        spec: JobSpec,
        server_config: ServerConfig,
        pods: Pods,
        writer: PersistedJobWriter,
        term: MasterTerm,
        progress: Progress,
    ) -> Self {
        let job = Job::new(spec.clone());
        let master = Self::assemble(
            job,
            spec,
            Duration::ZERO,
            server_config,
            WorkerBackend::Pods(pods),
            progress,
        );
        master.in_cluster(writer, term)
    }

    fn in_cluster(self, writer: PersistedJobWriter, term: MasterTerm) -> Self {
        let MasterTerm { incarnation, lease_guard } = term;
        Self {
            job_store: JobStore::Anchor(writer),
            incarnation,
            lease_guard: Some(lease_guard),
            ..self
        }
    }

    /// As [`Master::with_pods`], going on with a job whose master died, `age` after the job began:
    /// `record` is what that one has kept, `left` are the pods that it has made.
    ///
    /// # Errors
    /// What in the record can't be; no job can be made of it.
    pub(crate) fn resume_with_pods(
        (mut record, left): (JobRecord, Vec<Pod>),
        age: Duration,
        server_config: ServerConfig,
        pods: Pods,
        writer: PersistedJobWriter,
        term: MasterTerm,
        progress: Progress,
    ) -> Result<Self, String> {
        let mut left: BTreeMap<LaunchId, Pod> = left
            .into_iter()
            .filter_map(|pod| Some((objects::launch_and_slot(&pod)?.0, pod)))
            .collect();
        let lives = |pod: &&Pod| !matches!(classify(pod), Verdict::Ended(_));
        let there = left.values().filter(lives).filter_map(objects::launch_and_slot).collect();
        let strays = record.find(&there);
        let launches: Vec<LaunchId> = record.launches().collect();
        let spec = record.spec().clone();
        let job = Job::restore(record, Time(age))?;
        for launch in launches {
            pods.adopt(launch, left.remove(&launch));
        }
        strays.iter().filter_map(|launch| left.remove(launch)).for_each(|pod| pods.remove(pod));
        let master =
            Self::assemble(job, spec, age, server_config, WorkerBackend::Pods(pods), progress);
        Ok(master.in_cluster(writer, term))
    }

    fn assemble(
        job: Job,
        spec: JobSpec,
        age: Duration,
        server_config: ServerConfig,
        backend: WorkerBackend,
        progress: Progress,
    ) -> Self {
        let (sender, events) = mpsc::channel(SERVER_EVENTS_MAX);
        let server = Server::start(server_config, &spec.name, spec.worker_timeout, sender);
        Self {
            incarnation: job.masters(),
            lease_guard: None,
            is_lease_doubted: false,
            job,
            spec,
            start: Instant::now(),
            age,
            job_store: JobStore::Nothing,
            last_write: LastWrite { revision: 0, step: 0, at: Instant::now() },
            backend,
            progress,
            server,
            events,
            peers: BTreeMap::new(),
            workers: BTreeMap::new(),
            membership: None,
        }
    }

    /// Runs the job to its end. `commands` may be closed.
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
                        BackendEvent::Ended(exit) => Event::ProcessEnded { launch, exit },
                        BackendEvent::Explained(words) => Event::LaunchExplained { launch, words },
                        BackendEvent::Terminating(reason) => Event::LaunchLeaves { launch, reason },
                        BackendEvent::Created(class) => Event::LaunchMade { launch, class },
                        BackendEvent::OutputTail(lines) => Event::LaunchPrinted { launch, lines },
                        BackendEvent::Running => Event::LaunchRuns { launch },
                        BackendEvent::Waiting(wait) => Event::LaunchWaits { launch, wait },
                    });
                }
                Some(command) = commands.recv() => match command {
                    UserCommand::Checkpoint => self.job.handle(self.now(), Event::Checkpoint),
                    UserCommand::Kill => {
                        info!("killed by the user");
                        break Outcome::Stopped;
                    }
                    UserCommand::Scale(num_workers) => {
                        if let Err(reason) = self.scale(num_workers) {
                            self.progress.notice(self.now(), reason);
                        }
                    }
                    UserCommand::Stop => {
                        self.progress.notice(self.now(), "stopping; press Ctrl-C again to end at once".into());
                        self.job.handle(self.now(), Event::Stop);
                    }
                },
                event = self.job_store.changed() => if let Some(event) = event {
                    self.job.handle(self.now(), event);
                },
                () = lease_has_expired(&mut self.lease_guard) => self.suspend().await,
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
        JobResult { outcome, summary }
    }

    /// The lease can't be renewed, so another master may have the job: workers are sent away, and
    /// nobody listens until the server has answered. Workers train on and look for a master
    /// meanwhile. The job's clock stands still, for nothing that it waits for can happen.
    async fn suspend(&mut self) {
        let since = Instant::now();
        warn!(
            "the job's lease is not renewed: workers are sent away, and none is taken until it is"
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
        // What came of streams that are over, and of hellos that came too late.
        while self.events.try_recv().is_ok() {}
        self.start += since.elapsed();
        self.server.reopen();
        info!(
            away_s = since.elapsed().as_secs(),
            "the job's lease is renewed: workers are taken again"
        );
    }

    fn now(&self) -> Time {
        Time(self.age + self.start.elapsed())
    }

    fn show(&mut self) {
        let snapshot = self.job.snapshot(self.now());
        let status = &snapshot.status;
        // How far the job is need not be exact in its record, but not far behind either.
        let is_behind =
            status.step != self.last_write.step && self.last_write.at.elapsed() >= RECORD_AGE_MAX;
        if is_behind && self.job_store.saves_steps() {
            self.last_write.revision = 0;
        }
        self.progress.show(self.now(), snapshot);
    }

    /// Keeps what another master would have to know of what is done next.
    fn write_record(&mut self) {
        let revision = self.job.revision();
        if revision != self.last_write.revision {
            self.job_store.save(&self.job);
            let step = self.job.step();
            self.last_write = LastWrite { revision, step, at: Instant::now() };
        }
    }

    /// Does what the job wants done; its outcome, if that is the end.
    fn act(&mut self) -> Option<Outcome> {
        loop {
            self.write_record();
            if !self.job_store.allows_actions(&self.job) {
                return None;
            }
            let action = self.job.poll_action()?;
            match action {
                Action::Admit { connection, worker } => self.admit(connection, worker),
                Action::Disconnect { worker } => {
                    self.disconnect(worker);
                }
                Action::End(outcome) => return Some(outcome),
                Action::Kill { launch } => self.backend.kill(launch),
                Action::Launch { launch, index } => self.backend.start(launch, index),
                Action::Refuse { connection, reason } => {
                    warn!(connection = connection.0, reason, "worker refused");
                    if let Some(peer) = self.peers.remove(&connection) {
                        peer.outbox.refuse(reason);
                    }
                }
                Action::Say(text) => {
                    info!("{text}");
                    self.progress.notice(self.now(), text);
                }
                Action::Send { worker, message } => {
                    let message = self.encode(message);
                    self.send(worker, message);
                }
            }
        }
    }

    fn admit(&mut self, connection: ConnectionId, worker: WorkerId) {
        // The stream may have ended while the job decided; its end is on the way then.
        if let Some(peer) = self.peers.get_mut(&connection) {
            peer.worker = Some(worker);
            if let Some(dead) = self.workers.insert(worker, connection) {
                self.peers.remove(&dead);
            }
            self.send(worker, Arc::new(service::welcome(worker, &self.spec, self.incarnation)));
        }
    }

    fn encode(&mut self, message: ToWorker) -> Arc<MasterMessage> {
        let ToWorker::Membership(Membership { generation, .. }) = message else {
            return Arc::new(service::to_worker(message));
        };
        match &self.membership {
            Some((known, encoded)) if *known == generation => Arc::clone(encoded),
            _ => {
                let encoded = Arc::new(service::to_worker(message));
                self.membership = Some((generation, Arc::clone(&encoded)));
                encoded
            }
        }
    }

    fn send(&mut self, worker: WorkerId, message: Arc<MasterMessage>) {
        let peer = self.workers.get(&worker).and_then(|connection| self.peers.get(connection));
        if peer.is_some_and(|peer| !peer.outbox.send(message)) && self.disconnect(worker) {
            warn!(%worker, "worker doesn't read what it is sent: disconnected");
            self.job.handle(self.now(), Event::Disconnected { worker });
        }
    }

    /// Ends a worker's stream from this side; whether it was open.
    fn disconnect(&mut self, worker: WorkerId) -> bool {
        self.workers.remove(&worker).and_then(|connection| self.peers.remove(&connection)).is_some()
    }

    fn on_server_event(&mut self, event: ServerEvent) {
        let now = self.now();
        match event {
            ServerEvent::Checkpoint { reply } => {
                // The command may have gone.
                let _ = reply.send(self.checkpoint().map_err(Status::invalid_argument));
            }
            ServerEvent::Closed { connection } => {
                if let Some(worker) = self.peers.remove(&connection).and_then(|peer| peer.worker) {
                    self.workers.remove(&worker);
                    self.job.handle(now, Event::Disconnected { worker });
                }
            }
            ServerEvent::Connected { connection, hello, outbox } => {
                let service::Hello { launch, address, pid, resume, incarnation } = hello;
                if incarnation > self.incarnation {
                    // Its stream ends without a word; it goes on looking.
                    warn!(
                        launch = launch.0,
                        incarnation, "a worker has been with a newer master of this job"
                    );
                    return self.doubt_lease(incarnation);
                }
                self.backend.on_hello();
                self.peers.insert(connection, Peer { outbox, worker: None });
                self.job.handle(now, Event::Connected { connection, launch, address, pid, resume });
            }
            ServerEvent::Message { connection, message } => {
                if let Some(worker) = self.peers.get(&connection).and_then(|peer| peer.worker) {
                    self.job.handle(now, Event::Message { worker, message });
                }
            }
            ServerEvent::Scale { num_workers, reply } => {
                // The command may have gone.
                let _ = reply.send(self.scale(num_workers).map_err(Status::invalid_argument));
            }
            ServerEvent::Status { reply } => {
                // The command may have gone.
                let _ = reply.send(self.job.status(now));
            }
        }
    }

    /// There is, or was, a newer master than this one.
    fn doubt_lease(&mut self, incarnation: u64) {
        self.incarnation = incarnation;
        self.is_lease_doubted = self.lease_guard.is_some();
    }

    /// Asks the group for a checkpoint; the step that it has reached.
    fn checkpoint(&mut self) -> Result<u64, String> {
        if self.spec.checkpoints.is_none() {
            return Err(
                "this job keeps no checkpoints: it was started without --checkpoint-dir".into()
            );
        }
        self.job.handle(self.now(), Event::Checkpoint);
        Ok(self.job.step())
    }

    /// Keeps this many workers from now on; how many it were before.
    fn scale(&mut self, num_workers: u32) -> Result<u32, String> {
        self.spec.check_scale(num_workers)?;
        let now = self.now();
        let was = self.job.status(now).workers_desired;
        self.job.handle(now, Event::Scale { num_workers });
        Ok(was)
    }
}

/// Waits until a master that has a lease does not hold it any more.
async fn lease_has_expired(lease_guard: &mut Option<LeaseGuard>) {
    match lease_guard {
        Some(lease_guard) => lease_guard.expired().await,
        None => std::future::pending().await,
    }
}

/// Events that may wait for the job; when there are more, streams wait.
const SERVER_EVENTS_MAX: usize = 1024;
/// How old the record of a job that makes progress may be.
const RECORD_AGE_MAX: Duration = Duration::from_secs(1);
/// How often progress is looked at.
const TICK: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
