//! The master's gRPC server: streams of workers and requests of user commands.
//!
//! ```text
//!  worker ──Join──► TokenInterceptor ──► reader task ──hello, messages, end──► events ──► Master
//!         ◄──────────────────── WorkerOutbox (bounded) ◄───────────────────────────────────┘
//! ```
//!
//! The server runs in a thread of its own: handshakes and the decoding of messages take no time of
//! the task that owns the job.
//!
//! **Invariants:** no part of a request is decoded before its token is verified. Every message that
//! reaches the event queue has passed validation of each field. The master never waits for a worker
//! that does not read: the worker's outbox overflows and its stream is closed. The end of a stream
//! reaches the event queue at once, through the error or the end of the connection.

mod incoming;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use elasticdl_proto::limits::MESSAGE_BYTES_MAX;
use elasticdl_proto::wire::master_server::{Master, MasterServer};
use elasticdl_proto::wire::{
    CheckpointReply, CheckpointRequest, InspectRequest, Inspection, JoinRequest, JoinResponse,
    ScaleReply, ScaleRequest, SharedMessage, StatusRequest, SuspendReply, SuspendRequest,
};
use elasticdl_proto::{Hello, Welcome, WorkerMessage};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::{Request, Response, Status, Streaming};
use tracing::debug;

use crate::job::{self, ConnectionId, Scaling};
use crate::listener::{Identity, ServerConfig};
use crate::token::Token;

/// An event of the server for the task that owns the job.
#[derive(Debug)]
pub(crate) enum ServerEvent {
    /// A command requests a checkpoint; the reply is the newest committed step.
    Checkpoint { reply: oneshot::Sender<Result<u64, Status>> },
    /// A stream ended.
    Closed { connection: ConnectionId },
    /// A stream presented the token and sent a hello.
    Connected { connection: ConnectionId, hello: Box<Hello>, outbox: WorkerOutbox },
    /// A command asks what the workers do; the reply comes after some seconds at most.
    Inspect { reply: oneshot::Sender<Inspection> },
    /// A stream sent a message after its hello.
    Message { connection: ConnectionId, message: WorkerMessage },
    /// A command changes the number of workers, or its limits; the reply is the previous number.
    Scale { change: Scaling, reply: oneshot::Sender<Result<u32, Status>> },
    /// A command requests the status of the job.
    Status { reply: oneshot::Sender<job::Status> },
    /// A command suspends or resumes the job; the reply is whether that was so already.
    Suspend { suspend: bool, reply: oneshot::Sender<Result<bool, Status>> },
}

/// Sending half of a worker's stream. On drop the stream closes after the queued messages are sent.
#[derive(Debug)]
pub(crate) struct WorkerOutbox {
    outbox: MessageSender,
    /// Dropping this sender ends the task that reads the stream.
    _open: oneshot::Sender<()>,
}

impl WorkerOutbox {
    /// Queues a message. `false` if the outbox is full, because the worker does not read, or if
    /// the stream has ended.
    pub(crate) fn send(&self, message: SharedMessage) -> bool {
        self.outbox.try_send(Ok(JoinResponse::Message(message))).is_ok()
    }

    /// Queues the welcome; otherwise as [`WorkerOutbox::send`].
    pub(crate) fn welcome(&self, welcome: Welcome) -> bool {
        self.outbox.try_send(Ok(JoinResponse::Welcome(Box::new(welcome)))).is_ok()
    }

    /// Ends the stream with an error.
    pub(crate) fn refuse(self, reason: String) {
        // If the outbox is full, the stream ends without the reason.
        let _ = self.outbox.try_send(Err(Status::failed_precondition(reason)));
    }
}

/// Queue of messages to a worker.
type MessageSender = mpsc::Sender<Result<JoinResponse, Status>>;

/// A running server; see [`Server::end`].
#[derive(Debug)]
pub(crate) struct Server {
    open: watch::Sender<bool>,
    stop: oneshot::Sender<()>,
    /// Dropping this sender ends the server at once.
    abort: oneshot::Sender<()>,
    ended: oneshot::Receiver<()>,
}

/// The server's side of [`Server`], and what it serves.
struct Serving {
    config: ServerConfig,
    service: Service,
    keepalive: Option<Duration>,
    stopped: oneshot::Receiver<()>,
    aborted: oneshot::Receiver<()>,
    /// Dropped at the end.
    _ended: oneshot::Sender<()>,
}

