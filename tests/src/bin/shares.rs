//! The throughput of two workers of which one is slower, compared with the sum of what each of them
//! reaches alone.
//!
//! `cargo run --release -p elasticdl-tests --bin shares` trains with a worker on core 0 and one on
//! core 1, which a thread that does nothing else takes half of: first as two jobs at the same time,
//! then as one. It prints the median over the rounds of the ratio of the one job's rate to the sum
//! of both, and the same for two equal workers. It needs two idle cores.
//!
//! With `--factor N`, the time of a record is slept, N times as long in the slow worker, so that
//! the workers do not compete for cores.
//!
//! This program is at once the benchmark, the `elasticdl` command and the job's worker.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Parser;
use elasticdl::{Gradients, Loss, Model, NamedTensor, UserError};
use elasticdl_tests::{Command, counting_data, print, quantile, run_benchmark};
use rustix::thread::{CpuSet, sched_setaffinity};

#[derive(Parser)]
struct Arguments {
    /// Rounds; each trains six times
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Steps of a training
    #[arg(long, default_value_t = 150)]
    steps: u64,
    /// Records of a step
    #[arg(long, default_value_t = 600)]
    batch: u64,
    /// Sleep for each record, this many times as long in the slow worker
    #[arg(long)]
    factor: Option<u64>,
}

/// Takes time for each record.
#[derive(Parser)]
struct Delay {
    /// Microseconds to sleep per record, of the first launch and of others
    #[arg(long, value_delimiter = ',', num_args = 1)]
    sleep: Option<Vec<u64>>,
    /// Cores to compute on, of the first launch and of others, if the time is computed
    #[arg(long, value_delimiter = ',', num_args = 1)]
    cores: Option<Vec<usize>>,
}

impl Delay {
    /// The value of this launch.
    fn own<T: Copy>(values: &[T]) -> Option<T> {
        let is_first = std::env::var("ELASTICDL_LAUNCH").is_ok_and(|launch| launch == "1");
        values.get(usize::from(!is_first)).copied()
    }
}

impl Model for Delay {
    elasticdl_tests::read_counting_data!();

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [1000])]
    }

    fn gradients(
        &mut self,
        _parameters: &[f32],
        batch: Vec<u64>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        if let Some(micros) = self.sleep.as_deref().and_then(Self::own) {
            std::thread::sleep(Duration::from_micros(micros * batch.len() as u64));
        }
        if let Some(core) = self.cores.as_deref().and_then(Self::own) {
            stay_on(core)?;
            batch.iter().for_each(|record| compute(*record));
        }
        gradients.sum()[0] += batch.len() as f32;
        Ok(Loss::Mean(0.0))
    }
}

/// Option of the model, and its values for the first worker and for the other.
type Pair = (&'static str, [u64; 2]);

fn main() -> ExitCode {
    run_benchmark(Delay::parse, || measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    counting_data(&folder.path().join("data"), arguments.steps * arguments.batch, 1)?;
    let (mut ratios, mut even_ratios) = (Vec::new(), Vec::new());
    for round in 1..=arguments.rounds {
        let slow = match arguments.factor {
            Some(factor) => ("--sleep", [MICROS, MICROS * factor]),
            None => ("--cores", [0, 1]),
        };
        let even = match arguments.factor {
            Some(_) => ("--sleep", [MICROS; 2]),
            None => ("--cores", [0, 1]),
        };
        let compare = |pair: Pair, is_slow: bool| {
            burn_beside(is_slow && arguments.factor.is_none(), || {
                let apart = train_apart(arguments, folder.path(), pair, is_slow)?;
                let both = train(arguments, folder.path(), 2, pair, arguments.steps)?;
                Ok::<_, Box<dyn Error + Send + Sync>>((apart, both))
            })
        };
        let ([fast, slow], both) = compare(slow, true).map_err(|error| error as Box<dyn Error>)?;
        let ([one, other], two) = compare(even, false).map_err(|error| error as Box<dyn Error>)?;
        let (ratio, even_ratio) = (both / (fast + slow), two / (one + other));
        print(&format!(
            "round {round}: {fast:.0} and {slow:.0} records/s as two jobs, {both:.0} as one: \
             {:.1} % of the sum; two fast ones {two:.0}: {:.1} %",
            ratio * 100.0,
            even_ratio * 100.0
        ));
        ratios.push(ratio);
        even_ratios.push(even_ratio);
    }
    let (ratio, even_ratio) = (quantile(&mut ratios, 0.5), quantile(&mut even_ratios, 0.5));
    print(&serde_json::json!({ "ratio": ratio, "even_ratio": even_ratio }).to_string());
    Ok(())
}

/// Records per second of two jobs of one worker at the same time. The slow one trains half as much,
/// so that both last as long.
fn train_apart(
    arguments: &Arguments,
    folder: &Path,
    (option, [first, other]): Pair,
    is_slow: bool,
) -> Result<[f64; 2], Box<dyn Error + Send + Sync>> {
    let steps = arguments.steps / 2;
    let other_steps = if is_slow { steps / 2 } else { steps };
    std::thread::scope(|scope| {
        let beside =
            scope.spawn(move || train(arguments, folder, 1, (option, [other; 2]), other_steps));
        let first = train(arguments, folder, 1, (option, [first; 2]), steps)?;
        Ok([first, beside.join().map_err(|_| "a job panicked")??])
    })
}

/// Records per second of a job, from its first group's start to its end.
fn train(
    arguments: &Arguments,
    folder: &Path,
    workers: u32,
    (option, [first, other]): Pair,
    steps: u64,
) -> Result<f64, Box<dyn Error + Send + Sync>> {
    let this = std::env::current_exe()?;
    let program = [this.clone(), option.into(), format!("{first},{other}").into()];
    let own = tempfile::tempdir_in(folder)?;
    let ended = Command::new(this, own.path().join("job"), program.map(PathBuf::into_os_string))
        .flag("quiet")
        .option("checkpoint-dir", "none")
        .option("num-workers", workers.to_string())
        .option("training-data", folder.join("data"))
        .option("global-batch-size", arguments.batch.to_string())
        .option("max-steps", steps.to_string())
        .run();
    ended.assert_outcome(0, "completed");
    Ok(ended.summary().throughput.records_per_s)
}

/// Runs `act`, if asked for beside a thread that takes half of core 1.
fn burn_beside<T>(is_burning: bool, act: impl FnOnce() -> T) -> T {
    let has_ended = AtomicBool::new(!is_burning);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) && stay_on(1).is_ok() {
                compute(0);
            }
        });
        let result = act();
        has_ended.store(true, Ordering::Relaxed);
        result
    })
}

/// Keeps the calling thread on a core.
fn stay_on(core: usize) -> Result<(), std::io::Error> {
    let mut cores = CpuSet::new();
    cores.set(core);
    Ok(sched_setaffinity(None, &cores)?)
}

/// Computes for about [`MICROS`].
fn compute(record: u64) {
    let mut x = record | 1;
    for _ in 0..ITERATIONS {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
    }
    std::hint::black_box(x);
}

/// Time per record of the fast worker.
const MICROS: u64 = 200;

/// Rounds of a generator of random numbers, each of one to two nanoseconds.
const ITERATIONS: u64 = 120_000;
