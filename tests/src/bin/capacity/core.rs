//! The pure core, without a network.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use elasticdl_master::job::WorkerOptions;
use elasticdl_master::job::{
    Action, Batch, ConnectionId, Event, Exit, Job, JobSpec, LaunchId, MasterMessage, Time,
    WorkerMessage,
};
use elasticdl_proto::{FileList, Generation, LedgerReport, WorkerId};

use crate::Fault;
use crate::memory::resident_bytes;

/// Resident bytes per worker of the core, for 10,000 workers that have connected and have the data
/// set.
pub(crate) fn worker_bytes() -> Result<u64, Fault> {
    const WORKERS: u32 = 10_000;
    let mut job = Job::new(spec(WORKERS));
    drain(&mut job);
    connect(&mut job, 1);
    send(&mut job, 1, WorkerMessage::Described(Ok(dataset()), None));
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
    send(&mut job, 1, WorkerMessage::Described(Ok(dataset()), None));
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

fn spec(workers: u32) -> JobSpec {
    let records = NonZeroU64::new(64).expect("it is not 0");
    JobSpec {
        restart_without_checkpoint: true,
        options: WorkerOptions {
            epochs: 2,
            ..WorkerOptions::new("none", Batch::PerWorker(records))
        },
        ..JobSpec::new("capacity", "none", workers, Batch::PerWorker(records))
    }
}

fn dataset() -> FileList {
    FileList::pack([("none", 1 << 16)])
}

fn connect(job: &mut Job, i: u64) {
    let address = SocketAddr::from(([127, 0, 0, 1], 9));
    let (connection, launch) = (ConnectionId(i), LaunchId(i));
    job.handle(NOW, Event::Connected { connection, launch, address, pid: 1, resume: None });
}

fn send(job: &mut Job, worker: u64, message: WorkerMessage) {
    job.handle(NOW, Event::Message { worker: WorkerId(worker), message });
}

/// Takes all actions of the job.
fn drain(job: &mut Job) {
    while job.poll_action().is_some() {}
}

const NOW: Time = Time(Duration::from_secs(1));
