//! Records per second of the example `ctr`, with one and two copies of each row, beside the same
//! model in PyTorch.

use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use elasticdl_tests::{built, print, quantile};
use serde_json::{Value, json};

use crate::Arguments;

pub(crate) fn measure(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    let programs = [built("elasticdl-tests", "elasticdl-under-test")?, ctr()?];
    let python = python();
    let mut speeds = [const { Vec::new() }; CELLS.len()];
    let mut peers = [const { Vec::new() }; PROCESSES.len()];
    // The cells of a round follow each other directly, so that other load affects all of them.
    for round in 1..=arguments.rounds {
        for (speed, (workers, replicas)) in speeds.iter_mut().zip(CELLS) {
            speed.push(train(arguments, &programs, (workers, replicas), &[], None)?);
        }
        for (peer, processes) in peers.iter_mut().zip(PROCESSES) {
            peer.extend(
                python.as_ref().map(|it| train_peer(arguments, it, processes)).transpose()?,
            );
        }
        let last = |speeds: &[Vec<f64>]| speeds.iter().map(|all| all.last().copied()).collect();
        let (ours, theirs): (Vec<_>, Vec<_>) = (last(&speeds), last(&peers));
        print(&format!("round {round}: {CELLS:?} {ours:.0?}, PyTorch {PROCESSES:?} {theirs:.0?}"));
    }
    let median = |values: &mut Vec<f64>| (!values.is_empty()).then(|| quantile(values, 0.5));
    let speeds = speeds.each_mut().map(|all| quantile(all, 0.5));
    let peers = peers.each_mut().map(median);
    let of = |workers, replicas| {
        let cell = CELLS.iter().position(|cell| *cell == (workers, replicas));
        speeds[cell.expect("it is measured")]
    };
    let vs = |processes| {
        let place = PROCESSES.iter().position(|&other| other == processes);
        peers[place.expect("it is measured")].map(|peer| of(processes, 2) / peer)
    };
    let cost = |workers| of(workers, 1) / of(workers, 2) - 1.0;
    Ok(json!({
        "second_copy_cost": f64::max(cost(2), cost(4)),
        "vs_plain": vs(1),
        "vs_ddp": vs(2).zip(vs(4)).map(|(two, four)| two.min(four)),
        "speed": {
            "cells": CELLS, "records_per_s": speeds,
            "peer_processes": PROCESSES, "peer_records_per_s": peers,
        },
    }))
}

/// Records per second of a job with so many workers and copies of each row, with these options:
/// `NAME` or `NAME=VALUE`. `on_hosts`: what starts the command, the address that it listens at, and
/// the script that starts the workers.
pub(crate) fn train(
    arguments: &Arguments,
    [elasticdl, ctr]: &[PathBuf; 2],
    (workers, replicas): (u64, u64),
    options: &[&str],
    on_hosts: Option<&(Vec<String>, String, String)>,
) -> Result<f64, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let mut program: Vec<OsString> = vec![ctr.into()];
    if let Some((.., script)) = on_hosts {
        program.splice(..0, ["/bin/sh", "-c", script, "sh"].map(Into::into));
    }
    let mut job = elasticdl_tests::Command::new(elasticdl, folder.path().join("job"), program);
    if let Some((starter, address, _)) = on_hosts {
        job = job.started_by(starter).option("listen", address.clone());
    }
    for option in options {
        job = match option.split_once('=') {
            Some((name, value)) => job.option(name, value),
            None => job.flag(option),
        };
    }
    let ended = job
        .flag("quiet")
        .option("checkpoint-dir", "none")
        .option("num-workers", workers.to_string())
        .option("table-replicas", replicas.to_string())
        .option("training-data", format!("clicks:0..{}", arguments.records))
        .option("global-batch-size", (workers * arguments.batch).to_string())
        .run();
    ended.assert_outcome(0, "completed");
    let touches = ended.summary().row_touches.ok_or("the summary has no touches")?;
    if (touches.missing, touches.repeated) != (0, 0) {
        return Err(format!("touches of rows are missing or repeated: {touches:?}").into());
    }
    Ok(ended.summary().throughput.records_per_s)
}

/// Records per second of PyTorch.
fn train_peer(arguments: &Arguments, python: &Path, processes: u64) -> Result<f64, Box<dyn Error>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.bench/ctr-peer.py");
    let output = Command::new(python)
        .arg(script)
        .args([processes, arguments.batch, arguments.records].map(|number| number.to_string()))
        .env("OMP_NUM_THREADS", "1")
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().and_then(|line| line.parse().ok());
    last.ok_or_else(|| format!("{text}{}", String::from_utf8_lossy(&output.stderr)).into())
}

/// A Python that has PyTorch.
fn python() -> Option<PathBuf> {
    let environment = std::env::var_os("ELASTICDL_PYTHON_ENV")
        .unwrap_or_else(|| "/var/cache/elasticdl-python".into());
    let python = Path::new(&environment).join("bin/python");
    let has_torch = Command::new(&python).args(["-c", "import torch"]).output();
    let has_torch = has_torch.is_ok_and(|output| output.status.success());
    if !has_torch {
        print(&format!("{} has no PyTorch; its figures are null", python.display()));
    }
    has_torch.then_some(python)
}

/// The example.
pub(crate) fn ctr() -> Result<PathBuf, Box<dyn Error>> {
    built("elasticdl-examples", "ctr")
}

/// Workers, and copies of each row, of the jobs.
const CELLS: [(u64, u64); 5] = [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)];
/// Processes of PyTorch.
const PROCESSES: [u64; 3] = [1, 2, 4];
