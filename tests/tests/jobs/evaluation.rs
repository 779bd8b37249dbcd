//! Each record of the validation data is evaluated once under kills; the best model is retained,
//! and exported although its worker is killed; early stopping ends a training that does not
//! improve; a wrong metric and an error in `evaluate` are found before the first step, and a later
//! error loses no state.

use std::time::Duration;

use elasticdl_proto::{BestEvaluation, Summary};
use elasticdl_tests::{Command, JobFixture, KILLS_MAX, each_once, exported_counts, send};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::PROGRAMS;

const RECORDS: u64 = 6000;
const BATCH: u64 = 48;
/// Steps per epoch.
const EPOCH: u64 = RECORDS / BATCH;

/// A job that is evaluated on its training data.
fn evaluated(fixture: &JobFixture, seed: u64, every: u64) -> Command {
    fixture
        .command(seed)
        .option("validation-data", fixture.data())
        .option("evaluate-every", every.to_string())
}

/// Step of each evaluation, and the fraction of the records that had been absorbed by then.
fn seen(summary: &Summary) -> Vec<(u64, f64)> {
    let all = summary.evaluations.as_ref().unwrap().all.iter();
    all.map(|e| {
        assert_eq!((e.records, e.metrics["loss"]), (RECORDS, Some(1.0)), "{e:?}");
        (e.step, e.metrics["seen"].unwrap())
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
        job.wait_for_first_steps();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut faults = 0;
        while job.is_running() {
            std::thread::sleep(Duration::from_millis(rng.random_range(100..800)));
            if faults == KILLS_MAX || !job.makes_progress() {
                continue;
            }
            if faults == 3 {
                job.signal_workers(Signal::KILL)
            } else {
                job.any_worker(&mut rng).into_iter().for_each(|(_, pid)| send(pid, Signal::KILL))
            }
            faults += 1;
        }
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}"));
        // For evaluations of the first epoch the absorbed fraction is known. The report of one may
        // be lost with the lowest rank.
        let seen = seen(ended.summary());
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
    let model = fixture.path("best.safetensors");
    let ended = evaluated(&fixture, 1, 20)
        .option("best-metric", "seen:max")
        .option("export-best", &model)
        .option("checkpoint-dir", &dir)
        .option("checkpoint-every", "15")
        .option("checkpoint-keep", "1")
        .run();
    ended.assert_exact("the best of all");
    // The first one after an epoch; no later one is better.
    let export = model.to_str().map(str::to_owned);
    let best = BestEvaluation { step: 140, metric: "seen".into(), value: 1.0, export };
    assert_eq!(ended.summary().evaluations.as_ref().unwrap().best, Some(best));
    let mut steps: Vec<u64> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap()[5..17].parse().unwrap())
        .collect();
    steps.sort_unstable();
    assert_eq!(steps, [140, 2 * EPOCH]);
    let counted: f32 = exported_counts(&model).iter().sum();
    assert_eq!(counted as u64, 140 * BATCH);
    let shown = "best at step 140: seen 1.0000";
    assert!(ended.output.contains(shown), "{}", ended.output);
}

/// The only worker of the second job runs another executable.
const ANOTHER_BUILD: &str =
    "other=\"$TMPDIR/other-build\"; cp \"$1\" \"$other\"; echo >> \"$other\"
shift; exec \"$other\" \"$@\"";

#[test]
fn a_job_that_resumes_keeps_the_best_model_of_the_other_one_and_tells_another_build() {
    let fixture = JobFixture { micros_per_record: 20, ..JobFixture::new(PROGRAMS, 1) };
    let (dir, model) = (fixture.path("checkpoints"), fixture.path("best.safetensors"));
    // The loss is the same for every model, so the first one stays the best.
    let with_best = |fixture: &JobFixture| evaluated(fixture, 0, 20).option("export-best", &model);
    let stops = with_best(&fixture).option("checkpoint-dir", &dir).option("max-steps", "50");
    stops.run().assert_outcome(0, "completed");
    let best = exported_counts(&model);
    assert_eq!(best.iter().sum::<f32>() as u64, 20 * BATCH);
    let variables = vec![("TMPDIR", fixture.folder.path().into())];
    let script = Some(ANOTHER_BUILD.into());
    let other =
        JobFixture { script, variables, micros_per_record: 20, ..JobFixture::new(PROGRAMS, 1) };
    let ended = with_best(&other).option("resume-from", &dir).run();
    ended.assert_exact("another build resumes");
    let evaluations = ended.summary().evaluations.as_ref().unwrap();
    assert!(evaluations.all.len() > 5, "{evaluations:?}");
    assert!(exported_counts(&model) == best, "the best model is replaced");
    let named = evaluations.best.clone().unwrap();
    assert_eq!((named.step, named.export.as_deref()), (20, model.to_str()));
    let expected = "the program that wrote it differs in its executable from";
    assert!(ended.output.contains(expected), "{}", ended.output);
    // Where the file is not there, the best one of this job's own states is.
    std::fs::rename(&model, fixture.path("moved")).unwrap();
    let third = JobFixture { micros_per_record: 20, ..JobFixture::new(PROGRAMS, 1) };
    let ended = with_best(&third).option("resume-from", &dir).run();
    ended.assert_exact("a job without the best model of the one before");
    let named = ended.summary().evaluations.as_ref().unwrap().best.clone().unwrap();
    assert_eq!((named.step, named.export.as_deref()), (50, model.to_str()));
    assert_eq!(exported_counts(&model).iter().sum::<f32>() as u64, 50 * BATCH);
    // Nor is a model of an independent job lost, which has more steps.
    let fourth = JobFixture { micros_per_record: 20, ..JobFixture::new(PROGRAMS, 1) };
    let ended = with_best(&fourth).option("max-steps", "45").option("best-metric", "seen:max");
    let ended = ended.run();
    ended.assert_outcome(0, "completed");
    let previous = fixture.path("best.safetensors.previous");
    assert_eq!(exported_counts(&previous).iter().sum::<f32>() as u64, 50 * BATCH);
    assert!(ended.output.contains("kept as"), "{}", ended.output);
}

