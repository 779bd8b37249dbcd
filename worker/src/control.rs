//! The control stream: one thread that exchanges gRPC messages with the master, independently of
//! the trainer.
//!
//! **Invariant:** this process ends if no master answers within the timeout: no worker outlives its
//! job. HTTP/2 pings detect a master whose connection is silently dead. [`ControlState`] decides
//! what is sent to which master.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use elasticdl_collective::exit_at_once;
use elasticdl_collective::{Fence, Joiners, Progress};
use elasticdl_data::storage::Storage;
use elasticdl_proto::limits::{MESSAGE_BYTES_MAX, REPORT_BYTES_MAX};
use elasticdl_proto::wire::master_client::MasterClient;
use elasticdl_proto::wire::{JoinRequest, JoinResponse};
use elasticdl_proto::{
    Heartbeat, Hello, LaunchId, MasterMessage, Membership, Welcome, WorkerMessage,
    set_log_generation,
};
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Streaming};

use self::storage::StorageReporter;
use crate::environment::{EXIT_MASTER_LOST, Environment};
use crate::failure::causes;
use crate::host_check;
use crate::inspection::paces::PaceSampler;
use crate::inspection::{Inspector, stall_of};
use crate::messages::{ControlEvent, Outbox};
use crate::session::control::{ControlState, WelcomeError};
use crate::termination::Termination;
use crate::usage::UsageReporter;

/// The open stream, as the trainer uses it.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) welcome: Welcome,
    pub(crate) inbox: std::sync::mpsc::Receiver<ControlEvent>,
    pub(crate) outbox: Outbox,
    /// The fence for urgent messages, once it exists.
    pub(crate) fence: Arc<OnceLock<Fence>>,
    /// The progress of the group's operations, once it exists.
    pub(crate) progress: Arc<OnceLock<Progress>>,
    /// The joiners that may fetch this worker's state, once it can have one.
    pub(crate) joiners: Arc<OnceLock<Joiners>>,
    /// Whether this worker's work is to end, before the trainer hears of it.
    pub(crate) stops: Arc<AtomicBool>,
    thread: JoinHandle<bool>,
}

impl Control {
    /// Opens the stream and sends the hello. `address`: where peers reach this worker.
    ///
    /// # Errors
    /// No master answered, or it refused this worker; the text says which.
    pub(crate) fn open(environment: &Environment, address: SocketAddr) -> Result<Self, String> {
        let (to_trainer, inbox) = channel();
        let (messages, from_trainer) = mpsc::unbounded_channel();
        let outbox = Outbox::new(messages);
        let (tell_welcome, welcome) = oneshot::channel();
        let fence = Arc::new(OnceLock::new());
        let progress = Arc::new(OnceLock::new());
        let joiners = Arc::new(OnceLock::new());
        let stops = Arc::new(AtomicBool::new(false));
        let port = environment.master.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        let inspector = Inspector {
            activity: Arc::clone(&outbox.activity),
            progress: Arc::clone(&progress),
            master_port: port,
        };
        let stream = Stream {
            connector: MasterConnector { environment: environment.clone(), address },
            state: ControlState::default(),
            to_trainer,
            fence: Arc::clone(&fence),
            progress: Arc::clone(&progress),
            joiners: Arc::clone(&joiners),
            stops: Arc::clone(&stops),
            holds_state: Arc::clone(&outbox.holds_state),
            storage: StorageReporter::default(),
            usage: UsageReporter::default(),
            paces: PaceSampler::new(),
            inspector,
            folders: vec![std::env::temp_dir()],
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
        Ok(Self { welcome, inbox, outbox, fence, progress, joiners, stops, thread })
    }

    /// Waits until all sent messages have reached the master, for at most a second. Returns whether
    /// the job is over, as far as the master has said.
    pub(crate) fn close(self) -> bool {
        drop(self.outbox);
        self.thread.join().unwrap_or_default()
    }
}

struct Stream {
    connector: MasterConnector,
    state: ControlState,
    to_trainer: Sender<ControlEvent>,
    fence: Arc<OnceLock<Fence>>,
    progress: Arc<OnceLock<Progress>>,
    joiners: Arc<OnceLock<Joiners>>,
    stops: Arc<AtomicBool>,
    /// Whether this worker's group has agreed on a state.
    holds_state: Arc<AtomicBool>,
    /// Reports of waits for storage.
    storage: StorageReporter,
    /// Reports of what this process uses.
    usage: UsageReporter,
    /// Measurements of links to other members.
    paces: PaceSampler,
    /// Reports of what this process does.
    inspector: Inspector,
    /// Folders that this worker writes to.
    folders: Vec<PathBuf>,
}

/// Opens streams to the job's master.
#[derive(Clone)]
struct MasterConnector {
    environment: Environment,
    /// Address at which peers reach this worker.
    address: SocketAddr,
}

/// The stream to one master.
struct Link {
    requests: mpsc::UnboundedSender<JoinRequest>,
    incoming: Streaming<JoinResponse>,
}

impl Link {
    fn send(&self, message: WorkerMessage) {
        // The reader of the stream notices its end.
        let _ = self.requests.send(JoinRequest::Message(message));
    }
}

/// Why no stream was opened.
enum NotOpened {
    /// No complete answer; another attempt may succeed.
    NoAnswer(String),
    /// The master refused this worker.
    Refused(String),
}

impl MasterConnector {
    fn hello(&self, state: &ControlState) -> Hello {
        Hello {
            job: self.environment.job.clone(),
            launch: LaunchId(self.environment.launch),
            address: self.address,
            pid: std::process::id(),
            resume: state.identity().cloned(),
            incarnation: state.incarnation(),
            location: self.environment.location.clone(),
        }
    }

