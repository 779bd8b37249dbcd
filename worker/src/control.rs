//! The control stream: one thread that speaks gRPC with the master, so that the trainer need not.
//!
//! **Invariant:** generated types stop here. **Invariant:** a master that is gone for longer than
//! the timeout ends this process: no worker outlives its job. One that is there but can't be heard
//! is gone, too: the connection is tried now and then, so that its end is noticed. **Invariant:**
//! what the trainer said to one master is never told to the next.

use std::net::SocketAddr;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use elasticdl_collective::{Fence, Progress, WireDtype};
use elasticdl_proto::WorkerId;
use elasticdl_proto::v1;
use elasticdl_proto::v1::master_client::MasterClient;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Streaming};

use self::convert::{decode, decode_welcome, encode, encode_stall};
use self::storage::StorageReporter;
use crate::core::checkpoint::Interval;
use crate::core::plan::Batch;
use crate::core::session::Report;
use crate::environment::{EXIT_MASTER_LOST, EXIT_TERMINATED, Environment};
use crate::failure::causes;
use crate::inference::Format;
use crate::messages::{FromMaster, Outbox, ToMaster};

/// The open stream, seen from the trainer's side.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) welcome: Welcome,
    pub(crate) inbox: std::sync::mpsc::Receiver<FromMaster>,
    pub(crate) outbox: Outbox,
    /// Where the thread finds the fence, once there is one: what can't wait goes through it.
    pub(crate) fence: Arc<OnceLock<Fence>>,
    /// Where the thread sees whether the group is waiting.
    pub(crate) progress: Arc<OnceLock<Progress>>,
    thread: JoinHandle<()>,
}

/// What the master tells a new worker.
#[derive(Clone, Debug)]
pub(crate) struct Welcome {
    pub(crate) worker: WorkerId,
    /// Which master of the job has sent it; a later one has a higher number.
    incarnation: u64,
    pub(crate) training_data: String,
    pub(crate) epochs: u32,
    pub(crate) max_steps: Option<u64>,
    pub(crate) batch: Batch,
    pub(crate) seed: u64,
    /// How often the master is to hear from this worker: a tenth of the silence that is tolerated.
    heartbeat: Option<Duration>,
    /// A peer that answers no dial for as long can't be reached.
    pub(crate) worker_timeout: Option<Duration>,
    pub(crate) checkpoints: Option<CheckpointOptions>,
    /// A checkpoint, or the folder of some, that the job begins with.
    pub(crate) resume_from: Option<String>,
    pub(crate) work: Work,
    pub(crate) wire_dtype: WireDtype,
    /// A step whose gradient is not finite is left out; otherwise it ends the job.
    pub(crate) skips_nonfinite: bool,
    /// How long a worker that was told to end waits for the group to let it go.
    pub(crate) leave_timeout: Option<Duration>,
    /// Links between neighbours in the ring.
    pub(crate) channels: u8,
}

/// Where and when checkpoints are kept.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointOptions {
    pub(crate) dir: String,
    pub(crate) every: Interval,
    /// How many complete ones stay.
    pub(crate) keep: usize,
    /// The folder is this job's own: what runs before it left there may be removed.
    pub(crate) exclusive: bool,
}

/// What the job does with its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// `model`: where an exported one is.
    Evaluate { model: String },
    /// `output`: the folder for files of predictions.
    Predict { model: String, output: String, format: Format },
    /// `export`: where the final model is written.
    Train { export: Option<String>, validation: Option<ValidationOptions> },
}

/// What is to be evaluated, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ValidationOptions {
    pub(crate) data: String,
    /// Steps; `None`: at the end alone.
    pub(crate) every: Option<u64>,
    /// The metric that tells which model is best.
    pub(crate) metric: String,
    pub(crate) highest: bool,
    /// Evaluations without a better one after which the job ends.
    pub(crate) patience: Option<u32>,
}

impl Control {
    /// Opens the stream and says hello; `address` is where peers reach this worker.
    ///
    /// # Errors
    /// No master answered, or it refused; the text says which.
    pub(crate) fn open(environment: &Environment, address: SocketAddr) -> Result<Self, String> {
        let (to_trainer, inbox) = channel();
        let (outbox, from_trainer) = mpsc::unbounded_channel();
        let (tell_welcome, welcome) = oneshot::channel();
        let fence = Arc::new(OnceLock::new());
        let progress = Arc::new(OnceLock::new());
        let stream = Stream {
            connector: MasterConnector { environment: environment.clone(), address, me: None },
            to_trainer,
            fence: Arc::clone(&fence),
            progress: Arc::clone(&progress),
            leave_timeout: environment.leave_timeout(),
            leaving: false,
            over: false,
            storage: StorageReporter::default(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| format!("no runtime for the control stream: {error}"))?;
        let thread = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || runtime.block_on(stream.run(from_trainer, tell_welcome)))
            .map_err(|error| format!("no thread for the control stream: {error}"))?;
        let welcome = welcome
            .blocking_recv()
            .unwrap_or_else(|_| Err("the control stream's thread ended".into()))?;
        Ok(Self { welcome, inbox, outbox: Outbox(outbox), fence, progress, thread })
    }

