//! A killed master is replaced: the group keeps its processes, without another loss its generation
//! too, and every record counts exactly once; so do they when masters and workers are killed at
//! random.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::{Status, WorkerId};
use elasticdl_tests::{
    Command, JobFixture, Running, assert_end, assert_exactly_once, once_of, read_summary, send,
};
use rand::rngs::ChaCha8Rng;
use rand::seq::IteratorRandom;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::PROGRAMS;

/// A job of three workers that takes some seconds.
fn fixture() -> JobFixture {
    JobFixture {
        micros_per_record: 800,
        restart_without_checkpoint: false,
        ..JobFixture::new(PROGRAMS, 3)
    }
}

/// The job in its first steps.
fn start(fixture: &JobFixture, seed: u64) -> Running {
    let mut job = fixture.command(seed).start();
    job.wait_for_work_of(3);
    job
}

/// Waits until another master leads the group, at a later step than `before`.
fn taken_over(job: &mut Running, before: &Status) -> Status {
    job.wait_for("another master at work", |status| {
        status.state == "running" && status.members().count() == 3 && status.step > before.step
    })
}

fn workers(status: &Status) -> BTreeMap<WorkerId, u32> {
    status.workers.iter().map(|worker| (worker.worker, worker.pid)).collect()
}

#[test]
fn another_master_takes_over_the_running_group_as_it_is() {
    let fixture = fixture();
    let mut job = start(&fixture, 1);
    let before = job.status();
    job.kill_master();
    let error = job.status_error();
    assert!(error.contains("is gone") && error.contains("--resume"), "{error}");
    job.resume();
    let after = taken_over(&mut job, &before);
    assert_eq!((workers(&after), after.generation), (workers(&before), before.generation));
    assert_eq!(after.run_id, before.run_id);
    let ended = job.wait();
    ended.assert_exact("a killed master");
    assert_eq!(ended.summary().run_id, before.run_id);
    ended.assert_undisturbed(before.generation);
}

#[test]
fn a_job_that_waits_for_another_master_is_not_lost_by_the_same_command_or_by_delete() {
    let fixture = fixture();
    let mut job = start(&fixture, 1);
    let before = job.status();
    job.kill_master();
    let said = fixture.command(1).run();
    assert_eq!(said.code, Some(2), "{}", said.output);
    let job_dir = fixture.path("job").canonicalize().unwrap();
    let line = format!("elasticdl train --resume {}", job_dir.display());
    assert!(
        said.output.contains("3 workers of it still train") && said.output.contains(&line),
        "{}",
        said.output
    );
    let deleted = std::process::Command::new(PROGRAMS.elasticdl)
        .arg("delete")
        .arg(&job_dir)
        .output()
        .unwrap();
    let error = String::from_utf8(deleted.stderr).unwrap();
    assert!(deleted.status.code() == Some(1) && error.contains(&line), "{error}");
    job.resume();
    let after = taken_over(&mut job, &before);
    assert_eq!(workers(&after), workers(&before));
    job.wait().assert_exact("a second command");
}

#[test]
fn masters_may_die_one_after_the_other_and_before_they_have_taken_over() {
    for seed in 0..3 {
        let fixture = fixture();
        let mut job = start(&fixture, seed);
        let before = job.status();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..4 {
            job.kill_master();
            std::thread::sleep(Duration::from_millis(rng.random_range(0..300)));
            job.resume();
            std::thread::sleep(Duration::from_millis(rng.random_range(0..300)));
        }
        let after = taken_over(&mut job, &before);
        assert_eq!(
            (workers(&after), after.generation),
            (workers(&before), before.generation),
            "{seed}"
        );
        job.wait().assert_exact(&format!("four masters killed, seed {seed}"));
    }
}

#[test]
fn a_worker_that_dies_without_a_master_is_replaced_by_the_next_one() {
    for seed in 0..3 {
        let fixture = fixture();
        let mut job = start(&fixture, seed);
        let before = job.status();
        let (lost, pid) = workers(&before).into_iter().nth(seed as usize).unwrap();
        job.kill_master();
        send(pid, Signal::KILL);
        job.resume();
        let after = taken_over(&mut job, &before);
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
        ended.assert_exact(&format!("worker {lost} and the master killed"));
        let memberships = ended.memberships();
        assert!(memberships.iter().any(|m| m.lost == [lost]), "{memberships:?}");
    }
}

#[test]
fn a_worker_that_gets_sigterm_without_a_master_leaves_under_the_next_one() {
    let fixture = fixture();
    let mut job = start(&fixture, 1);
    let (leaver, pid) = workers(&job.status()).into_iter().nth(1).unwrap();
    job.kill_master();
    send(pid, Signal::TERM);
    job.resume();
    let ended = job.wait();
    ended.assert_exact("a leave without a master");
    let memberships = ended.memberships();
    assert!(memberships.iter().any(|m| m.left == [leaver]), "{memberships:?}");
}

#[test]
fn a_job_that_was_taken_over_is_stopped_like_any_other() {
    let fixture = fixture();
    let mut job = start(&fixture, 1);
    let before = job.status();
    job.kill_master();
    job.resume();
    taken_over(&mut job, &before);
    job.signal(Signal::TERM);
    let ended = job.wait();
    ended.assert_outcome(143, "stopped");
    let records = ended.summary().records;
    assert_eq!(records, once_of(records.expected, records.counted));
}

#[test]
fn records_are_counted_exactly_once_under_random_kills_of_master_and_workers() {
    for seed in 0..4 {
        let fixture = fixture();
        let mut job = start(&fixture, seed);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut kills = 0;
        while job.is_running() {
            let worker = job.workers().into_iter().choose(&mut rng);
            let worker = worker.filter(|_| job.makes_progress());
            match rng.random_range(0..3) {
                // The end may be decided, and the summary written, before the master is killed.
                0 if job.is_running() && !fixture.path("job/summary.json").exists() => {
                    job.kill_master();
                    kills += 1;
                    if fixture.path("job/summary.json").exists() {
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
        let summary = read_summary(&fixture.path("job")).unwrap();
        let context = format!("seed {seed}, {kills} kills");
        assert_exactly_once(&summary, &context, fixture.records, fixture.epochs);
    }
}

#[test]
fn a_job_whose_master_never_returns_leaves_no_process_and_can_be_resumed() {
    // Their state is lost with them, so the records are trained again.
    let fixture = JobFixture { restart_without_checkpoint: true, ..fixture() };
    let mut job = fixture.command(1).option("master-timeout", "1s").start();
    job.wait_for_work_of(3);
    let pids: Vec<u32> = job.workers().into_values().collect();
    job.kill_master();
    assert_end(&pids, Duration::from_secs(60));
    job.resume();
    let ended = job.wait();
    ended.assert_exact("all gone");
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
    let records = FILES.to_string();
    let program = [PROGRAMS.counting, "--records", &records, "--micros-per-record", "200"];
    let job_dir = folder.path().join("job");
    let mut job = Command::new(PROGRAMS.elasticdl, &job_dir, program)
        .option("training-data", data)
        .option("num-workers", "2")
        .option("global-batch-size", "500")
        .start();
    job.wait_for("two members at work", |status| status.members().count() == 2 && status.step > 1);
    job.kill_master();
    // The file list is stored next to the snapshot, which stays small.
    let bytes = |name: &str| std::fs::read(job_dir.join(name)).unwrap().trim_ascii_end().len();
    assert!(
        bytes("record.json") < 16 << 10 && bytes("files.zst") > 0,
        "{} bytes",
        bytes("record.json")
    );
    job.resume();
    job.wait().assert_exactly_once("15,000 files", FILES, 1);
}
