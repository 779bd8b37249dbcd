//! A simulated worker: a client of the master's real service, over TLS, with the job's token.
//!
//! It answers the master as a worker does, and leaves what depends on the other members to the
//! job's [group](super::group).

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use elasticdl_proto::wire::master_client::MasterClient;
use elasticdl_proto::wire::{JoinRequest, JoinResponse};
use elasticdl_proto::{
    FileList, Heartbeat, Hello, LaunchId, ListedFile, Location, MasterMessage, Resume, Welcome,
    WorkerMessage,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};
use tonic::{Request, Streaming};

use crate::Fault;
use crate::group::PARAMETERS;
use crate::job::{GroupEvent, Job};

/// How workers reach the master of their job.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) job: String,
    /// Address of the master's pod.
    pub(crate) address: SocketAddr,
    /// Name in the master's certificate.
    pub(crate) name: String,
    /// Certificate of the job's CA, PEM.
    pub(crate) ca: String,
    pub(crate) token: String,
}

/// What the kubelet wants of a pod's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// The pod is gone: end at once.
    Kill,
    Run,
    /// SIGTERM, and SIGKILL after the grace period.
    Terminate(Duration),
}

/// Runs a worker to its end, and returns its exit code.
pub(crate) async fn run(
    target: Target,
    launch: LaunchId,
    address: SocketAddr,
    job: Arc<Job>,
    mut signal: watch::Receiver<Signal>,
) -> i32 {
    let mut hello = Hello {
        job: target.job.clone(),
        launch,
        address,
        pid: 1,
        resume: None,
        incarnation: 0,
        location: Location::default(),
    };
    let opened = tokio::select! {
        opened = open(&target, &hello) => opened,
        // SIGTERM has its default disposition until the stream is open.
        () = deleted(&mut signal) => return EXIT_SIGTERM,
    };
    let Some((stream, welcome)) = opened else { return EXIT_MASTER_LOST };
    let id = welcome.worker;
    hello.resume =
        Some(Resume { worker: id, membership: None, parameters: None, holds_state: false });
    let (exit, released) = oneshot::channel();
    let _ = job.group.send(GroupEvent::Joined(id, stream.outgoing.clone(), exit));
    let worker = Worker { hello, stream, welcome, job: Arc::clone(&job), end_at: None };
    let code = worker.work(&target, signal, released).await;
    let _ = job.group.send(GroupEvent::Ended(id));
    code
}

/// A worker's stream.
struct Stream {
    outgoing: mpsc::UnboundedSender<JoinRequest>,
    incoming: Streaming<JoinResponse>,
}

struct Worker {
    /// The hello for the next stream.
    hello: Hello,
    stream: Stream,
    welcome: Welcome,
    job: Arc<Job>,
    /// When it ends after SIGTERM unless it is released, and its exit code then.
    end_at: Option<(Instant, i32)>,
}

impl Worker {
    async fn work(
        mut self,
        target: &Target,
        mut signal: watch::Receiver<Signal>,
        mut released: oneshot::Receiver<()>,
    ) -> i32 {
        let heartbeat = self.welcome.options.heartbeat().unwrap_or(HEARTBEAT_MAX);
        let mut heartbeats = tokio::time::interval(heartbeat.min(HEARTBEAT_MAX));
        let code = loop {
            let due = self.end_at.map(|(at, _)| at);
            tokio::select! {
                message = self.stream.incoming.message() => match message {
                    Ok(Some(JoinResponse::Message(message))) => {
                        if self.handle(message.into_inner()) {
                            break 0;
                        }
                    }
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => {
                        tokio::select! {
                            is_open = self.reopen(target) => if !is_open {
                                return EXIT_MASTER_LOST;
                            },
                            () = deleted(&mut signal) => return EXIT_SIGTERM,
                        }
                    }
                },
                _ = heartbeats.tick() => self.send(WorkerMessage::Heartbeat(Heartbeat::default())),
                _ = &mut released => break 0,
                Ok(()) = signal.changed() => match *signal.borrow_and_update() {
                    Signal::Run => {}
                    Signal::Kill => return EXIT_SIGKILL,
                    Signal::Terminate(grace) => self.terminate(grace),
                },
                () = until(due) => break self.end_at.map_or(0, |(_, code)| code),
            }
        };
        // What was sent reaches the master before the stream ends.
        let Stream { outgoing, mut incoming } = self.stream;
        drop(outgoing);
        let drained = async { while let Ok(Some(_)) = incoming.message().await {} };
        let _ = timeout(CLOSE_TIMEOUT, drained).await;
        code
    }

