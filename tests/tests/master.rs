//! The master is killed, and another one resumes the job: the group keeps its processes, and
//! without another loss its generation; every record is counted exactly once nevertheless.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use elasticdl_tests::{Command, Running, counting_data, is_alive, send};
use rand::rngs::ChaCha8Rng;
use rand::seq::IteratorRandom;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

const RECORDS: u64 = 6000;
const EPOCHS: u64 = 2;

struct MasterFixture {
    folder: TempDir,
}

impl MasterFixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        counting_data(&folder.path().join("data"), RECORDS, 3).unwrap();
        Self { folder }
    }

    /// A job of three workers that takes some seconds, in its first steps.
    fn start(&self, seed: u64, options: &[(&str, &str)]) -> Running {
        let mut job = self.command(seed, options).start();
        job.wait_for("three members at work", |status| {
            ranked(status) == 3 && status["step"].as_u64() > Some(3)
        });
        job
    }

    fn command(&self, seed: u64, options: &[(&str, &str)]) -> Command {
        let program = [
            PathBuf::from(env!("CARGO_BIN_EXE_counting")),
            "--records".into(),
            RECORDS.to_string().into(),
            "--micros-per-record".into(),
            "800".into(),
        ];
        let job_dir = self.folder.path().join("job");
        let command = Command::new(env!("CARGO_BIN_EXE_elasticdl-under-test"), job_dir, program)
            .option("training-data", self.folder.path().join("data"))
            .option("num-epochs", EPOCHS.to_string())
            .option("num-workers", "3")
            .option("global-batch-size", "48")
            .option("seed", seed.to_string())
            // Longer than a busy machine delays any worker, so that none is evicted.
            .option("worker-timeout", "10s");
        options.iter().fold(command, |command, (name, value)| command.option(name, *value))
    }
}

fn ranked(status: &Value) -> usize {
    status["workers"].as_array().into_iter().flatten().filter(|w| w["rank"].is_u64()).count()
}

/// Waits until another master leads the group, at a later step than `step`.
fn taken_over(job: &mut Running, step: u64) -> Value {
    job.wait_for("another master at work", |status| {
        status["state"] == "running" && ranked(status) == 3 && status["step"].as_u64() > Some(step)
    })
}

fn workers(status: &Value) -> BTreeMap<u64, u64> {
    let entry = |w: &Value| (w["worker"].as_u64().unwrap(), w["pid"].as_u64().unwrap());
    status["workers"].as_array().unwrap().iter().map(entry).collect()
}

#[test]
fn another_master_takes_over_the_running_group_as_it_is() {
    let fixture = MasterFixture::new();
    let mut job = fixture.start(1, &[]);
    let before = job.status();
    job.kill_master();
    let error = job.status_error();
    assert!(error.contains("is gone") && error.contains("--resume"), "{error}");
    job.resume();
    let after = taken_over(&mut job, before["step"].as_u64().unwrap());
    assert_eq!((workers(&after), &after["generation"]), (workers(&before), &before["generation"]));
    assert_eq!(after["run_id"], before["run_id"]);
    let ended = job.wait();
    ended.assert_exactly_once("a killed master", RECORDS, EPOCHS);
    assert_eq!(ended.summary["run_id"], before["run_id"]);
    assert_eq!(
        ended.summary["memberships"].as_array().unwrap().len(),
        1,
        "{}",
        ended.summary["memberships"]
    );
    assert_eq!(ended.summary["workers"]["restarts"], 0);
}

