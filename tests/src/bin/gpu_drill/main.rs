//! Measures the GPU ring on this machine, in at most ten minutes: `cargo run --release -p
//! elasticdl-tests --bin gpu_drill -- --json FILE`.
//!
//! The ranks are processes of this program. They have a GPU each if there are enough, and share the
//! first one otherwise: then NCCL is configured as if they were on different hosts, and uses
//! sockets. A phase that fails is reported, and the others run.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use elasticdl_tests::print;
use serde_json::{Value, json};

mod phases;
mod rank;
mod ranks;
mod step;

/// Measures the ring of GPUs, and prints a table
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Also write all figures to this file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Folder in which libcuda.so and libnccl.so.2 are looked up first: the fakes of the tests, or
    /// a package's folder
    #[arg(long, value_name = "DIR")]
    stand_in: Option<PathBuf>,
    /// The largest buffer, in bytes
    #[arg(long, default_value_t = 1 << 30)]
    bytes_max: usize,
    /// The buffer of the phases in which a rank fails, in bytes
    #[arg(long, default_value_t = 400 << 20)]
    bytes_lost: usize,
    /// Seconds after which remaining phases are left out
    #[arg(long, default_value_t = 570)]
    seconds: u64,
    /// The example of that name, built with `--features cuda`, to compare steps with a plain loop
    /// of candle
    #[arg(long, value_name = "FILE")]
    bytelm: Option<PathBuf>,
    /// Its arguments: 100 million parameters, on a GPU
    #[arg(
        long,
        default_value = "--device cuda --width 832 --heads 13 --layers 12 --context 256",
        allow_hyphen_values = true
    )]
    bytelm_arguments: String,
    /// Milliseconds that each sum is repeated for
    #[arg(long, default_value_t = 1500)]
    effort_ms: u64,
    /// Only these phases
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Run as this rank, and execute the commands on standard input
    #[arg(long, hide = true)]
    rank: Option<u64>,
    /// Index of the rank's GPU
    #[arg(long, hide = true, default_value_t = 0)]
    ordinal: usize,
}

/// A measured figure.
#[derive(Clone, Debug)]
struct Figure {
    phase: &'static str,
    what: String,
    value: f64,
    unit: &'static str,
}

/// Context of all phases.
#[derive(Debug)]
struct Drill {
    arguments: Arguments,
    devices: usize,
    /// Copy rate per direction with both directions active, in bytes per second.
    copy_rate: f64,
    begun: Instant,
    figures: Vec<Figure>,
    /// Errors that ended a phase, by phase.
    failures: BTreeMap<&'static str, String>,
}

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    if std::env::args().nth(1).is_some_and(|word| word == "train") {
        return elasticdl_master::cli::main();
    }
    let arguments = Arguments::parse();
    if let Some(me) = arguments.rank {
        return rank::serve(me, arguments.ordinal);
    }
    let mut drill = Drill {
        arguments,
        devices: 0,
        copy_rate: f64::INFINITY,
        begun: Instant::now(),
        figures: Vec::new(),
        failures: BTreeMap::new(),
    };
    // A machine without a GPU is reported by each phase.
    if let Ok(ranks) = ranks::Ranks::start(&drill, 1, false) {
        drill.devices = ranks.devices();
    }
    for (name, phase) in phases::ALL {
        if !drill.arguments.only.is_empty() && !drill.arguments.only.iter().any(|only| only == name)
        {
            continue;
        }
        if drill.left().is_zero() {
            drill.failures.insert(name, "left out: the time is up".to_owned());
            continue;
        }
        let had = drill.figures.len();
        if let Err(error) = phase(&mut drill) {
            drill.failures.insert(name, error.to_string());
        }
        for figure in &drill.figures[had..] {
            print(&figure.line());
        }
        if let Some(failure) = drill.failures.get(name) {
            print(&format!("{name:<10}  FAILED: {failure}"));
        }
    }
    drill.end()
}

impl Drill {
    fn add(
        &mut self,
        phase: &'static str,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
    ) {
        self.figures.push(Figure { phase, what: what.into(), value, unit });
    }

    /// Number of repetitions of an operation that takes `once` seconds.
    fn iterations(&self, once: f64) -> u64 {
        (self.arguments.effort_ms as f64 / 1e3 / once.max(1e-6)).clamp(3.0, 300.0) as u64
    }

    /// Fails if the time is up: no further phase begins.
    fn check_time(&self) -> Fallible<()> {
        if self.left().is_zero() {
            Err("left out from here: the time is up".into())
        } else {
            Ok(())
        }
    }

    /// Time that is left of the whole drill.
    fn left(&self) -> Duration {
        Duration::from_secs(self.arguments.seconds).saturating_sub(self.begun.elapsed())
    }

    fn end(self) -> ExitCode {
        print(&format!(
            "done in {:.0} s, {} phases failed",
            self.begun.elapsed().as_secs_f64(),
            self.failures.len()
        ));
        if let Some(path) = &self.arguments.json {
            let figures: Vec<_> = self.figures.iter().map(Figure::value).collect();
            let all = json!({ "figures": figures, "failures": self.failures });
            if let Err(error) = fs::write(path, format!("{all:#}\n")) {
                print(&format!("{}: {error}", path.display()));
                return ExitCode::FAILURE;
            }
        }
        if self.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

impl Figure {
    fn line(&self) -> String {
        format!("{:<10}  {:<58} {:>12.3} {}", self.phase, self.what, self.value, self.unit)
    }

    fn value(&self) -> Value {
        json!({ "phase": self.phase, "what": self.what, "value": self.value, "unit": self.unit })
    }
}
