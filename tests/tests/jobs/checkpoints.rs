//! Jobs whose workers are all lost, again and again, resume from the newest checkpoint, and new
//! jobs start from checkpoints of others, in a folder and in a bucket whose server fails and
//! delays: every record is in the final model exactly once.

use std::path::PathBuf;
use std::time::Duration;

use elasticdl_proto::CheckpointsSummary;
use elasticdl_tests::{Command, Ended, FaultRates, JobFixture, Running, S3, assert_end, send};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::PROGRAMS;

const EVERY: u64 = 15;
/// Steps that may be made while a checkpoint is written: its parts, the reports of them, the
/// manifest, and the report of it.
const ON_THE_WAY: u64 = 25;

/// `ELASTICDL_CHAOS_SEEDS=20` runs 20 seeds.
fn seeds(usual: u64) -> std::ops::Range<u64> {
    let wanted = std::env::var("ELASTICDL_CHAOS_SEEDS").ok().map(|text| text.parse().unwrap());
    0..wanted.unwrap_or(usual)
}

fn checkpointed(fixture: &JobFixture, seed: u64, dir: &str) -> Command {
    fixture
        .command(seed)
        .option("checkpoint-dir", dir)
        .option("checkpoint-every", EVERY.to_string())
}

/// Kills all workers or a single one after each pause, fewer times than kills without progress end
/// a job.
fn kill_repeatedly(job: &mut Running, seed: u64, pause_ms: std::ops::Range<u64>) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    job.wait_for_first_steps();
    for _ in 0..12 {
        std::thread::sleep(Duration::from_millis(rng.random_range(pause_ms.clone())));
        if !job.is_running() {
            break;
        }
        if rng.random_ratio(2, 3) {
            job.signal_workers(Signal::KILL)
        } else {
            job.any_worker(&mut rng).into_iter().for_each(|(_, pid)| send(pid, Signal::KILL));
        }
    }
}

fn checkpoints(ended: &Ended) -> &CheckpointsSummary {
    ended.summary().checkpoints.as_ref().unwrap()
}

/// Number of checkpoints that a group began with; asserts that no more steps were repeated than
/// allowed.
fn restored(ended: &Ended, context: &str) -> usize {
    let restored = &checkpoints(ended).restored;
    let may_be = restored.iter().all(|one| one.lost_steps <= EVERY + ON_THE_WAY);
    assert!(may_be, "{context}: {restored:?}");
    restored.len()
}

#[test]
fn each_record_is_in_the_model_once_after_repeated_losses_of_all_workers() {
    let mut total = 0;
    for seed in seeds(2) {
        // Every other job has a model of 4 MiB, so that many workers are hit while they write.
        let fixture = JobFixture::new(PROGRAMS, 3);
        let fixture = if seed % 2 == 1 { fixture.large() } else { fixture };
        let dir = fixture.folder.path().join("checkpoints");
        let mut job = checkpointed(&fixture, seed, dir.to_str().unwrap()).start();
        kill_repeatedly(&mut job, seed, 100..1500);
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}"));
        total += restored(&ended, &format!("seed {seed}"));
        assert_eq!(checkpoints(&ended).damaged, 0, "seed {seed}");
    }
    assert!(total > 0, "no group began with a checkpoint");
}

#[test]
fn the_same_holds_for_checkpoints_in_a_bucket_whose_server_fails_and_delays() {
    let mut total = 0;
    for seed in seeds(2) {
        let server = S3::start(
            FaultRates { errors: 10, cuts: 6, delay_ms: 20, ..FaultRates::default() },
            seed,
        );
        let fixture = JobFixture { micros_per_record: 600, ..JobFixture::new(PROGRAMS, 3) };
        let starter = [vec!["env".to_owned()], server.environment()].concat();
        let mut job = checkpointed(&fixture, seed, "s3://bucket/a folder/of jobs")
            .started_by(starter)
            .start();
        kill_repeatedly(&mut job, seed, 400..2500);
        server.set_fault_rates(FaultRates::default());
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}"));
        total += checkpoints(&ended).restored.len();
        assert!(server.requests_hit() > 0, "no fault was injected");
        // The final state is retained, and two before it; the removal of older ones may have failed
        // under the fault rates.
        let manifests =
            server.names().into_iter().filter(|name| name.ends_with("manifest.json")).count();
        assert!((1..=5).contains(&manifests), "{:?}", server.names());
    }
    assert!(total > 0, "no group began with a checkpoint");
}

