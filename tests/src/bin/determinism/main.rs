//! Whether the result of a job depends on its workers.
//!
//! `cargo run --release -p elasticdl-tests --bin determinism` trains the same model with
//! `--deterministic` at several numbers of workers, under faults and over several transports, and
//! prints the digest of the final parameters and optimizer state of each. It fails if they differ.
//! For comparison, it trains without the option, too.
//!
//! `--cost 4194304` measures how much longer a step and its all-reduce take.
//!
//! This program is at once the benchmark, the `elasticdl` command and the job's worker.

mod model;

use std::collections::BTreeSet;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use elasticdl_tests::{DeterminismCase, Network, Programs, print, quantile, run_benchmark};

/// Compare the results of one job at different numbers of workers, under faults.
#[derive(Debug, Parser)]
struct Arguments {
    /// Instead, compare the speed with and without the option: two workers, this many parameters,
    /// and a model that computes next to nothing.
    #[arg(long, value_name = "PARAMETERS")]
    cost: Option<u64>,
    /// With --cost: the workers are in network namespaces that send at this rate, such as 1gbit;
    /// otherwise they share memory.
    #[arg(long, requires = "cost")]
    rate: Option<String>,
    /// Also write the digests to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    run_benchmark(model::Mlp::parse, || {
        let arguments = Arguments::parse();
        let this = std::env::current_exe()?;
        let this: &'static str = this.display().to_string().leak();
        let programs = Programs { elasticdl: this, counting: this };
        match arguments.cost {
            Some(parameters) => cost(programs, parameters, arguments.rate.as_deref()),
            None => compare(programs, &arguments),
        }
    })
}

/// Prints the ratios of a step's durations and of its all-reduce's, by round and in the median.
fn cost(programs: Programs, parameters: u64, rate: Option<&str>) -> Result<(), Box<dyn Error>> {
    if rate.is_some() && !Network::is_allowed() {
        return Err("--rate needs root and iproute2".into());
    }
    let (mut steps, mut all_reduces) = (Vec::new(), Vec::new());
    for round in 1..=5 {
        let [plain, exact] =
            [false, true].map(|on| DeterminismCase::throughput(programs, on, parameters, rate));
        print(&format!(
            "round {round}: step {:.2} ms, of it all-reduce {:.2} ms; with --deterministic {:.2} \
             and {:.2} ms",
            1000.0 / plain.steps_per_s,
            plain.all_reduce_ms,
            1000.0 / exact.steps_per_s,
            exact.all_reduce_ms,
        ));
        steps.push(plain.steps_per_s / exact.steps_per_s);
        all_reduces.push(exact.all_reduce_ms / plain.all_reduce_ms);
    }
    let result = serde_json::json!({
        "parameters": parameters,
        "step_ratio": quantile(&mut steps, 0.5),
        "all_reduce_ratio": quantile(&mut all_reduces, 0.5),
    });
    print(&result.to_string());
    Ok(())
}

fn compare(programs: Programs, arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let mut digests = serde_json::Map::new();
    let mut run = |case: &DeterminismCase, is_deterministic| {
        let ended = case.run(programs, is_deterministic);
        let summary = ended.summary();
        let digest = summary.digest.clone().unwrap_or_default();
        let option = if is_deterministic { "--deterministic" } else { "" };
        let (groups, restarts) = (summary.memberships.len(), summary.workers.restarts);
        let transport = summary.allreduce_transport.as_deref().unwrap_or("none");
        print(&format!(
            "{digest}  {option:15}  {:40} {groups} groups, {restarts} restarts, {transport}",
            case.name
        ));
        digests.insert(format!("{} {option}", case.name).trim().into(), digest.into());
    };
    let mut all = [DeterminismCase::UNDISTURBED, DeterminismCase::DISTURBED].concat();
    if Network::is_allowed() {
        all.extend(DeterminismCase::TRANSPORTS);
    } else {
        print("jobs on hosts of their own are skipped: they need root and iproute2");
    }
    all.iter().for_each(|case| run(case, true));
    DeterminismCase::UNDISTURBED.iter().take(3).for_each(|case| run(case, false));
    let exact = digests.iter().filter(|(name, _)| name.ends_with("--deterministic"));
    let distinct: BTreeSet<&str> = exact.filter_map(|(_, digest)| digest.as_str()).collect();
    print(&format!("{} digest(s) with --deterministic", distinct.len()));
    if let Some(file) = &arguments.json {
        std::fs::write(file, serde_json::Value::from(digests.clone()).to_string())?;
    }
    if distinct.len() != 1 {
        return Err("the digests differ".into());
    }
    Ok(())
}
