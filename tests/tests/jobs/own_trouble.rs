//! A worker's own trouble ends no job: no file descriptors, a hang, a hang while the job stops, a
//! kill at the beginning, an end without joining, data that it may no longer read; if no worker
//! may, the job ends with its state.

use elasticdl_proto::Cause;
use elasticdl_tests::{JobFixture, exported_counts};
use rustix::process::Signal;

use crate::PROGRAMS;

#[test]
fn a_worker_whose_trainer_hangs_logs_its_stacks_and_is_replaced() {
    let fixture =
        JobFixture { program_options: &["--hang-at", "3000"], ..JobFixture::new(PROGRAMS, 2) };
    let ended = fixture.command(0).option("step-timeout", "2s").run();
    ended.assert_exact("a hang");
    assert!(ended.causes().contains(&Cause::Hung), "{:?}", ended.memberships());
    let files = std::fs::read_dir(fixture.path("job/logs")).unwrap();
    let logs = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    let told = |log: &String| log.contains("this worker hangs") && log.contains("Counting");
    assert_eq!(logs.filter(told).count(), 1);
    let log = std::fs::read_to_string(fixture.path("job/logs/master.log")).unwrap();
    let (before, _) = log.split_once(" and is evicted").unwrap();
    assert!(before.contains(" hangs\n") && before.contains("hang_if_first"), "{log}");
    assert!(log.contains(": evicted\n"), "{log}");
}

/// The others wait for it for half of the minute after which a stop gives the state up.
#[test]
fn a_stop_during_which_a_worker_hangs_evicts_it_and_keeps_the_state() {
    let fixture =
        JobFixture { program_options: &["--hang-in-summary"], ..JobFixture::new(PROGRAMS, 3) };
    let (export, hung) = (fixture.path("model.safetensors"), fixture.path("hurry.hung"));
    let mut job = fixture.command(0).option("export", &export).start();
    job.wait_for_work_of(3);
    let (exporter, _) = job.members()[0];
    job.signal(Signal::INT);
    let ended = job.wait();
    ended.assert_outcome(130, "stopped");
    let summary = ended.summary();
    assert!(summary.state_lost.is_none() && hung.exists(), "{summary:?}");
    let counted: f32 = exported_counts(&export).iter().sum();
    assert_eq!(counted, summary.records.counted as f32);
    let told = format!("worker {exporter} has not reported its final state");
    assert!(ended.output.contains(&told), "{}", ended.output);
}

#[test]
fn replacements_without_file_descriptors_are_replaced_until_one_has_some() {
    let limited = "case $ELASTICDL_LAUNCH in 3) ulimit -n 12;; 4) ulimit -n 15;; esac; exec \"$@\"";
    let fixture = JobFixture {
        script: Some(limited.into()),
        // A minute, unless it is hurried.
        micros_per_record: 8000,
        ..JobFixture::new(PROGRAMS, 2)
    };
    let mut job = fixture.start(1);
    let (_, pid) = job.members()[1];
    elasticdl_tests::send(pid, Signal::KILL);
    job.wait_for("a worker with descriptors", |status| {
        status.workers.iter().any(|worker| worker.worker.0 >= 5)
    });
    job.hurry();
    let ended = job.wait();
    ended.assert_exact("two launches without descriptors");
    let summary = ended.summary();
    assert!(summary.state_lost.is_none() && summary.workers.restarts >= 3, "{summary:?}");
    for limit in ["may open 12 files", "may open 15 files"] {
        assert!(ended.output.contains(limit), "{limit}: {}", ended.output);
    }
    for worker in ["worker 3 joined", "worker 4 joined"] {
        assert!(!ended.output.contains(worker), "{worker}: {}", ended.output);
    }
}

#[test]
fn workers_that_are_all_killed_at_the_beginning_begin_again() {
    let fixture = JobFixture {
        restart_without_checkpoint: false,
        worker_timeout: None,
        ..JobFixture::new(PROGRAMS, 2)
    };
    let mut job = fixture.command(0).option("max-workers", "2").start();
    job.wait_for("some steps", |status| status.step > 10);
    job.signal_workers(Signal::KILL);
    let ended = job.wait();
    ended.assert_exact("all killed at the beginning");
    let lost = ended.summary().state_lost.unwrap();
    assert!(lost.count == 1 && lost.at_step > 0, "{lost:?}");
}

#[test]
fn a_program_that_ends_without_joining_is_told_at_once() {
    let fixture = JobFixture { script: Some("exit 0".into()), ..JobFixture::new(PROGRAMS, 2) };
    let ended = fixture.command(0).run();
    ended.assert_outcome(1, "failed");
    let error = ended.summary().error.as_ref().unwrap();
    assert!(error.contains("exited with code 0 and never joined the job"), "{error}");
}

/// A job of two workers whose data is refused while there is a file, with its path.
fn refusable() -> (JobFixture, std::path::PathBuf) {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let refused = fixture.path("refused");
    let variables = vec![("REFUSED", refused.clone().into())];
    (JobFixture { variables, ..fixture }, refused)
}

#[test]
fn workers_that_all_wait_for_data_in_vain_write_a_last_checkpoint() {
    let (fixture, refused) = refusable();
    let checkpoints = fixture.path("checkpoints");
    let command = || fixture.command(0).option("checkpoint-dir", &checkpoints);
    let mut job = command().option("checkpoint-every", "1h").start();
    job.wait_for_first_steps();
    std::fs::write(&refused, "").unwrap();
    let ended = job.wait();
    ended.assert_outcome(1, "failed");
    let (summary, told) = (ended.summary(), "(os error 13); all workers have waited for it");
    assert!(ended.output.contains(told), "{}", ended.output);
    assert_eq!((&summary.state_lost, summary.workers.restarts), (&None, 0), "{}", ended.output);
    let saved = summary.checkpoints.as_ref().and_then(|kept| kept.newest.as_ref());
    assert_eq!(saved.map(|saved| saved.step), Some(summary.steps), "{}", ended.output);
    std::fs::remove_file(refused).unwrap();
    let quick = JobFixture { micros_per_record: 20, ..JobFixture::new(PROGRAMS, 2) };
    let again = quick.command(0).option("resume-from", &checkpoints).run();
    again.assert_exact("the data is back");
}

#[test]
fn a_worker_that_alone_waits_for_data_in_vain_is_replaced() {
    let (fixture, refused) = refusable();
    let mut job = fixture.lasting().start(0);
    std::fs::write(refused, "2").unwrap();
    job.wait_for("a replacement", |status| status.members().any(|member| member.worker.0 == 3));
    job.hurry();
    let ended = job.wait();
    ended.assert_exact("one worker's data is refused");
    assert_eq!(ended.summary().workers.restarts, 1, "{}", ended.output);
    assert!(ended.output.contains("worker 2 failed: "), "{}", ended.output);
}
