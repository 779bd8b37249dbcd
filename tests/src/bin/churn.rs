//! What coming and going costs: kills, leaves, joins and stops of real worker processes, one at a time.
//!
//! `cargo run --release -p elasticdl-tests --bin churn -- --workers 4 --params 1048576 --events 20` prints, per kind of
//! event, the gap that the members saw between two committed steps, less the median step. Gaps are the master's record of
//! what members reported (`gap_ms` of the job's summary: the member that lost the most). This program is at once the
//! benchmark, the `elasticdl` command and the job's worker.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use elasticdl_tests::{Running, counting_data, send};
use elasticdl_worker::readers::FixedRecords;
use elasticdl_worker::{Model, Update, UserError};
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand::seq::IteratorRandom;
use rustix::process::Signal;
use serde_json::{Value, json};

#[derive(Debug, Parser)]
struct Arguments {
    /// Workers of the job
    #[arg(long, default_value_t = 4)]
    workers: u32,
    /// Parameters of the model
    #[arg(long, default_value_t = 1 << 20)]
    params: usize,
    /// Events of each kind
    #[arg(long, default_value_t = 20)]
    events: u32,
    /// What happens to workers
    #[arg(long, value_enum, default_value = "all")]
    kind: Kind,
    /// Also write the result to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Kill,
    Leave,
    Join,
    Stop,
    All,
}

/// Counts records in its first parameters; the rest are there to be reduced.
#[derive(Parser)]
struct Counting {
    #[arg(long)]
    params: usize,
}

impl Model for Counting {
    type Reader = FixedRecords;
    type Batch = Vec<u64>;

    fn reader(&self) -> FixedRecords {
        FixedRecords::new(8)
    }

    fn parameters(&self) -> usize {
        self.params
    }

    fn initialize(&mut self, _seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        parameters.fill(0.0);
        Ok(())
    }

    fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<Vec<u64>, UserError> {
        let number = |bytes: Vec<u8>| Ok(u64::from_le_bytes(bytes.as_slice().try_into()?));
        records.into_iter().map(number).collect()
    }

    fn gradients(&mut self, _: &[f32], batch: Vec<u64>, gradients: &mut [f32]) -> Result<f64, UserError> {
        let slots = gradients.len() as u64;
        batch.iter().for_each(|record| gradients[(record % slots) as usize] += 1.0);
        Ok(batch.len() as f64)
    }

    fn update(&mut self, update: Update<'_>) -> Result<(), UserError> {
        update.parameters.iter_mut().zip(update.sum).for_each(|(parameter, sum)| *parameter += sum);
        Ok(())
    }

    fn slots(&self) -> usize {
        0
    }
}