impl Server {
    /// Starts to serve `job` with `config`, in a thread of its own. `events` is the event queue of
    /// the job; streams wait while it is full. Connections that are silent for much longer than
    /// `worker_timeout` are closed. Must be called within a runtime.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(crate) fn start(
        config: ServerConfig,
        job: &str,
        worker_timeout: Option<Duration>,
        events: mpsc::Sender<ServerEvent>,
    ) -> io::Result<Self> {
        let ServerConfig { listener, token, identity } = config;
        // The listener is moved to the runtime of the other thread.
        let listener = listener.into_std()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _entered = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let config = ServerConfig { listener, token, identity };
        let (server, serving) = Self::prepare(config, job, worker_timeout, events);
        thread::Builder::new().name("grpc".into()).spawn(move || {
            runtime.block_on(serving.run());
            runtime.shutdown_background();
        })?;
        Ok(server)
    }

    /// Starts to serve in the caller's runtime, whose clock a test can control.
    #[cfg(test)]
    fn start_here(config: ServerConfig, job: &str, events: mpsc::Sender<ServerEvent>) -> Self {
        let (server, serving) = Self::prepare(config, job, None, events);
        tokio::spawn(serving.run());
        server
    }

    fn prepare(
        config: ServerConfig,
        job: &str,
        worker_timeout: Option<Duration>,
        events: mpsc::Sender<ServerEvent>,
    ) -> (Self, Serving) {
        let (stop, stopped) = oneshot::channel();
        let (abort, aborted) = oneshot::channel();
        let (ending, ended) = oneshot::channel();
        let (open, opened) = watch::channel(true);
        let service = Service {
            job: job.into(),
            events,
            connections: AtomicU64::new(0),
            awaiting_hello: Arc::new(Semaphore::new(AWAITING_HELLO_MAX)),
            open: opened,
        };
        let keepalive = worker_timeout.map(|timeout| timeout.max(KEEPALIVE_MIN));
        let serving = Serving { config, service, keepalive, stopped, aborted, _ended: ending };
        (Self { open, stop, abort, ended }, serving)
    }

    /// Stops listening and rejects new streams on open connections. An existing stream ends when
    /// its outbox is dropped.
    pub(crate) fn close(&self) {
        self.open.send_replace(false);
    }

    /// Listens again.
    pub(crate) fn reopen(&self) {
        self.open.send_replace(true);
    }

    /// Stops accepting, waits up to `END_TIMEOUT` for replies in flight, and ends.
    pub(crate) async fn end(self) {
        let Self { open: _open, stop, abort, ended } = self;
        drop(stop);
        let _ = tokio::time::timeout(END_TIMEOUT, ended).await;
        drop(abort);
    }
}

impl Serving {
    async fn run(self) {
        let Self { config, service, keepalive, stopped, aborted, _ended } = self;
        let ServerConfig { listener, token, identity } = config;
        let opened = service.open.clone();
        let service = MasterServer::new(service)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let router = identity
            .map_or_else(tonic::transport::Server::builder, Identity::into_server)
            .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
            // The job detects silent workers by its own clock. The keepalive closes half-open
            // connections, whose peer is unreachable. It is not needed for a worker that is merely
            // stopped, whose connection stays open.
            .http2_keepalive_interval(keepalive)
            .http2_keepalive_timeout(keepalive)
            .add_service(InterceptedService::new(service, TokenInterceptor(token)));
        let stopped = async { drop(stopped.await) };
        tokio::select! {
            served = router
                .serve_with_incoming_shutdown(incoming::accept(listener, opened), stopped) =>
            {
                if let Err(error) = served {
                    panic!("the server of the master has failed: {error}");
                }
            }
            _ = aborted => {}
        }
    }
}

/// Rejects requests without the job's token.
#[derive(Clone)]
struct TokenInterceptor(Token);

impl Interceptor for TokenInterceptor {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let shown = request.metadata().get("authorization").map(|value| value.as_encoded_bytes());
        if !self.0.authorizes(shown.unwrap_or_default()) {
            return Err(Status::unauthenticated(
                "`authorization` must be `Bearer ` and the job's token",
            ));
        }
        if let Some(authentication) = request.extensions().get::<incoming::Authentication>() {
            authentication.complete();
        }
        Ok(request)
    }
}

struct Service {
    job: String,
    events: mpsc::Sender<ServerEvent>,
    /// Id of the next connection.
    connections: AtomicU64,
    /// Permits for streams that have not sent a hello yet.
    awaiting_hello: Arc<Semaphore>,
    /// Whether new streams are accepted.
    open: watch::Receiver<bool>,
}

