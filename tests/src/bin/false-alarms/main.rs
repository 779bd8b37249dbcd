//! Workers that are evicted although they live.
//!
//! `cargo run --release -p elasticdl-tests --bin false-alarms -- --json FILE` trains jobs with
//! default options, and with several times as many workers as there are cores, each of which
//! computes all the time. Again and again some of a job's processes, the master's among them, stand
//! still for less than `--worker-timeout`, and all the time their wall clock jumps back and forth
//! by an hour. No worker is lost, so each eviction is wrong. In the end a worker is stopped for
//! good: its eviction shows that those that are lost are found.
//!
//! The wall clock jumps in a library that is loaded before others, which a C compiler makes: a time
//! namespace can't set it, and the machine's own is not this program's.

mod freezer;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant, SystemTime};

use clap::Parser;
use elasticdl_proto::WorkerId;
use elasticdl_tests::{JobFixture, Programs, built, exit_code, print, send, write_results};
use rand::rngs::ChaCha8Rng;
use rand::seq::IteratorRandom as _;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use serde_json::{Map, Value, json};

use crate::freezer::Freezer;

/// Count workers that are evicted although they live.
#[derive(Debug, Parser)]
struct Arguments {
    /// Workers of a job, for each core
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    factors: Vec<u32>,
    /// Minutes of each job
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// The longest time that processes stand still, in milliseconds; `--worker-timeout` is 800 ms
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(50..800))]
    freeze_ms: u64,
    /// Seed of the pauses
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Also write the results to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    exit_code(measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let path = |name| -> Result<&'static str, Box<dyn Error>> {
        Ok(built("elasticdl-tests", name)?.display().to_string().leak())
    };
    let programs =
        Programs { elasticdl: path("elasticdl-under-test")?, counting: path("counting")? };
    let folder = tempfile::tempdir()?;
    let clock = jumping_clock(folder.path())?;
    let freezer = Freezer::new();
    print(
        "| workers per core | minutes | bursts | frozen | evicted | evicted per hour | stopped |",
    );
    print("|---|---|---|---|---|---|---|");
    let mut results = Map::new();
    for &factor in &arguments.factors {
        let cell = cell(arguments, programs, &clock, &freezer, factor)?;
        print(&format!(
            "| {factor} | {} | {} | {} by {} | {} | {} | {} ms |",
            arguments.minutes,
            cell["bursts"],
            cell["frozen"],
            freezer.name(),
            cell["evicted"],
            cell["evicted_per_hour"],
            cell["stopped_evicted_after_ms"],
        ));
        results.insert(format!("{factor} workers per core"), cell);
        if let Some(path) = &arguments.json {
            write_results(path, &results)?;
        }
    }
    Ok(())
}

/// The library that lets a wall clock jump.
fn jumping_clock(folder: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bin/false-alarms/wall_clock.c");
    let library = folder.join("wall_clock.so");
    let seconds = format!("-DSECONDS={}", JUMP_EVERY.as_secs());
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-shared", "-fPIC", &seconds, source, "-ldl", "-o"]).arg(&library);
    if !compiler.status()?.success() {
        return Err(format!("{source} can't be compiled").into());
    }
    let output = Command::new("date").arg("+%s").env("LD_PRELOAD", &library).output()?;
    let shown: u64 = String::from_utf8(output.stdout)?.trim().parse()?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
    if shown.abs_diff(now) < 3000 {
        return Err(format!("{} has no effect on `date`", library.display()).into());
    }
    Ok(library)
}

/// A job of `factor` workers per core.
fn cell(
    arguments: &Arguments,
    programs: Programs,
    clock: &Path,
    freezer: &Freezer,
    factor: u32,
) -> Result<Value, Box<dyn Error>> {
    let cores = std::thread::available_parallelism()?.get() as u32;
    let workers = factor * cores;
    let fixture = JobFixture {
        epochs: 1_000_000,
        micros_per_record: 1000,
        global_batch_size: u64::from(workers * RECORDS_PER_WORKER),
        program_options: &["--busy"],
        worker_timeout: None,
        restart_without_checkpoint: false,
        variables: vec![("LD_PRELOAD", clock.into())],
        ..JobFixture::new(programs, workers)
    };
    let mut job = fixture.command(arguments.seed).option("checkpoint-dir", "none").start();
    job.wait_for_work_of(workers as usize);
    let mut rng = ChaCha8Rng::seed_from_u64(arguments.seed);
    let (began, time) = (Instant::now(), Duration::from_secs(60 * arguments.minutes));
    let (mut bursts, mut frozen) = (0, 0);
    while job.is_running() && began.elapsed() < time {
        std::thread::sleep(Duration::from_millis(rng.random_range(PAUSE_MS)));
        let mut pids: Vec<u32> = job.workers().into_values().collect();
        pids.push(job.pid());
        let count = rng.random_range(1..=pids.len());
        let pids = pids.into_iter().sample(&mut rng, count);
        freezer.freeze(&pids, Duration::from_millis(rng.random_range(50..=arguments.freeze_ms)));
        (bursts, frozen) = (bursts + 1, frozen + pids.len());
    }
    let hours = began.elapsed().as_secs_f64() / 3600.0;
    let before = job.status();
    let (stopped, pid) = job.workers().into_iter().next().ok_or("no worker is left")?;
    let at = Instant::now();
    send(pid, Signal::STOP);
    job.wait_for("the eviction of a stopped worker", |status| {
        status.workers.iter().all(|worker| worker.worker != stopped)
    });
    let found_after = at.elapsed();
    job.signal(Signal::TERM);
    let ended = job.wait();
    ended.assert_outcome(143, "stopped");
    let records = ended.summary().records;
    if (records.missing, records.repeated) != (0, 0) {
        return Err(format!("{records:?}").into());
    }
    let evicted: Vec<WorkerId> = ended.lost().into_iter().filter(|id| *id != stopped).collect();
    if !evicted.is_empty() {
        print(&ended.output);
    }
    Ok(json!({
        "workers": workers,
        "cores": cores,
        "minutes": arguments.minutes,
        "frozen_by": freezer.name(),
        "freeze_ms_max": arguments.freeze_ms,
        "bursts": bursts,
        "frozen": frozen,
        "clock_jumps": (hours * 3600.0 / JUMP_EVERY.as_secs_f64()) as u64,
        "steps": before.step,
        "groups": ended.memberships().len(),
        "evicted": evicted.len(),
        "evicted_per_hour": evicted.len() as f64 / hours,
        "replaced": ended.summary().workers.restarts,
        "stopped_evicted_after_ms": found_after.as_millis() as u64,
    }))
}

/// Records of a step for each worker, of a millisecond each.
const RECORDS_PER_WORKER: u32 = 16;
/// Time between two bursts, in milliseconds.
const PAUSE_MS: std::ops::Range<u64> = 500..4000;
/// Time between two jumps of the wall clock.
const JUMP_EVERY: Duration = Duration::from_secs(5);