fn main() -> ExitCode {
    if std::env::args().nth(1).is_some_and(|word| ["train", "status", "scale"].contains(&word.as_str())) {
        return elasticdl_master::cli::main();
    }
    if std::env::var_os("ELASTICDL_MASTER").is_some() {
        return elasticdl_worker::run(Counting::parse());
    }
    match measure(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    counting_data(&folder.path().join("data"), RECORDS, 1)?;
    let kinds = [Kind::Kill, Kind::Leave, Kind::Join, Kind::Stop];
    let mut rows = serde_json::Map::new();
    let (mut lost, mut repeated, mut steps_ms, mut latencies) = (0, 0, Vec::new(), Vec::new());
    for kind in kinds.into_iter().filter(|kind| [*kind, Kind::All].contains(&arguments.kind)) {
        let measured = disturb(arguments, kind, folder.path())?;
        print(&measured.line(kind));
        rows.insert(format!("{kind:?}").to_lowercase(), measured.row());
        lost += measured.records_lost;
        repeated += measured.records_repeated;
        steps_ms.push(measured.median_step_ms);
        latencies.extend(measured.join_latency_ms);
    }
    let result = json!({
        "workers": arguments.workers,
        "params": arguments.params,
        "median_step_ms": quantile(&mut steps_ms, 0.5),
        "kinds": rows,
        "join_latency_ms": {"p50": quantile(&mut latencies, 0.5), "p99": quantile(&mut latencies, 0.99)},
        "records_lost": lost,
        "records_repeated": repeated,
    });
    print(&result.to_string());
    if let Some(path) = &arguments.json {
        std::fs::write(path, result.to_string())?;
    }
    Ok(())
}

/// One job and what its events of one kind cost.
struct Measured {
    median_step_ms: f64,
    /// Less the median step.
    gaps_ms: Vec<f64>,
    /// From the start of a process until it was a member of a generation that had committed a step, as seen by polling.
    join_latency_ms: Vec<f64>,
    records_lost: u64,
    records_repeated: u64,
}

fn disturb(arguments: &Arguments, kind: Kind, folder: &Path) -> Result<Measured, Box<dyn Error>> {
    let this = std::env::current_exe()?;
    let program = [this.clone(), "--params".into(), arguments.params.to_string().into()];
    let job = elasticdl_tests::Command::new(&this, folder.join(format!("{kind:?}")), program)
        .option("training-data", folder.join("data"))
        .option("num-epochs", "1000000")
        .option("num-workers", arguments.workers.to_string())
        .option("max-workers", (arguments.workers + 1).to_string())
        .option("global-batch-size", (arguments.workers * 8).to_string())
        .option("max-worker-restarts", "1000");
    let mut job = job.start();
    let members = |n: u32| move |status: &Value| ranked(status) == n as usize;
    job.wait_for("all members", members(arguments.workers));
    let median_step_ms = undisturbed_step_ms(&job);
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let mut join_latency_ms = Vec::new();
    for _ in 0..arguments.events {
        std::thread::sleep(PAUSE);
        let started = Instant::now();
        let victim = job.workers().into_values().choose(&mut rng).ok_or("the job has no workers")?;
        match kind {
            Kind::Kill => send(victim, Signal::KILL),
            Kind::Leave => send(victim, Signal::TERM),
            Kind::Stop => send(victim, Signal::STOP),
            Kind::Join | Kind::All => {
                job.scale(arguments.workers + 1);
                job.wait_for("the newcomer", members(arguments.workers + 1));
                join_latency_ms.push(started.elapsed().as_secs_f64() * 1e3);
                job.scale(arguments.workers);
            }
        }
        job.wait_for("the change", move |status| {
            let pids = status["workers"].as_array().into_iter().flatten();
            kind == Kind::Join || pids.into_iter().all(|w| w["pid"] != victim)
        });
        job.wait_for("all members again", members(arguments.workers));
    }
    std::thread::sleep(PAUSE);
    job.signal(Signal::INT);
    let summary = job.wait().summary;
    let cause = match kind {
        Kind::Kill => "lost",
        Kind::Leave => "leave",
        Kind::Stop => "hung",
        Kind::Join | Kind::All => "join",
    };
    let memberships = summary["memberships"].as_array().map(Vec::as_slice).unwrap_or_default();
    let gaps = memberships.iter().filter(|m| m["cause"] == cause).filter_map(|m| m["gap_ms"].as_f64());
    Ok(Measured {
        median_step_ms,
        gaps_ms: gaps.map(|gap| (gap - median_step_ms).max(0.0)).collect(),
        join_latency_ms,
        records_lost: summary["records"]["missing"].as_u64().ok_or("no records in the summary")?,
        records_repeated: summary["records"]["repeated"].as_u64().ok_or("no records in the summary")?,
    })
}

fn ranked(status: &Value) -> usize {
    status["workers"].as_array().into_iter().flatten().filter(|w| w["rank"].is_u64()).count()
}

/// Milliseconds of a step while nothing happens: the median over short stretches.
fn undisturbed_step_ms(job: &Running) -> f64 {
    let mut stretches = Vec::new();
    let mut before = (Instant::now(), job.status()["step"].as_u64().unwrap_or(0));
    for _ in 0..STRETCHES {
        std::thread::sleep(STRETCH);
        let now = (Instant::now(), job.status()["step"].as_u64().unwrap_or(0));
        let steps = now.1.saturating_sub(before.1);
        if steps > 0 {
            stretches.push((now.0 - before.0).as_secs_f64() * 1e3 / steps as f64);
            before = now;
        }
    }
    quantile(&mut stretches, 0.5)
}

impl Measured {
    fn row(&self) -> Value {
        let mut gaps = self.gaps_ms.clone();
        json!({
            "events": gaps.len(),
            "p50_ms": quantile(&mut gaps, 0.5),
            "p99_ms": quantile(&mut gaps, 0.99),
            "max_ms": quantile(&mut gaps, 1.0),
        })
    }

    fn line(&self, kind: Kind) -> String {
        let mut gaps = self.gaps_ms.clone();
        format!(
            "{:<6} {:>3} gaps   p50 {:>7.1} ms   p99 {:>7.1} ms   max {:>7.1} ms   (step {:.1} ms; {} records lost, {} repeated)",
            format!("{kind:?}").to_lowercase(),
            gaps.len(),
            quantile(&mut gaps, 0.5),
            quantile(&mut gaps, 0.99),
            quantile(&mut gaps, 1.0),
            self.median_step_ms,
            self.records_lost,
            self.records_repeated,
        )
    }
}

/// The value below which `part` of the values lie; 0 of none.
fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get((last as f64 * part).ceil() as usize).copied().unwrap_or(0.0)
}

#[expect(clippy::print_stdout, reason = "the benchmark's result")]
fn print(text: &str) {
    println!("{text}");
}

/// Records of an epoch.
const RECORDS: u64 = 4096;
/// Between two events.
const PAUSE: Duration = Duration::from_millis(700);
/// How long, and how often, the undisturbed job is looked at.
const STRETCH: Duration = Duration::from_millis(300);
const STRETCHES: usize = 7;
