//! The master at work: one task that owns the job, and everything that feeds it.
//!
//! ```text
//!  streams ─► Server ─┐                            ┌─► Line (a worker's outbox)
//!  launches ──────────┼─► Master::run ─► Job ──────┼─► Launches: processes, or pods
//!  interrupts, time ──┘    (one task)    actions   └─► Progress
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

use crate::entrance::Entrance;
use crate::job::{
    Action, ConnectionId, Event, Job, JobRecord, JobSpec, LaunchId, Membership, Outcome, Summary,
    Time, ToWorker,
};
use crate::jobdir::{AbandonedJob, PersistedJobFile};
use crate::keeping::Keeping;
use crate::kube::leader_lease::LeaseGuard;
use crate::kube::objects;
use crate::kube::persisted_job::PersistedJobWriter;
use crate::kube::pods::Pods;
use crate::kube::verdict::{Verdict, classify};
use crate::launches::{Happening, Launches};
use crate::local::{Launcher, Processes};
use crate::progress::Progress;
use crate::service::{self, Input, Line, Server};

/// A master that is about to run one job.
#[derive(Debug)]
pub struct Master {
    spec: JobSpec,
    job: Job,
    start: Instant,
    /// How old the job was then.
    age: Duration,
    keeping: Keeping,
    /// What the record's file holds, and when it was written.
    written: Written,
    launches: Launches,
    progress: Progress,
    server: Server,
    inputs: mpsc::Receiver<Input>,
    /// Streams that are open on this side.
    peers: BTreeMap<ConnectionId, Peer>,
    workers: BTreeMap<WorkerId, ConnectionId>,
    /// The newest membership as it is sent: the same to all, and long where these are many.
    membership: Option<(Generation, Arc<MasterMessage>)>,
    /// Which of the job's masters this is, from 1. Workers accept none that is older than one that
    /// they know.
    incarnation: u64,
    /// In a cluster: whether this master holds the job's lease.
    warrant: Option<LeaseGuard>,
    /// A worker has told of a newer master: the server is to say whether this one still holds the
    /// lease.
    is_doubted: bool,
}

/// Who a master in a cluster is.
#[derive(Debug)]
pub(crate) struct Office {
    /// Which of the job's masters.
    pub(crate) incarnation: u64,
    /// Whether it holds the job's lease.
    pub(crate) warrant: LeaseGuard,
}

/// What the user can do to a running job from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
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
pub struct Ended {
    /// In a word.
    pub outcome: Outcome,
    /// In full.
    pub summary: Summary,
}

#[derive(Debug)]
struct Written {
    revision: u64,
    step: u64,
    at: Instant,
}

struct Peer {
    line: Line,
    /// `None` until it is admitted.
    worker: Option<WorkerId>,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("worker", &self.worker).finish_non_exhaustive()
    }
}

impl Master {
    /// A master at `entrance`, whose workers are started by `launcher`. Must be called within a
    /// tokio runtime; nothing is started before [`Master::run`].
    ///
    /// `spec` has passed [`JobSpec::check`].
    ///
    /// # Errors
    /// The listener has no address.
    pub fn new(
        spec: JobSpec,
        entrance: Entrance,
        launcher: Launcher,
        progress: Progress,
    ) -> io::Result<Self> {
        let job = Job::new(spec.clone());
        Self::with(job, spec, Duration::ZERO, entrance, launcher, progress)
    }

    /// A master that goes on with a job whose master died, `age` after the job began. `entrance` is
    /// where its workers look for it; the rest as for [`Master::new`].
    ///
    /// # Errors
    /// The listener has no address, or no job can be made of the record.
    pub fn resume(
        abandoned: AbandonedJob,
        age: Duration,
        entrance: Entrance,
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
        let mut master = Self::with(job, spec, age, entrance, launcher, progress)?;
        for launch in launches {
            master.launches.adopt(launch, processes.remove(&launch));
        }
        Ok(master)
    }

    /// Keeps what another master would need in `record`.
    #[must_use]
    pub fn keeping(self, record: PersistedJobFile) -> Self {
        Self { keeping: Keeping::File(record), ..self }
    }

    fn with(
        job: Job,
        spec: JobSpec,
        age: Duration,
        entrance: Entrance,
        mut launcher: Launcher,
        progress: Progress,
    ) -> io::Result<Self> {
        let address = entrance.listener.local_addr()?;
        launcher.env.push(("ELASTICDL_MASTER".into(), address.to_string().into()));
        launcher.env.push(("ELASTICDL_JOB".into(), spec.name.clone().into()));
        info!(job = spec.name, %address, "master listens");
        let launches = Launches::Processes(Processes::new(launcher));
        Ok(Self::assemble(job, spec, age, entrance, launches, progress))
    }