    async fn open(&self, master: &str, hello: Hello) -> Result<(Link, Welcome), NotOpened> {
        let environment = &self.environment;
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
        let endpoint = endpoint(master, environment)
            .map_err(|error| refused("can't be dialed", &causes(&error)))?;
        let channel =
            endpoint.connect().await.map_err(|error| no_answer("no answer", &causes(&error)))?;
        let mut client: MasterClient<Channel> =
            MasterClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let (requests, outgoing) = mpsc::unbounded_channel();
        requests
            .send(JoinRequest::Hello(Box::new(hello)))
            .map_err(|error| no_answer("stream", &error))?;
        let mut request = Request::new(UnboundedReceiverStream::new(outgoing));
        let bearer = format!("Bearer {}", environment.token)
            .parse()
            .map_err(|_| refused("token", &"not printable"))?;
        request.metadata_mut().insert("authorization", bearer);
        let mut incoming = client.join(request).await.map_err(status)?.into_inner();
        match incoming.next().await {
            Some(Ok(JoinResponse::Welcome(welcome))) => Ok((Link { requests, incoming }, *welcome)),
            Some(Ok(JoinResponse::Invalid(reason))) => Err(refused("welcome", &reason)),
            Some(Ok(JoinResponse::Message(other))) => {
                Err(refused("expected a welcome", &format!("{:?}", other.get())))
            }
            Some(Err(error)) => Err(status(error)),
            None => Err(no_answer("ended the stream", &"no reason given")),
        }
    }

    /// Retries, with back-off, until a stream is open. `Err`: why a master refused this worker.
    async fn search(&self, hello: Hello, mut pause: Duration) -> Result<(Link, Welcome), String> {
        let mut attempt = 0;
        loop {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
            let master = self.environment.master_in_attempt(attempt);
            attempt += 1;
            match self.open(&master, hello.clone()).await {
                Ok(opened) => return Ok(opened),
                Err(NotOpened::NoAnswer(reason)) => tracing::debug!(reason, "no master yet"),
                Err(NotOpened::Refused(reason)) => return Err(reason),
            }
        }
    }

