//! Jobs keep to the user's policies: suspension, deadlines, meanings of exit codes.

use std::time::Duration;

use elasticdl_tests::{JobFixture, Running, assert_end, once_of};

use crate::PROGRAMS;

const RECORDS: u64 = 3000;

/// A job of one epoch that takes a second for each of its three workers.
fn fixture() -> JobFixture {
    JobFixture {
        records: RECORDS,
        epochs: 1,
        global_batch_size: 30,
        ..JobFixture::new(PROGRAMS, 3)
    }
}

/// A job that would take minutes until it is hurried.
fn start_slow() -> Running {
    JobFixture { micros_per_record: 20_000, ..fixture() }.start(0)
}

#[test]
fn a_suspended_job_has_no_workers_and_continues_where_it_was() {
    let mut job = start_slow();
    job.wait_for_work_of(3);
    for _ in 0..2 {
        let before: Vec<u32> = job.workers().into_values().collect();
        job.command(&["suspend"]);
        let suspended = job.wait_for("the suspension", |status| status.state == "suspended");
        assert_eq!(suspended.workers.len(), 0);
        let newest = suspended.checkpoints.unwrap().newest.unwrap();
        assert_eq!(newest.step, suspended.step, "the checkpoint is of the last step");
        assert_end(&before, Duration::from_secs(30));
        job.command(&["resume"]);
        job.wait_for("further steps", |status| {
            status.state == "running" && status.step > suspended.step
        });
    }
    job.hurry();
    let ended = job.wait();
    ended.assert_exactly_once("suspended twice", RECORDS, 1);
    let summary = ended.summary();
    let restored = &summary.checkpoints.as_ref().unwrap().restored;
    assert_eq!(restored.iter().map(|one| one.lost_steps).collect::<Vec<_>>(), [0, 0]);
    assert_eq!(summary.workers.restarts, 0);
}

#[test]
fn a_job_that_is_suspended_outlives_its_master_and_can_be_stopped() {
    let mut job = start_slow();
    job.command(&["suspend"]);
    let suspended = job.wait_for("the suspension", |status| status.state == "suspended");
    job.kill_master();
    job.resume();
    let next = job.wait_for("the next master", |status| status.state == "suspended");
    assert_eq!(next.step, suspended.step);
    job.command(&["stop"]);
    let ended = job.wait();
    ended.assert_outcome(143, "stopped");
    assert_eq!(ended.summary().steps, suspended.step);
}

#[test]
fn a_forced_stop_waits_for_no_step() {
    // A step takes 200 s.
    let fixture = JobFixture { micros_per_record: 20_000_000, ..fixture() };
    let mut job = fixture.command(0).start();
    job.wait_for("a step that is computed", |status| {
        status.workers.iter().any(|worker| worker.state == "training")
    });
    job.command(&["stop", "--force"]);
    let ended = job.wait();
    ended.assert_outcome(143, "stopped");
    assert_eq!(ended.summary().steps, 0);
}

#[test]
fn a_job_stops_at_its_deadline_with_its_newest_state() {
    let fixture = JobFixture { micros_per_record: 20_000, ..fixture() };
    let ended = fixture.command(0).option("deadline", "4s").run();
    ended.assert_outcome(0, "stopped");
    let summary = ended.summary();
    assert_eq!(summary.stop_reason.as_deref(), Some("the deadline of 4 s has passed"));
    assert!(ended.output.contains("the deadline of 4 s has passed"), "{}", ended.output);
    // It would have taken minutes.
    let records = summary.records;
    assert_eq!(records, once_of(fixture.epochs * RECORDS, records.counted));
    assert!(records.not_trained > 0, "{records:?}");
    assert!(ended.output.contains(" not trained"), "{}", ended.output);
    let newest = summary.checkpoints.as_ref().unwrap().newest.as_ref();
    assert_eq!(newest.map(|newest| newest.step), Some(summary.steps).filter(|steps| *steps > 0));
}

#[test]
fn an_exit_code_of_the_program_may_fail_the_job_at_once() {
    let program_options = &["--exit-at", "1234"];
    let fixture = JobFixture { program_options, micros_per_record: 0, ..fixture() };
    let ended = fixture.command(0).option("on-exit", "9=fail").run();
    ended.assert_outcome(1, "failed");
    let error = ended.summary().error.clone().unwrap();
    assert!(error.contains("exited with code 9") && error.contains("--on-exit 9=fail"), "{error}");
    assert_eq!(ended.summary().workers.restarts, 0);
}
