//! The control stream: one thread that speaks gRPC with the master, so that the trainer need not.
//!
//! **Invariant:** generated types stop here.
//! **Invariant:** a master that is gone for longer than the timeout ends this process: no worker outlives its job. One
//! that is there but can't be heard is gone, too: the connection is tried now and then, so that its end is noticed.

use std::net::SocketAddr;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use elasticdl_collective::{Fence, Progress, Stall};
use elasticdl_proto::v1;
use elasticdl_proto::v1::master_client::MasterClient;
use elasticdl_proto::{Generation, Ledger, RecordRange, WorkerId};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};

use crate::core::plan::Batch;
use crate::core::session::{Membership, Report};
use crate::environment::{EXIT_MASTER_LOST, EXIT_TERMINATED, Environment};
use crate::messages::{Finished, FromMaster, Outbox, ToMaster};
use crate::reader::{Dataset, File};

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
    pub(crate) training_data: String,
    pub(crate) epochs: u32,
    pub(crate) max_steps: Option<u64>,
    pub(crate) batch: Batch,
    pub(crate) seed: u64,
    /// How often the master is to hear from this worker: a tenth of the silence that is tolerated.
    heartbeat: Option<Duration>,
    /// A peer that answers no dial for as long can't be reached.
    pub(crate) worker_timeout: Option<Duration>,
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
            environment: environment.clone(),
            to_trainer,
            fence: Arc::clone(&fence),
            progress: Arc::clone(&progress),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| format!("no runtime for the control stream: {error}"))?;
        let thread = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || runtime.block_on(stream.run(address, from_trainer, tell_welcome)))
            .map_err(|error| format!("no thread for the control stream: {error}"))?;
        let welcome =
            welcome.blocking_recv().unwrap_or_else(|_| Err("the control stream's thread ended".into()))?;
        Ok(Self { welcome, inbox, outbox: Outbox(outbox), fence, progress, thread })
    }

    /// Waits until everything said has reached the master, a second at most.
    pub(crate) fn close(self) {
        drop(self.outbox);
        let _ = self.thread.join();
    }
}

struct Stream {
    environment: Environment,
    to_trainer: Sender<FromMaster>,
    fence: Arc<OnceLock<Fence>>,
    progress: Arc<OnceLock<Progress>>,
}

impl Stream {
    async fn run(
        self,
        address: SocketAddr,
        mut from_trainer: mpsc::UnboundedReceiver<ToMaster>,
        tell_welcome: oneshot::Sender<Result<Welcome, String>>,
    ) {
        let (requests, outgoing) = mpsc::unbounded_channel();
        let opened = async {
            let sigterm = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
            let (incoming, welcome) = self.open(address, &requests, outgoing).await?;
            Ok((sigterm, incoming, welcome))
        };
        let heartbeat;
        let (mut sigterm, mut incoming) = match opened.await {
            Ok((sigterm, incoming, welcome)) => {
                heartbeat = welcome.heartbeat.unwrap_or(HEARTBEAT_NEVER);
                let _ = tell_welcome.send(Ok(welcome));
                (sigterm, incoming)
            }
            Err(error) => {
                let _ = tell_welcome.send(Err(error));
                return;
            }
        };
        let mut beats = tokio::time::interval(heartbeat);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let say = |kind| requests.send(v1::WorkerMessage { kind: Some(kind) });
        loop {
            tokio::select! {
                message = incoming.next() => match message {
                    Some(Ok(message)) => self.handle(message),
                    Some(Err(status)) => return self.outlive(status.message(), &mut sigterm).await,
                    None => return self.outlive("the stream ended", &mut sigterm).await,
                },
                message = from_trainer.recv() => match message {
                    Some(message) => {
                        let _ = say(encode(message));
                    }
                    None => break,
                },
                _ = beats.tick() => {
                    let stall = self.progress.get().and_then(Progress::stall);
                    let stall = stall.filter(|s| s.since >= heartbeat).map(encode_stall);
                    let _ = say(v1::worker_message::Kind::Heartbeat(v1::Heartbeat { stall }));
                }
                _ = sigterm.recv() => {
                    tracing::info!("told to end: leaving at the next boundary");
                    let _ = say(v1::worker_message::Kind::Leaving(v1::Leaving {}));
                    leave_in_time(self.environment.leave_timeout());
                }
            }
        }
        // The trainer is done. Ending the request stream flushes it; the master then ends its side.
        drop(requests);
        let drained = async { while let Some(Ok(_)) = incoming.next().await {} };
        let _ = tokio::time::timeout(Duration::from_secs(1), drained).await;
    }

