//! A NaN in the last gradient is neither applied nor exported; a state is not lost if all workers
//! are told to end.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

use elasticdl_proto::FailedShard;
use elasticdl_tests::{Command, JobFixture, each_once, exported_counts};
use rustix::process::Signal;

use crate::PROGRAMS;

const RECORDS: u64 = 600;

/// Two workers, 20 steps, whose last gradient holds a NaN.
fn diverging() -> (JobFixture, Command, PathBuf) {
    let fixture = JobFixture {
        records: RECORDS,
        files: 2,
        epochs: 1,
        micros_per_record: 0,
        global_batch_size: 30,
        restart_without_checkpoint: false,
        // In the last step, as records are taken in order.
        program_options: &["--nan-at", "599"],
        ..JobFixture::new(PROGRAMS, 2)
    };
    let export = fixture.path("model.safetensors");
    let command = fixture.command(0).option("export", &export).option("shuffle", "none");
    (fixture, command, export)
}

#[test]
fn a_nan_in_the_last_gradient_ends_the_job_before_it_is_applied() {
    let (_fixture, command, export) = diverging();
    let ended = command.run();
    ended.assert_outcome(1, "failed");
    let summary = ended.summary();
    let (step, error) = (summary.steps, summary.error.as_ref().unwrap());
    assert!(error.contains(&format!("of step {} is not finite", step + 1)), "{error}");
    assert!(
        error.contains("rank ") && error.contains("records ") && error.contains("--on-nonfinite"),
        "{error}"
    );
    // The second file's.
    let holds_it = |shard: &FailedShard| shard.start < 300 && shard.end == 300;
    assert!(summary.failed_shards.iter().any(holds_it), "{:?}", summary.failed_shards);
    // The state before that step is exported, and written to a checkpoint.
    let model = exported_counts(&export.with_added_extension("failed"));
    assert!(!export.exists());
    assert!(model.iter().all(|count| [0.0, 1.0].contains(count)), "{model:?}");
    assert_eq!(model.iter().sum::<f32>(), summary.records.counted as f32);
    let newest = summary.checkpoints.as_ref().and_then(|all| all.newest.as_ref());
    assert_eq!(newest.map(|saved| saved.step), Some(step));
}

#[test]
fn a_step_that_is_not_finite_is_skipped_and_counted_if_the_user_allows_it() {
    let (_fixture, command, export) = diverging();
    let ended = command.option("on-nonfinite", "skip").run();
    ended.assert_outcome(0, "completed");
    let summary = ended.summary();
    assert_eq!((summary.steps_skipped, summary.records), (1, each_once(RECORDS)));
    assert!(exported_counts(&export).iter().all(|count| [0.0, 1.0].contains(count)));
}

/// A job of at most two workers with the default timeouts.
fn pair(micros_per_record: u64) -> JobFixture {
    JobFixture {
        micros_per_record,
        worker_timeout: None,
        restart_without_checkpoint: false,
        ..JobFixture::new(PROGRAMS, 2)
    }
}

#[test]
fn a_job_whose_workers_are_all_killed_resumes_from_its_own_directory() {
    let fixture = pair(400);
    let command = || fixture.command(0).option("max-workers", "2");
    let mut job = command().option("checkpoint-every", "10").start();
    job.wait_for_checkpoints(1);
    job.signal_workers(Signal::KILL);
    let ended = job.wait();
    ended.assert_exact("all killed");
    let checkpoints = ended.summary().checkpoints.as_ref().unwrap();
    assert_eq!((checkpoints.restored.len(), ended.summary().state_lost), (1, None));
    let dir = fixture.path("job/checkpoints");
    assert_eq!(checkpoints.dir.as_deref(), dir.canonicalize().unwrap().to_str());
    // The next job in this directory ignores them, and replaces them by its own.
    let names = || -> BTreeSet<OsString> {
        std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    };
    let before = names();
    let ended = command().run();
    ended.assert_exact("the next job");
    assert_eq!(ended.summary().checkpoints.as_ref().unwrap().restored, []);
    let after = names();
    assert!(!after.is_empty() && after.is_disjoint(&before), "{before:?}, {after:?}");
}

#[test]
fn workers_that_all_get_sigterm_write_a_checkpoint_and_no_step_is_lost() {
    // Steps of about 36 ms, so that usually both workers get SIGTERM within the same step.
    let fixture = pair(1_500);
    let mut job = fixture.command(0).option("max-workers", "2").start();
    job.wait_for("some steps", |status| status.step > 10);
    job.signal_workers(Signal::TERM);
    let ended = job.wait();
    ended.assert_exact("SIGTERM for all");
    assert_eq!(ended.lost(), [], "{:?}", ended.memberships());
    let summary = ended.summary();
    assert_eq!(summary.state_lost, None);
    // If one worker leaves a step before the other, its replacement can fetch the state from the
    // one that remains. Then no checkpoint is restored.
    let restored = &summary.checkpoints.as_ref().unwrap().restored;
    assert!(restored.iter().all(|one| one.lost_steps == 0), "{restored:?}");
}
