//! A real master, and a thousand workers that are streams of this process.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elasticdl_master::jobdir;
use elasticdl_proto::wire::master_client::MasterClient;
use elasticdl_proto::wire::{JoinRequest, JoinResponse};
use elasticdl_proto::{
    Committed, FileList, Generation, Hello, LaunchId, LedgerReport, ListedFile, MasterMessage,
    RecordRange, StepTimes, WorkerMessage,
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
    pub(crate) leases_per_s: f64,
    /// For each change: time from the end of one worker's stream until the last of the other
    /// workers has received the membership without it.
    pub(crate) published_ms: Vec<f64>,
    /// Growth of the master's resident memory from the first connected worker to the last, per
    /// worker; includes the supervision of a process.
    pub(crate) worker_bytes: u64,
}

pub(crate) fn measure(load: Load) -> Result<Measured, Fault> {
    let folder = tempfile::tempdir()?;
    let master = Master::start(folder.path(), load)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(drive(&master, &folder.path().join("job"), load))
}

async fn drive(master: &Master, job_dir: &Path, load: Load) -> Result<Measured, Fault> {
    let target = Target::find(job_dir).await?;
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
    let before = resident_bytes(master.child.id())?;
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
    let mut group = Group::default();
    group.gather(&mut received, workers.len()).await?;
    let worker_bytes =
        resident_bytes(master.child.id())?.saturating_sub(before) / u64::from(load.workers - 1);
    group.form(&workers, 0, Vec::new())?;
    let leases_per_s = lease(&workers, &mut received, &mut group, load.operations).await?;
    let mut published_ms = Vec::new();
    for _ in 0..load.changes {
        let (first, last) = group.ends()?;
        let at = workers
            .iter()
            .position(|w| w.id == last && last != first)
            .ok_or("too few workers are left")?;
        let gone = workers.swap_remove(at);
        let started = Instant::now();
        gone.end();
        let last_received = group.gather(&mut received, workers.len()).await?;
        published_ms.push(last_received.duration_since(started).as_secs_f64() * 1000.0);
        let ledger = group.absorbed.clone();
        group.form(&workers, group.step, ledger)?;
    }
    Ok(Measured { leases_per_s, published_ms, worker_bytes })
}

/// Lease operations per second: a request, the lease that answers it, and its commit. Each worker
/// asks again when it has been answered; the lowest rank reports for all of them ten times a
/// second.
async fn lease(
    workers: &[Worker],
    received: &mut Received,
    group: &mut Group,
    operations: u64,
) -> Result<f64, Fault> {
    let ask = || WorkerMessage::LeaseRequest { epoch: 0, records: SHARD_RECORDS };
    let mut by_id: Vec<Option<&Worker>> = Vec::new();
    for worker in workers {
        let at = usize::try_from(worker.id)?;
        by_id.resize(by_id.len().max(at + 1), None);
        by_id[at] = Some(worker);
    }
    let started = Instant::now();
    let (mut asked, mut committed, mut reported) = (0, 0, Instant::now());
    for worker in workers {
        worker.send(ask())?;
        asked += 1;
    }
    let mut pending = Vec::new();
    while committed < operations {
        let (id, message, _) =
            tokio::time::timeout(TIMEOUT, received.recv()).await?.ok_or("all streams ended")?;
        let MasterMessage::Lease(ranges) = message else {
            continue;
        };
        pending.extend(ranges);
        if asked < operations {
            asked += 1;
            by_id
                .get(usize::try_from(id)?)
                .copied()
                .flatten()
                .ok_or("a lease for an unknown worker")?
                .send(ask())?;
        }
        let all = committed + pending.len() as u64 >= operations;
        if all || reported.elapsed() >= REPORT_INTERVAL {
            committed += pending.len() as u64;
            group.commit(workers, std::mem::take(&mut pending))?;
            reported = Instant::now();
        }
    }
    // The master has handled the last commit when it answers a request that was sent after it.
    let reporter = group.reporter(workers)?;
    reporter.send(ask())?;
    wait_for(received, reporter.id, |message| matches!(message, MasterMessage::Lease(_))).await?;
    Ok(operations as f64 / started.elapsed().as_secs_f64())
}

/// State of the group.
#[derive(Debug, Default)]
struct Group {
    generation: u64,
    members: Vec<u64>,
    step: u64,
    absorbed: Vec<RecordRange>,
}

impl Group {
    /// Waits until `count` workers have received the next generation, and returns the time at which
    /// the last one did.
    async fn gather(&mut self, received: &mut Received, count: usize) -> Result<Instant, Fault> {
        let mut count_received = 0;
        let wanted = self.generation + 1;
        loop {
            let (_, message, at) =
                tokio::time::timeout(TIMEOUT, received.recv()).await?.ok_or("all streams ended")?;
            let MasterMessage::Membership(membership) = message else {
                continue;
            };
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

    fn reporter<'a>(&self, workers: &'a [Worker]) -> Result<&'a Worker, Fault> {
        let (first, _) = self.ends()?;
        Ok(workers.iter().find(|w| w.id == first).ok_or("the lowest rank is gone")?)
    }

    fn form(&self, workers: &[Worker], step: u64, ranges: Vec<RecordRange>) -> Result<(), Fault> {
        let ledger = LedgerReport { epochs_complete: 0, ranges, repeated: 0 };
        let generation = Generation(self.generation);
        self.reporter(workers)?.send(WorkerMessage::Formed { generation, step, ledger })
    }

    fn commit(&mut self, workers: &[Worker], ranges: Vec<RecordRange>) -> Result<(), Fault> {
        self.step += 1;
        self.absorbed.extend(&ranges);
        let records = ranges.iter().map(RecordRange::len).sum();
        self.reporter(workers)?.send(WorkerMessage::Committed(Committed {
            generation: Generation(self.generation),
            step: self.step,
            ranges,
            loss_sum: 1.0,
            records,
            compute_us: vec![1000; self.members.len()],
            times: StepTimes::default(),
            steps_skipped: 0,
        }))
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
        // All of them start together, however long it takes to connect them.
        let stay = load.workers.saturating_sub(load.changes).max(1).to_string();
        let records = SHARD_RECORDS.to_string();
        let child = Command::new(std::env::current_exe()?)
            .args(["train", "--local", "--quiet", "--job-name", JOB, "--training-data", "none"])
            .args(["--num-workers", &workers, "--max-workers", &workers, "--min-workers", &stay])
            .args([
                "--minibatch-size",
                &records,
                "--records-per-shard",
                &records,
                "--num-epochs",
                "2",
            ])
            // The streams of this program send no heartbeats.
            .args(["--worker-timeout", "1day", "--max-worker-restarts", "0"])
            .arg("--job-dir")
            .arg(folder.join("job"))
            .args(["--", "sleep", "600"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
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
/// The interval of real workers.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
