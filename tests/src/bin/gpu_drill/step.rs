//! A job of one worker, compared with the same model in a plain loop of its framework.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use elasticdl_proto::Summary;
use elasticdl_tests::quantile;
use serde_json::Value;

use crate::{Drill, Fallible, LeftOut};

/// The median times of a step of both, measured in turn.
pub(crate) fn step(drill: &mut Drill) -> Fallible<()> {
    let Some(model) = &drill.arguments.bytelm else {
        let reason = "name bytelm, built with `--features cuda`, by --bytelm";
        return Err(LeftOut(reason.to_owned()).into());
    };
    let folder = tempfile::tempdir()?;
    let text = folder.path().join("text");
    let words =
        ["the ", "group ", "is ", "a ", "database, ", "and ", "its ", "log ", "never ", "ends.\n"];
    let text_bytes = 4 << 20;
    let all: String = (0..text_bytes / 4).map(|i: usize| words[i * i % 97 % words.len()]).collect();
    fs::write(&text, all)?;
    let arguments: Vec<&str> = drill.arguments.bytelm_arguments.split_whitespace().collect();
    let (mut plain, mut job) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        drill.check_time()?;
        plain.push(plain_step(model, &arguments, &text)?);
        // The work before the first step is the same in jobs of both lengths.
        let [short, long] =
            STEPS.map(|steps| job_time(model, &arguments, &text, folder.path(), (round, steps)));
        job.push((long? - short?) / (STEPS[1] - STEPS[0]) as f64);
    }
    let mut overheads: Vec<f64> =
        plain.iter().zip(&job).map(|(plain, job)| (job / plain - 1.0) * 100.0).collect();
    drill.add("step", "bytelm, a job of one worker", 1.0 / quantile(&mut job, 0.5), "steps/s");
    drill.add("step", "bytelm, a plain loop of candle", 1.0 / quantile(&mut plain, 0.5), "steps/s");
    drill.add(
        "step",
        "how much slower the job is, median of the rounds",
        quantile(&mut overheads, 0.5),
        "%",
    );
    Ok(())
}

/// Seconds per step of the plain loop.
fn plain_step(model: &Path, arguments: &[&str], text: &Path) -> Fallible<f64> {
    let output = Command::new(model)
        .args(arguments)
        .args([
            "--plain-steps",
            &STEPS[1].to_string(),
            "--plain-batch",
            &BATCH.to_string(),
            "--plain-text",
        ])
        .arg(text)
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let output_json: Value = serde_json::from_slice(&output.stdout)?;
    output_json["seconds_per_step"].as_f64().ok_or_else(|| "the plain loop printed no time".into())
}

/// Seconds of a job of this number of steps, from its first group's start to its end.
fn job_time(
    model: &Path,
    arguments: &[&str],
    text: &Path,
    folder: &Path,
    (round, steps): (usize, u64),
) -> Fallible<f64> {
    let summary = folder.join("summary.json");
    let output = Command::new(env::current_exe()?)
        .args([
            "train",
            "--local",
            "--quiet",
            "--num-workers",
            "1",
            "--num-epochs",
            "1000",
            "--training-data",
        ])
        .arg(text)
        .args([
            "--global-batch-size",
            &BATCH.to_string(),
            "--max-steps",
            &steps.to_string(),
            "--job-dir",
        ])
        .arg(folder.join(format!("job-{round}-{steps}")))
        .arg("--summary")
        .arg(&summary)
        .arg("--")
        .arg(model)
        .args(arguments)
        .stdout(Stdio::null())
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let summary: Summary = serde_json::from_slice(&fs::read(summary)?)?;
    Ok((steps * BATCH) as f64 / summary.throughput.records_per_s)
}

const ROUNDS: usize = 2;
const STEPS: [u64; 2] = [6, 16];
const BATCH: u64 = 64;
