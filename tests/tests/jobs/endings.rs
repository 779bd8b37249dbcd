//! No process outlives its job, however it ends: by itself, by the user's request, by a failure,
//! which is named.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use elasticdl_proto::{Cause, FailedShard};
use elasticdl_tests::{
    Command, Ended, JobFixture, Running, assert_end, each_once, is_alive, once_of, send,
};
use rustix::process::Signal;

use crate::PROGRAMS;

const RECORDS: u64 = 3000;

/// A short job: one epoch, without delays.
fn fixture(num_workers: u32) -> JobFixture {
    JobFixture {
        records: RECORDS,
        files: 2,
        epochs: 1,
        micros_per_record: 0,
        global_batch_size: 30,
        restart_without_checkpoint: false,
        ..JobFixture::new(PROGRAMS, num_workers)
    }
}

/// A job that would take minutes, and the process ids of its workers.
fn start_long() -> (Running, Vec<u32>) {
    let fixture = JobFixture { epochs: 1000, micros_per_record: 1000, ..fixture(3) };
    let job = fixture.command(0).option("master-timeout", "2s").start();
    let mut job = job.keeping(fixture.folder);
    job.wait_for_work_of(3);
    let pids = job.workers().into_values().collect();
    (job, pids)
}

fn assert_stopped(ended: &Ended, code: i32) {
    ended.assert_outcome(code, "stopped");
    let records = ended.summary().records;
    assert_eq!(records, once_of(1000 * RECORDS, records.counted));
    assert!(records.counted > 0, "{records:?}");
}

#[test]
fn max_steps_is_exact() {
    for (steps, workers) in [(1, 3), (17, 2)] {
        let ended = fixture(workers).command(0).option("max-steps", steps.to_string()).run();
        assert_eq!(ended.code, Some(0), "{}", ended.output);
        let summary = ended.summary();
        assert_eq!((summary.steps, summary.records), (steps, each_once(30 * steps)));
    }
}

#[test]
fn every_way_of_splitting_the_data_counts_every_record_once() {
    let split = |num_workers, program_options, seed, shuffle: &str| {
        let fixture = JobFixture { epochs: 2, program_options, ..fixture(num_workers) };
        let context = format!("{num_workers} workers, --shuffle {shuffle}");
        fixture
            .command(seed)
            .option("shuffle", shuffle)
            .run()
            .assert_exactly_once(&context, RECORDS, 2);
    };
    split(2, &["--micro-batch", "4"], 0, "record");
    split(3, &[], 0, "block");
    split(1, &[], 9, "none");
}

#[test]
fn a_batch_per_worker_grows_with_the_workers() {
    let fixture = fixture(3);
    let program = [PROGRAMS.counting, "--records", &RECORDS.to_string()];
    let ended = Command::new(PROGRAMS.elasticdl, fixture.path("job"), program)
        .option("training-data", fixture.data())
        .option("minibatch-size", "50")
        .option("min-workers", "3")
        .option("num-workers", "3")
        .run();
    ended.assert_exactly_once("50 records per worker", RECORDS, 1);
    assert_eq!(ended.summary().steps, RECORDS / 150);
}

#[test]
fn ctrl_c_finishes_the_step_and_leaves_no_process() {
    let (job, pids) = start_long();
    job.signal(Signal::INT);
    assert_stopped(&job.wait(), 130);
    assert_end(&pids, Duration::from_secs(5));
}

#[test]
fn sigterm_is_like_ctrl_c() {
    let (job, pids) = start_long();
    job.signal(Signal::TERM);
    assert_stopped(&job.wait(), 143);
    assert_end(&pids, Duration::from_secs(5));
}

/// Workers that are stopped finish no step, so the first signal alone does not end the job. Nor do
/// they write a checkpoint: the state is lost, which is a failure whatever the signal.
#[test]
fn ctrl_c_twice_ends_at_once() {
    let (mut job, pids) = start_long();
    pids.iter().for_each(|pid| send(*pid, Signal::STOP));
    job.signal(Signal::INT);
    job.wait_for("the first", |status| status.state == "stopping");
    // Signals within 2 s are one request.
    std::thread::sleep(Duration::from_secs(2));
    job.signal(Signal::INT);
    job.wait().assert_outcome(1, "stopped");
    assert_end(&pids, Duration::from_secs(5));
}

#[test]
fn workers_of_a_killed_master_end_themselves() {
    let (job, pids) = start_long();
    job.signal(Signal::KILL);
    assert_eq!(job.wait().code, None);
    assert!(pids.iter().any(|pid| is_alive(*pid)), "workers outlive their master for a while");
    assert_end(&pids, Duration::from_secs(20));
}

