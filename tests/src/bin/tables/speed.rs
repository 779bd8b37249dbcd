//! Records per second of the example `ctr`, with one and two copies of each row, beside the same
//! model in PyTorch and in TorchRec.

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
    let has = PEERS.map(|(_, module)| has(&python, module));
    let mut speeds = [const { Vec::new() }; CELLS.len()];
    let mut peers = [const { [const { Vec::new() }; PROCESSES.len()] }; PEERS.len()];
    // The cells of a round follow each other directly, so that other load affects all of them.
    for round in 1..=arguments.rounds {
        for (speed, (workers, replicas)) in speeds.iter_mut().zip(CELLS) {
            speed.push(train(arguments, &programs, (workers, replicas), &[], None)?);
        }
        for (place, (name, _)) in PEERS.into_iter().enumerate().filter(|&(place, _)| has[place]) {
            for (speeds, processes) in peers[place].iter_mut().zip(PROCESSES) {
                speeds.push(train_peer(arguments, &python, name, processes)?);
            }
        }
        let last = |speeds: &[Vec<f64>]| -> Vec<_> {
            speeds.iter().map(|all| all.last().copied()).collect()
        };
        let theirs = peers.each_ref().map(|speeds| last(speeds));
        let names = PEERS.map(|(name, _)| name);
        let ours = last(&speeds);
        print(&format!(
            "round {round}: {CELLS:?} {ours:.0?}, {names:?} {PROCESSES:?} {theirs:.0?}"
        ));
    }
    let median = |values: &mut Vec<f64>| (!values.is_empty()).then(|| quantile(values, 0.5));
    let speeds = speeds.each_mut().map(|all| quantile(all, 0.5));
    let peers = peers.each_mut().map(|peer| peer.each_mut().map(median));
    let of = |workers, replicas| {
        let cell = CELLS.iter().position(|cell| *cell == (workers, replicas));
        speeds[cell.expect("it is measured")]
    };
    let vs = |peer: usize, processes| {
        let place = PROCESSES.iter().position(|&other| other == processes);
        peers[peer][place.expect("it is measured")].map(|peer| of(processes, 2) / peer)
    };
    let vs_several = |peer| vs(peer, 2).zip(vs(peer, 4)).map(|(two, four)| two.min(four));
    let cost = |workers| of(workers, 1) / of(workers, 2) - 1.0;
    Ok(json!({
        "second_copy_cost": f64::max(cost(2), cost(4)),
        "vs_plain": vs(0, 1),
        "vs_ddp": vs_several(0),
        "vs_torchrec": vs_several(1),
        "speed": {
            "cells": CELLS, "records_per_s": speeds,
            "peers": PEERS, "peer_processes": PROCESSES, "peer_records_per_s": peers,
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

/// Records per second of a peer.
fn train_peer(
    arguments: &Arguments,
    python: &Path,
    peer: &str,
    processes: u64,
) -> Result<f64, Box<dyn Error>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.bench/ctr-peer.py");
    let output = Command::new(python)
        .arg(script)
        .arg(peer)
        .args([processes, arguments.batch, arguments.records].map(|number| number.to_string()))
        .env("OMP_NUM_THREADS", "1")
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().and_then(|line| line.parse().ok());
    last.ok_or_else(|| format!("{text}{}", String::from_utf8_lossy(&output.stderr)).into())
}

/// The Python that the peers run with.
fn python() -> PathBuf {
    let environment = std::env::var_os("ELASTICDL_PYTHON_ENV")
        .unwrap_or_else(|| "/var/cache/elasticdl-python".into());
    Path::new(&environment).join("bin/python")
}

/// Whether that Python has this module.
fn has(python: &Path, module: &str) -> bool {
    let found = Command::new(python).args(["-c", &format!("import {module}")]).output();
    let found = found.is_ok_and(|output| output.status.success());
    if !found {
        print(&format!("{} has no {module}; its figures are null", python.display()));
    }
    found
}

/// The example.
pub(crate) fn ctr() -> Result<PathBuf, Box<dyn Error>> {
    built("elasticdl-examples", "ctr")
}

/// Workers, and copies of each row, of the jobs.
const CELLS: [(u64, u64); 5] = [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)];
/// The peers, each with the module that it needs.
const PEERS: [(&str, &str); 2] = [("ddp", "torch"), ("torchrec", "torchrec")];
/// Processes of a peer.
const PROCESSES: [u64; 3] = [1, 2, 4];
