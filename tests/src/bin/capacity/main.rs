//! The capacity of a master: the time in which a thousand workers of a training job receive a new
//! membership, the time that the pure core takes for one among ten thousand, and the memory per
//! worker.
//!
//! `cargo run --release -p elasticdl-tests --bin capacity` measures the pure core in this process,
//! and then a real master (`elasticdl train --local`, which this program includes) as a process of
//! its own. Its workers are processes that do nothing; this program acts for all of them, each on a
//! connection of its own. So master and benchmark share the machine's cores.

mod core;
mod memory;
mod wire;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use elasticdl_master::limits::WORKERS_MAX;
use elasticdl_tests::{exit_code, print};
use serde_json::json;

/// Why there is no result.
type Fault = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, Parser)]
struct Arguments {
    /// Connected workers
    #[arg(long, default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(3..=i64::from(WORKERS_MAX)))]
    workers: u32,
    /// Changes of membership
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    changes: u32,
    /// Also write the result to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    if std::env::args().nth(1).is_some_and(|word| word == "train") {
        return elasticdl_cli::main();
    }
    exit_code(measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Fault> {
    let &Arguments { workers, changes, .. } = arguments;
    let cores = std::thread::available_parallelism()?;
    print(&format!("{workers} workers, {cores} cores"));
    let core_worker_bytes = core::worker_bytes()?;
    print(&format!("core: {core_worker_bytes} bytes per worker of 10000"));
    let changes_ms: Vec<(u32, f64)> = CORE_WORKERS
        .map(|workers| (workers, median(core::change_ms(workers, CORE_CHANGES))))
        .to_vec();
    for (workers, ms) in &changes_ms {
        print(&format!("core: {ms:.3} ms p50 for a change of membership among {workers} workers"));
    }
    let wire::Measured { mut published_ms, worker_bytes } =
        wire::measure(wire::Load { workers, changes })?;
    published_ms.sort_by(f64::total_cmp);
    let (p50, max) = (published_ms[published_ms.len() / 2], published_ms[published_ms.len() - 1]);
    print(&format!(
        "gRPC: {} workers received a new membership in {p50:.1} ms p50, {max:.1} ms max of {} \
         changes (target 250)",
        workers - 1,
        published_ms.len()
    ));
    print(&format!("master: {worker_bytes} bytes of resident memory per connected worker"));
    let result = json!({
        "workers": workers,
        "cores": cores.get(),
        "core_worker_bytes": core_worker_bytes,
        "core_change_ms": changes_ms,
        "membership_told_ms": {"p50": p50, "max": max, "changes": published_ms.len()},
        "master_worker_bytes": worker_bytes,
    });
    print(&result.to_string());
    if let Some(path) = &arguments.json {
        std::fs::write(path, serde_json::to_vec_pretty(&result)?)?;
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Sizes of the group for which the core is measured.
const CORE_WORKERS: [u32; 5] = [100, 300, 1000, 3000, 10_000];
const CORE_CHANGES: u32 = 25;