    async fn open(
        &self,
        address: SocketAddr,
        requests: &mpsc::UnboundedSender<v1::WorkerMessage>,
        outgoing: mpsc::UnboundedReceiver<v1::WorkerMessage>,
    ) -> Result<(Streaming<v1::MasterMessage>, Welcome), String> {
        let environment = &self.environment;
        let master = &environment.master;
        let refused =
            |what: &str, error: &dyn std::fmt::Display| format!("master at {master}: {what}: {error}");
        let channel = Endpoint::from_shared(format!("http://{master}"))
            .map_err(|error| refused("not an address", &error))?
            .tcp_nodelay(true)
            .connect_timeout(environment.master_timeout)
            .http2_keep_alive_interval(environment.master_timeout / 2)
            .keep_alive_timeout(environment.master_timeout / 2)
            .keep_alive_while_idle(true)
            .connect()
            .await
            .map_err(|error| refused("no answer", &error))?;
        let mut client: MasterClient<Channel> =
            MasterClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let hello = v1::Hello {
            job: environment.job.clone(),
            launch: environment.launch,
            address: address.to_string(),
            pid: std::process::id(),
            resume: None,
        };
        let hello = v1::WorkerMessage { kind: Some(v1::worker_message::Kind::Hello(hello)) };
        requests.send(hello).map_err(|error| refused("stream", &error))?;
        let mut request = Request::new(UnboundedReceiverStream::new(outgoing));
        let bearer = format!("Bearer {}", environment.token)
            .parse()
            .map_err(|_| refused("token", &"not printable"))?;
        request.metadata_mut().insert("authorization", bearer);
        let mut incoming = client
            .join(request)
            .await
            .map_err(|status| refused("refused this worker", &status.message()))?
            .into_inner();
        match incoming.next().await {
            Some(Ok(v1::MasterMessage { kind: Some(v1::master_message::Kind::Welcome(welcome)) })) => {
                let welcome =
                    decode_welcome(welcome).ok_or_else(|| refused("welcome", &"options are missing"))?;
                Ok((incoming, welcome))
            }
            Some(Ok(other)) => Err(refused("expected a welcome", &format!("{other:?}"))),
            Some(Err(status)) => Err(refused("refused this worker", &status.message())),
            None => Err(refused("ended the stream", &"no reason given")),
        }
    }

    fn handle(&self, message: v1::MasterMessage) {
        let Some(message) = decode(message) else {
            tracing::warn!("the master sent a message that can't be read; it is ignored");
            return;
        };
        // What can't wait for the trainer's next look into its inbox: a lost member, the end.
        let abort_before = match &message {
            FromMaster::Membership(m, _) if m.abort => Some(m.generation.0),
            FromMaster::Shutdown(_) => Some(u64::MAX),
            _ => None,
        };
        let _ = self.to_trainer.send(message);
        if let (Some(generation), Some(fence)) = (abort_before, self.fence.get()) {
            fence.abort_before(generation);
        }
    }

    /// The stream is gone. The group goes on without a master, but not for longer than the timeout; and a master that is
    /// there has ended the stream for a reason.
    async fn outlive(&self, why: &str, sigterm: &mut Signal) {
        tracing::warn!(why, "lost the master");
        let deadline = tokio::time::Instant::now() + self.environment.master_timeout;
        let gone = async {
            loop {
                tokio::time::sleep(MASTER_PROBE).await;
                if tokio::net::TcpStream::connect(&self.environment.master).await.is_ok() {
                    return "the master has ended this worker's stream";
                }
            }
        };
        let reason = tokio::select! {
            reason = tokio::time::timeout_at(deadline, gone) => reason.unwrap_or("no master within the timeout"),
            _ = sigterm.recv() => "told to end",
        };
        tracing::error!(reason, "this worker ends");
        std::process::exit(EXIT_MASTER_LOST);
    }
}

/// Ends the process if the group hasn't let it go by then.
fn leave_in_time(timeout: Duration) {
    tokio::spawn(async move {
        tokio::time::sleep(timeout).await;
        tracing::warn!("not let go in time");
        std::process::exit(EXIT_TERMINATED);
    });
}

fn decode_welcome(welcome: v1::Welcome) -> Option<Welcome> {
    let options = welcome.options?;
    let batch = match options.batch? {
        v1::options::Batch::GlobalBatchSize(records) => Batch::Global(records.max(1)),
        v1::options::Batch::MinibatchSize(records) => Batch::PerWorker(records.max(1)),
    };
    Some(Welcome {
        worker: WorkerId(welcome.worker),
        training_data: options.training_data,
        epochs: options.epochs,
        max_steps: options.max_steps,
        batch,
        seed: options.seed,
        heartbeat: options.heartbeat_ms.map(|ms| Duration::from_millis(ms.max(1))),
        worker_timeout: options.worker_timeout_ms.map(Duration::from_millis),
    })
}