    /// A master whose workers are `pods`, and which keeps what another one would need with
    /// `keeper`.
    pub(crate) fn with_pods(
        spec: JobSpec,
        entrance: Entrance,
        pods: Pods,
        keeper: PersistedJobWriter,
        office: Office,
        progress: Progress,
    ) -> Self {
        let job = Job::new(spec.clone());
        let master =
            Self::assemble(job, spec, Duration::ZERO, entrance, Launches::Pods(pods), progress);
        master.in_cluster(keeper, office)
    }

    fn in_cluster(self, keeper: PersistedJobWriter, office: Office) -> Self {
        let Office { incarnation, warrant } = office;
        Self { keeping: Keeping::Anchor(keeper), incarnation, warrant: Some(warrant), ..self }
    }

    /// As [`Master::with_pods`], going on with a job whose master died, `age` after the job began:
    /// `record` is what that one has kept, `left` are the pods that it has made.
    ///
    /// # Errors
    /// What in the record can't be; no job can be made of it.
    pub(crate) fn resume_with_pods(
        (mut record, left): (JobRecord, Vec<Pod>),
        age: Duration,
        entrance: Entrance,
        pods: Pods,
        keeper: PersistedJobWriter,
        office: Office,
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
        let master = Self::assemble(job, spec, age, entrance, Launches::Pods(pods), progress);
        Ok(master.in_cluster(keeper, office))
    }

    fn assemble(
        job: Job,
        spec: JobSpec,
        age: Duration,
        entrance: Entrance,
        launches: Launches,
        progress: Progress,
    ) -> Self {
        let (sender, inputs) = mpsc::channel(INPUTS_MAX);
        let server = Server::start(entrance, &spec.name, spec.worker_timeout, sender);
        Self {
            incarnation: job.masters(),
            warrant: None,
            is_doubted: false,
            job,
            spec,
            start: Instant::now(),
            age,
            keeping: Keeping::Nothing,
            written: Written { revision: 0, step: 0, at: Instant::now() },
            launches,
            progress,
            server,
            inputs,
            peers: BTreeMap::new(),
            workers: BTreeMap::new(),
            membership: None,
        }
    }

    /// Runs the job to its end. `interrupts` may be closed.
    pub async fn run(mut self, mut interrupts: mpsc::Receiver<Interrupt>) -> Ended {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let outcome = loop {
            if std::mem::take(&mut self.is_doubted) {
                self.step_aside().await;
            }
            if let Some(outcome) = self.act() {
                break outcome;
            }
            let timeout = self.job.poll_timeout();
            let due = timeout.unwrap_or_default().since(Time(self.age));
            let due = tokio::time::sleep_until(self.start + due);
            tokio::select! {
                Some(input) = self.inputs.recv() => self.on_input(input),
                (launch, happening) = self.launches.next() => {
                    self.job.handle(self.now(), match happening {
                        Happening::Ended(exit) => Event::ProcessEnded { launch, exit },
                        Happening::Explained(words) => Event::LaunchExplained { launch, words },
                        Happening::Leaves(reason) => Event::LaunchLeaves { launch, reason },
                        Happening::Made(class) => Event::LaunchMade { launch, class },
                        Happening::Printed(lines) => Event::LaunchPrinted { launch, lines },
                        Happening::Runs => Event::LaunchRuns { launch },
                        Happening::Waits(wait) => Event::LaunchWaits { launch, wait },
                    });
                }
                Some(interrupt) = interrupts.recv() => match interrupt {
                    Interrupt::Checkpoint => self.job.handle(self.now(), Event::Checkpoint),
                    Interrupt::Kill => {
                        info!("killed by the user");
                        break Outcome::Stopped;
                    }
                    Interrupt::Scale(num_workers) => {
                        if let Err(reason) = self.scale(num_workers) {
                            self.progress.say(self.now(), reason);
                        }
                    }
                    Interrupt::Stop => {
                        self.progress.say(self.now(), "stopping; press Ctrl-C again to end at once".into());
                        self.job.handle(self.now(), Event::Stop);
                    }
                },
                event = self.keeping.changed() => if let Some(event) = event {
                    self.job.handle(self.now(), event);
                },
                () = has_run_out(&mut self.warrant) => self.step_aside().await,
                () = due, if timeout.is_some() => self.job.handle_timeout(self.now()),
                _ = ticks.tick() => self.show(),
            }
        };
        let now = self.now();
        self.progress.show(now, self.job.snapshot(now));
        let summary = self.job.summary(now);
        info!(?outcome, steps = summary.steps, "job ended");
        self.peers.clear();
        self.launches.end().await;
        self.server.end().await;
        self.progress.end();
        Ended { outcome, summary }
    }