    /// Waits until everything said has reached the master, a second at most.
    pub(crate) fn close(self) {
        drop(self.outbox);
        let _ = self.thread.join();
    }
}

struct Stream {
    connector: MasterConnector,
    to_trainer: Sender<FromMaster>,
    fence: Arc<OnceLock<Fence>>,
    progress: Arc<OnceLock<Progress>>,
    /// How long the group may take to let this worker go.
    leave_timeout: Duration,
    /// It was told to end, and every master is to know.
    leaving: bool,
    /// It was shut down: no other master is of interest.
    over: bool,
    /// What was said of storage that does not answer.
    storage: StorageReporter,
}

/// How this worker comes to a master.
#[derive(Clone)]
struct MasterConnector {
    environment: Environment,
    /// Where peers reach this worker.
    address: SocketAddr,
    /// Who this worker is, for a master that comes after this one; `None` before the first welcome.
    me: Option<v1::Resume>,
}

/// The stream to one master.
struct Link {
    requests: mpsc::UnboundedSender<v1::WorkerMessage>,
    incoming: Streaming<v1::MasterMessage>,
    /// What the trainer says is meant for this master, and not for the one before.
    current: bool,
}

impl Link {
    fn say(&self, kind: v1::worker_message::Kind) {
        // A stream that has ended says so to its reader.
        let _ = self.requests.send(v1::WorkerMessage { kind: Some(kind) });
    }
}

/// Why there is no stream.
enum NotOpened {
    /// Nobody answered, or not to the end: another attempt may succeed.
    NoAnswer(String),
    /// The master does not want this worker.
    Refused(String),
}

impl MasterConnector {
    async fn open(&self) -> Result<(Link, Welcome), NotOpened> {
        let environment = &self.environment;
        let master = &environment.master;
        let text = |what: &str, error: &dyn std::fmt::Display| {
            format!("master at {master}: {what}: {error}")
        };
        let no_answer =
            |what: &str, error: &dyn std::fmt::Display| NotOpened::NoAnswer(text(what, error));
        let refused =
            |what: &str, error: &dyn std::fmt::Display| NotOpened::Refused(text(what, error));
        let status = |status: tonic::Status| match status.code() {
            Code::FailedPrecondition | Code::InvalidArgument | Code::Unauthenticated => {
                refused("refused this worker", &status.message())
            }
            _ => no_answer("no welcome", &causes_of(&status)),
        };
        let endpoint =
            endpoint(environment).map_err(|error| refused("can't be dialed", &causes(&error)))?;
        let channel =
            endpoint.connect().await.map_err(|error| no_answer("no answer", &causes(&error)))?;
        let mut client: MasterClient<Channel> =
            MasterClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let hello = v1::Hello {
            job: environment.job.clone(),
            launch: environment.launch,
            address: self.address.to_string(),
            pid: std::process::id(),
            resume: self.me.clone(),
        };
        let (requests, outgoing) = mpsc::unbounded_channel();
        let hello = v1::WorkerMessage { kind: Some(v1::worker_message::Kind::Hello(hello)) };
        requests.send(hello).map_err(|error| no_answer("stream", &error))?;
        let mut request = Request::new(UnboundedReceiverStream::new(outgoing));
        let bearer = format!("Bearer {}", environment.token)
            .parse()
            .map_err(|_| refused("token", &"not printable"))?;
        request.metadata_mut().insert("authorization", bearer);
        let mut incoming = client.join(request).await.map_err(status)?.into_inner();
        match incoming.next().await {
            Some(Ok(v1::MasterMessage {
                kind: Some(v1::master_message::Kind::Welcome(welcome)),
            })) => {
                let welcome = decode_welcome(welcome)
                    .ok_or_else(|| refused("welcome", &"options are missing"))?;
                if self.me.as_ref().is_some_and(|me| me.worker != welcome.worker.0) {
                    return Err(refused("welcome", &"it is for another worker"));
                }
                // A newer master has the job: this one does not know yet.
                if self.me.as_ref().is_some_and(|me| welcome.incarnation < me.incarnation) {
                    return Err(no_answer("welcome", &"from an older master of the job"));
                }
                Ok((Link { requests, incoming, current: false }, welcome))
            }
            Some(Ok(other)) => Err(refused("expected a welcome", &format!("{other:?}"))),
            Some(Err(error)) => Err(status(error)),
            None => Err(no_answer("ended the stream", &"no reason given")),
        }
    }

