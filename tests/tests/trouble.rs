//! Values that are not finite are never applied, written to a checkpoint or exported; a state is
//! never lost silently, and not at all if all workers get SIGTERM.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::path::{Path, PathBuf};

use elasticdl_tests::{Command, Ended, JobFixture, Programs, Running, counting_data, send};
use rustix::process::Signal;
use safetensors::SafeTensors;
use tempfile::TempDir;

const PROGRAMS: Programs = Programs {
    elasticdl: env!("CARGO_BIN_EXE_elasticdl-under-test"),
    counting: env!("CARGO_BIN_EXE_counting"),
};

const RECORDS: u64 = 600;
/// In the last step, as records are taken in order.
const LAST_RECORD: u64 = RECORDS - 1;

/// Two workers, 20 steps, whose last gradient holds a NaN.
fn diverging(folder: &TempDir) -> (Command, PathBuf) {
    counting_data(&folder.path().join("data"), RECORDS, 2).unwrap();
    let (records, last) = (RECORDS.to_string(), LAST_RECORD.to_string());
    let program = [PROGRAMS.counting, "--records", &records, "--nan-at", &last].map(PathBuf::from);
    let export = folder.path().join("model.safetensors");
    let command = Command::new(PROGRAMS.elasticdl, folder.path().join("job"), program)
        .option("training-data", folder.path().join("data"))
        .option("global-batch-size", "30")
        .option("num-workers", "2")
        .option("export", &export)
        .flag("no-shuffle");
    (command, export)
}

/// The exported parameters.
fn exported(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let data = file.tensor("parameters").unwrap().data();
    data.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().unwrap())).collect()
}

#[test]
fn a_nan_in_the_last_gradient_ends_the_job_before_it_is_applied() {
    let folder = tempfile::tempdir().unwrap();
    let (command, export) = diverging(&folder);
    let ended = command.run();
    assert_eq!(
        (ended.code, &ended.summary["state"]),
        (Some(1), &"failed".into()),
        "{}",
        ended.output
    );
    let error = ended.summary["error"].as_str().unwrap();
    let step = ended.summary["steps"].as_u64().unwrap();
    assert!(error.contains(&format!("of step {} is not finite", step + 1)), "{error}");
    assert!(
        error.contains("rank ") && error.contains("records ") && error.contains("--on-nonfinite"),
        "{error}"
    );
    let failed = ended.summary["failed_shards"].as_array().unwrap();
    // The second file's.
    let holds_it =
        |s: &serde_json::Value| s["start"].as_u64() < Some(300) && s["end"].as_u64() == Some(300);
    assert!(failed.iter().any(holds_it), "{failed:?}");
    // The state before that step is exported, and written to a checkpoint.
    let counted = ended.summary["records"]["counted"].as_u64().unwrap();
    let model = exported(&export);
    assert!(model.iter().all(|count| [0.0, 1.0].contains(count)), "{model:?}");
    assert_eq!(model.iter().sum::<f32>(), counted as f32);
    assert_eq!(ended.summary["checkpoints"]["newest"]["step"], step, "{}", ended.summary);
}

#[test]
fn a_step_that_is_not_finite_is_skipped_and_counted_if_the_user_allows_it() {
    let folder = tempfile::tempdir().unwrap();
    let (command, export) = diverging(&folder);
    let ended = command.option("on-nonfinite", "skip").run();
    assert_eq!(
        (ended.code, &ended.summary["state"]),
        (Some(0), &"completed".into()),
        "{}",
        ended.output
    );
    assert_eq!(ended.summary["steps_skipped"], 1, "{}", ended.summary);
    let records = &ended.summary["records"];
    assert_eq!(
        (&records["counted"], &records["repeated"]),
        (&RECORDS.into(), &0.into()),
        "{records}"
    );
    assert!(exported(&export).iter().all(|count| [0.0, 1.0].contains(count)));
    assert!(ended.output.contains("1 step was skipped"), "{}", ended.output);
}

fn kill_all(job: &Running) {
    job.workers().values().for_each(|pid| send(*pid, Signal::KILL));
}

/// At most two workers.
fn pair(fixture: &JobFixture, micros_per_record: u32) -> Command {
    let micros = micros_per_record.to_string();
    let program = [PROGRAMS.counting, "--records", "6000", "--micros-per-record", &micros];
    Command::new(PROGRAMS.elasticdl, fixture.folder.path().join("job"), program)
        .option("training-data", fixture.folder.path().join("data"))
        .option("num-epochs", "2")
        .option("num-workers", "2")
        .option("max-workers", "2")
        .option("global-batch-size", "48")
}

fn wait_for_steps(job: &mut Running) {
    job.wait_for("some steps", |status| status["step"].as_u64() > Some(30));
}

#[test]
fn a_lost_state_fails_the_job_and_is_reported_first() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let mut job = pair(&fixture, 400).option("checkpoint-dir", "none").start();
    wait_for_steps(&mut job);
    kill_all(&job);
    let ended: Ended = job.wait();
    assert_eq!(
        (ended.code, &ended.summary["state"]),
        (Some(1), &"failed".into()),
        "{}",
        ended.output
    );
    let lost = &ended.summary["state_lost"];
    assert!(lost["count"] == 1 && lost["at_step"].as_u64() > Some(0), "{}", ended.summary);
    assert!(ended.output.starts_with("STATE LOST at step "), "{}", ended.output);
    assert!(ended.output.contains("--restart-without-checkpoint"), "{}", ended.output);
}

#[test]
fn a_job_whose_workers_are_all_killed_resumes_from_its_own_directory() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let mut job = pair(&fixture, 400).option("checkpoint-every", "10").start();
    job.wait_for("a checkpoint", |status| status["checkpoints"]["saved"].as_u64() > Some(0));
    kill_all(&job);
    let ended = job.wait();
    ended.assert_exact("all killed");
    assert_eq!(
        ended.summary["checkpoints"]["restored"].as_array().unwrap().len(),
        1,
        "{}",
        ended.summary
    );
    assert!(ended.summary["state_lost"].is_null());
    let dir = fixture.folder.path().join("job/checkpoints");
    assert_eq!(ended.summary["checkpoints"]["dir"], dir.canonicalize().unwrap().to_str().unwrap());
    // The next job in this directory ignores them, and replaces them by its own.
    let ended = pair(&fixture, 400).run();
    ended.assert_exact("the next job");
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 1);
}

#[test]
fn workers_that_all_get_sigterm_write_a_checkpoint_and_no_step_is_lost() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    // Steps of about 36 ms, so that usually both workers get SIGTERM within the same step.
    let mut job = pair(&fixture, 1_500).start();
    job.wait_for("some steps", |status| status["step"].as_u64() > Some(10));
    job.workers().values().for_each(|pid| send(*pid, Signal::TERM));
    let ended = job.wait();
    ended.assert_exact("SIGTERM for all");
    assert_eq!(ended.lost(), [0; 0], "{:?}", ended.memberships());
    assert!(ended.summary["state_lost"].is_null(), "{}", ended.summary);
    // If one worker leaves a step before the other, its replacement can fetch the state from the
    // one that remains. Then no checkpoint is restored.
    let restored = ended.summary["checkpoints"]["restored"].as_array().unwrap();
    assert!(restored.iter().all(|r| r["lost_steps"] == 0), "{}", ended.summary);
}
