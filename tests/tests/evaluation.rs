//! Jobs that evaluate their model during training: each record of the validation data is evaluated
//! once, whichever workers are lost; the checkpoint of the best model is retained; early stopping
//! ends the training of a model that does not improve.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::time::Duration;

use elasticdl_tests::{Command, JobFixture, Programs, send};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use serde_json::Value;

const PROGRAMS: Programs = Programs {
    elasticdl: env!("CARGO_BIN_EXE_elasticdl-under-test"),
    counting: env!("CARGO_BIN_EXE_counting"),
};

const RECORDS: u64 = 6000;
const BATCH: u64 = 48;
/// Steps per epoch.
const EPOCH: u64 = RECORDS / BATCH;

/// A job that is evaluated on its training data.
fn evaluated(fixture: &JobFixture, seed: u64, every: u64) -> Command {
    let data = fixture.folder.path().join("data");
    fixture
        .command(seed)
        .option("validation-data", data)
        .option("evaluate-every", every.to_string())
}

/// Step of each evaluation, and the fraction of the records that had been absorbed by then.
fn seen(summary: &Value) -> Vec<(u64, f64)> {
    let all = summary["evaluations"]["all"].as_array().unwrap().iter();
    all.map(|e| {
        assert_eq!((&e["records"], &e["metrics"]["loss"]), (&RECORDS.into(), &1.0.into()), "{e}");
        (e["step"].as_u64().unwrap(), e["metrics"]["seen"].as_f64().unwrap())
    })
    .collect()
}

#[test]
fn each_record_is_evaluated_once_whichever_worker_is_killed() {
    for seed in 0..3 {
        let fixture = JobFixture::new(PROGRAMS, 3);
        let dir = fixture.folder.path().join("checkpoints");
        let command = evaluated(&fixture, seed, 10).option("checkpoint-dir", dir);
        let mut job = command.option("checkpoint-every", "15").start();
        job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for fault in 0.. {
            std::thread::sleep(Duration::from_millis(rng.random_range(100..800)));
            if !job.is_running() {
                break;
            }
            if fault == 3 {
                job.workers().values().for_each(|pid| send(*pid, Signal::KILL))
            } else {
                job.any_worker(&mut rng).into_iter().for_each(|(_, pid)| send(pid, Signal::KILL))
            }
        }
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}"));
        // For evaluations of the first epoch the absorbed fraction is known. The report of one may
        // be lost with the lowest rank.
        let seen = seen(&ended.summary);
        assert!(seen.len() > 12 && seen.last() == Some(&(2 * EPOCH, 1.0)), "seed {seed}: {seen:?}");
        for (step, seen) in seen {
            let expected = (step * BATCH).min(RECORDS) as f64 / RECORDS as f64;
            assert_eq!((step % 10, seen), (0, expected), "seed {seed}: step {step}");
        }
    }
}

#[test]
fn the_best_model_is_retained_after_later_ones() {
    let fixture = JobFixture { micros_per_record: 50, ..JobFixture::new(PROGRAMS, 2) };
    let dir = fixture.folder.path().join("checkpoints");
    let ended = evaluated(&fixture, 1, 20)
        .option("best-metric", "seen:max")
        .option("checkpoint-dir", &dir)
        .option("checkpoint-every", "15")
        .option("checkpoint-keep", "1")
        .run();
    ended.assert_exact("the best of all");
    // The first one after an epoch; no later one is better.
    let best = &ended.summary["evaluations"]["best"];
    assert_eq!(
        (&best["step"], &best["metric"], &best["value"]),
        (&140.into(), &"seen".into(), &1.0.into())
    );
    let mut steps: Vec<u64> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap()[5..17].parse().unwrap())
        .collect();
    steps.sort_unstable();
    assert_eq!(steps, [140, 2 * EPOCH]);
    let shown = "best at step 140: seen 1.0000";
    assert!(ended.output.contains(shown), "{}", ended.output);
}

#[test]
fn early_stopping_ends_the_training_of_a_model_that_does_not_improve() {
    let fixture = JobFixture { micros_per_record: 50, ..JobFixture::new(PROGRAMS, 2) };
    let ended = evaluated(&fixture, 1, 10).option("early-stopping", "2").run();
    assert_eq!(
        (ended.code, &ended.summary["state"]),
        (Some(0), &"completed".into()),
        "{}",
        ended.output
    );
    assert_eq!(
        (&ended.summary["steps"], &ended.summary["evaluations"]["stopped_early"]),
        (&30.into(), &true.into())
    );
    let records = &ended.summary["records"];
    assert_eq!((&records["counted"], &records["missing"]), (&(30 * BATCH).into(), &0.into()));
}

#[test]
fn validation_data_that_cannot_be_used_is_named() {
    let fixture = JobFixture { micros_per_record: 50, ..JobFixture::new(PROGRAMS, 2) };
    let ended = evaluated(&fixture, 1, 10).option("best-metric", "accuracy").run();
    let why = "no metric `accuracy`; the model's evaluate() gives: loss, seen";
    assert!(ended.code == Some(1) && ended.output.contains(why), "{}", ended.output);
    let ended = fixture.command(1).option("validation-data", "/nowhere/at/all").run();
    assert!(ended.code == Some(1) && ended.output.contains("/nowhere/at/all"), "{}", ended.output);
}