    /// Opens the first stream, with retries: in a cluster, the route to a new master may take a
    /// moment.
    async fn open_first(&self, hello: Hello) -> Result<(Link, Welcome), String> {
        let why = match self.open(&self.environment.master, hello.clone()).await {
            Ok(opened) => return Ok(opened),
            Err(NotOpened::Refused(reason)) => return Err(reason),
            Err(NotOpened::NoAnswer(reason)) => reason,
        };
        tracing::info!(why, "no master yet");
        let search = self.search(hello, RETRY_FIRST);
        let search = tokio::time::timeout(self.environment.master_timeout, search);
        search.await.unwrap_or(Err(why))
    }
}

impl Stream {
    async fn run(
        mut self,
        mut from_trainer: mpsc::UnboundedReceiver<WorkerMessage>,
        tell_welcome: oneshot::Sender<Result<Welcome, String>>,
    ) -> bool {
        let opened = async {
            let leave_timeout = self.connector.environment.leave_timeout();
            let sigterm = Termination::new(leave_timeout).map_err(|error| error.to_string())?;
            let hello = self.connector.hello(&self.state);
            let (link, welcome) = self.connector.open_first(hello).await?;
            self.state.handle_welcome(&welcome).map_err(|error| error.to_string())?;
            Ok((sigterm, link, welcome))
        };
        let heartbeat;
        let (mut sigterm, mut link) = match opened.await {
            Ok((mut sigterm, link, welcome)) => {
                heartbeat = welcome.options.heartbeat().unwrap_or(HEARTBEAT_NEVER);
                sigterm.set_timeout(welcome.options.leave_timeout());
                let folder = welcome.options.checkpoints.iter().map(|spec| &spec.dir);
                self.folders.extend(folder.filter(|dir| !Storage::is_remote(dir)).map(Into::into));
                let _ = tell_welcome.send(Ok(welcome));
                (sigterm, link)
            }
            Err(error) => {
                let _ = tell_welcome.send(Err(error));
                return false;
            }
        };
        let mut heartbeats = tokio::time::interval(heartbeat);
        heartbeats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut next_sample = tokio::time::Instant::now();
        loop {
            tokio::select! {
                message = link.incoming.next() => {
                    let why = match message {
                        Some(Ok(message)) => {
                            self.handle(message, &link);
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
                        None => return self.state.job_is_over(),
                    }
                }
                message = from_trainer.recv() => match message {
                    Some(message) => {
                        // The job may end with it, and with it the report of a wait at the end.
                        if matches!(message, WorkerMessage::Finished(_))
                            && let Some(wait) = self.storage.poll()
                        {
                            link.send(wait);
                        }
                        self.state.forward(message).into_iter().for_each(|m| link.send(m));
                    }
                    None => break,
                },
                _ = heartbeats.tick() => {
                    let stall = self.progress.get().and_then(Progress::stall);
                    let stall = stall.filter(|s| s.since >= heartbeat).map(stall_of);
                    let holds_state = self.holds_state.load(Ordering::Relaxed);
                    let usage = self.usage.poll();
                    let step = self.inspector.activity.step();
                    let members = self.state.membership().map(|it| &*it.members);
                    let link_pace = self.paces.poll(members.unwrap_or_default());
                    let heartbeat = Heartbeat { stall, holds_state, usage, step, link_pace };
                    link.send(WorkerMessage::Heartbeat(heartbeat));
                    if let Some(wait) = self.storage.poll() {
                        link.send(wait);
                    }
                }
                () = tokio::time::sleep_until(next_sample) => {
                    next_sample = tokio::time::Instant::now() + self.paces.sample();
                }
                () = sigterm.received() => {
                    if let Some(leaving) = self.state.terminate() {
                        link.send(leaving);
                    }
                }
            }
        }
        // The trainer is done. Ending the request stream flushes it; the master then ends its side.
        let Link { requests, mut incoming, .. } = link;
        drop(requests);
        let state = &mut self.state;
        let drained = async {
            while let Some(Ok(response)) = incoming.next().await {
                if let JoinResponse::Message(message) = response {
                    state.handle_message(&message.into_inner());
                }
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(1), drained).await;
        self.state.job_is_over()
    }

    /// The stream has ended. The group continues without a master while this worker searches for
    /// one until the timeout. `None` if the trainer ends meanwhile. Ends the process if no master
    /// answers or the master refuses this worker.
    async fn reopen(
        &mut self,
        why: &str,
        from_trainer: &mut mpsc::UnboundedReceiver<WorkerMessage>,
        sigterm: &mut Termination,
    ) -> Option<Link> {
        tracing::warn!(why, "lost the master");
        self.state.handle_stream_end();
        if self.holds_state.load(Ordering::Relaxed) {
            self.state.note_state();
        }
        if self.state.is_leaving() {
            self.want_checkpoint();
        }
        let deadline = tokio::time::Instant::now() + self.connector.environment.master_timeout;
        let mut search = Box::pin(self.search(RETRY_FIRST));
        let reason = loop {
            tokio::select! {
                found = &mut search, if !self.state.is_over() => match found {
                    Ok((link, welcome)) => match self.state.handle_welcome(&welcome) {
                        Ok(_) => {
                            let incarnation = welcome.incarnation;
                            tracing::info!(incarnation, "reconnected to a master");
                            let _ = self.to_trainer.send(ControlEvent::Reconnected);
                            return Some(link);
                        }
                        Err(WelcomeError::OlderMaster) => {
                            search = Box::pin(self.search(RETRY_MAX));
                        }
                        Err(WelcomeError::OtherWorker) => {
                            break "the master's welcome is for another worker".into();
                        }
                    },
                    Err(reason) => break reason,
                },
                () = tokio::time::sleep_until(deadline) => {
                    break "no master within the timeout".into();
                }
                // The messages have no receiver meanwhile.
                message = from_trainer.recv() => drop(self.state.forward(message?)),
                // If all workers get it, no process can start replacements that take the state
                // over, so a checkpoint is written.
                () = sigterm.received() => {
                    drop(self.state.terminate());
                    self.want_checkpoint();
                }
            }
        };
        tracing::error!(reason, "this worker ends");
        // Destructors of a C++ library would run beside its threads.
        exit_at_once(EXIT_MASTER_LOST);
    }

    /// Searches for a master, as the worker that this one is now.
    fn search(
        &self,
        pause: Duration,
    ) -> impl Future<Output = Result<(Link, Welcome), String>> + use<> {
        let (connector, hello) = (self.connector.clone(), self.connector.hello(&self.state));
        async move { connector.search(hello, pause).await }
    }

    fn want_checkpoint(&self) {
        let wanted = ControlEvent::Message(MasterMessage::KeepCheckpoint, Instant::now());
        let _ = self.to_trainer.send(wanted);
    }

    fn handle(&mut self, response: JoinResponse, link: &Link) {
        let message = match response {
            JoinResponse::Message(message) => message.into_inner(),
            JoinResponse::Invalid(reason) => {
                tracing::warn!(reason, "the master sent an invalid message; it is ignored");
                return;
            }
            JoinResponse::Welcome(_) => {
                tracing::warn!("the master sent another welcome; it is ignored");
                return;
            }
        };
        match message {
            MasterMessage::Inspect { request, bytes_max } => {
                return self.report(request, bytes_max, link);
            }
            MasterMessage::CheckHost => return self.check_host(link),
            MasterMessage::ReportStacks => return self.report(HANGS, REPORT_BYTES_MAX, link),
            _ => {}
        }
        // A joiner must not wait until the trainer, which may be in a long step, hears of it.
        if let (MasterMessage::Joiners(named), Some(joiners)) = (&message, self.joiners.get()) {
            return joiners.name(named.iter().map(|id| id.0));
        }
        if let MasterMessage::Membership(Membership { generation, .. }) = &message {
            set_log_generation(*generation);
        }
        // A lost member and the end can't wait until the trainer checks its inbox.
        let abort_before = self.state.handle_message(&message);
        if let MasterMessage::Drain
        | MasterMessage::GiveUp
        | MasterMessage::Suspend
        | MasterMessage::Shutdown { .. } = message
        {
            self.stops.store(true, Ordering::Release);
        }
        let _ = self.to_trainer.send(ControlEvent::Message(message, Instant::now()));
        if let (Some(generation), Some(fence)) = (abort_before, self.fence.get()) {
            fence.abort_before(generation);
        }
    }

    /// Measures this host, beside what the worker does to join.
    fn check_host(&self, link: &Link) {
        let (folders, requests) = (self.folders.clone(), link.requests.clone());
        let work = move || {
            let report = host_check::measure(folders.iter().map(PathBuf::as_path));
            tracing::info!("this host: {report}");
            let report = WorkerMessage::HostChecked(Box::new(report));
            // The stream may have ended.
            let _ = requests.send(JoinRequest::Message(report));
        };
        // Without a thread there is no report.
        let _ = std::thread::Builder::new().name("host-check".into()).spawn(work);
    }

    /// Reports what this worker does, from a thread of its own: the heartbeats go on meanwhile.
    fn report(&self, request: u64, bytes_max: u64, link: &Link) {
        let (inspector, requests) = (self.inspector.clone(), link.requests.clone());
        let bytes_max = usize::try_from(bytes_max).unwrap_or(usize::MAX);
        let work = move || {
            let Some(report) = inspector.report(bytes_max) else { return };
            if request == HANGS {
                tracing::error!("this worker hangs\n{report}");
            }
            let report = WorkerMessage::Report { request, report: Box::new(report) };
            // The stream may have ended.
            let _ = requests.send(JoinRequest::Message(report));
        };
        // Without a thread there is no report.
        let _ = std::thread::Builder::new().name("inspect".into()).spawn(work);
    }
}

/// The master's endpoint.
fn endpoint(master: &str, environment: &Environment) -> Result<Endpoint, tonic::transport::Error> {
    let Environment { master_timeout, .. } = environment;
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

/// Formats a status with the chain of its causes.
fn causes_of(status: &tonic::Status) -> String {
    let message = status.message();
    std::error::Error::source(status)
        .map_or_else(|| message.into(), |s| format!("{message}: {}", causes(s)))
}

/// Number of the report of a worker that hangs.
const HANGS: u64 = 0;
/// Interval for a master that requests no heartbeats: a day.
const HEARTBEAT_NEVER: Duration = Duration::from_secs(24 * 60 * 60);

/// A dial without an answer may go to a dead master while a new one is already there. Longer than
/// the retransmission time of a lost SYN (1 s).
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
/// Interval of HTTP/2 pings, and timeout of their answers. A stream to a master that is cut off or
/// stopped ends after the sum of both, and the worker searches for a master.
const KEEP_ALIVE_MAX: Duration = Duration::from_secs(10);

/// First pause between two attempts to find a master; it doubles each time.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);

mod alone;
pub(crate) mod dataset;
mod storage;

#[cfg(test)]
mod tests;
