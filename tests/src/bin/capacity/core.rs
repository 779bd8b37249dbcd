//! Throughput of the pure core, without a network.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use elasticdl_master::job::{
    Action, Batch, Committed, ConnectionId, Event, Job, JobSpec, LaunchId, LedgerReport,
    MasterMessage, StepTimes, Time, WorkerMessage,
};
use elasticdl_proto::{FileList, Generation, RecordRange, WorkerId};
use elasticdl_tests::job_spec;

use crate::Fault;
use crate::memory::resident_bytes;

/// Records of a shard, and of one lease request.
pub(crate) const SHARD_RECORDS: u64 = 64;

/// Lease operations per second over one epoch: a request, the lease that answers it, and its
/// commit. The workers ask in turn; the group reports after each has asked once.
pub(crate) fn leases(workers: u32, shards: u32) -> f64 {
    let mut job = started(workers, u64::from(shards));
    let start = Instant::now();
    let mut operations = 0_u64;
    let mut step = 0;
    while operations < u64::from(shards) {
        let mut ranges: Vec<RecordRange> = Vec::new();
        for worker in 1..=u64::from(workers) {
            send(
                &mut job,
                worker,
                WorkerMessage::LeaseRequest { epoch: 0, records: SHARD_RECORDS },
            );
            ranges.extend(drain(&mut job));
        }
        operations += ranges.len() as u64;
        step += 1;
        let records = ranges.iter().map(RecordRange::len).sum();
        let compute_us = vec![1000; workers as usize];
        let generation = Generation(1);
        let times = StepTimes::default();
        let report = Committed {
            generation,
            step,
            ranges,
            loss_sum: 1.0,
            records,
            compute_us,
            times,
            steps_skipped: 0,
        };
        send(&mut job, 1, WorkerMessage::Committed(report));
        // Near the epoch's end, records that a commit makes available belong to the next step.
        let late = drain(&mut job);
        assert!(late.is_empty() || operations < u64::from(shards), "leases after the end");
        operations += late.len() as u64;
    }
    operations as f64 / start.elapsed().as_secs_f64()
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

/// A job whose group trains.
fn started(workers: u32, shards: u64) -> Job {
    let mut job = Job::new(spec(workers));
    connect(&mut job, 1);
    send(&mut job, 1, WorkerMessage::Described(Ok(dataset(shards))));
    (2..=u64::from(workers)).for_each(|worker| connect(&mut job, worker));
    (1..=u64::from(workers))
        .for_each(|w| send(&mut job, w, WorkerMessage::Ready { parameters: 10 }));
    let ledger = LedgerReport::default();
    send(&mut job, 1, WorkerMessage::Formed { generation: Generation(1), step: 0, ledger });
    drain(&mut job);
    job
}

fn spec(workers: u32) -> JobSpec {
    let records = NonZeroU64::new(SHARD_RECORDS).expect("it is not 0");
    JobSpec {
        records_per_shard: Some(records),
        ..job_spec("capacity", "none", workers, Batch::PerWorker(records))
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
