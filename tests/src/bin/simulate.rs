//! Runs simulated jobs: many seeds for some minutes, or one with its trace.
//!
//! `cargo run --release -p elasticdl-tests --bin simulate -- --minutes 30`, or `--seeds 0..100000`,
//! or `--seed 7 --story`.

use std::num::NonZero;
use std::ops::Range;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use elasticdl_tests::parse_seeds;
use elasticdl_tests::simulation::{Many, run_many, run_traced};

/// Runs whole jobs in simulated worlds, each drawn from a seed, and reports those that violate an
/// invariant.
#[derive(Debug, Parser)]
struct Arguments {
    /// Run these seeds
    #[arg(long, value_name = "A..B", value_parser = parse_seeds,
        default_value = "0..18446744073709551615")]
    seeds: Range<u64>,
    /// Run this seed
    #[arg(long, value_name = "N", conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Print the trace: one line per state change; one seed only
    #[arg(long = "story", requires = "seed")]
    trace: bool,
    /// Stop after M minutes [default: when all seeds have run, or after one minute if no seeds are
    /// given]
    #[arg(long, value_name = "M")]
    minutes: Option<u64>,
    /// Continue until N seeds have failed
    #[arg(long, value_name = "N", default_value = "1")]
    failures: usize,
    /// Threads [default: one per core]
    #[arg(long, value_name = "N")]
    threads: Option<NonZero<usize>>,
}

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "it is a program")]
fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let (true, Some(seed)) = (arguments.trace, arguments.seed) {
        let (outcome, trace) = run_traced(seed);
        trace.iter().for_each(|line| println!("{line}"));
        println!("{outcome:?}");
        return if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let seeds = arguments.seed.map_or(arguments.seeds, |seed| seed..seed.saturating_add(1));
    let minutes = arguments.minutes.or_else(|| (seeds.end == u64::MAX).then_some(1));
    let time = minutes.map(|minutes| Duration::from_secs(minutes.saturating_mul(60)));
    let one = NonZero::<usize>::MIN;
    let threads =
        arguments.threads.unwrap_or_else(|| std::thread::available_parallelism().unwrap_or(one));
    // A core's panic is reported with its seed; the output of the panic hook is not needed.
    std::panic::set_hook(Box::new(|_| {}));
    let started = Instant::now();
    let report = |begun, failed| {
        eprintln!("{begun} seeds, {failed} failed, {:.1} s", started.elapsed().as_secs_f64());
    };
    let Many { coverage, failures } = run_many(seeds, threads, arguments.failures, time, report);
    failures.iter().for_each(|failure| println!("{failure}\n"));
    println!("{coverage:#?}");
    let (runs, seconds) = (coverage.runs + failures.len() as u64, started.elapsed().as_secs_f64());
    println!(
        "{runs} seeds, {} failed, {seconds:.1} s, {:.0} seeds/s",
        failures.len(),
        runs as f64 / seconds
    );
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