fn decode(message: v1::MasterMessage) -> Option<FromMaster> {
    use v1::master_message::Kind;
    let member = |m: &v1::Member| Some((WorkerId(m.worker), m.address.parse().ok()?));
    Some(match message.kind? {
        Kind::Describe(_) => FromMaster::Describe,
        Kind::Drain(_) => FromMaster::Drain,
        Kind::Fetch(fetch) => FromMaster::Fetch(fetch.donors.iter().map(member).collect::<Option<_>>()?),
        Kind::Lease(lease) => FromMaster::Lease(lease.ranges.iter().map(decode_range).collect()),
        Kind::Membership(membership) => {
            let arrived = Instant::now();
            let generation = Generation(membership.generation);
            let members = membership.members.iter().map(member).collect::<Option<_>>()?;
            FromMaster::Membership(Membership { generation, members, abort: membership.abort }, arrived)
        }
        Kind::Prepare(prepare) => {
            let file = |f: v1::File| File { path: f.path, records: f.records };
            FromMaster::Prepare(Dataset { files: prepare.dataset?.files.into_iter().map(file).collect() })
        }
        Kind::Shutdown(shutdown) => FromMaster::Shutdown(shutdown.reason),
        Kind::Welcome(_) => return None,
    })
}

fn encode(message: ToMaster) -> v1::worker_message::Kind {
    use v1::worker_message::Kind;
    match message {
        ToMaster::Described(outcome) => {
            use v1::described::Outcome;
            let file = |f: File| v1::File { path: f.path, records: f.records };
            let outcome = match outcome {
                Ok(dataset) => {
                    Outcome::Dataset(v1::Dataset { files: dataset.files.into_iter().map(file).collect() })
                }
                Err(error) => Outcome::Error(error),
            };
            Kind::Described(v1::Described { outcome: Some(outcome) })
        }
        ToMaster::Failed(failure) => Kind::Failed(v1::Failed {
            error: failure.error,
            ranges: failure.ranges.iter().map(encode_range).collect(),
            fatal: failure.fatal,
        }),
        ToMaster::Finished(finished) => Kind::Finished(encode_finished(finished)),
        ToMaster::Ready { parameters } => Kind::Ready(v1::Ready { parameters }),
        ToMaster::Report(report) => encode_report(report),
        ToMaster::Resumed { generation, step, phases } => Kind::Resumed(v1::Resumed {
            generation: generation.0,
            step,
            phases: Some(v1::Phases {
                detect_us: phases.detect_us,
                abort_us: phases.abort_us,
                agree_us: phases.agree_us,
                connect_us: phases.connect_us,
                state_us: phases.state_us,
                first_step_us: phases.first_step_us,
            }),
        }),
    }
}

fn encode_report(report: Report) -> v1::worker_message::Kind {
    use v1::worker_message::Kind;
    match report {
        Report::Broken { generation, suspect, error, unreachable } => Kind::Broken(v1::Broken {
            generation: generation.0,
            suspect: suspect.map(|s| s.0),
            error,
            unreachable,
        }),
        Report::Committed(progress) => Kind::Committed(v1::Committed {
            generation: progress.generation.0,
            step: progress.step,
            ranges: progress.ranges.iter().map(encode_range).collect(),
            loss_sum: progress.loss_sum,
            records: progress.records,
            compute_us: progress.compute_us,
        }),
        Report::Formed { generation, step, ledger } => {
            Kind::Formed(v1::Formed { generation: generation.0, step, ledger: Some(encode_ledger(&ledger)) })
        }
        Report::Primed { step } => Kind::Primed(v1::Primed { step }),
        Report::LeaseRequest { epoch, records } => Kind::LeaseRequest(v1::LeaseRequest { epoch, records }),
    }
}

fn encode_stall(stall: Stall) -> v1::Stall {
    let Stall { generation, operation, received, sent, since } = stall;
    let for_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    v1::Stall { generation, operation, received, for_ms, sent }
}

fn encode_finished(finished: Finished) -> v1::Finished {
    v1::Finished {
        generation: finished.generation.0,
        step: finished.step,
        digest: finished.digest,
        ledger: Some(encode_ledger(&finished.ledger)),
        records_trained: finished.records_trained,
        summary: finished.summary,
    }
}

fn encode_ledger(ledger: &Ledger) -> v1::Ledger {
    v1::Ledger {
        epochs_complete: ledger.epoch(),
        ranges: ledger.ranges().map(|r| encode_range(&r)).collect(),
        repeated_records: ledger.repeated(),
    }
}

fn encode_range(range: &RecordRange) -> v1::Range {
    v1::Range { epoch: range.epoch, start: range.start, end: range.end }
}

fn decode_range(range: &v1::Range) -> RecordRange {
    RecordRange { epoch: range.epoch, start: range.start, end: range.end }
}

/// A ledger of an epoch in progress can be long; anything beyond this is no message of a master's.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// For a master that does not want to hear anything: a day.
const HEARTBEAT_NEVER: Duration = Duration::from_secs(24 * 60 * 60);

/// How often a worker without a stream looks whether a master is there.
const MASTER_PROBE: Duration = Duration::from_millis(200);