    /// Opens a stream as soon as there is a master; the text says why one that is there does not
    /// want this worker.
    async fn search(&self) -> Result<(Link, Welcome), String> {
        let mut pause = RETRY_FIRST;
        loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
            match self.open().await {
                Ok(opened) => return Ok(opened),
                Err(NotOpened::NoAnswer(reason)) => tracing::debug!(reason, "still no master"),
                Err(NotOpened::Refused(reason)) => return Err(reason),
            }
        }
    }

    /// Opens the first stream. A cluster may take a moment to know the way to a master that has
    /// just started.
    async fn open_first(&self) -> Result<(Link, Welcome), String> {
        let why = match self.open().await {
            Ok(opened) => return Ok(opened),
            Err(NotOpened::Refused(reason)) => return Err(reason),
            Err(NotOpened::NoAnswer(reason)) => reason,
        };
        tracing::info!(why, "no master yet");
        let search = tokio::time::timeout(self.environment.master_timeout, self.search());
        search.await.unwrap_or(Err(why))
    }

    /// Keeps what a later master will have to know of this worker.
    fn note(&mut self, message: &ToMaster) {
        if let (ToMaster::Ready { parameters }, Some(me)) = (message, &mut self.me) {
            me.parameters = Some(*parameters);
        }
    }
}

impl Stream {
    async fn run(
        mut self,
        mut from_trainer: mpsc::UnboundedReceiver<ToMaster>,
        tell_welcome: oneshot::Sender<Result<Welcome, String>>,
    ) {
        let opened = async {
            let sigterm = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
            let (link, welcome) = self.connector.open_first().await?;
            Ok((sigterm, link, welcome))
        };
        let heartbeat;
        let (mut sigterm, mut link) = match opened.await {
            Ok((sigterm, link, welcome)) => {
                heartbeat = welcome.heartbeat.unwrap_or(HEARTBEAT_NEVER);
                self.leave_timeout = welcome.leave_timeout.unwrap_or(self.leave_timeout);
                self.connector.me = Some(v1::Resume {
                    worker: welcome.worker.0,
                    membership: None,
                    parameters: None,
                    incarnation: welcome.incarnation,
                });
                let _ = tell_welcome.send(Ok(welcome));
                (sigterm, link)
            }
            Err(error) => {
                let _ = tell_welcome.send(Err(error));
                return;
            }
        };
        link.current = true;
        let mut beats = tokio::time::interval(heartbeat);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = link.incoming.next() => {
                    let why = match message {
                        Some(Ok(message)) => {
                            self.handle(message);
                            continue;
                        }
                        Some(Err(status)) => status.message().to_owned(),
                        None => "the stream ended".into(),
                    };
                    match self.reopen(&why, &mut from_trainer, &mut sigterm).await {
                        Some(other) => {
                            link = other;
                            self.storage.forget();
                        }
                        None => return,
                    }
                }
                message = from_trainer.recv() => match message {
                    Some(message) => self.pass_on(&mut link, message),
                    None => break,
                },
                _ = beats.tick() => {
                    let stall = self.progress.get().and_then(Progress::stall);
                    let stall = stall.filter(|s| s.since >= heartbeat).map(encode_stall);
                    link.say(v1::worker_message::Kind::Heartbeat(v1::Heartbeat { stall }));
                    if let Some(wait) = self.storage.poll() {
                        link.say(v1::worker_message::Kind::StorageWait(wait));
                    }
                }
                _ = sigterm.recv() => {
                    self.leave();
                    if link.current {
                        link.say(v1::worker_message::Kind::Leaving(v1::Leaving {}));
                    }
                }
            }
        }
        // The trainer is done. Ending the request stream flushes it; the master then ends its side.
        let Link { requests, mut incoming, .. } = link;
        drop(requests);
        let drained = async { while let Some(Ok(_)) = incoming.next().await {} };
        let _ = tokio::time::timeout(Duration::from_secs(1), drained).await;
    }

    /// The stream is gone: the group goes on without a master, and this worker looks for one until
    /// the timeout. `None` when the trainer has ended meanwhile. Ends the process where there is no
    /// master, or none that wants it.
    async fn reopen(
        &mut self,
        why: &str,
        from_trainer: &mut mpsc::UnboundedReceiver<ToMaster>,
        sigterm: &mut Signal,
    ) -> Option<Link> {
        tracing::warn!(why, "lost the master");
        let (connector, over) = (self.connector.clone(), self.over);
        let search = async {
            match over {
                true => std::future::pending().await,
                false => connector.search().await,
            }
        };
        let search = tokio::time::timeout(self.connector.environment.master_timeout, search);
        tokio::pin!(search);
        let reason = loop {
            tokio::select! {
                found = &mut search => match found {
                    Ok(Ok((link, welcome))) => {
                        tracing::info!(incarnation = welcome.incarnation, "a master is there again");
                        if let Some(me) = &mut self.connector.me {
                            me.incarnation = welcome.incarnation;
                        }
                        let _ = self.to_trainer.send(FromMaster::Reconnected);
                        return Some(link);
                    }
                    Ok(Err(reason)) => break reason,
                    Err(_) => break "no master within the timeout".into(),
                },
                // What the trainer says meanwhile nobody hears.
                message = from_trainer.recv() => self.connector.note(&message?),
                _ = sigterm.recv() => self.leave(),
            }
        };
        tracing::error!(reason, "this worker ends");
        std::process::exit(EXIT_MASTER_LOST);
    }

    /// Tells the master what the trainer says. What the trainer said before it knew of this master
    /// is dropped: it says again what still matters, and first what it holds.
    fn pass_on(&mut self, link: &mut Link, message: ToMaster) {
        self.connector.note(&message);
        let first = matches!(message, ToMaster::Report(Report::HeldLeases { .. })) && !link.current;
        link.current |= first;
        if link.current {
            link.say(encode(message));
        }
        if first && self.leaving {
            link.say(v1::worker_message::Kind::Leaving(v1::Leaving {}));
        }
    }

    fn leave(&mut self) {
        tracing::info!("told to end: leaving at the next boundary");
        if !std::mem::replace(&mut self.leaving, true) {
            leave_in_time(self.leave_timeout);
        }
    }

    fn handle(&mut self, message: v1::MasterMessage) {
        let membership = match &message.kind {
            Some(v1::master_message::Kind::Membership(membership)) => Some(membership.clone()),
            _ => None,
        };
        let Some(message) = decode(message) else {
            tracing::warn!("the master sent a message that can't be read; it is ignored");
            return;
        };
        if let (Some(membership), Some(me)) = (membership, &mut self.connector.me)
            && me.membership.as_ref().is_none_or(|m| m.generation < membership.generation)
        {
            me.membership = Some(membership);
        }
        // What can't wait for the trainer's next look into its inbox: a lost member, the end.
        let abort_before = match &message {
            FromMaster::Membership(m, _) if m.abort => Some(m.generation.0),
            FromMaster::Shutdown(_) => Some(u64::MAX),
            _ => None,
        };
        self.over |= matches!(message, FromMaster::Shutdown(_));
        let _ = self.to_trainer.send(message);
        if let (Some(generation), Some(fence)) = (abort_before, self.fence.get()) {
            fence.abort_before(generation);
        }
    }
}

