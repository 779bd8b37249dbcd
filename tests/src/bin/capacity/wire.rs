//! Real masters, and a thousand workers that are streams of this process.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elasticdl_master::jobdir;
use elasticdl_proto::wire::master_client::MasterClient;
use elasticdl_proto::wire::{JoinRequest, JoinResponse};
use elasticdl_proto::{
    FileList, Generation, Hello, LaunchId, LedgerReport, ListedFile, MasterMessage, WorkerId,
    WorkerMessage,
};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Streaming};

use crate::Fault;
use crate::memory::resident_bytes;

/// Load on the master.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) workers: u32,
    pub(crate) changes: u32,
}

/// Measurements of the master.
#[derive(Debug)]
pub(crate) struct Measured {
    /// For each change: time from the message of a worker that leaves until the last of the other
    /// workers has received the membership without it.
    pub(crate) published_ms: Vec<f64>,
    /// Growth of the master's resident memory from the first connected worker to the last, per
    /// worker; includes the supervision of a process.
    pub(crate) worker_bytes: u64,
}

pub(crate) fn measure(load: Load) -> Result<Measured, Fault> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut job = Connected::start(load).await?;
        publish(&mut job, load.changes).await
    })
}

/// A master and its workers, which are ready.
struct Connected {
    /// Dropped before the folder.
    master: Master,
    _folder: tempfile::TempDir,
    workers: Vec<Worker>,
    received: Received,
    /// The master's resident memory when one worker was connected.
    bytes_of_first: u64,
}

impl Connected {
    /// Starts the master, and connects its workers.
    async fn start(load: Load) -> Result<Self, Fault> {
        let folder = tempfile::tempdir()?;
        let master = Master::start(folder.path(), load)?;
        let target = Target::find(&folder.path().join("job")).await?;
        let (sender, mut received) = mpsc::unbounded_channel();
        let connector = Connector { target, received: sender };
        let mut workers = vec![connector.join(1).await?];
        wait_for(&mut received, 1, |message| matches!(message, MasterMessage::Describe)).await?;
        let file = ListedFile { path: "none".into(), records: RECORDS, version: None };
        workers[0].send(WorkerMessage::Described(Ok(FileList::pack([file])), None))?;
        // The launches are started in the order of their ids, before the first worker receives the
        // data set.
        wait_for(&mut received, 1, |message| matches!(message, MasterMessage::Prepare(_))).await?;
        let bytes_of_first = resident_bytes(master.child.id())?;
        for launches in Vec::from_iter(2..=u64::from(load.workers)).chunks(JOINS_AT_ONCE) {
            let mut joins = tokio::task::JoinSet::new();
            for &launch in launches {
                let connector = connector.clone();
                joins.spawn(async move { connector.join(launch).await });
            }
            while let Some(joined) = joins.join_next().await {
                workers.push(joined??);
            }
        }
        for worker in &workers {
            worker.send(WorkerMessage::Ready { parameters: 10 })?;
        }
        Ok(Self { master, _folder: folder, workers, received, bytes_of_first })
    }

    /// Growth of the master's resident memory since one worker was connected, per worker.
    fn worker_bytes(&self) -> Result<u64, Fault> {
        let grown = resident_bytes(self.master.child.id())?.saturating_sub(self.bytes_of_first);
        Ok(grown / (self.workers.len() as u64 - 1))
    }
}

/// Changes the membership, and measures when all members have received it.
async fn publish(job: &mut Connected, changes: u32) -> Result<Measured, Fault> {
    let mut group = Group::default();
    group.gather(&mut job.received, job.workers.len()).await?;
    let worker_bytes = job.worker_bytes()?;
    let Connected { workers, received, .. } = job;
    group.form(workers)?;
    let mut published_ms = Vec::new();
    for _ in 0..changes {
        let (first, last) = group.ends()?;
        let at = workers
            .iter()
            .position(|w| w.id == last && last != first)
            .ok_or("too few workers are left")?;
        let gone = workers.swap_remove(at);
        let started = Instant::now();
        gone.send(WorkerMessage::Leaving)?;
        let last_received = group.gather(received, workers.len()).await?;
        published_ms.push(last_received.duration_since(started).as_secs_f64() * 1000.0);
        gone.end();
        group.form(workers)?;
    }
    Ok(Measured { published_ms, worker_bytes })
}

/// State of the group.
#[derive(Debug, Default)]
struct Group {
    generation: u64,
    members: Vec<u64>,
}

impl Group {
    /// Waits until `count` workers have received the next generation, and returns the time at which
    /// the last one did.
    async fn gather(&mut self, received: &mut Received, count: usize) -> Result<Instant, Fault> {
        let mut count_received = 0;
        let wanted = self.generation + 1;
        loop {
            let (worker, message, at) =
                tokio::time::timeout(TIMEOUT, received.recv()).await?.ok_or("all streams ended")?;
            let MasterMessage::Membership(membership) = message else {
                continue;
            };
            // The worker that leaves receives it too.
            if membership.rank_of(WorkerId(worker)).is_none() {
                continue;
            }
            if membership.generation.0 != wanted || membership.members.len() != count {
                return Err(format!(
                    "generation {} of {} members",
                    membership.generation,
                    membership.members.len()
                )
                .into());
            }
            count_received += 1;
            if count_received == count {
                self.generation = wanted;
                self.members = membership.members.iter().map(|(id, _)| id.0).collect();
                return Ok(at);
            }
        }
    }