#[test]
fn a_job_that_waits_for_another_master_is_not_lost_by_the_same_command_or_by_delete() {
    let fixture = MasterFixture::new();
    let mut job = fixture.start(1, &[]);
    let before = job.status();
    job.kill_master();
    let said = fixture.command(1, &[]).run();
    assert_eq!(said.code, Some(2), "{}", said.output);
    let job_dir = fixture.folder.path().join("job").canonicalize().unwrap();
    let line = format!("elasticdl train --resume {}", job_dir.display());
    assert!(
        said.output.contains("3 workers of it still train") && said.output.contains(&line),
        "{}",
        said.output
    );
    let deleted = std::process::Command::new(env!("CARGO_BIN_EXE_elasticdl-under-test"))
        .arg("delete")
        .arg(&job_dir)
        .output()
        .unwrap();
    let error = String::from_utf8(deleted.stderr).unwrap();
    assert!(deleted.status.code() == Some(1) && error.contains(&line), "{error}");
    job.resume();
    let after = taken_over(&mut job, before["step"].as_u64().unwrap());
    assert_eq!(workers(&after), workers(&before));
    job.wait().assert_exactly_once("a second command", RECORDS, EPOCHS);
}

#[test]
fn masters_may_die_one_after_the_other_and_before_they_have_taken_over() {
    for seed in 0..3 {
        let fixture = MasterFixture::new();
        let mut job = fixture.start(seed, &[]);
        let before = job.status();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..4 {
            job.kill_master();
            std::thread::sleep(Duration::from_millis(rng.random_range(0..300)));
            job.resume();
            std::thread::sleep(Duration::from_millis(rng.random_range(0..300)));
        }
        let after = taken_over(&mut job, before["step"].as_u64().unwrap());
        assert_eq!(
            (workers(&after), &after["generation"]),
            (workers(&before), &before["generation"]),
            "{seed}"
        );
        job.wait().assert_exactly_once(
            &format!("four masters killed, seed {seed}"),
            RECORDS,
            EPOCHS,
        );
    }
}

#[test]
fn a_worker_that_dies_without_a_master_is_replaced_by_the_next_one() {
    for seed in 0..3 {
        let fixture = MasterFixture::new();
        let mut job = fixture.start(seed, &[]);
        let before = job.status();
        let (lost, pid) = workers(&before).into_iter().nth(seed as usize).unwrap();
        job.kill_master();
        send(pid as u32, Signal::KILL);
        job.resume();
        let after = taken_over(&mut job, before["step"].as_u64().unwrap());
        let (before, after) = (workers(&before), workers(&after));
        assert!(
            !after.contains_key(&lost) && after.keys().max() > before.keys().max(),
            "{seed}: {after:?}"
        );
        assert!(
            before
                .iter()
                .filter(|(id, _)| **id != lost)
                .all(|kept| after.get(kept.0) == Some(kept.1))
        );
        let ended = job.wait();
        ended.assert_exactly_once(&format!("worker {lost} and the master killed"), RECORDS, EPOCHS);
        let memberships = ended.summary["memberships"].as_array().unwrap();
        assert!(
            memberships.iter().any(|m| m["lost"] == serde_json::json!([lost])),
            "{memberships:?}"
        );
    }
}

#[test]
fn a_worker_that_gets_sigterm_without_a_master_leaves_under_the_next_one() {
    let fixture = MasterFixture::new();
    let mut job = fixture.start(1, &[]);
    let (leaver, pid) = workers(&job.status()).into_iter().nth(1).unwrap();
    job.kill_master();
    send(pid as u32, Signal::TERM);
    job.resume();
    let ended = job.wait();
    ended.assert_exactly_once("a leave without a master", RECORDS, EPOCHS);
    let memberships = ended.summary["memberships"].as_array().unwrap();
    assert!(
        memberships.iter().any(|m| m["left"] == serde_json::json!([leaver])),
        "{memberships:?}"
    );
}

#[test]
fn a_job_that_was_taken_over_is_stopped_like_any_other() {
    let fixture = MasterFixture::new();
    let mut job = fixture.start(1, &[]);
    let before = job.status();
    job.kill_master();
    job.resume();
    taken_over(&mut job, before["step"].as_u64().unwrap());
    job.signal(Signal::TERM);
    let ended = job.wait();
    assert_eq!(
        (ended.code, &ended.summary["state"]),
        (Some(143), &"stopped".into()),
        "{}",
        ended.output
    );
    let records = &ended.summary["records"];
    assert_eq!((&records["missing"], &records["repeated"]), (&0.into(), &0.into()), "{records}");
}

