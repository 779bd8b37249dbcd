//! A complete master in this process. Its worker processes are shell scripts, and the test
//! implements their side of the protocol.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use elasticdl_proto::wire::master_client::MasterClient;
use elasticdl_proto::wire::{JoinRequest, JoinResponse, ScaleRequest, StatusRequest};
use elasticdl_proto::{
    Committed, FileList, Finished, Hello, LaunchId, LedgerReport, MasterMessage, RankStep,
    RecordRange, StepTimes, WorkerMessage,
};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Request, Streaming};

use crate::event_loop::{JobResult, Master, UserCommand};
use crate::job::{Batch, JobSpec, Outcome};
use crate::jobdir::JobDir;
use crate::listener::ServerConfig;
use crate::local::Launcher;
use crate::progress::Progress;

/// A running job. Its processes write their launch id to a named pipe, then wait until the pipe is
/// written to.
struct Fixture {
    _folder: tempfile::TempDir,
    dir: JobDir,
    pipe: PathBuf,
    address: SocketAddr,
    commands: mpsc::Sender<UserCommand>,
    ended: JoinHandle<JobResult>,
}

/// The worker's side of a stream.
struct Worker {
    outgoing: mpsc::Sender<JoinRequest>,
    incoming: Streaming<JoinResponse>,
}

impl Fixture {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let dir = JobDir::create(&folder.path().join("job")).unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let script = "echo $ELASTICDL_LAUNCH > $0; cat $0";
        let args = vec!["-c".into(), script.into(), pipe.clone().into()];
        let launcher = Launcher::new("/bin/sh".into(), args, &dir, Duration::from_secs(30));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let server_config = ServerConfig { listener, token: dir.token().clone(), identity: None };
        let master = Master::new(spec(), server_config, launcher, Progress::quiet()).unwrap();
        let (commands, received_commands) = mpsc::channel(4);
        let ended = tokio::spawn(master.run(received_commands));
        Self { _folder: folder, dir, pipe, address, commands, ended }
    }

    /// Waits for the next launch.
    async fn launched(&self) -> u64 {
        let pipe = self.pipe.clone();
        let line =
            tokio::task::spawn_blocking(move || fs::read_to_string(pipe).unwrap()).await.unwrap();
        line.trim().parse().unwrap()
    }

    /// Makes a launched process exit.
    async fn let_end(&self) {
        let pipe = self.pipe.clone();
        tokio::task::spawn_blocking(move || drop(File::options().write(true).open(pipe).unwrap()))
            .await
            .unwrap();
    }

    async fn client(&self) -> MasterClient<Channel> {
        MasterClient::connect(format!("http://{}", self.address)).await.unwrap()
    }

    fn with_token<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request
            .metadata_mut()
            .insert("authorization", self.dir.token().to_bearer().parse().unwrap());
        request
    }

    async fn join(&self, launch: u64) -> Worker {
        let (outgoing, received) = mpsc::channel(16);
        let hello = Hello {
            job: "mnist".into(),
            launch: LaunchId(launch),
            address: "127.0.0.1:9".parse().unwrap(),
            pid: 42,
            resume: None,
            incarnation: 0,
            location: Default::default(),
        };
        outgoing.send(JoinRequest::Hello(Box::new(hello))).await.unwrap();
        let request = self.with_token(ReceiverStream::new(received));
        let incoming = self.client().await.join(request).await.unwrap().into_inner();
        Worker { outgoing, incoming }
    }

    async fn ended(self) -> JobResult {
        self.ended.await.unwrap()
    }
}

impl Worker {
    async fn send(&self, message: WorkerMessage) {
        self.outgoing.send(JoinRequest::Message(message)).await.unwrap();
    }

    async fn receive_response(&mut self) -> JoinResponse {
        self.incoming.message().await.unwrap().expect("the stream is open")
    }

    async fn receive(&mut self) -> MasterMessage {
        match self.receive_response().await {
            JoinResponse::Message(message) => message.into_inner(),
            other => panic!("{other:?}"),
        }
    }

    /// Reads messages up to the first one that `wanted` accepts.
    async fn receive_until<T>(&mut self, wanted: impl Fn(MasterMessage) -> Option<T>) -> T {
        loop {
            if let JoinResponse::Message(message) = self.receive_response().await
                && let Some(found) = wanted(message.into_inner())
            {
                return found;
            }
        }
    }
}

fn spec() -> JobSpec {
    let batch = Batch::Global(NonZeroU64::new(4).unwrap());
    JobSpec { max_workers: 3, ..JobSpec::new("mnist", "d", 1, batch) }
}

