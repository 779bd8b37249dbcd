//! The overhead of a job of one worker over a bare loop that calls the same model.
//!
//! `cargo run --release -p elasticdl-tests --bin overhead` trains the same model on the same
//! records both ways, in turn, and prints the median over the rounds of the two times' ratio. This
//! program is at once the benchmark, the `elasticdl` command (`overhead train …`) and the job's
//! worker.

use std::error::Error;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use clap::Parser;
use elasticdl::readers::FixedRecords;
use elasticdl::{Gradients, Loss, Model, Optimizer, Reader, Sgd, Update, UserError};
use elasticdl_tests::{counting_data, counting_reader, numbers, print, quantile};
use serde_json::Value;

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
    type Reader = FixedRecords;
    type Batch = Vec<u64>;

    fn reader(&self) -> FixedRecords {
        counting_reader()
    }

    fn parameter_count(&self) -> usize {
        self.parameters
    }

    fn initialize(&mut self, _seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        parameters.fill(0.0);
        Ok(())
    }

    fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<Vec<u64>, UserError> {
        numbers(records)
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

    fn optimizer(&self) -> Optimizer {
        Sgd::new(1e-9).momentum(0.9).into()
    }
}

fn main() -> ExitCode {
    if std::env::args().nth(1).is_some_and(|word| word == "train") {
        return elasticdl_master::cli::main();
    }
    if std::env::var_os("ELASTICDL_MASTER").is_some() {
        return elasticdl::run(Dense { parameters: Arguments::parse().parameters });
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
    let result = serde_json::json!({
        "bare_records_per_s": bare, "worker_records_per_s": elastic, "overhead_percent": overhead,
    });
    print(&result.to_string());
    Ok(())
}

/// Records per second of a plain loop.
fn train_bare(arguments: &Arguments, data: &Path) -> Result<f64, UserError> {
    let mut model = Dense { parameters: arguments.parameters };
    let mut reader = model.reader();
    let dataset = reader.describe(&data.display().to_string())?;
    let mut parameters = vec![0.0; model.parameter_count()];
    let mut slots = vec![0.0; model.slots() * model.parameter_count()];
    let mut gradients = vec![0.0; model.parameter_count()];
    model.initialize(0, &mut parameters)?;
    let started = Instant::now();
    for step in 0..arguments.steps {
        let range = step * arguments.batch..(step + 1) * arguments.batch;
        let records = reader.read(&dataset.files[0], range)?;
        let batch = model.feed(records)?;
        gradients.fill(0.0);
        let count = arguments.batch;
        model.gradients(&parameters, batch, &mut Gradients::new(&mut gradients, count as usize))?;
        model.update(Update::new(step, count, &gradients, &mut parameters, &mut slots))?;
    }
    Ok((arguments.steps * arguments.batch) as f64 / started.elapsed().as_secs_f64())
}

/// Records per second of a job of one worker, from its first group's start to its end.
fn train_elastic(arguments: &Arguments, data: &Path, folder: &Path) -> Result<f64, Box<dyn Error>> {
    let this = std::env::current_exe()?;
    let summary = folder.join("summary.json");
    let status = Command::new(&this)
        .args([
            "train",
            "--local",
            "--quiet",
            "--checkpoint-dir",
            "none",
            "--num-workers",
            "1",
            "--training-data",
        ])
        .arg(data)
        .args(["--global-batch-size", &arguments.batch.to_string(), "--job-dir"])
        .arg(folder.join("job"))
        .arg("--summary")
        .arg(&summary)
        .arg("--")
        .arg(&this)
        .args(["--parameters", &arguments.parameters.to_string()])
        .stdout(Stdio::null())
        .status()?;
    if !status.success() {
        return Err(format!("the job ended with {status}").into());
    }
    let summary: Value = serde_json::from_slice(&std::fs::read(summary)?)?;
    summary["throughput"]["records_per_s"]
        .as_f64()
        .ok_or_else(|| "no throughput in the summary".into())
}
