//! Jobs whose storage becomes unavailable for a while wait for it, and lose nothing; jobs whose
//! data is changed during training end.
//!
//! All with the options that jobs have by default.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::ffi::OsString;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use elasticdl_tests::{Command, Ended, FaultRates, Running, S3, counting_data, send};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

const ELASTICDL: &str = env!("CARGO_BIN_EXE_elasticdl-under-test");
const RECORDS: u64 = 6000;

/// A store with the data in many objects, so that workers always have some to read, and a job of
/// three workers on it.
fn job(folder: &TempDir, server: &S3) -> Command {
    let data = folder.path().join("data");
    counting_data(&data, RECORDS, 300).unwrap();
    for entry in std::fs::read_dir(&data).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        server.put(&format!("bucket/data/{name}"), std::fs::read(entry.path()).unwrap());
    }
    let never = folder.path().join("never");
    let mut program: Vec<OsString> = [
        env!("CARGO_BIN_EXE_counting"),
        "--records",
        "6000",
        "--micros-per-record",
        "2500",
        "--hurry-when",
    ]
    .map(Into::into)
    .into();
    program.push(never.into());
    Command::new(ELASTICDL, folder.path().join("job"), program)
        .option("training-data", "s3://bucket/data")
        .option("num-epochs", "1")
        .option("num-workers", "3")
        .option("global-batch-size", "48")
        .started_by([vec!["env".to_owned()], server.environment()].concat())
}

fn become_unavailable(server: &S3, for_how_long: Duration) {
    server.set_fault_rates(FaultRates { unavailable: true, ..FaultRates::default() });
    std::thread::sleep(for_how_long);
    server.set_fault_rates(FaultRates::default());
}

fn step(job: &Running) -> u64 {
    job.status()["step"].as_u64().unwrap_or(0)
}

fn times(ended: &Ended, words: &str) -> usize {
    ended.output.matches(words).count()
}

#[test]
fn a_store_that_is_unavailable_for_six_and_for_twenty_seconds_costs_no_worker_and_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let server = S3::start(FaultRates::default(), 1);
    let job = job(&folder, &server)
        .option("checkpoint-dir", "s3://bucket/checkpoints")
        .option("checkpoint-every", "20");
    let mut job = job.start();
    job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
    let before = step(&job);
    become_unavailable(&server, Duration::from_secs(6));
    job.wait_for("steps after six seconds", |status| status["step"].as_u64() > Some(before + 20));
    let before = step(&job);
    become_unavailable(&server, Duration::from_secs(20));
    let status = job.status();
    let members =
        status["workers"].as_array().unwrap().iter().filter(|w| w["rank"].is_u64()).count();
    assert_eq!(members, 3, "{status}");
    assert!(status["step"].as_u64() >= Some(before), "{status}");
    let ended = job.wait();
    ended.assert_exactly_once("20 s", RECORDS, 1);
    let workers = &ended.summary["workers"];
    assert_eq!(
        (&workers["restarts"], ended.memberships().len()),
        (&Value::from(0), 1),
        "{}",
        ended.summary
    );
    assert_eq!(ended.summary["checkpoints"]["failed"], 0, "{}", ended.summary);
    assert_eq!(times(&ended, "waits for storage: s3://bucket/"), 2, "{}", ended.output);
    assert_eq!(times(&ended, "storage answers again"), 2, "{}", ended.output);
}

#[test]
fn a_group_that_waits_for_storage_from_its_start_on_still_changes() {
    let folder = tempfile::tempdir().unwrap();
    let server = S3::start(FaultRates { unavailable: true, ..FaultRates::default() }, 1);
    let mut job = job(&folder, &server).start();
    std::thread::sleep(Duration::from_secs(2));
    server.set_fault_rates(FaultRates::default());
    job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
    server.set_fault_rates(FaultRates { unavailable: true, ..FaultRates::default() });
    // Until the prefetched data is used up.
    std::thread::sleep(Duration::from_secs(3));
    let (worker, pid) = job.members()[1];
    send(pid, Signal::KILL);
    let killed = Instant::now();
    job.wait_for("three members again, while the store is unavailable", |status| {
        let workers = status["workers"].as_array().into_iter().flatten();
        let members: Vec<_> = workers.filter(|w| w["rank"].is_u64()).collect();
        members.len() == 3 && members.iter().all(|member| member["worker"] != worker)
    });
    assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
    server.set_fault_rates(FaultRates::default());
    let ended = job.wait();
    ended.assert_exactly_once("a kill amid an outage", RECORDS, 1);
    assert_eq!(ended.summary["workers"]["restarts"], 1, "{}", ended.summary);
    assert!(ended.output.contains("waits for storage"), "{}", ended.output);
}

fn table(rows: usize) -> String {
    let mut text = "x,y,name\n".to_owned();
    for row in 0..rows {
        writeln!(text, "{row},0.5,row {row} and some more").unwrap();
    }
    text
}

#[test]
fn a_table_in_a_store_is_read_with_few_requests() {
    let folder = tempfile::tempdir().unwrap();
    let server = S3::start(FaultRates::default(), 1);
    let bytes = table(60_000).into_bytes();
    let blocks = bytes.len() as u64 / (256 << 10) + 1;
    server.put("bucket/table.csv", bytes);
    let program = [env!("CARGO_BIN_EXE_reading"), "csv"];
    let ended = Command::new(ELASTICDL, folder.path().join("job"), program)
        .option("training-data", "s3://bucket")
        .option("num-workers", "2")
        .option("global-batch-size", "256")
        .started_by([vec!["env".to_owned()], server.environment()].concat())
        .run();
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    let requests = server.requests();
    let of = |method: &str| requests.get(method).copied().unwrap_or(0);
    // The worker that lists the table knows its version.
    assert!(of("HEAD") <= 1, "{requests:?}");
    assert!(of("GET") <= 2 * blocks.div_ceil(4) + 4, "{requests:?} for {blocks} blocks");
}

#[test]
fn one_line_appended_to_a_table_ends_the_job_which_names_it() {
    use std::io::Write as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.csv");
    std::fs::write(&path, table(40_000)).unwrap();
    let program = [env!("CARGO_BIN_EXE_reading"), "csv", "300"];
    let mut job = Command::new(ELASTICDL, folder.path().join("job"), program)
        .option("training-data", &path)
        .option("num-epochs", "1")
        .option("num-workers", "2")
        .option("global-batch-size", "64")
        .start();
    job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
    let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"1,2,appended\n").unwrap();
    let ended = job.wait();
    let error = ended.summary["error"].as_str().unwrap_or_default();
    let (path, restarts) = (path.to_str().unwrap(), &ended.summary["workers"]["restarts"]);
    assert!(
        error.contains(path) && error.contains("it has changed since the job started"),
        "{}",
        ended.summary
    );
    assert_eq!(
        (&ended.summary["state"], restarts),
        (&"failed".into(), &0.into()),
        "{}",
        ended.summary
    );
    assert!(ended.summary["steps"].as_u64() > Some(3), "{}", ended.summary);
}