    fn ends(&self) -> Result<(u64, u64), Fault> {
        Ok((*self.members.first().ok_or("no members")?, *self.members.last().ok_or("no members")?))
    }

    /// Reports the state of the new group, as its lowest rank.
    fn form(&self, workers: &[Worker]) -> Result<(), Fault> {
        let (first, _) = self.ends()?;
        let reporter = workers.iter().find(|w| w.id == first).ok_or("the lowest rank is gone")?;
        let (generation, ledger) = (Generation(self.generation), LedgerReport::default());
        reporter.send(WorkerMessage::Formed { generation, step: 0, ledger })
    }
}

/// Messages to workers, with the worker and the time of arrival.
type Received = mpsc::UnboundedReceiver<(u64, MasterMessage, Instant)>;

async fn wait_for(
    received: &mut Received,
    worker: u64,
    wanted: impl Fn(&MasterMessage) -> bool,
) -> Result<(), Fault> {
    loop {
        let (id, message, _) =
            tokio::time::timeout(TIMEOUT, received.recv()).await?.ok_or("all streams ended")?;
        if id == worker && wanted(&message) {
            return Ok(());
        }
    }
}

/// Connects workers.
#[derive(Clone)]
struct Connector {
    target: Target,
    received: mpsc::UnboundedSender<(u64, MasterMessage, Instant)>,
}

/// One worker's stream.
struct Worker {
    id: u64,
    outgoing: mpsc::UnboundedSender<JoinRequest>,
    reader: tokio::task::JoinHandle<()>,
}

impl Connector {
    /// Connects as the process of `launch` would.
    async fn join(&self, launch: u64) -> Result<Worker, Fault> {
        let Target { address, bearer } = &self.target;
        let endpoint = tonic::transport::Endpoint::from_shared(address.clone())?.tcp_nodelay(true);
        let mut client =
            MasterClient::new(endpoint.connect().await?).max_decoding_message_size(64 << 20);
        let (outgoing, received) = mpsc::unbounded_channel();
        let hello = Hello {
            job: JOB.into(),
            launch: LaunchId(launch),
            address: "127.0.0.1:9".parse()?,
            pid: std::process::id(),
            resume: None,
            incarnation: 0,
            location: Default::default(),
        };
        outgoing.send(JoinRequest::Hello(Box::new(hello)))?;
        let mut request = Request::new(UnboundedReceiverStream::new(received));
        request.metadata_mut().insert("authorization", bearer.parse()?);
        let mut incoming = client.join(request).await?.into_inner();
        let Some(JoinResponse::Welcome(welcome)) = incoming.message().await? else {
            return Err("no welcome".into());
        };
        let id = welcome.worker.0;
        let reader = tokio::spawn(read(id, incoming, self.received.clone()));
        Ok(Worker { id, outgoing, reader })
    }
}

async fn read(
    id: u64,
    mut incoming: Streaming<JoinResponse>,
    received: mpsc::UnboundedSender<(u64, MasterMessage, Instant)>,
) {
    while let Some(Ok(response)) = incoming.next().await {
        if let JoinResponse::Message(message) = response
            && received.send((id, message.into_inner(), Instant::now())).is_err()
        {
            return;
        }
    }
}

impl Worker {
    fn send(&self, message: WorkerMessage) -> Result<(), Fault> {
        Ok(self.outgoing.send(JoinRequest::Message(message))?)
    }

    /// Ends the stream, as the end of the worker's process would.
    fn end(self) {
        self.reader.abort();
    }
}

/// Address and token of a master.
#[derive(Clone)]
struct Target {
    address: String,
    bearer: String,
}

impl Target {
    /// Waits until the master publishes its address.
    async fn find(job_dir: &Path) -> Result<Self, Fault> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match jobdir::look_up(job_dir) {
                Ok((endpoint, token)) => {
                    let address = format!("http://{}", endpoint.address);
                    return Ok(Self { address, bearer: token.to_bearer() });
                }
                Err(error) if Instant::now() >= deadline => return Err(error.into()),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }
}

/// A master as a process. If this process is killed, the master ends by itself: the workers that it
/// then starts stay silent for a minute, and it may not restart them.
struct Master {
    child: Child,
}

impl Master {
    fn start(folder: &Path, load: Load) -> Result<Self, Fault> {
        let workers = load.workers.to_string();
        let mut master = Command::new(std::env::current_exe()?);
        // All of them start together, however long it takes to connect them.
        let stay = load.workers.saturating_sub(load.changes).max(1).to_string();
        master
            .args(["train", "--local", "--quiet", "--job-name", JOB, "--training-data", "none"])
            .args(["--num-workers", &workers, "--max-workers", &workers, "--min-workers", &stay])
            // The streams of this program send no heartbeats.
            .args(["--worker-timeout", "1day", "--max-worker-restarts", "0"])
            .arg("--job-dir")
            .arg(folder.join("job"));
        let program = ["--", "sleep", "600"];
        let child = master.args(program).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        Ok(Self { child })
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        let pid = self.child.id();
        // The first signal requests the end after the step, the second one ends the step.
        elasticdl_tests::send(pid, rustix::process::Signal::TERM);
        std::thread::sleep(Duration::from_millis(100));
        elasticdl_tests::send(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
    }
}

const JOB: &str = "capacity";
/// Records of the data set, of which none is trained.
const RECORDS: u64 = 1 << 26;
/// Fewer than the number of unauthenticated connections that the master allows.
const JOINS_AT_ONCE: usize = 32;
/// Longer than any wait of this benchmark takes on any machine.
const TIMEOUT: Duration = Duration::from_secs(60);