/// A job that has been stopped in its first epoch: the folder of its checkpoints, and its step.
fn stopped(fixture: &JobFixture) -> (PathBuf, u64) {
    let dir = fixture.folder.path().join("checkpoints");
    let mut job =
        checkpointed(fixture, 1, dir.to_str().unwrap()).option("checkpoint-keep", "9").start();
    job.wait_for_checkpoints(2);
    job.signal(Signal::TERM);
    let ended = job.wait();
    ended.assert_outcome(143, "stopped");
    let step = ended.summary().steps;
    let newest = checkpoints(&ended).newest.as_ref().map(|saved| saved.step);
    assert_eq!(newest, Some(step), "the final state is kept");
    (dir, step)
}

#[test]
fn a_stopped_job_is_resumed_by_another_one_with_other_workers_and_batch() {
    let fixture = JobFixture { micros_per_record: 200, ..JobFixture::new(PROGRAMS, 3) };
    let (dir, step) = stopped(&fixture);
    for (workers, batch) in [(1, 96), (5, 30)] {
        let other = JobFixture {
            global_batch_size: batch,
            micros_per_record: 20,
            ..JobFixture::new(PROGRAMS, workers)
        };
        let ended = other.command(1).option("resume-from", dir.to_str().unwrap()).run();
        ended.assert_exact(&format!("{workers} workers"));
        let restored: Vec<u64> = checkpoints(&ended).restored.iter().map(|one| one.step).collect();
        assert_eq!(restored, [step]);
    }
}

#[test]
fn one_checkpoint_is_a_model_to_evaluate() {
    let fixture = JobFixture { micros_per_record: 200, ..JobFixture::new(PROGRAMS, 3) };
    let (dir, step) = stopped(&fixture);
    let evaluate = |model: &str| {
        let program = [PROGRAMS.counting, "--records", "6000"];
        Command::new(PROGRAMS.elasticdl, fixture.folder.path().join("inference"), program)
            .verb("evaluate")
            .option("model", model)
            .option("data", fixture.data())
            .option("num-workers", "2")
            .run()
    };
    let ended = evaluate(dir.to_str().unwrap());
    assert_eq!(ended.code, Some(2), "{}", ended.output);
    let (_, newest) = ended.output.split_once("the furthest is ").unwrap();
    let ended = evaluate(newest.split_whitespace().next().unwrap());
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    // 48 records a step.
    let seen = (step as f64 * 48.0 / 6000.0).min(1.0);
    assert_eq!(ended.summary().metrics.as_ref().unwrap()["seen"], Some(seen));
}

#[test]
fn a_job_that_cannot_resume_from_a_checkpoint_reports_why() {
    let fixture = JobFixture { micros_per_record: 200, ..JobFixture::new(PROGRAMS, 2) };
    let (dir, _) = stopped(&fixture);
    let dir = dir.to_str().unwrap();
    let refused = |fixture: &JobFixture, options: &[(&str, &str)], why: &str| {
        let command =
            options.iter().fold(fixture.command(1), |c, (name, value)| c.option(name, *value));
        let ended = command.run();
        ended.assert_outcome(2, "refused");
        assert!(ended.output.contains(why), "{}", ended.output);
    };
    let quick = JobFixture { micros_per_record: 20, ..JobFixture::new(PROGRAMS, 2) };
    refused(&quick, &[("resume-from", dir), ("max-steps", "1")], "must be larger");
    // Another order has other records at the positions that the ledger holds.
    let another = [("resume-from", dir), ("shuffle", "none")];
    refused(&quick, &another, "this job's are in that of --shuffle none");
    refused(&quick, &[("checkpoint-dir", dir)], "--resume-from");
    refused(&quick, &[("resume-from", "/nowhere/to/be/found")], "no complete checkpoint");
    let larger = JobFixture { parameters: 7000, ..quick };
    refused(&larger, &[("resume-from", dir)], "6000 parameters, and this one has 7000");
}

