//! Jobs whose workers are all lost go on from a checkpoint, and new jobs from those of others:
//! every record is in the final model exactly once, which the counting model proves.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::path::PathBuf;
use std::time::Duration;

use elasticdl_tests::{Command, Ended, Programs, Running, S3, Stage, Weather, send};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

const PROGRAMS: Programs = Programs {
    elasticdl: env!("CARGO_BIN_EXE_elasticdl-under-test"),
    counting: env!("CARGO_BIN_EXE_counting"),
};

const EVERY: u64 = 15;
/// Steps that may be made while a checkpoint is written: its parts, word of them, the manifest,
/// word of it.
const ON_THE_WAY: u64 = 25;

/// `ELASTICDL_CHAOS_SEEDS=20` runs as many.
fn seeds(usual: u64) -> std::ops::Range<u64> {
    let wanted = std::env::var("ELASTICDL_CHAOS_SEEDS").ok().map(|text| text.parse().unwrap());
    0..wanted.unwrap_or(usual)
}

fn kept(stage: &Stage, seed: u64, dir: &str) -> Command {
    stage.command(seed).option("checkpoint-dir", dir).option("checkpoint-every", EVERY.to_string())
}

fn kill_all(job: &Running) {
    job.workers().values().for_each(|pid| send(*pid, Signal::KILL));
}

/// Kills all workers now and then, and single ones in between, until the job ends.
fn storm(job: &mut Running, seed: u64, pause_ms: std::ops::Range<u64>) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
    for blow in 0.. {
        std::thread::sleep(Duration::from_millis(rng.random_range(pause_ms.clone())));
        if !job.is_running() {
            break;
        }
        // Enough, or it would never end on a busy machine.
        match rng.random_ratio(2, 3) && blow < 12 {
            true => kill_all(job),
            false => {
                job.any_worker(&mut rng).into_iter().for_each(|(_, pid)| send(pid, Signal::KILL))
            }
        }
    }
}

/// How often the group began from a checkpoint; no more work was repeated than may be.
fn restored(ended: &Ended, context: &str) -> usize {
    let restored = ended.summary["checkpoints"]["restored"].as_array().unwrap();
    for one in restored {
        let lost = one["lost_steps"].as_u64().unwrap();
        assert!(lost <= EVERY + ON_THE_WAY, "{context}: {lost} steps again: {restored:?}");
    }
    restored.len()
}

#[test]
fn after_the_loss_of_all_workers_again_and_again_each_record_is_in_the_model_once() {
    let mut total = 0;
    for seed in seeds(4) {
        // Every other one is of 4 MiB, so that many are hit while they write.
        let stage = Stage::new(PROGRAMS, 3);
        let stage = if seed % 2 == 1 { stage.large() } else { stage };
        let dir = stage.folder.path().join("checkpoints");
        let mut job = kept(&stage, seed, dir.to_str().unwrap()).start();
        storm(&mut job, seed, 100..1500);
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}"));
        total += restored(&ended, &format!("seed {seed}"));
        assert_eq!(ended.summary["checkpoints"]["damaged"], 0, "seed {seed}");
    }
    assert!(total > 0, "nobody has begun from a checkpoint");
}

#[test]
fn the_same_where_the_checkpoints_are_in_a_bucket_whose_server_fails_and_delays() {
    let mut total = 0;
    for seed in seeds(2) {
        let server =
            S3::start(Weather { errors: 10, cuts: 6, delay_ms: 20, ..Weather::default() }, seed);
        let stage = Stage { micros_per_record: 600, ..Stage::new(PROGRAMS, 3) };
        let starter = [vec!["env".to_owned()], server.environment()].concat();
        let mut job =
            kept(&stage, seed, "s3://bucket/a folder/of jobs").started_by(starter).start();
        storm(&mut job, seed, 400..2500);
        server.set_weather(Weather::default());
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}"));
        total += ended.summary["checkpoints"]["restored"].as_array().unwrap().len();
        assert!(server.disturbed() > 0, "the weather was fine");
        // The final state is kept, and two before it; the last ones to be removed may have outlived
        // that, in such weather.
        let manifests =
            server.names().into_iter().filter(|name| name.ends_with("manifest.json")).count();
        assert!((1..=5).contains(&manifests), "{:?}", server.names());
    }
    assert!(total > 0, "nobody has begun from a checkpoint");
}

/// A job that has been stopped in its first epoch; where its checkpoints are, and how far it was.
fn stopped(stage: &Stage) -> (PathBuf, u64) {
    let dir = stage.folder.path().join("checkpoints");
    let mut job = kept(stage, 1, dir.to_str().unwrap()).option("checkpoint-keep", "9").start();
    job.wait_for("some checkpoints", |status| status["checkpoints"]["saved"].as_u64() > Some(1));
    job.signal(Signal::TERM);
    let ended = job.wait();
    assert_eq!(
        (ended.code, &ended.summary["state"]),
        (Some(143), &"stopped".into()),
        "{}",
        ended.output
    );
    let step = ended.summary["steps"].as_u64().unwrap();
    assert_eq!(ended.summary["checkpoints"]["newest"]["step"], step, "the final state is kept");
    (dir, step)
}