#[test]
fn the_best_model_is_exported_although_the_worker_that_exports_it_is_killed() {
    let fixture = JobFixture { micros_per_record: 50, ..JobFixture::new(PROGRAMS, 3) };
    let model = fixture.path("best.safetensors");
    let mut job = evaluated(&fixture, 2, 1)
        .option("best-metric", "seen:max")
        .option("export-best", &model)
        .start();
    job.wait_for_first_steps();
    for _ in 0..5 {
        let step = job.wait_for_members(3).step;
        // The lowest rank, most of whose time is spent with evaluations and exports.
        send(job.members()[0].1, Signal::KILL);
        job.wait_for("the next steps", |status| status.step > step + 5);
    }
    let ended = job.wait();
    ended.assert_exact("the exporting worker is killed");
    let best = ended.summary().evaluations.as_ref().unwrap().best.clone().unwrap();
    assert_eq!((best.step, best.value), (EPOCH, 1.0));
    let counted: f32 = exported_counts(&model).iter().sum();
    assert_eq!(counted as u64, EPOCH * BATCH);
}

#[test]
fn early_stopping_ends_the_training_of_a_model_that_does_not_improve() {
    let fixture = JobFixture { micros_per_record: 50, ..JobFixture::new(PROGRAMS, 2) };
    let ended = evaluated(&fixture, 1, 10).option("early-stopping", "2").run();
    ended.assert_outcome(0, "completed");
    let summary = ended.summary();
    assert!(summary.evaluations.as_ref().unwrap().stopped_early, "{}", ended.output);
    assert_eq!((summary.steps, summary.records), (30, each_once(30 * BATCH)));
}

#[test]
fn validation_data_that_cannot_be_used_is_named() {
    let fixture = JobFixture { micros_per_record: 50, ..JobFixture::new(PROGRAMS, 2) };
    let ended = fixture.command(1).option("validation-data", "/nowhere/at/all").run();
    ended.assert_outcome(2, "refused");
    assert!(ended.output.contains("/nowhere/at/all"), "{}", ended.output);
}

#[test]
fn a_mistake_of_the_evaluation_is_refused_before_the_first_step() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let ended = fixture
        .command(1)
        .option("validation-split", "0.1")
        .option("best-metric", "accuracy:max")
        .run();
    ended.assert_outcome(2, "refused");
    let why = "there is no metric `accuracy`; the model's evaluate() gives: loss, seen; \
               --best-metric names one of them";
    assert!(ended.output.contains(why), "{}", ended.output);
    assert_eq!((ended.summary().steps, ended.summary().workers.peak), (0, 0));
}

#[test]
fn a_panic_in_the_last_evaluation_costs_neither_checkpoint_nor_export() {
    let options = ["--panic-in-evaluation"].as_slice();
    let fixture = JobFixture {
        micros_per_record: 20,
        program_options: options,
        ..JobFixture::new(PROGRAMS, 2)
    };
    let (dir, model) = (fixture.path("checkpoints"), fixture.path("last.safetensors"));
    let ended = fixture
        .command(1)
        .option("validation-data", fixture.data())
        .option("checkpoint-dir", &dir)
        .option("export", &model)
        .run();
    ended.assert_outcome(1, "failed");
    let summary = ended.summary();
    let error = summary.error.as_ref().unwrap();
    assert!(error.contains("evaluate() panicked: a mistake in the evaluation"), "{error}");
    assert_eq!((summary.steps, summary.records), (2 * EPOCH, each_once(2 * RECORDS)));
    let newest = summary.checkpoints.as_ref().unwrap().newest.as_ref().unwrap();
    assert_eq!((newest.step, &summary.state_lost), (2 * EPOCH, &None));
    // A failed job does not write over a model that it did not write itself.
    let model = fixture.path("last.safetensors.failed");
    assert_eq!(exported_counts(&model).iter().sum::<f32>() as u64, 2 * RECORDS);
}

#[test]
fn records_of_a_validation_split_are_evaluated_and_not_trained() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let command = fixture.command(4).option("validation-split", "0.1");
    let ended = command.option("evaluate-every", "40").run();
    let summary = ended.summary();
    assert_eq!(summary.records, each_once(fixture.epochs * RECORDS * 9 / 10));
    for evaluation in &summary.evaluations.as_ref().unwrap().all {
        assert_eq!((evaluation.records, evaluation.metrics["seen"]), (RECORDS / 10, Some(0.0)));
    }
}