#[test]
fn a_checkpoint_is_written_on_request() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let dir = fixture.folder.path().join("checkpoints");
    let mut job =
        fixture.command(1).option("checkpoint-dir", &dir).option("checkpoint-every", "1h").start();
    let at = job.wait_for_first_steps().step;
    let path = job.checkpoint();
    assert!(PathBuf::from(&path).join("manifest.json").is_file(), "{path}");
    let newest = job.status().checkpoints.unwrap().newest.unwrap();
    assert!(newest.step > at, "{newest:?}");
    job.signal(Signal::TERM);
    assert_eq!(checkpoints(&job.wait()).saved, 2);
}

#[test]
fn a_checkpoint_folder_that_cannot_be_written_to_is_refused_before_training() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    // A file has the name of the folder.
    let dir = fixture.folder.path().join("checkpoints");
    std::fs::write(&dir, "in the way").unwrap();
    let ended = checkpointed(&fixture, 1, dir.to_str().unwrap()).run();
    ended.assert_outcome(2, "refused");
    assert!(ended.output.contains("--checkpoint-dir"), "{}", ended.output);
}

/// A job whose folder of checkpoints has just been moved away, with a file in its place, and that
/// folder.
fn without_folder(fixture: &JobFixture) -> (Running, PathBuf) {
    let dir = fixture.path("checkpoints");
    let command = checkpointed(fixture, 1, dir.to_str().unwrap());
    let mut job = command.option("summary", fixture.path("s")).start();
    job.wait_for_first_steps();
    while std::fs::rename(&dir, fixture.path("away")).is_err() {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::fs::write(&dir, "in the way").unwrap();
    (job, dir)
}

fn wait_for_wait(job: &mut Running) {
    job.wait_for("a wait for storage", |status| {
        status.events.iter().any(|event| event.contains("waits for storage"))
    });
}

#[test]
fn training_continues_when_no_checkpoint_can_be_written_and_the_last_one_is_waited_for() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let (mut job, dir) = without_folder(&fixture);
    // The last one is worth a wait: no later one makes up for it.
    wait_for_wait(&mut job);
    std::fs::remove_file(&dir).unwrap();
    let ended = job.wait();
    ended.assert_exact("nothing could be written until the end");
    let known = checkpoints(&ended);
    let newest = known.newest.as_ref().map(|kept| kept.step);
    assert!(known.failed > 2 && newest == Some(ended.summary().steps), "{known:?}");
    assert!(ended.summary().throughput.storage_wait_s > 0.0, "{}", ended.output);
}

#[test]
fn a_stop_tries_the_last_checkpoint_for_longer_than_an_export() {
    let fixture = JobFixture { epochs: 100, ..JobFixture::new(PROGRAMS, 2) };
    let (mut job, dir) = without_folder(&fixture);
    job.signal(Signal::TERM);
    wait_for_wait(&mut job);
    std::thread::sleep(Duration::from_secs(5));
    std::fs::remove_file(&dir).unwrap();
    let ended = job.wait();
    ended.assert_outcome(143, "stopped");
    let newest = checkpoints(&ended).newest.as_ref().map(|saved| saved.step);
    assert_eq!(newest, Some(ended.summary().steps), "{}", ended.output);
}

#[test]
fn workers_that_are_told_to_end_while_there_is_no_master_write_a_checkpoint() {
    let fixture = JobFixture {
        micros_per_record: 800,
        restart_without_checkpoint: false,
        ..JobFixture::new(PROGRAMS, 3)
    };
    // None is due by itself.
    let command = fixture.command(1).option("checkpoint-dir", fixture.path("checkpoints"));
    let command = command.option("grace-period", "8s");
    let mut job = command.option("checkpoint-every", "1000000").start();
    job.wait_for_work_of(3);
    let pids: Vec<u32> = job.workers().into_values().collect();
    job.kill_master();
    pids.iter().for_each(|pid| send(*pid, Signal::TERM));
    assert_end(&pids, Duration::from_secs(60));
    job.resume();
    let ended = job.wait();
    ended.assert_exact("told to end without a master");
    assert_eq!(restored(&ended, "told to end without a master"), 1);
    assert_eq!(ended.summary().state_lost, None);
}