#[tokio::test]
async fn a_job_runs_from_its_first_launch_to_its_summary() {
    let job = Fixture::start().await;
    let mut worker = job.join(job.launched().await).await;
    let JoinResponse::Welcome(welcome) = worker.receive_response().await else {
        panic!("no welcome")
    };
    assert_eq!(welcome.options.training_data, "d");
    assert_eq!(worker.receive().await, MasterMessage::Describe);
    let dataset = FileList::pack([("a", 4)]);
    worker.send(WorkerMessage::Described(Ok(dataset.clone()))).await;
    assert_eq!(worker.receive().await, MasterMessage::Prepare(dataset));
    worker.send(WorkerMessage::Ready { parameters: 10 }).await;
    let generation = worker
        .receive_until(|message| match message {
            MasterMessage::Membership(membership) => Some(membership.generation),
            _ => None,
        })
        .await;
    let ledger = LedgerReport::default();
    worker.send(WorkerMessage::Formed { generation, step: 0, ledger }).await;
    let committed = Committed {
        generation,
        step: 1,
        ranges: vec![RecordRange { epoch: 0, start: 0, end: 4 }],
        loss_sum: 8.0,
        records: 4,
        ranks: vec![RankStep { records: 1, compute_us: 10, ..RankStep::default() }],
        times: StepTimes::default(),
        steps_skipped: 0,
        ..Committed::default()
    };
    worker.send(WorkerMessage::Committed(committed)).await;
    let ledger = LedgerReport { epochs_complete: 1, ..LedgerReport::default() };
    let finished = Finished {
        generation,
        step: 1,
        digest: 77,
        ledger,
        records_trained: 4,
        stopped_early: false,
        summary: Some("accuracy 1".into()),
        failure: None,
        suspended: false,
        steps_skipped: 0,
        exported: false,
        row_touches: None,
    };
    worker.send(WorkerMessage::Finished(finished)).await;
    worker
        .receive_until(|message| matches!(message, MasterMessage::Shutdown(_)).then_some(()))
        .await;
    drop(worker);
    job.let_end().await;
    let JobResult { outcome, summary } = job.ended().await;
    assert_eq!(
        (outcome, &*summary.state, summary.steps),
        (Outcome::Completed, "completed", 1),
        "{summary:?}"
    );
    assert_eq!(
        (summary.records.counted, summary.records.missing, summary.records.repeated),
        (4, 0, 0)
    );
    assert_eq!(summary.model_summary.as_deref(), Some("accuracy 1"));
    assert_eq!(summary.loss.last, Some(2.0));
}

#[tokio::test]
async fn data_that_cannot_be_used_ends_the_job_and_its_process() {
    let job = Fixture::start().await;
    let mut worker = job.join(job.launched().await).await;
    worker.receive_until(|message| matches!(message, MasterMessage::Describe).then_some(())).await;
    worker.send(WorkerMessage::Described(Err("d: no such file".into()))).await;
    worker
        .receive_until(|message| matches!(message, MasterMessage::Shutdown(_)).then_some(()))
        .await;
    drop(worker);
    job.let_end().await;
    let JobResult { outcome, summary } = job.ended().await;
    assert_eq!((outcome, &*summary.state), (Outcome::InvalidInput, "refused"));
    assert!(
        summary.error.as_ref().is_some_and(|e| e.contains("d: no such file")),
        "{:?}",
        summary.error
    );
}

#[tokio::test]
async fn a_kill_command_ends_the_job_at_once() {
    let job = Fixture::start().await;
    let _worker = job.join(job.launched().await).await;
    job.commands.send(UserCommand::Kill).await.unwrap();
    let JobResult { outcome, summary } = job.ended().await;
    assert_eq!((outcome, &*summary.state), (Outcome::Stopped, "stopped"));
}

#[tokio::test]
async fn a_stop_before_there_is_a_group_ends_the_job() {
    let job = Fixture::start().await;
    job.launched().await;
    job.commands.send(UserCommand::Stop).await.unwrap();
    let JobResult { outcome, summary } = job.ended().await;
    assert_eq!((outcome, &*summary.state), (Outcome::Stopped, "stopped"));
}

#[tokio::test]
async fn a_worker_whose_stream_ends_is_replaced_or_fails_the_job() {
    let job = Fixture::start().await;
    let worker = job.join(job.launched().await).await;
    // The process is still running, so the master kills it; its replacement does not count as a
    // failure.
    drop(worker);
    assert!(job.launched().await > 0);
    job.commands.send(UserCommand::Kill).await.unwrap();
    job.ended().await;
}

#[tokio::test]
async fn a_worker_of_an_unknown_launch_is_refused() {
    let job = Fixture::start().await;
    let launch = job.launched().await;
    let mut unknown = job.join(launch + 1000).await;
    assert_eq!(unknown.incoming.message().await.unwrap_err().code(), Code::FailedPrecondition);
    job.commands.send(UserCommand::Kill).await.unwrap();
    job.ended().await;
}

#[tokio::test]
async fn a_job_is_scaled_within_its_bounds_and_shows_it() {
    let job = Fixture::start().await;
    let launch = job.launched().await;
    let worker = job.join(launch).await;
    let mut client = job.client().await;
    let scale = |num_workers| job.with_token(ScaleRequest { num_workers });
    for out_of_bounds in [0, 4, u32::MAX] {
        let refused = client.scale(scale(out_of_bounds)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains("1 to 3 workers"), "{}", refused.message());
    }
    assert_eq!(client.scale(scale(3)).await.unwrap().into_inner().was, 1);
    let status = client.status(job.with_token(StatusRequest)).await.unwrap().into_inner();
    assert_eq!((status.job.as_str(), status.workers_desired), ("mnist", 3));
    assert_eq!(status.workers.iter().map(|w| w.pid).collect::<Vec<_>>(), [42]);
    drop(worker);
    job.commands.send(UserCommand::Kill).await.unwrap();
    job.ended().await;
}
