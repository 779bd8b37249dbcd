//! A real master, and a thousand workers that are streams of this process.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elasticdl_master::jobdir;
use elasticdl_proto::v1;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Streaming};
use v1::master_client::MasterClient;
use v1::master_message::Kind as Told;
use v1::worker_message::Kind as Said;

use crate::Fault;
use crate::core::SHARD_RECORDS;
use crate::memory::resident_bytes;

/// What is done to the master.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) workers: u32,
    pub(crate) shards: u32,
    pub(crate) operations: u64,
    pub(crate) changes: u32,
}

/// What it made of it.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) leases_per_s: f64,
    /// For each change: from the end of one worker's stream until the last of the others had the
    /// membership without it.
    pub(crate) told_ms: Vec<f64>,
    /// Growth of the master's resident memory from the first connected worker to the last, per
    /// worker; with what it takes to watch over a process.
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
    let (news_sender, mut news) = mpsc::unbounded_channel();
    let crowd = Crowd { target, news: news_sender };
    let mut workers = vec![crowd.join(1).await?];
    told(&mut news, 1, |told| matches!(told, Told::Describe(_))).await?;
    let file = v1::File {
        path: "none".into(),
        records: u64::from(load.shards) * SHARD_RECORDS,
        version: None,
    };
    let dataset = v1::Dataset { files: vec![file], ..v1::Dataset::default() };
    let dataset = v1::described::Outcome::Dataset(dataset);
    workers[0].say(Said::Described(v1::Described { outcome: Some(dataset) }))?;
    // Its processes are named in the order in which they are wanted, before the first worker hears
    // that the data is known.
    told(&mut news, 1, |told| matches!(told, Told::Prepare(_))).await?;
    let before = resident_bytes(master.child.id())?;
    for launches in Vec::from_iter(2..=u64::from(load.workers)).chunks(JOINS_AT_ONCE) {
        let mut joins = tokio::task::JoinSet::new();
        for &launch in launches {
            let crowd = crowd.clone();
            joins.spawn(async move { crowd.join(launch).await });
        }
        while let Some(joined) = joins.join_next().await {
            workers.push(joined??);
        }
    }
    for worker in &workers {
        worker.say(Said::Ready(v1::Ready { parameters: 10 }))?;
    }
    let mut group = Group::default();
    group.gather(&mut news, workers.len()).await?;
    let worker_bytes =
        resident_bytes(master.child.id())?.saturating_sub(before) / u64::from(load.workers - 1);
    group.form(&workers, 0, Vec::new())?;
    let leases_per_s = lease(&workers, &mut news, &mut group, load.operations).await?;
    let mut told_ms = Vec::new();
    for _ in 0..load.changes {
        let (first, last) = group.ends()?;
        let at = workers
            .iter()
            .position(|w| w.id == last && last != first)
            .ok_or("too few workers are left")?;
        let gone = workers.swap_remove(at);
        let started = Instant::now();
        gone.end();
        let heard = group.gather(&mut news, workers.len()).await?;
        told_ms.push(heard.duration_since(started).as_secs_f64() * 1000.0);
        let ledger = group.absorbed.clone();
        group.form(&workers, group.step, ledger)?;
    }
    Ok(Measured { leases_per_s, told_ms, worker_bytes })
}

/// Lease operations per second: a request, the lease that answers it, and its commit. Each worker
/// asks again when it has been answered; the lowest rank reports what all have, ten times a second.
async fn lease(
    workers: &[Worker],
    news: &mut News,
    group: &mut Group,
    operations: u64,
) -> Result<f64, Fault> {
    let ask = || Said::LeaseRequest(v1::LeaseRequest { epoch: 0, records: SHARD_RECORDS });
    let mut by_id: Vec<Option<&Worker>> = Vec::new();
    for worker in workers {
        let at = usize::try_from(worker.id)?;
        by_id.resize(by_id.len().max(at + 1), None);
        by_id[at] = Some(worker);
    }
    let started = Instant::now();
    let (mut asked, mut committed, mut reported) = (0, 0, Instant::now());
    for worker in workers {
        worker.say(ask())?;
        asked += 1;
    }
    let mut pending = Vec::new();
    while committed < operations {
        let (id, told, _) =
            tokio::time::timeout(PATIENCE, news.recv()).await?.ok_or("all streams ended")?;
        let Told::Lease(lease) = told else {
            continue;
        };
        pending.extend(lease.ranges);
        if asked < operations {
            asked += 1;
            by_id
                .get(usize::try_from(id)?)
                .copied()
                .flatten()
                .ok_or("a lease for nobody")?
                .say(ask())?;
        }
        let all = committed + pending.len() as u64 >= operations;
        if all || reported.elapsed() >= REPORT_INTERVAL {
            committed += pending.len() as u64;
            group.commit(workers, std::mem::take(&mut pending))?;
            reported = Instant::now();
        }
    }
    // The master has taken the last commit when it answers what was asked after it.
    let speaker = group.speaker(workers)?;
    speaker.say(ask())?;
    told(news, speaker.id, |told| matches!(told, Told::Lease(_))).await?;
    Ok(operations as f64 / started.elapsed().as_secs_f64())
}

/// What the group knows of itself.
#[derive(Debug, Default)]
struct Group {
    generation: u64,
    members: Vec<u64>,
    step: u64,
    absorbed: Vec<v1::Range>,
}

