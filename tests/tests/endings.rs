//! How jobs end: by themselves, by the user's request, by failures. No process is left.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use elasticdl_tests::{Command, Ended, Running, counting_data, is_alive, send};
use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;

const RECORDS: u64 = 3000;

struct EndingFixture {
    folder: TempDir,
}

impl EndingFixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        counting_data(&folder.path().join("data"), RECORDS, 2).unwrap();
        Self { folder }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut program = vec![PathBuf::from(env!("CARGO_BIN_EXE_counting"))];
        program.extend(["--records".into(), RECORDS.to_string().into()]);
        program.extend(arguments.iter().map(PathBuf::from));
        Command::new(
            env!("CARGO_BIN_EXE_elasticdl-under-test"),
            self.folder.path().join("job"),
            program,
        )
        .option("training-data", self.folder.path().join("data"))
        .option("global-batch-size", "30")
        // Longer than a busy machine delays any worker, so that none is evicted.
        .option("worker-timeout", "10s")
    }

    /// A job that would take minutes, and the process ids of its workers.
    fn start_long(&self) -> (Running, Vec<u32>) {
        let mut job = self
            .command(&["--micros-per-record", "1000"])
            .option("num-epochs", "1000")
            .option("num-workers", "3")
            .option("master-timeout", "2s")
            .start();
        job.wait_for("three members at work", |status| {
            let ranked = status["workers"]
                .as_array()
                .map(|w| w.iter().filter(|w| w["rank"].is_u64()).count());
            ranked == Some(3) && status["step"].as_u64() > Some(3)
        });
        let pids = job.workers().into_values().collect();
        (job, pids)
    }
}

