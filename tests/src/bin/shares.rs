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
//! With `--change N`, too, but the slow worker is slow in the second third of the steps alone. It
//! prints how many steps pass until its share is within a tenth of the one that it then has.
//!
//! This program is at once the benchmark, the `elasticdl` command and the job's worker.

use std::cell::OnceCell;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Parser;
use elasticdl::{Gradients, Loss, Model, NamedTensor, Sgd, UpdateRule, UserError};
use elasticdl_tests::churn::{EventLog, EventLogs, StepLog};
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
    /// Sleep for each record, this many times as long in one worker for a third of the steps
    #[arg(long)]
    change: Option<u64>,
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
    /// Steps in which the slow worker is slow [default: all]
    #[arg(long, value_delimiter = ',', num_args = 1)]
    slow_steps: Option<Vec<u64>>,
    /// Folder of the event logs
    #[arg(long)]
    event_logs: Option<PathBuf>,
    #[arg(skip)]
    log: OnceCell<StepLog>,
}

impl Delay {
    /// The value of this launch.
    fn own<T: Copy>(values: &[T]) -> Option<T> {
        let is_first = std::env::var("ELASTICDL_LAUNCH").is_ok_and(|launch| launch == "1");
        values.get(usize::from(!is_first)).copied()
    }

    fn log(&self) -> &StepLog {
        self.log.get_or_init(|| StepLog::new(self.event_logs.as_deref()))
    }

    /// Microseconds to sleep per record now.
    fn sleep(&self) -> Option<u64> {
        let sleep = self.sleep.as_deref()?;
        let is_slow = self.slow_steps.as_deref().is_none_or(|steps| {
            steps
                .first()
                .zip(steps.last())
                .is_some_and(|(a, b)| (*a..*b).contains(&self.log().steps()))
        });
        if is_slow { Self::own(sleep) } else { sleep.first().copied() }
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
        if let Some(micros) = self.sleep() {
            std::thread::sleep(Duration::from_micros(micros * batch.len() as u64));
        }
        if let Some(core) = self.cores.as_deref().and_then(Self::own) {
            stay_on(core)?;
            batch.iter().for_each(|record| compute(*record));
        }
        gradients.sum()[0] += batch.len() as f32;
        self.log().computed(batch.len() as u64)?;
        Ok(Loss::Mean(0.0))
    }

    fn optimizer(&self) -> impl UpdateRule {
        self.log().rule(Sgd::new(1e-3))
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
    if let Some(factor) = arguments.change {
        return measure_change(arguments, folder.path(), factor);
    }
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
                let both = train(arguments, folder.path(), 2, &of(pair), arguments.steps)?;
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

/// How soon the share of a worker follows when it becomes slow, and fast again.
fn measure_change(arguments: &Arguments, folder: &Path, factor: u64) -> Result<(), Box<dyn Error>> {
    let [from, to] = [1, 2].map(|third| arguments.steps * third / 3);
    let mut passed = [Vec::new(), Vec::new()];
    for round in 1..=arguments.rounds {
        let mut logs = EventLogs::create(folder.join(format!("event-logs-{round}")))?;
        let options = [
            ("--sleep", format!("{MICROS},{}", MICROS * factor)),
            ("--slow-steps", format!("{from},{to}")),
            ("--event-logs", logs.folder.display().to_string()),
        ];
        train(arguments, folder, 2, &options, arguments.steps)
            .map_err(|error| error as Box<dyn Error>)?;
        logs.refresh()?;
        let shares = |log: &EventLog| log.commits.iter().map(|(_, c)| c.own as f64).collect();
        let shares: Vec<Vec<f64>> = logs.all.values().map(shares).collect();
        let slow_part = |shares: &Vec<f64>| shares[from as usize..to as usize].iter().sum::<f64>();
        let slow = shares.iter().min_by(|a, b| slow_part(a).total_cmp(&slow_part(b)));
        let slow = slow.ok_or("no worker has an event log")?;
        for (passed, (from, to)) in passed.iter_mut().zip([(from, to), (to, arguments.steps)]) {
            let part = &slow[from as usize..(to as usize).min(slow.len())];
            let last = quantile(&mut part[part.len() / 2..].to_vec(), 0.5);
            let follows = |share: &f64| (share - last).abs() <= last / 10.0;
            passed.push(part.iter().position(follows).ok_or("the share never follows")? as f64);
        }
        let [slow, fast] = passed.each_ref().map(|steps| steps[steps.len() - 1]);
        print(&format!("round {round}: steps with the old share: {slow} slow, then {fast} fast"));
    }
    let [slow, fast] = passed.map(|mut steps| quantile(&mut steps, 0.5));
    print(&serde_json::json!({ "steps_slow": slow, "steps_fast": fast }).to_string());
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
        let beside = scope
            .spawn(move || train(arguments, folder, 1, &of((option, [other; 2])), other_steps));
        let first = train(arguments, folder, 1, &of((option, [first; 2])), steps)?;
        Ok([first, beside.join().map_err(|_| "a job panicked")??])
    })
}

/// Records per second of a job, from its first group's start to its end.
fn train(
    arguments: &Arguments,
    folder: &Path,
    workers: u32,
    options: &[(&str, String)],
    steps: u64,
) -> Result<f64, Box<dyn Error + Send + Sync>> {
    let this = std::env::current_exe()?;
    let options = options.iter().flat_map(|(name, value)| [(*name).into(), value.into()]);
    let program = std::iter::once(this.clone().into_os_string()).chain(options);
    let own = tempfile::tempdir_in(folder)?;
    let ended = Command::new(this, own.path().join("job"), program)
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

/// The option as an argument.
fn of((option, [first, other]): Pair) -> [(&'static str, String); 1] {
    [(option, format!("{first},{other}"))]
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