#[tonic::async_trait]
impl Master for Service {
    type JoinStream = ReceiverStream<Result<JoinResponse, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<JoinRequest>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        if !*self.open.borrow() {
            return Err(Status::unavailable(
                "this master does not hold the leader Lease now; try again",
            ));
        }
        let awaiting_hello =
            Arc::clone(&self.awaiting_hello).try_acquire_owned().map_err(|_| {
                Status::resource_exhausted("too many streams wait to say hello; try again")
            })?;
        let connection = ConnectionId(self.connections.fetch_add(1, Ordering::Relaxed));
        let (outbox, outgoing) = mpsc::channel(OUTBOX_MAX);
        let (job, events) = (self.job.clone(), self.events.clone());
        let mut stream = request.into_inner();
        tokio::spawn(async move {
            let hello = match first_message(&mut stream, &job).await {
                Ok(hello) => hello,
                Err(status) => {
                    debug!(
                        connection = connection.0,
                        %status,
                        "a stream was refused before its hello"
                    );
                    let _ = outbox.try_send(Err(status));
                    return;
                }
            };
            drop(awaiting_hello);
            read(connection, hello, stream, outbox, events).await;
        });
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }

    async fn status(
        &self,
        _request: Request<StatusRequest>,
    ) -> Result<Response<job::Status>, Status> {
        let (reply, answer) = oneshot::channel();
        self.events.send(ServerEvent::Status { reply }).await.map_err(|_| ending())?;
        answer.await.map(Response::new).map_err(|_| ending())
    }

    async fn inspect(&self, _: Request<InspectRequest>) -> Result<Response<Inspection>, Status> {
        let (reply, answer) = oneshot::channel();
        self.events.send(ServerEvent::Inspect { reply }).await.map_err(|_| ending())?;
        answer.await.map(Response::new).map_err(|_| ending())
    }

    async fn checkpoint(
        &self,
        _: Request<CheckpointRequest>,
    ) -> Result<Response<CheckpointReply>, Status> {
        let (reply, answer) = oneshot::channel();
        self.events.send(ServerEvent::Checkpoint { reply }).await.map_err(|_| ending())?;
        let step = answer.await.map_err(|_| ending())??;
        Ok(Response::new(CheckpointReply { step }))
    }

    async fn scale(&self, request: Request<ScaleRequest>) -> Result<Response<ScaleReply>, Status> {
        let ScaleRequest { num_workers, min_workers, max_workers } = request.into_inner();
        let change = Scaling { num_workers, min_workers, max_workers };
        let (reply, answer) = oneshot::channel();
        self.events.send(ServerEvent::Scale { change, reply }).await.map_err(|_| ending())?;
        let was = answer.await.map_err(|_| ending())??;
        Ok(Response::new(ScaleReply { was }))
    }

    async fn suspend(
        &self,
        request: Request<SuspendRequest>,
    ) -> Result<Response<SuspendReply>, Status> {
        let suspend = request.into_inner().suspend;
        let (reply, answer) = oneshot::channel();
        self.events.send(ServerEvent::Suspend { suspend, reply }).await.map_err(|_| ending())?;
        let unchanged = answer.await.map_err(|_| ending())??;
        Ok(Response::new(SuspendReply { unchanged }))
    }
}

async fn first_message(
    stream: &mut Streaming<JoinRequest>,
    job: &str,
) -> Result<Box<Hello>, Status> {
    let invalid = |reason: String| Err(Status::invalid_argument(reason));
    let message = tokio::time::timeout(HELLO_TIMEOUT, stream.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no `hello` came in time"))??;
    match message {
        Some(JoinRequest::Hello(hello)) if hello.job == job => Ok(hello),
        Some(JoinRequest::Hello(hello)) => {
            let theirs: String = hello.job.chars().take(JOB_NAME_SHOWN_MAX).collect();
            invalid(format!("hello.job: this is the master of `{job}`, not of `{theirs}`"))
        }
        Some(JoinRequest::Invalid(reason)) => invalid(reason),
        Some(JoinRequest::Message(_)) | None => invalid("the first message must be `hello`".into()),
    }
}

/// Reads a stream after its hello until either side closes it.
async fn read(
    connection: ConnectionId,
    hello: Box<Hello>,
    mut stream: Streaming<JoinRequest>,
    outbox: MessageSender,
    events: mpsc::Sender<ServerEvent>,
) {
    let (open, mut closed) = oneshot::channel();
    let errors = outbox.downgrade();
    let outbox = WorkerOutbox { outbox, _open: open };
    if events.send(ServerEvent::Connected { connection, hello, outbox }).await.is_err() {
        return;
    }
    loop {
        let received = tokio::select! {
            received = stream.message() => received,
            // Closed from this side, so that no `Closed` event is needed.
            _ = &mut closed => return,
        };
        let checked = match received {
            Ok(Some(JoinRequest::Message(message))) => Ok(message),
            Ok(Some(JoinRequest::Invalid(reason))) => Err(Status::invalid_argument(reason)),
            Ok(Some(JoinRequest::Hello(_))) => {
                Err(Status::invalid_argument("`hello` comes first, and once"))
            }
            Ok(None) => break,
            Err(status) => Err(status),
        };
        match checked {
            Ok(message) => {
                if events.send(ServerEvent::Message { connection, message }).await.is_err() {
                    return;
                }
            }
            Err(status) => {
                debug!(connection = connection.0, %status, "a stream broke");
                if let Some(outbox) = errors.upgrade() {
                    let _ = outbox.try_send(Err(status));
                }
                break;
            }
        }
    }
    // Fails only if the job has ended.
    let _ = events.send(ServerEvent::Closed { connection }).await;
}

fn ending() -> Status {
    Status::unavailable("the job is ending")
}

const END_TIMEOUT: Duration = Duration::from_millis(200);
const KEEPALIVE_MIN: Duration = Duration::from_secs(10);
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Capacity of an outbox. A worker with this many unread messages counts as stopped.
const OUTBOX_MAX: usize = 1024;
const STREAMS_PER_CONNECTION_MAX: u32 = 16;
const AWAITING_HELLO_MAX: usize = 64;
/// Number of characters of a foreign job's name that an error shows.
const JOB_NAME_SHOWN_MAX: usize = 64;

#[cfg(test)]
mod tests;
