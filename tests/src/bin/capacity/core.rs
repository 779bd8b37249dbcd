//! Throughput of the pure core, without a network.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use elasticdl_master::job::{
    Action, Batch, ConnectionId, Event, Exit, Job, JobSpec, LaunchId, MasterMessage, Time, Work,
    WorkerMessage,
};
use elasticdl_proto::{FileList, Generation, LedgerReport, RecordRange, WorkerId};

use crate::Fault;
use crate::memory::resident_bytes;

/// Records of a shard.
pub(crate) const SHARD_RECORDS: u64 = 64;

/// Shards of an evaluate job per second: a request, the lease that answers it, and the report that
/// the shard is done. The workers take turns.
pub(crate) fn shards_per_s(workers: u32, shards: u32) -> f64 {
    let mut job = evaluating(workers, u64::from(shards));
    let start = Instant::now();
    let mut done = 0;
    for worker in (1..=u64::from(workers)).cycle() {
        send(&mut job, worker, WorkerMessage::LeaseRequest { shards: 1 });
        let Some(range) = drain(&mut job).pop() else { break };
        let metrics = [("loss".to_owned(), 1.0)].into();
        send(&mut job, worker, WorkerMessage::ShardDone { range, metrics });
        drain(&mut job);
        done += 1;
    }
    assert_eq!(done, shards, "each shard is leased and done once");
    f64::from(done) / start.elapsed().as_secs_f64()
}

/// Resident bytes per worker of the core, for 10,000 workers that have connected and have the data
/// set.
pub(crate) fn worker_bytes() -> Result<u64, Fault> {
    const WORKERS: u32 = 10_000;
    let mut job = Job::new(spec(WORKERS));
    drain(&mut job);
    connect(&mut job, 1);
    send(&mut job, 1, WorkerMessage::Described(Ok(dataset(1 << 10))));
    drain(&mut job);
    let before = resident_bytes(std::process::id())?;
    for worker in 2..=u64::from(WORKERS) {
        connect(&mut job, worker);
        drain(&mut job);
    }
    let after = resident_bytes(std::process::id())?;
    assert_eq!(job.status(Time::default()).workers.len(), WORKERS as usize);
    Ok(after.saturating_sub(before) / u64::from(WORKERS - 1))
}

/// Milliseconds from the message of a worker that leaves until the membership without it is handed
/// out for all others, in a group of so many workers: for each of `changes` changes.
pub(crate) fn change_ms(workers: u32, changes: u32) -> Vec<f64> {
    let mut job = Job::new(JobSpec { min_workers: 1, ..spec(workers) });
    connect(&mut job, 1);
    send(&mut job, 1, WorkerMessage::Described(Ok(dataset(1 << 10))));
    (2..=u64::from(workers)).for_each(|worker| connect(&mut job, worker));
    drain(&mut job);
    for worker in 1..=u64::from(workers) {
        send(&mut job, worker, WorkerMessage::Ready { parameters: 10 });
    }
    drain(&mut job);
    let mut times = Vec::new();
    for (generation, worker) in (1..=u64::from(changes)).zip((2..=u64::from(workers)).rev()) {
        let ledger = LedgerReport::default();
        let generation = Generation(generation);
        send(&mut job, 1, WorkerMessage::Formed { generation, step: 0, ledger });
        drain(&mut job);
        let start = Instant::now();
        send(&mut job, worker, WorkerMessage::Leaving);
        let mut told = 0;
        while let Some(action) = job.poll_action() {
            told += u64::from(matches!(
                action,
                Action::Send { message: MasterMessage::Membership(_), .. }
            ));
        }
        times.push(start.elapsed().as_secs_f64() * 1000.0);
        assert!(told >= worker - 1, "{told} of {worker} workers receive the new membership");
        let (worker, launch) = (WorkerId(worker), LaunchId(worker));
        job.handle(NOW, Event::Disconnected { worker });
        job.handle(NOW, Event::ProcessEnded { launch, exit: Exit::Code(0) });
    }
    times
}

/// An evaluate job whose workers are ready.
fn evaluating(workers: u32, shards: u64) -> Job {
    let work = Work::Evaluate { model: "none".into() };
    let mut job = Job::new(JobSpec { work, epochs: 1, ..spec(workers) });
    connect(&mut job, 1);
    send(&mut job, 1, WorkerMessage::Described(Ok(dataset(shards))));
    (2..=u64::from(workers)).for_each(|worker| connect(&mut job, worker));
    (1..=u64::from(workers))
        .for_each(|w| send(&mut job, w, WorkerMessage::Ready { parameters: 10 }));
    drain(&mut job);
    job
}

fn spec(workers: u32) -> JobSpec {
    let records = NonZeroU64::new(SHARD_RECORDS).expect("it is not 0");
    JobSpec {
        records_per_shard: Some(records),
        epochs: 2,
        restart_without_checkpoint: true,
        ..JobSpec::new("capacity", "none", workers, Batch::PerWorker(records))
    }
}

fn dataset(shards: u64) -> FileList {
    FileList::pack([("none", shards * SHARD_RECORDS)])
}

fn connect(job: &mut Job, i: u64) {
    let address = SocketAddr::from(([127, 0, 0, 1], 9));
    let (connection, launch) = (ConnectionId(i), LaunchId(i));
    job.handle(NOW, Event::Connected { connection, launch, address, pid: 1, resume: None });
}

fn send(job: &mut Job, worker: u64, message: WorkerMessage) {
    job.handle(NOW, Event::Message { worker: WorkerId(worker), message });
}

/// Takes all actions of the job, and returns the records that it leased.
fn drain(job: &mut Job) -> Vec<RecordRange> {
    let mut leased = Vec::new();
    while let Some(action) = job.poll_action() {
        if let Action::Send { message: MasterMessage::Lease(ranges), .. } = action {
            leased.extend(ranges);
        }
    }
    leased
}

const NOW: Time = Time(Duration::from_secs(1));
