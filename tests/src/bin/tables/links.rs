//! Records per second of the example `ctr` on hosts between which links are slow: with rows of the
//! last commit, and with those of the one before.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use elasticdl_tests::{Network, built, print, quantile};
use serde_json::{Value, json};

use crate::Arguments;
use crate::speed::{ctr, train};

pub(crate) fn measure(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    if !Network::is_allowed() {
        print("only root makes slow links; their figures are null");
        return Ok(json!({ "lag_ratio": null }));
    }
    let programs = [built("elasticdl-tests", "elasticdl-under-test")?, ctr()?];
    let mut speeds = vec![[const { Vec::new() }; WAYS.len()]; WORKERS.len()];
    for round in 1..=arguments.rounds {
        for (workers, speeds) in WORKERS.into_iter().zip(&mut speeds) {
            let network = Network::new(workers + 1);
            let links = DelayedLinks::start(&network, workers + 1)?;
            for (speed, options) in speeds.iter_mut().zip(WAYS) {
                let script = network.on_host_of_launch(workers);
                let on_hosts = (network.on(0), network.address(0), script);
                let job = (u64::from(workers), 2);
                speed.push(train(arguments, &programs, job, options, Some(&on_hosts))?);
            }
            drop(links);
        }
        let last: Vec<Vec<f64>> =
            speeds.iter().map(|ways| ways.iter().map(|all| all[round - 1]).collect()).collect();
        print(&format!("round {round}: {WORKERS:?} workers, {WAYS:?}: {last:.0?} records/s"));
    }
    let speeds: Vec<[f64; WAYS.len()]> =
        speeds.iter_mut().map(|ways| ways.each_mut().map(|all| quantile(all, 0.5))).collect();
    let ratios: Vec<f64> = speeds.iter().map(|[newest, lagged]| lagged / newest).collect();
    Ok(json!({
        "lag_ratio": ratios.last(),
        "lag": { "workers": WORKERS, "ways": WAYS, "records_per_s": speeds },
    }))
}

/// Links of 1 Gbit/s with 1 ms latency between the hosts of a network.
struct DelayedLinks(Child);

impl DelayedLinks {
    fn start(network: &Network, hosts: u8) -> Result<Self, Box<dyn Error>> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.bench/delayed-links.py");
        let mut child = Command::new("python3")
            .arg(script)
            .args([network.name(), &hosts.to_string(), "1gbit", "1"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("it has an output")?;
        let links = Self(child);
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        if line.trim() == "ready" { Ok(links) } else { Err("the links can't be made".into()) }
    }
}

impl Drop for DelayedLinks {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It has no other work.
        let _ = self.0.wait();
    }
}

/// Numbers of workers, each on a host of its own.
const WORKERS: [u8; 2] = [2, 4];
/// Options of the jobs.
const WAYS: [&[&str]; 2] = [&[], &["table-lag=1"]];
