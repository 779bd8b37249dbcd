//! `elasticdl status` of real jobs: its output, and the end of `--watch`.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command as Process, Stdio};

use elasticdl_tests::{Command, Running, counting_data, send};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

const RECORDS: u64 = 3000;
const ELASTICDL: &str = env!("CARGO_BIN_EXE_elasticdl-under-test");

/// A job of three workers that trains until it is stopped, once all are members and train.
fn start() -> (TempDir, Running) {
    let folder = tempfile::tempdir().unwrap();
    counting_data(&folder.path().join("data"), RECORDS, 2).unwrap();
    let program =
        ["--records", &RECORDS.to_string(), "--micros-per-record", "100"].map(PathBuf::from);
    let program = std::iter::once(PathBuf::from(env!("CARGO_BIN_EXE_counting"))).chain(program);
    let mut job = Command::new(ELASTICDL, folder.path().join("job"), program)
        .option("training-data", folder.path().join("data"))
        .option("global-batch-size", "30")
        .option("records-per-shard", "100")
        .option("num-epochs", "100000")
        .option("num-workers", "3")
        .option("worker-timeout", "10s")
        .start();
    job.wait_for("three members at work", |status| {
        status["step"].as_u64() > Some(3) && members(status) == 3 && status["loss"].is_f64()
    });
    (folder, job)
}

fn members(status: &Value) -> usize {
    status["workers"]
        .as_array()
        .map_or(0, |workers| workers.iter().filter(|w| w["rank"].is_u64()).count())
}

fn watch(folder: &TempDir, options: &[&str]) -> Child {
    Process::new(ELASTICDL)
        .arg("status")
        .arg(folder.path().join("job"))
        .args(["--watch", "--interval", "50ms"])
        .args(options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_running_job_shows_its_workers_its_shards_and_what_a_loss_cost() {
    let (_folder, mut job) = start();
    let status = job.status();
    let shards = ["todo", "leased", "done"].map(|key| status["shards"][key].as_u64().unwrap());
    assert_eq!(shards.iter().sum::<u64>(), RECORDS / 100, "{status}");
    for worker in status["workers"].as_array().unwrap() {
        assert!(worker["step"].is_u64() && worker["straggler"].is_boolean(), "{worker}");
    }
    assert!(status["records_per_s"].as_f64() > Some(0.0), "{status}");
    let victim = *job.workers().values().next_back().unwrap();
    send(victim, Signal::KILL);
    // The line is logged, and the membership is final, once all survivors have reported.
    let status = job.wait_for("a line about it", |status| {
        let events = status["events"].as_array();
        events.is_some_and(|e| {
            e.iter().any(|l| l.as_str().is_some_and(|l| l.contains("(lost): step")))
        })
    });
    let records = status["memberships"].as_array().unwrap();
    let record = records.iter().find(|record| record["cause"] == "lost").unwrap().clone();
    let phases = ["detect_ms", "abort_ms", "agree_ms", "connect_ms", "state_ms", "first_step_ms"];
    let sum: f64 = phases.iter().map(|phase| record[phase].as_f64().unwrap()).sum();
    assert!((sum - record["gap_ms"].as_f64().unwrap()).abs() < 0.01, "{record}");
    assert_eq!(record["lost"].as_array().unwrap().len(), 1, "{record}");
    job.signal(Signal::TERM);
    let ended = job.wait();
    // The summary has the same entry.
    assert!(ended.summary["memberships"].as_array().unwrap().contains(&record), "{record}");
}

#[test]
fn watching_ends_with_the_job_and_shows_its_outcome() {
    let (folder, job) = start();
    let mut json = watch(&folder, &["--json"]);
    let mut documents = BufReader::new(json.stdout.take().unwrap()).lines();
    let first = documents.next().unwrap().unwrap();
    let lines = watch(&folder, &[]);
    job.signal(Signal::TERM);
    let ended = job.wait();
    let documents: Vec<String> =
        std::iter::once(first).chain(documents.map(Result::unwrap)).collect();
    let json = json.wait_with_output().unwrap();
    let lines = lines.wait_with_output().unwrap();
    assert_eq!((json.status.code(), lines.status.code()), (Some(0), Some(0)));
    let parse =
        |line: &String| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    let documents: Vec<Value> = documents.iter().map(parse).collect();
    assert_eq!(documents[0]["state"], "running");
    let last = documents.last().unwrap();
    assert_eq!((&last["state"], &last["step"]), (&"stopped".into(), &ended.summary["steps"]));
    let keys = |value: &Value| Vec::from_iter(value.as_object().unwrap().keys().cloned());
    assert!(documents.iter().all(|document| keys(document) == keys(last)));
    let lines = String::from_utf8(lines.stdout).unwrap();
    assert!(lines.lines().last().unwrap().contains("stopped after"), "{lines}");
    // A watch that starts later gets the same.
    let late = watch(&folder, &[]).wait_with_output().unwrap();
    assert_eq!(late.status.code(), Some(0));
    assert!(String::from_utf8(late.stdout).unwrap().contains("stopped after"));
}

#[test]
fn watching_waits_for_a_lost_master_for_the_requested_time() {
    let (folder, job) = start();
    let workers = job.workers();
    job.signal(Signal::KILL);
    let watched = watch(&folder, &["--master-timeout", "1s"]).wait_with_output().unwrap();
    workers.into_values().for_each(|pid| send(pid, Signal::KILL));
    assert_eq!(watched.status.code(), Some(1));
    assert!(String::from_utf8(watched.stdout).unwrap().contains("no master answers"));
}
