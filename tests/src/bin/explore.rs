//! Searches through all runs of a small job with few faults: every fault at every point.
//!
//! `cargo run --release -p elasticdl-tests --bin explore -- --json FILE` prints and writes:
//!
//! | key | meaning |
//! |---|---|
//! | `states`, `runs`, `events` | different states, runs, and events of all runs |
//! | `depth` | events of the longest run |
//! | `known` | runs that came to a state that another one had been in |
//! | `symmetric` | choices that were left out, as those for another, equal worker were made |
//! | `complete` | whether all runs within the bounds were made |
//! | `violations` | each with its decisions, which `--replay` takes |
//! | `seconds` | time |
//!
//! A fault is one of: a worker is killed, gets SIGTERM, is stopped for half the worker timeout
//! (`pause`) or for twice as long as it (`stop`); two hosts are cut off from each other for twice
//! the worker timeout; the master is killed, between any two of its actions; a worker joins. A
//! delay lets the next turn or delivery happen 1 ms later, in which all others come first.

use std::num::NonZero;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use elasticdl_tests::print;
use elasticdl_tests::simulation::{Bounds, Decision, Explored, Found, explore, replay};
use serde_json::json;

/// Search through all runs of a small job with few faults, and report those that violate an
/// invariant
#[derive(Debug, Parser)]
struct Arguments {
    /// Workers of the job; one more may join
    #[arg(long, default_value = "3")]
    workers: u32,
    /// Steps of the job
    #[arg(long, default_value = "3")]
    steps: u64,
    /// Workers beyond them that take the places of lost ones
    #[arg(long, default_value = "0")]
    spares: u32,
    /// Shards of the model's tables; 0: it has none
    #[arg(long, default_value = "0")]
    shards: u32,
    /// Chunks of the optimizer's state, which are divided over the workers; 0: each has all of it
    #[arg(long, default_value = "0", conflicts_with = "shards")]
    chunks: u32,
    /// Faults and delays of a run, at most
    #[arg(long, default_value = "2")]
    faults: usize,
    /// Delays among them, at most
    #[arg(long, default_value = "0")]
    delays: usize,
    /// Stop after this many runs
    #[arg(long, default_value = "18446744073709551615")]
    runs: u64,
    /// Continue until N violations are found
    #[arg(long, value_name = "N", default_value = "1")]
    violations: usize,
    /// Threads [default: one per core]
    #[arg(long, value_name = "N")]
    threads: Option<NonZero<usize>>,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Make one run, and print its trace; for example `120 kill 2,300 join`
    #[arg(long, value_name = "DECISIONS", value_delimiter = ',', num_args = 0..=1)]
    replay: Option<Vec<Decision>>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let Arguments { workers, steps, spares, shards, chunks, .. } = arguments;
    let job = Explored { workers, steps, spares, shards, chunks };
    // A core's panic is reported with its decisions; the output of the panic hook is not needed.
    std::panic::set_hook(Box::new(|_| {}));
    if let Some(decisions) = arguments.replay {
        let (outcome, trace) = replay(job, &decisions);
        trace.iter().for_each(|line| print(line));
        print(&format!("{outcome:?}"));
        return if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let one = NonZero::<usize>::MIN;
    let threads =
        arguments.threads.unwrap_or_else(|| std::thread::available_parallelism().unwrap_or(one));
    let bounds = Bounds {
        job,
        decisions: arguments.faults,
        delays: arguments.delays,
        runs: arguments.runs,
        violations: arguments.violations,
        threads: threads.get(),
    };
    let found = explore(&bounds);
    let text = |(decisions, what): &(Vec<Decision>, String)| {
        let decisions = listed(decisions);
        json!({ "decisions": decisions, "what": what })
    };
    let Found { states, depth, runs, events, known, symmetric, is_complete, .. } = found;
    for (decisions, what) in &found.violations {
        print(&format!("after {}: {what}", listed(decisions)));
    }
    let violations: Vec<_> = found.violations.iter().map(text).collect();
    let figures = json!({
        "workers": workers, "steps": steps, "spares": spares, "shards": shards, "chunks": chunks,
        "faults": arguments.faults, "delays": arguments.delays,
        "states": states, "depth": depth, "runs": runs, "events": events, "known": known,
        "symmetric": symmetric, "complete": is_complete, "violations": violations,
        "seconds": found.took.as_secs_f64(),
    });
    print(&format!("{figures:#}"));
    if let Some(path) = arguments.json
        && let Err(error) = std::fs::write(&path, figures.to_string())
    {
        print(&format!("{}: {error}", path.display()));
        return ExitCode::FAILURE;
    }
    if found.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn listed(decisions: &[Decision]) -> String {
    decisions.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