    /// Opens another stream, as the worker that this one is. Returns whether a master answered.
    async fn reopen(&mut self, target: &Target) -> bool {
        let Some((stream, welcome)) = open(target, &self.hello).await else { return false };
        self.hello.incarnation = welcome.incarnation;
        let _ = self.job.group.send(GroupEvent::Returned(welcome.worker, stream.outgoing.clone()));
        (self.stream, self.welcome) = (stream, welcome);
        true
    }

    /// Handles SIGTERM.
    fn terminate(&mut self, grace: Duration) {
        self.send(WorkerMessage::Leaving);
        let leave = self.welcome.options.leave_timeout();
        let now = Instant::now();
        let (time, code) =
            if leave < grace { (leave, EXIT_SIGTERM) } else { (grace, EXIT_SIGKILL) };
        self.end_at = Some((now + time, code));
    }

    /// Handles a message of the master. Returns whether the worker ends.
    fn handle(&mut self, message: MasterMessage) -> bool {
        let resume = self.hello.resume.as_mut();
        match message {
            MasterMessage::Describe => {
                let records = self.job.records;
                let file = ListedFile { path: "none".into(), records, version: None };
                self.send(WorkerMessage::Described(Ok(FileList::pack([file])), None));
            }
            MasterMessage::Prepare(_) => {
                if let Some(resume) = resume {
                    resume.parameters = Some(PARAMETERS);
                }
                self.send(WorkerMessage::Ready { parameters: PARAMETERS });
            }
            MasterMessage::Shutdown { .. } => return true,
            message => {
                if let (MasterMessage::Membership(newest), Some(resume)) = (&message, resume) {
                    resume.membership = Some(newest.clone());
                }
                drop(self.job.group.send(GroupEvent::Received(self.welcome.worker, message)));
            }
        }
        false
    }

    fn send(&self, message: WorkerMessage) {
        // The reader of the stream notices its end.
        let _ = self.stream.outgoing.send(JoinRequest::Message(message));
    }
}

/// Waits until the time; for ever without one.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => pending().await,
    }
}

/// Waits until the pod is deleted.
pub(crate) async fn deleted(signal: &mut watch::Receiver<Signal>) {
    // An error: the nodes' task has ended.
    let _ = signal.wait_for(|signal| *signal != Signal::Run).await;
}

/// Opens a stream, with retries. `None`: no master has welcomed the worker in time.
async fn open(target: &Target, hello: &Hello) -> Option<(Stream, Welcome)> {
    for _ in 0..OPEN_ATTEMPTS {
        match timeout(OPEN_TIMEOUT, try_open(target, hello)).await {
            Ok(Ok(opened)) => return Some(opened),
            Ok(Err(_)) | Err(_) => sleep(OPEN_PAUSE).await,
        }
    }
    None
}

async fn try_open(target: &Target, hello: &Hello) -> Result<(Stream, Welcome), Fault> {
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&target.ca))
        .domain_name(&target.name);
    let endpoint = Endpoint::from_shared(format!("https://{}", target.address))?
        .tcp_nodelay(true)
        .tls_config(tls)?;
    let mut client =
        MasterClient::new(endpoint.connect().await?).max_decoding_message_size(64 << 20);
    let (outgoing, requests) = mpsc::unbounded_channel();
    outgoing.send(JoinRequest::Hello(Box::new(hello.clone())))?;
    let mut request = Request::new(UnboundedReceiverStream::new(requests));
    request.metadata_mut().insert("authorization", format!("Bearer {}", target.token).parse()?);
    let mut incoming = client.join(request).await?.into_inner();
    match incoming.message().await? {
        Some(JoinResponse::Welcome(welcome)) => Ok((Stream { outgoing, incoming }, *welcome)),
        _ => Err("no welcome".into()),
    }
}

const EXIT_MASTER_LOST: i32 = 70;
const EXIT_SIGKILL: i32 = 137;
const EXIT_SIGTERM: i32 = 143;
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Five minutes.
const OPEN_ATTEMPTS: u32 = 1200;
const OPEN_TIMEOUT: Duration = Duration::from_secs(20);
const OPEN_PAUSE: Duration = Duration::from_millis(250);
