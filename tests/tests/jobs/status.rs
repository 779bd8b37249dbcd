//! `elasticdl status` shows workers and the cost of a loss; watching ends with the job.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command as Process, Stdio};

use elasticdl_proto::{Cause, MembershipChange, Status, WorkerStatus};
use elasticdl_tests::{JobFixture, Running, send};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::PROGRAMS;

const RECORDS: u64 = 3000;

/// A job of three workers that trains until it is stopped, once all are members and train.
fn start() -> (TempDir, Running) {
    let fixture = JobFixture {
        records: RECORDS,
        epochs: 100_000,
        micros_per_record: 100,
        global_batch_size: 30,
        ..JobFixture::new(PROGRAMS, 3)
    };
    let mut job = fixture.command(0).start();
    job.wait_for("three members at work", |status| {
        status.step > 3 && status.members().count() == 3 && status.loss.is_some()
    });
    (fixture.folder, job)
}

fn watch(folder: &TempDir, options: &[&str]) -> Child {
    Process::new(PROGRAMS.elasticdl)
        .arg("status")
        .arg(folder.path().join("job"))
        .args(["--watch", "--interval", "50ms"])
        .args(options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_running_job_shows_its_workers_and_what_a_loss_cost() {
    let (_folder, mut job) = start();
    let status = job.status();
    assert_eq!((status.shards, status.records_expected), (None, RECORDS * 100_000), "{status:?}");
    assert!(status.workers.iter().all(|worker| worker.step.is_some()), "{:?}", status.workers);
    assert!(status.records_per_s > 0.0, "{status:?}");
    job.wait_for("what the workers use", |status| {
        let uses = |worker: &WorkerStatus| {
            worker.cpu.is_some_and(|cores| cores > 0.0) && worker.memory_bytes > Some(1 << 20)
        };
        status.workers.iter().all(uses)
    });
    let (victim, pid) = job.workers().into_iter().next_back().unwrap();
    send(pid, Signal::KILL);
    // Once all survivors have reported, the next change finds the membership final.
    let is_its_loss = |m: &&MembershipChange| m.cause == Cause::Lost && m.gap_ms.is_some();
    job.wait_for("what the loss cost", |status| status.memberships.iter().any(|m| is_its_loss(&m)));
    job.wait_for_members_without(3, &[victim]);
    let status = job.status();
    let change = status.memberships.iter().find(is_its_loss).unwrap();
    let sum: f64 = change.phases().iter().map(|(_, ms)| ms.unwrap()).sum();
    assert!((sum - change.gap_ms.unwrap()).abs() < 0.01, "{change:?}");
    assert_eq!(change.lost, [victim], "{change:?}");
    job.signal(Signal::TERM);
    // The summary has the same entry.
    assert!(job.wait().memberships().contains(change), "{change:?}");
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
    let documents: Vec<Status> = documents.iter().map(parse).collect();
    assert_eq!(documents[0].state, "running");
    let last = documents.last().unwrap();
    assert_eq!((&*last.state, last.step), ("stopped", ended.summary().steps));
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