#[test]
fn failing_code_is_reported_with_worker_and_records_and_fails_the_job() {
    let cases: [(&[&str], &str); 2] = [
        (&["--panic-at", "1234"], "record 1234 is not to my liking"),
        (&["--fail-at", "1234"], "record 1234 can't be learned"),
    ];
    for (program_options, message) in cases {
        // Both workers may be gone at once.
        let fixture =
            JobFixture { program_options, restart_without_checkpoint: true, ..fixture(2) };
        let ended = fixture.command(0).option("max-worker-restarts", "2").run();
        ended.assert_outcome(1, "failed");
        let failed = &ended.summary().failed_shards;
        assert!(failed.iter().all(|shard| shard.error.contains(message)), "{failed:?}");
        let workers = BTreeSet::from_iter(failed.iter().map(|shard| shard.worker));
        // A step's records may be several ranges; one of them holds the record in question.
        let holds_it = |shard: &&FailedShard| {
            shard.file.ends_with("part-000.bin") && (shard.start..shard.end).contains(&1234)
        };
        let culprits = failed.iter().filter(holds_it).count();
        assert_eq!((workers.len(), culprits), (3, 3), "{failed:?}");
        assert!(ended.output.contains(message), "{}", ended.output);
    }
}

#[test]
fn a_worker_that_exits_without_a_report_counts_as_a_failure() {
    let fixture = JobFixture {
        program_options: &["--exit-at", "1234"],
        restart_without_checkpoint: true,
        ..fixture(2)
    };
    let ended = fixture.command(0).option("max-worker-restarts", "1").run();
    ended.assert_outcome(1, "failed");
    let error = ended.summary().error.as_ref().unwrap();
    assert!(error.contains("exited with code 9;"), "{error}");
}

/// Replaces the program's file as a build during the job does: with a new file.
#[test]
fn a_replacement_runs_the_program_that_the_job_began_with_even_after_a_rebuild() {
    let fixture = fixture(2);
    let program = fixture.path("program");
    std::fs::copy(PROGRAMS.counting, &program).unwrap();
    let arguments = ["--records", &RECORDS.to_string(), "--micros-per-record", "300"];
    let words = [&[program.as_os_str()][..], &arguments.map(OsStr::new)].concat();
    let mut job = Command::new(PROGRAMS.elasticdl, fixture.path("job"), words)
        .option("training-data", fixture.data())
        .option("global-batch-size", "30")
        .option("num-epochs", "3")
        .start();
    job.wait_for_first_steps();
    std::fs::remove_file(&program).unwrap();
    std::fs::copy("/bin/false", &program).unwrap();
    send(*job.workers().values().next_back().unwrap(), Signal::KILL);
    let ended = job.wait();
    ended.assert_exactly_once("a new program", RECORDS, 3);
    assert!(ended.output.contains("the job's own copy of the program"), "{}", ended.output);
    assert!(!fixture.path("job/program").exists(), "it is not needed any more");
    assert_eq!(ended.summary().workers.restarts, 1);
}

#[test]
fn an_unauthenticated_peer_with_random_bytes_changes_nothing() {
    // Minutes, which a busy machine does not use up before the test is done; see `hurry` below.
    let fixture = JobFixture { epochs: 3, micros_per_record: 50_000, ..fixture(3) };
    let mut job = fixture.start(0);
    let ports = job.listening_ports();
    assert_eq!(ports.len(), 5, "of the master, its dashboard and its workers: {ports:?}");
    for port in ports {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        for round in 0..20_u8 {
            let mut stream = TcpStream::connect(address).unwrap();
            let bytes: Vec<u8> = (0..2000_u32)
                .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 ^ round)
                .collect();
            // The other side may close the connection meanwhile.
            let _ = stream.write_all(&bytes);
        }
    }
    // All ports still accept connections of the job's processes.
    job.scale(4);
    job.wait_for_members(4);
    job.hurry();
    let ended = job.wait();
    ended.assert_exactly_once("strangers", RECORDS, 3);
    assert_eq!(ended.causes(), [Cause::Start, Cause::Join]);
}

#[test]
fn a_master_whose_output_is_a_full_pipe_trains_and_ends_by_a_signal() {
    let fixture = fixture(2);
    let fifo = fixture.path("fifo");
    // A pipe of 64 KiB without a byte left, and with a reader that never reads.
    let fill = "mkfifo $0 && exec 3<>$0 && dd bs=4096 count=16 if=/dev/zero of=$0 \
                oflag=nonblock && exec \"$@\" > $0 2>&1";
    let starter = ["/bin/sh".as_ref(), "-c".as_ref(), fill.as_ref(), fifo.as_os_str()];
    let mut job = fixture.command(0).started_by(starter).start();
    let summary = fixture.path("job").join("summary.json");
    let limit = Instant::now() + Duration::from_secs(120);
    while !summary.exists() {
        assert!(Instant::now() < limit, "{:?}", job.try_status());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(job.is_running(), "it waits for a reader");
    // The first signals may be those of a job that is about to end.
    while job.is_running() {
        assert!(Instant::now() < limit, "no signal ends it");
        job.signal(Signal::TERM);
        std::thread::sleep(Duration::from_millis(200));
    }
    let ended = job.wait();
    assert_eq!((ended.code, ended.summary().state.to_string()), (Some(143), "completed".into()));
}