    /// The lease can't be renewed, so another master may have the job: workers are sent away, and
    /// nobody listens until the server has answered. Workers train on and look for a master
    /// meanwhile. The job's clock stands still, for nothing that it waits for can happen.
    async fn step_aside(&mut self) {
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
        match &mut self.warrant {
            Some(warrant) => warrant.renewed().await,
            None => return,
        }
        // What came of streams that are over, and of hellos that came too late.
        while self.inputs.try_recv().is_ok() {}
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
            status.step != self.written.step && self.written.at.elapsed() >= RECORD_AGE_MAX;
        if is_behind && self.keeping.keeps_steps() {
            self.written.revision = 0;
        }
        self.progress.show(self.now(), snapshot);
    }

    /// Keeps what another master would have to know of what is done next.
    fn write_record(&mut self) {
        let revision = self.job.revision();
        if revision != self.written.revision {
            self.keeping.keep(&self.job);
            let step = self.job.step();
            self.written = Written { revision, step, at: Instant::now() };
        }
    }

    /// Does what the job wants done; its outcome, if that is the end.
    fn act(&mut self) -> Option<Outcome> {
        loop {
            self.write_record();
            if !self.keeping.lets_act(&self.job) {
                return None;
            }
            let action = self.job.poll_action()?;
            match action {
                Action::Admit { connection, worker } => self.admit(connection, worker),
                Action::Disconnect { worker } => {
                    self.disconnect(worker);
                }
                Action::End(outcome) => return Some(outcome),
                Action::Kill { launch } => self.launches.kill(launch),
                Action::Launch { launch, index } => self.launches.start(launch, index),
                Action::Refuse { connection, reason } => {
                    warn!(connection = connection.0, reason, "worker refused");
                    if let Some(peer) = self.peers.remove(&connection) {
                        peer.line.refuse(reason);
                    }
                }
                Action::Say(text) => {
                    info!("{text}");
                    self.progress.say(self.now(), text);
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
        if peer.is_some_and(|peer| !peer.line.send(message)) && self.disconnect(worker) {
            warn!(%worker, "worker doesn't read what it is sent: disconnected");
            self.job.handle(self.now(), Event::Disconnected { worker });
        }
    }

    /// Ends a worker's stream from this side; whether it was open.
    fn disconnect(&mut self, worker: WorkerId) -> bool {
        self.workers.remove(&worker).and_then(|connection| self.peers.remove(&connection)).is_some()
    }

    fn on_input(&mut self, input: Input) {
        let now = self.now();
        match input {
            Input::Checkpoint { reply } => {
                // The command may have gone.
                let _ = reply.send(self.checkpoint().map_err(Status::invalid_argument));
            }
            Input::Closed { connection } => {
                if let Some(worker) = self.peers.remove(&connection).and_then(|peer| peer.worker) {
                    self.workers.remove(&worker);
                    self.job.handle(now, Event::Disconnected { worker });
                }
            }
            Input::Connected { connection, hello, line } => {
                let service::Hello { launch, address, pid, resume, incarnation } = hello;
                if incarnation > self.incarnation {
                    // Its stream ends without a word; it goes on looking.
                    warn!(
                        launch = launch.0,
                        incarnation, "a worker has been with a newer master of this job"
                    );
                    return self.doubt(incarnation);
                }
                self.launches.heard();
                self.peers.insert(connection, Peer { line, worker: None });
                self.job.handle(now, Event::Connected { connection, launch, address, pid, resume });
            }
            Input::Said { connection, message } => {
                if let Some(worker) = self.peers.get(&connection).and_then(|peer| peer.worker) {
                    self.job.handle(now, Event::Message { worker, message });
                }
            }
            Input::Scale { num_workers, reply } => {
                // The command may have gone.
                let _ = reply.send(self.scale(num_workers).map_err(Status::invalid_argument));
            }
            Input::Status { reply } => {
                // The command may have gone.
                let _ = reply.send(self.job.status(now));
            }
        }
    }

    /// There is, or was, a newer master than this one.
    fn doubt(&mut self, incarnation: u64) {
        self.incarnation = incarnation;
        self.is_doubted = self.warrant.is_some();
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
async fn has_run_out(warrant: &mut Option<LeaseGuard>) {
    match warrant {
        Some(warrant) => warrant.expired().await,
        None => std::future::pending().await,
    }
}

/// Events that may wait for the job; when there are more, streams wait.
const INPUTS_MAX: usize = 1024;
/// How old the record of a job that makes progress may be.
const RECORD_AGE_MAX: Duration = Duration::from_secs(1);
/// How often progress is looked at.
const TICK: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