#[test]
fn records_are_counted_exactly_once_under_random_kills_of_master_and_workers() {
    for seed in 0..4 {
        let fixture = MasterFixture::new();
        let mut job = fixture.start(seed, &[]);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut kills = 0;
        while job.is_running() {
            let worker = job.workers().into_iter().choose(&mut rng);
            match rng.random_range(0..3) {
                // The end may be decided, and the summary written, before the master is killed.
                0 if job.is_running()
                    && !fixture.folder.path().join("job/summary.json").exists() =>
                {
                    job.kill_master();
                    kills += 1;
                    if fixture.folder.path().join("job/summary.json").exists() {
                        break;
                    }
                    if let Some((_, pid)) = worker.filter(|_| rng.random()) {
                        send(pid, Signal::KILL);
                    }
                    std::thread::sleep(Duration::from_millis(rng.random_range(0..500)));
                    job.resume();
                }
                1 => {
                    if let Some((_, pid)) = worker {
                        send(pid, Signal::KILL);
                        kills += 1;
                    }
                }
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(rng.random_range(100..900)));
        }
        let summary = std::fs::read(fixture.folder.path().join("job/summary.json")).unwrap();
        let summary: Value = serde_json::from_slice(&summary).unwrap();
        let total = RECORDS * EPOCHS;
        let expected =
            serde_json::json!({"expected": total, "counted": total, "missing": 0, "repeated": 0});
        assert_eq!(
            (&summary["records"], &summary["state"]),
            (&expected, &"completed".into()),
            "seed {seed}"
        );
        assert_eq!(
            summary["model_summary"],
            format!("{EPOCHS} {EPOCHS} {total}"),
            "seed {seed}, {kills} kills"
        );
    }
}

#[test]
fn a_job_whose_master_never_returns_leaves_no_process_and_can_be_resumed() {
    let fixture = MasterFixture::new();
    let mut job = fixture.start(1, &[("master-timeout", "1s")]);
    let pids: Vec<u32> = job.workers().into_values().collect();
    job.kill_master();
    let deadline = Instant::now() + Duration::from_secs(60);
    while pids.iter().any(|pid| is_alive(*pid)) {
        assert!(Instant::now() < deadline, "workers {pids:?} are still there");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Their state is lost with them, so the records are trained again.
    job.resume();
    let ended = job.wait();
    ended.assert_exactly_once("all gone", RECORDS, EPOCHS);
}

#[test]
fn a_data_set_of_fifteen_thousand_files_survives_its_master() {
    const FILES: u64 = 15_000;
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    std::fs::create_dir(&data).unwrap();
    for i in 0..FILES {
        std::fs::write(data.join(format!("part-{i:090}.bin")), i.to_le_bytes()).unwrap();
    }
    let program = [
        PathBuf::from(env!("CARGO_BIN_EXE_counting")),
        "--records".into(),
        FILES.to_string().into(),
        "--micros-per-record".into(),
        "200".into(),
    ];
    let job_dir = folder.path().join("job");
    let mut job = Command::new(env!("CARGO_BIN_EXE_elasticdl-under-test"), &job_dir, program)
        .option("training-data", data)
        .option("num-workers", "2")
        .option("global-batch-size", "500")
        .start();
    job.wait_for("two members at work", |status| {
        ranked(status) == 2 && status["step"].as_u64() > Some(1)
    });
    job.kill_master();
    // The file list is stored next to the snapshot, which stays small.
    let bytes = |name: &str| std::fs::metadata(job_dir.join(name)).unwrap().len();
    assert!(
        bytes("record.json") < 16 << 10 && bytes("files.zst") > 0,
        "{} bytes",
        bytes("record.json")
    );
    job.resume();
    job.wait().assert_exactly_once("15,000 files", FILES, 1);
}