fn assert_all_end(pids: &[u32], within: Duration) {
    let deadline = Instant::now() + within;
    while pids.iter().any(|pid| is_alive(*pid)) {
        assert!(Instant::now() < deadline, "workers {pids:?} are still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn assert_stopped(ended: &Ended, code: i32) {
    assert_eq!(ended.code, Some(code), "{}", ended.output);
    assert_eq!(ended.summary["state"], "stopped", "{}", ended.output);
    let records = &ended.summary["records"];
    assert_eq!((&records["missing"], &records["repeated"]), (&json!(0), &json!(0)), "{records}");
    assert!(records["counted"].as_u64() > Some(0), "{records}");
}

#[test]
fn max_steps_is_exact() {
    for (steps, workers) in [(1, 3), (17, 2)] {
        let fixture = EndingFixture::new();
        let ended = fixture
            .command(&[])
            .option("max-steps", steps.to_string())
            .option("num-workers", workers.to_string())
            .run();
        let counted = 30 * steps;
        assert_eq!(ended.code, Some(0), "{}", ended.output);
        assert_eq!(ended.summary["steps"], steps);
        let records = json!({"expected": counted, "counted": counted, "missing": 0, "repeated": 0});
        assert_eq!(ended.summary["records"], records);
    }
}

#[test]
fn every_way_of_splitting_the_data_counts_every_record_once() {
    type Way = (&'static [&'static str], &'static [(&'static str, &'static str)]);
    let ways: [Way; 3] = [
        (&["--micro-batch", "4"], &[("num-workers", "2")]),
        (&[], &[("num-workers", "3"), ("records-per-shard", "7")]),
        (&[], &[("num-workers", "1"), ("records-per-shard", "100000"), ("seed", "9")]),
    ];
    for (arguments, options) in ways {
        let fixture = EndingFixture::new();
        let command = fixture.command(arguments).option("num-epochs", "2");
        let command =
            options.iter().fold(command, |command, (name, value)| command.option(name, value));
        command.run().assert_exactly_once(&format!("{arguments:?} {options:?}"), RECORDS, 2);
    }
}

#[test]
fn a_batch_per_worker_grows_with_the_workers() {
    let fixture = EndingFixture::new();
    let program = [
        PathBuf::from(env!("CARGO_BIN_EXE_counting")),
        "--records".into(),
        RECORDS.to_string().into(),
    ];
    let ended = Command::new(
        env!("CARGO_BIN_EXE_elasticdl-under-test"),
        fixture.folder.path().join("job"),
        program,
    )
    .option("training-data", fixture.folder.path().join("data"))
    .option("minibatch-size", "50")
    .option("min-workers", "3")
    .option("num-workers", "3")
    .run();
    ended.assert_exactly_once("50 records per worker", RECORDS, 1);
    assert_eq!(ended.summary["steps"], RECORDS / 150);
}

#[test]
fn ctrl_c_finishes_the_step_and_leaves_no_process() {
    let (job, pids) = EndingFixture::new().start_long_kept();
    job.1.signal(Signal::INT);
    let ended = job.1.wait();
    assert_stopped(&ended, 130);
    assert_all_end(&pids, Duration::from_secs(5));
}

#[test]
fn sigterm_is_like_ctrl_c() {
    let (job, pids) = EndingFixture::new().start_long_kept();
    job.1.signal(Signal::TERM);
    assert_stopped(&job.1.wait(), 143);
    assert_all_end(&pids, Duration::from_secs(5));
}

/// Workers that are stopped finish no step, so the job reports that its last step was not finished.
#[test]
fn ctrl_c_twice_ends_at_once() {
    let ((_stage, mut job), pids) = EndingFixture::new().start_long_kept();
    pids.iter().for_each(|pid| send(*pid, Signal::STOP));
    job.signal(Signal::INT);
    job.wait_for("the first", |status| status["state"] == "stopping");
    job.signal(Signal::INT);
    let ended = job.wait();
    assert_eq!(ended.code, Some(130), "{}", ended.output);
    assert!(!ended.output.contains("has not finished"), "{}", ended.output);
    assert_all_end(&pids, Duration::from_secs(5));
}

#[test]
fn workers_of_a_killed_master_end_themselves() {
    let (job, pids) = EndingFixture::new().start_long_kept();
    job.1.signal(Signal::KILL);
    let ended = job.1.wait();
    assert_eq!(ended.code, None);
    assert!(pids.iter().any(|pid| is_alive(*pid)), "workers outlive their master for a while");
    assert_all_end(&pids, Duration::from_secs(20));
}

#[test]
fn failing_code_is_reported_with_worker_and_records_and_fails_the_job() {
    let cases = [
        (["--panic-at", "1234"], "record 1234 is not to my liking"),
        (["--fail-at", "1234"], "record 1234 can't be learned"),
    ];
    for (arguments, message) in cases {
        let fixture = EndingFixture::new();
        let command = fixture
            .command(&arguments)
            .option("num-workers", "2")
            .option("max-worker-restarts", "2");
        // Both workers may be gone at once.
        let ended = command.flag("restart-without-checkpoint").run();
        assert_eq!(ended.code, Some(1), "{}", ended.output);
        assert_eq!(ended.summary["state"], "failed");
        let failed = ended.summary["failed_shards"].as_array().unwrap();
        let mut workers = BTreeSet::new();
        let mut culprits = 0;
        for shard in failed {
            assert!(shard["error"].as_str().unwrap().contains(message), "{shard}");
            workers.insert(shard["worker"].as_u64().unwrap());
            // A step's records may be several ranges; one of them holds the record in question.
            let (start, end) = (shard["start"].as_u64().unwrap(), shard["end"].as_u64().unwrap());
            let is_first_file = shard["file"].as_str().unwrap().ends_with("part-000.bin");
            culprits += usize::from(is_first_file && start <= 1234 && 1234 < end);
        }
        assert_eq!((workers.len(), culprits), (3, 3), "{failed:?}");
        assert!(ended.output.contains(message), "{}", ended.output);
    }
}

#[test]
fn a_worker_that_exits_without_a_report_counts_as_a_failure() {
    let fixture = EndingFixture::new();
    let ended = fixture
        .command(&["--exit-at", "1234"])
        .option("num-workers", "2")
        .option("max-worker-restarts", "1")
        .flag("restart-without-checkpoint")
        .run();
    assert_eq!(ended.code, Some(1), "{}", ended.output);
    let error = ended.summary["error"].as_str().unwrap();
    assert!(error.contains("exited with code 9;"), "{error}");
}

/// Replaces the program's file as a build during the job does: with a new file.
#[test]
fn a_replacement_runs_the_program_that_the_job_began_with_even_after_a_rebuild() {
    let fixture = EndingFixture::new();
    let program = fixture.folder.path().join("program");
    std::fs::copy(env!("CARGO_BIN_EXE_counting"), &program).unwrap();
    let mut job = Command::new(
        env!("CARGO_BIN_EXE_elasticdl-under-test"),
        fixture.folder.path().join("job"),
        [
            program.clone(),
            "--records".into(),
            RECORDS.to_string().into(),
            "--micros-per-record".into(),
            "300".into(),
        ],
    )
    .option("training-data", fixture.folder.path().join("data"))
    .option("global-batch-size", "30")
    .option("num-epochs", "3")
    .start();
    job.wait_for("two members at work", |status| status["step"].as_u64() > Some(3));
    std::fs::remove_file(&program).unwrap();
    std::fs::copy("/bin/false", &program).unwrap();
    send(*job.workers().values().next_back().unwrap(), Signal::KILL);
    let ended = job.wait();
    ended.assert_exactly_once("a new program", RECORDS, 3);
    assert!(ended.output.contains("the job's own copy of the program"), "{}", ended.output);
    assert!(!fixture.folder.path().join("job/program").exists(), "it is not needed any more");
    assert_eq!(ended.summary["workers"]["restarts"], 1);
}

#[test]
fn replicas_that_differ_end_the_job_with_ranks_and_step() {
    let fixture = EndingFixture::new();
    let ended = fixture
        .command(&["--drift-at", "5"])
        .option("num-workers", "2")
        .option("num-epochs", "10")
        .run();
    assert_eq!(ended.code, Some(1), "{}", ended.output);
    let error = ended.summary["error"].as_str().unwrap();
    assert!(error.contains("replicas differ at step") && error.contains("ranks [1]"), "{error}");
}

#[test]
fn an_unauthenticated_peer_with_random_bytes_changes_nothing() {
    let fixture = EndingFixture::new();
    let mut job = fixture
        .command(&["--micros-per-record", "1000"])
        .option("num-epochs", "3")
        .option("num-workers", "3")
        .start();
    job.wait_for("three members", |status| status["step"].as_u64() > Some(3));
    let ports = job.listening_ports();
    assert_eq!(ports.len(), 4, "of the master and its workers: {ports:?}");
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
    let ended = job.wait();
    ended.assert_exactly_once("strangers", RECORDS, 3);
    let causes: Vec<_> = ended.memberships().iter().map(|m| m["cause"].as_str().unwrap()).collect();
    assert_eq!(causes, ["start", "join"]);
}

impl EndingFixture {
    /// As `start_long`, and keeps the fixture's folder until the job has ended.
    fn start_long_kept(self) -> ((Self, Running), Vec<u32>) {
        let (job, pids) = self.start_long();
        ((self, job), pids)
    }
}
