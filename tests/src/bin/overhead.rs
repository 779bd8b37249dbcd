//! The overhead of a job of one worker over a bare loop that calls the same model.
//!
//! `cargo run --release -p elasticdl-tests --bin overhead` trains the same model on the same
//! records both ways, in turn, and prints the median over the rounds of the two times' ratio, and
//! the part of a step that the check for values that are not finite takes. This program is at once
//! the benchmark, the `elasticdl` command (`overhead train …`) and the job's worker.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use elasticdl::{Gradients, Loss, Model, NamedTensor, Reader, Sgd, Update, UpdateRule, UserError};
use elasticdl_tests::{Command, counting_data, print, quantile, run_benchmark};

#[derive(Parser)]
struct Arguments {
    /// Rounds; each trains once both ways
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Steps of a training
    #[arg(long, default_value_t = 400)]
    steps: u64,
    /// Parameters of the model
    #[arg(long, default_value_t = 100_000)]
    parameters: usize,
    /// Records of a step
    #[arg(long, default_value_t = 64)]
    batch: u64,
}

/// A linear model with as many inputs as parameters, drawn from the record's number: its cost is
/// two passes over the parameters for each record.
struct Dense {
    parameters: usize,
}

impl Model for Dense {
    elasticdl_tests::read_counting_data!();

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.parameters])]
    }

    fn gradients(
        &mut self,
        parameters: &[f32],
        batch: Vec<u64>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        let (sum, mut loss) = (gradients.sum(), 0.0);
        for record in batch {
            let scale = (record % 7) as f32 / 7.0;
            let prediction: f32 = parameters.iter().map(|p| p * scale).sum();
            let error = prediction - scale;
            sum.iter_mut().zip(parameters).for_each(|(g, p)| *g += error * scale + 1e-6 * p);
            loss += f64::from(error * error);
        }
        Ok(Loss::Sum(loss))
    }

    fn optimizer(&self) -> impl UpdateRule {
        Sgd::new(1e-9).momentum(0.9)
    }
}

fn main() -> ExitCode {
    run_benchmark(
        || Dense { parameters: Arguments::parse().parameters },
        || measure(&Arguments::parse()),
    )
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    counting_data(&data, arguments.steps * arguments.batch, 1)?;
    let (mut bare, mut elastic) = (Vec::new(), Vec::new());
    for round in 1..=arguments.rounds {
        bare.push(train_bare(arguments, &data).map_err(|error| error as Box<dyn Error>)?);
        elastic.push(train_elastic(arguments, &data, folder.path())?);
        let (b, e) = (bare[round - 1], elastic[round - 1]);
        print(&format!("round {round}: bare {b:.0} records/s, one worker {e:.0} records/s"));
    }
    // The two trainings of a round follow each other directly, so that other load on the machine
    // affects both.
    let mut overheads: Vec<f64> =
        bare.iter().zip(&elastic).map(|(b, e)| (b / e - 1.0) * 100.0).collect();
    let overhead = quantile(&mut overheads, 0.5);
    let (bare, elastic) = (quantile(&mut bare, 0.5), quantile(&mut elastic, 0.5));
    let (step_ms, check_ms) = (arguments.batch as f64 / elastic * 1e3, check_ms(arguments));
    let result = serde_json::json!({
        "bare_records_per_s": bare, "worker_records_per_s": elastic, "overhead_percent": overhead,
        "step_ms": step_ms, "finite_check_ms": check_ms,
        "finite_check_percent": check_ms / step_ms * 100.0,
    });
    print(&result.to_string());
    Ok(())
}

/// Median time of the check that a sum of this length is finite, in milliseconds.
fn check_ms(arguments: &Arguments) -> f64 {
    let sum = vec![1.0; arguments.parameters];
    let check = || {
        let started = Instant::now();
        assert!(elasticdl::is_finite(std::hint::black_box(&sum)));
        started.elapsed().as_secs_f64() * 1e3
    };
    let mut times: Vec<f64> = (0..CHECKS).map(|_| check()).collect();
    quantile(&mut times, 0.5)
}

/// Records per second of a plain loop.
fn train_bare(arguments: &Arguments, data: &Path) -> Result<f64, UserError> {
    let mut model = Dense { parameters: arguments.parameters };
    let mut reader = model.reader();
    let dataset = reader.describe(&data.display().to_string())?;
    let (len, mut rule) = (arguments.parameters, model.optimizer());
    let (mut parameters, mut slots) = (vec![0.0; len], vec![0.0; rule.slots() * len]);
    let mut gradients = vec![0.0; len];
    model.initialize(0, &mut parameters)?;
    let started = Instant::now();
    for step in 0..arguments.steps {
        let range = step * arguments.batch..(step + 1) * arguments.batch;
        let records = reader.read(&dataset.files[0], range)?;
        let batch = model.feed(records)?;
        gradients.fill(0.0);
        let count = arguments.batch;
        model.gradients(&parameters, batch, &mut Gradients::new(&mut gradients, count as usize))?;
        rule.apply(Update::new(step, count, &gradients, &mut parameters, &mut slots))?;
    }
    Ok((arguments.steps * arguments.batch) as f64 / started.elapsed().as_secs_f64())
}

/// Records per second of a job of one worker, from its first group's start to its end.
fn train_elastic(arguments: &Arguments, data: &Path, folder: &Path) -> Result<f64, Box<dyn Error>> {
    let this = std::env::current_exe()?;
    let program = [
        this.clone().into_os_string(),
        "--parameters".into(),
        arguments.parameters.to_string().into(),
    ];
    let ended = Command::new(this, folder.join("job"), program)
        .flag("quiet")
        .option("checkpoint-dir", "none")
        .option("num-workers", "1")
        .option("training-data", data)
        .option("global-batch-size", arguments.batch.to_string())
        .run();
    ended.assert_outcome(0, "completed");
    Ok(ended.summary().throughput.records_per_s)
}

/// Number of timed checks.
const CHECKS: usize = 21;