/// Where the master is, and how it is spoken to.
fn endpoint(environment: &Environment) -> Result<Endpoint, tonic::transport::Error> {
    let Environment { master, master_timeout, .. } = environment;
    let scheme = if environment.tls.is_some() { "https" } else { "http" };
    let endpoint = Endpoint::from_shared(format!("{scheme}://{master}"))?
        .tcp_nodelay(true)
        .connect_timeout((*master_timeout).min(CONNECT_TIMEOUT))
        .http2_keep_alive_interval((*master_timeout / 2).min(KEEP_ALIVE_MAX))
        .keep_alive_timeout((*master_timeout / 2).min(KEEP_ALIVE_MAX))
        .keep_alive_while_idle(true);
    let Some(tls) = &environment.tls else { return Ok(endpoint) };
    let config = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&tls.ca))
        .domain_name(&tls.name)
        .timeout(*master_timeout);
    endpoint.tls_config(config)
}

/// A status's message, and what caused it.
fn causes_of(status: &tonic::Status) -> String {
    let message = status.message();
    std::error::Error::source(status)
        .map_or_else(|| message.into(), |s| format!("{message}: {}", causes(s)))
}

/// Ends the process if the group hasn't let it go by then.
fn leave_in_time(timeout: Duration) {
    tokio::spawn(async move {
        tokio::time::sleep(timeout).await;
        tracing::warn!("not let go in time");
        std::process::exit(EXIT_TERMINATED);
    });
}

/// A ledger of an epoch in progress can be long; anything beyond this is no message of a master's.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// For a master that does not want to hear anything: a day.
const HEARTBEAT_NEVER: Duration = Duration::from_secs(24 * 60 * 60);

/// A dial that nobody answers may go to a master that is gone, where another is there by now.
/// Longer than a lost SYN takes to be sent again (1 s).
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
/// Interval of HTTP/2 pings, and how long an answer may take: a stream to a master that is cut off
/// or stopped ends after the sum of both, and the worker looks for a master.
const KEEP_ALIVE_MAX: Duration = Duration::from_secs(10);

/// How long a worker without a stream waits before it looks for a master again: twice as long each
/// time.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);

mod convert;
mod storage;

#[cfg(test)]
mod tests;
