//! Real masters, and a thousand workers that are streams of this process.

use std::collections::BTreeMap;
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
use crate::core::SHARD_RECORDS;
use crate::memory::resident_bytes;

/// Load on the master.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) workers: u32,
    pub(crate) shards: u32,
    pub(crate) operations: u64,
    pub(crate) changes: u32,
}

/// Measurements of the master.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) shards_per_s: f64,
    /// For each change: time from the message of a worker that leaves until the last of the other
    /// workers has received the membership without it.
    pub(crate) published_ms: Vec<f64>,
    /// Growth of the master's resident memory from the first connected worker to the last, per
    /// worker; includes the supervision of a process.
    pub(crate) worker_bytes: u64,
}

pub(crate) fn measure(load: Load) -> Result<Measured, Fault> {
    if u64::from(load.shards) < load.operations + u64::from(load.workers) {
        return Err("--shards must be at least --operations and --workers together".into());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let shards_per_s = runtime.block_on(async {
        let mut job = Connected::start(load, "evaluate").await?;
        process_shards(&mut job, load.operations).await
    })?;
    let (published_ms, worker_bytes) = runtime.block_on(async {
        let mut job = Connected::start(load, "train").await?;
        publish(&mut job, load.changes).await
    })?;
    Ok(Measured { shards_per_s, published_ms, worker_bytes })
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
    /// Starts the master with `elasticdl COMMAND`, and connects its workers.
    async fn start(load: Load, command: &str) -> Result<Self, Fault> {
        let folder = tempfile::tempdir()?;
        let master = Master::start(folder.path(), load, command)?;
        let target = Target::find(&folder.path().join("job")).await?;
        let (sender, mut received) = mpsc::unbounded_channel();
        let connector = Connector { target, received: sender };
        let mut workers = vec![connector.join(1).await?];
        wait_for(&mut received, 1, |message| matches!(message, MasterMessage::Describe)).await?;
        let file = ListedFile {
            path: "none".into(),
            records: u64::from(load.shards) * SHARD_RECORDS,
            version: None,
        };
        workers[0].send(WorkerMessage::Described(Ok(FileList::pack([file]))))?;
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

/// For each change, the time until all members have received it; and the memory per worker.
async fn publish(job: &mut Connected, changes: u32) -> Result<(Vec<f64>, u64), Fault> {
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
    Ok((published_ms, worker_bytes))
}

/// Shards per second: a request, the lease that answers it, and the report that the shard is done.
/// Each worker asks again when it has reported. A lease shows that the master has handled the
/// report before it.
async fn process_shards(job: &mut Connected, operations: u64) -> Result<f64, Fault> {
    let ask = || WorkerMessage::LeaseRequest { shards: 1 };
    let by_id: BTreeMap<u64, &Worker> = job.workers.iter().map(|w| (w.id, w)).collect();
    let started = Instant::now();
    for worker in &job.workers {
        worker.send(ask())?;
    }
    let mut leased = 0;
    while leased < operations + job.workers.len() as u64 {
        let received = tokio::time::timeout(TIMEOUT, job.received.recv()).await?;
        let (id, message, _) = received.ok_or("all streams ended")?;
        let MasterMessage::Lease(ranges) = message else { continue };
        let worker = by_id.get(&id).ok_or("a lease for an unknown worker")?;
        leased += ranges.len() as u64;
        for range in ranges {
            let metrics = [("loss".to_owned(), 1.0)].into();
            worker.send(WorkerMessage::ShardDone { range, metrics })?;
        }
        worker.send(ask())?;
    }
    Ok(operations as f64 / started.elapsed().as_secs_f64())
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
    fn start(folder: &Path, load: Load, command: &str) -> Result<Self, Fault> {
        let workers = load.workers.to_string();
        let records = SHARD_RECORDS.to_string();
        let mut master = Command::new(std::env::current_exe()?);
        master
            .args([command, "--local", "--quiet", "--job-name", JOB])
            .args(["--num-workers", &workers, "--max-workers", &workers])
            .args(["--minibatch-size", &records])
            // The streams of this program send no heartbeats.
            .args(["--worker-timeout", "1day", "--max-worker-restarts", "0"])
            .arg("--job-dir")
            .arg(folder.join("job"));
        if command == "train" {
            // All of them start together, however long it takes to connect them.
            let stay = load.workers.saturating_sub(load.changes).max(1).to_string();
            master.args(["--training-data", "none", "--min-workers", &stay]);
        } else {
            master.args(["--data", "none", "--model", "none", "--records-per-shard", &records]);
        }
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
/// Fewer than the number of unauthenticated connections that the master allows.
const JOINS_AT_ONCE: usize = 32;
/// Longer than any wait of this benchmark takes on any machine.
const TIMEOUT: Duration = Duration::from_secs(60);