impl Group {
    /// Waits until `count` workers have heard of the next generation; when the last one did.
    async fn gather(&mut self, news: &mut News, count: usize) -> Result<Instant, Fault> {
        let mut heard = 0;
        let wanted = self.generation + 1;
        loop {
            let (_, told, at) =
                tokio::time::timeout(PATIENCE, news.recv()).await?.ok_or("all streams ended")?;
            let Told::Membership(membership) = told else {
                continue;
            };
            if membership.generation != wanted || membership.members.len() != count {
                return Err(format!(
                    "generation {} of {} members",
                    membership.generation,
                    membership.members.len()
                )
                .into());
            }
            heard += 1;
            if heard == count {
                self.generation = wanted;
                self.members = membership.members.iter().map(|m| m.worker).collect();
                return Ok(at);
            }
        }
    }

    fn ends(&self) -> Result<(u64, u64), Fault> {
        Ok((*self.members.first().ok_or("no members")?, *self.members.last().ok_or("no members")?))
    }

    fn speaker<'a>(&self, workers: &'a [Worker]) -> Result<&'a Worker, Fault> {
        let (first, _) = self.ends()?;
        Ok(workers.iter().find(|w| w.id == first).ok_or("the lowest rank is gone")?)
    }

    fn form(&self, workers: &[Worker], step: u64, ranges: Vec<v1::Range>) -> Result<(), Fault> {
        let ledger = Some(v1::Ledger { epochs_complete: 0, ranges, repeated_records: 0 });
        self.speaker(workers)?.say(Said::Formed(v1::Formed {
            generation: self.generation,
            step,
            ledger,
        }))
    }

    fn commit(&mut self, workers: &[Worker], ranges: Vec<v1::Range>) -> Result<(), Fault> {
        self.step += 1;
        self.absorbed.extend(&ranges);
        let records = ranges.iter().map(|range| range.end - range.start).sum();
        self.speaker(workers)?.say(Said::Committed(v1::Committed {
            generation: self.generation,
            step: self.step,
            ranges,
            loss_sum: 1.0,
            records,
            compute_us: vec![1000; self.members.len()],
            times: None,
            steps_skipped: 0,
        }))
    }
}

/// What a worker was told, and when.
type News = mpsc::UnboundedReceiver<(u64, Told, Instant)>;

async fn told(news: &mut News, worker: u64, wanted: impl Fn(&Told) -> bool) -> Result<(), Fault> {
    loop {
        let (id, told, _) =
            tokio::time::timeout(PATIENCE, news.recv()).await?.ok_or("all streams ended")?;
        if id == worker && wanted(&told) {
            return Ok(());
        }
    }
}

/// How workers come to be.
#[derive(Clone)]
struct Crowd {
    target: Target,
    news: mpsc::UnboundedSender<(u64, Told, Instant)>,
}

/// One worker's stream.
struct Worker {
    id: u64,
    outgoing: mpsc::UnboundedSender<v1::WorkerMessage>,
    reader: tokio::task::JoinHandle<()>,
}

impl Crowd {
    /// Connects as the process of `launch` would.
    async fn join(&self, launch: u64) -> Result<Worker, Fault> {
        let Target { address, bearer } = &self.target;
        let endpoint = tonic::transport::Endpoint::from_shared(address.clone())?.tcp_nodelay(true);
        let mut client =
            MasterClient::new(endpoint.connect().await?).max_decoding_message_size(64 << 20);
        let (outgoing, received) = mpsc::unbounded_channel();
        let hello = v1::Hello {
            job: JOB.into(),
            launch,
            address: "127.0.0.1:9".into(),
            pid: std::process::id(),
            resume: None,
        };
        outgoing.send(v1::WorkerMessage { kind: Some(Said::Hello(hello)) })?;
        let mut request = Request::new(UnboundedReceiverStream::new(received));
        request.metadata_mut().insert("authorization", bearer.parse()?);
        let mut incoming = client.join(request).await?.into_inner();
        let Some(v1::MasterMessage { kind: Some(Told::Welcome(welcome)) }) =
            incoming.message().await?
        else {
            return Err("no welcome".into());
        };
        let reader = tokio::spawn(read(welcome.worker, incoming, self.news.clone()));
        Ok(Worker { id: welcome.worker, outgoing, reader })
    }
}

async fn read(
    id: u64,
    mut incoming: Streaming<v1::MasterMessage>,
    news: mpsc::UnboundedSender<(u64, Told, Instant)>,
) {
    while let Some(Ok(message)) = incoming.next().await {
        if let Some(kind) = message.kind
            && news.send((id, kind, Instant::now())).is_err()
        {
            return;
        }
    }
}

impl Worker {
    fn say(&self, kind: Said) -> Result<(), Fault> {
        Ok(self.outgoing.send(v1::WorkerMessage { kind: Some(kind) })?)
    }

    /// Ends its stream, as the end of its process would.
    fn end(self) {
        self.reader.abort();
    }
}

/// Where a master is and what it wants to see.
#[derive(Clone)]
struct Target {
    address: String,
    bearer: String,
}

impl Target {
    /// Waits for the master to say where it listens.
    async fn find(job_dir: &Path) -> Result<Self, Fault> {
        let deadline = Instant::now() + PATIENCE;
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

/// A master as a process. Should this process be killed, the master ends by itself: the workers
/// that it then starts say nothing for a minute, and it may not try again.
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
            // Streams of this program do not beat.
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
        // The first asks for the end of the step, the second ends it.
        elasticdl_tests::send(pid, rustix::process::Signal::TERM);
        std::thread::sleep(Duration::from_millis(100));
        elasticdl_tests::send(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
    }
}

const JOB: &str = "capacity";
/// Fewer than the master lets wait without having said who they are.
const JOINS_AT_ONCE: usize = 32;
/// Nothing here takes that long on any machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// As workers do.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