#[test]
fn a_stopped_job_is_gone_on_with_by_another_with_other_workers_and_batch() {
    let stage = Stage { micros_per_record: 200, ..Stage::new(PROGRAMS, 3) };
    let (dir, step) = stopped(&stage);
    for (workers, batch) in [(1, 96), (5, 30)] {
        let other = Stage {
            global_batch_size: batch,
            micros_per_record: 20,
            ..Stage::new(PROGRAMS, workers)
        };
        let ended = other.command(7).option("resume-from", dir.to_str().unwrap()).run();
        ended.assert_exact(&format!("{workers} workers"));
        let restored = &ended.summary["checkpoints"]["restored"];
        assert_eq!((&restored[0]["step"], restored.as_array().unwrap().len()), (&step.into(), 1));
    }
}

#[test]
fn one_checkpoint_is_a_model_to_evaluate() {
    let stage = Stage { micros_per_record: 200, ..Stage::new(PROGRAMS, 3) };
    let (dir, step) = stopped(&stage);
    let evaluate = |model: &str| {
        let program = [PROGRAMS.counting, "--records", "6000"];
        Command::new(PROGRAMS.elasticdl, stage.folder.path().join("apart"), program)
            .verb("evaluate")
            .option("model", model)
            .option("data", stage.folder.path().join("data"))
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
    assert_eq!(ended.summary["metrics"]["seen"], seen, "{}", ended.summary);
}

#[test]
fn what_was_changed_is_named_and_the_one_before_is_taken() {
    let stage = Stage { micros_per_record: 200, ..Stage::new(PROGRAMS, 2) };
    let (dir, step) = stopped(&stage);
    let mut names: Vec<String> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let newest = names.last().unwrap();
    let shard = dir.join(newest).join("shard-00001-of-00002.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let quick = Stage { micros_per_record: 20, ..Stage::new(PROGRAMS, 2) };
    let ended = quick.command(7).option("resume-from", dir.to_str().unwrap()).run();
    ended.assert_exact("a flipped bit");
    let known = &ended.summary["checkpoints"];
    assert!(known["damaged"] == 1 && known["restored"][0]["step"].as_u64() < Some(step), "{known}");
    assert!(ended.output.contains(&format!("checkpoint {newest} is damaged")), "{}", ended.output);
}

#[test]
fn a_job_that_cannot_go_on_from_a_checkpoint_says_why() {
    let stage = Stage { micros_per_record: 200, ..Stage::new(PROGRAMS, 2) };
    let (dir, _) = stopped(&stage);
    let dir = dir.to_str().unwrap();
    let refused = |stage: &Stage, options: &[(&str, &str)], why: &str| {
        let command =
            options.iter().fold(stage.command(7), |c, (name, value)| c.option(name, *value));
        let ended = command.run();
        assert!(
            ended.code == Some(2) && ended.output.contains(why),
            "{:?}: {}",
            ended.code,
            ended.output
        );
        assert_eq!(ended.summary["state"], "refused");
    };
    let quick = Stage { micros_per_record: 20, ..Stage::new(PROGRAMS, 2) };
    refused(&quick, &[("resume-from", dir), ("max-steps", "1")], "raise it");
    refused(&quick, &[("checkpoint-dir", dir)], "--resume-from");
    refused(&quick, &[("resume-from", "/nowhere/to/be/found")], "no whole checkpoint");
    let larger = Stage { parameters: 7000, ..quick };
    refused(&larger, &[("resume-from", dir)], "6000 parameters, and this one has 7000");
}

#[test]
fn a_checkpoint_is_written_when_it_is_asked_for() {
    let stage = Stage::new(PROGRAMS, 2);
    let dir = stage.folder.path().join("checkpoints");
    let mut job =
        stage.command(1).option("checkpoint-dir", &dir).option("checkpoint-every", "1h").start();
    let at = job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
    let path = job.checkpoint();
    assert!(PathBuf::from(&path).join("manifest.json").is_file(), "{path}");
    let newest = &job.status()["checkpoints"]["newest"];
    assert!(newest["step"].as_u64() > at["step"].as_u64(), "{newest}");
    job.signal(Signal::TERM);
    assert_eq!(job.wait().summary["checkpoints"]["saved"], 2);
}

#[test]
fn a_folder_that_can_not_be_written_to_is_found_out_before_the_training() {
    let stage = Stage::new(PROGRAMS, 2);
    // A file is where the folder should be.
    let dir = stage.folder.path().join("checkpoints");
    std::fs::write(&dir, "in the way").unwrap();
    let ended = kept(&stage, 1, dir.to_str().unwrap()).run();
    assert_eq!(
        (ended.code, &ended.summary["state"]),
        (Some(2), &"refused".into()),
        "{}",
        ended.output
    );
    assert!(ended.output.contains("--checkpoint-dir"), "{}", ended.output);
}

#[test]
fn training_goes_on_where_nothing_can_be_written_any_more_and_the_job_says_so() {
    let stage = Stage::new(PROGRAMS, 2);
    let dir = stage.folder.path().join("checkpoints");
    let mut job = kept(&stage, 1, dir.to_str().unwrap())
        .option("summary", stage.folder.path().join("s"))
        .start();
    job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
    // What is at hand is taken away, and a file put in its place.
    while std::fs::rename(&dir, stage.folder.path().join("away")).is_err() {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::fs::write(&dir, "in the way").unwrap();
    let ended = job.wait();
    ended.assert_exact("nothing can be written");
    assert!(
        ended.output.contains("warning: the last checkpoint could not be written"),
        "{}",
        ended.output
    );
    let known = &ended.summary["checkpoints"];
    assert!(known["failed"].as_u64() > Some(2) && known["error"].is_string(), "{known}");
}
