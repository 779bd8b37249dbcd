//! The memory of a worker for each parameter of its model.
//!
//! `cargo run --release -p elasticdl-tests --bin memory` trains models of two sizes in jobs of 4
//! and of 8 workers, with AdamW and with SGD, with and without `--shard-optimizer`, and prints by
//! how many bytes the resident memory of the first rank grows with a parameter: what the size of
//! the model does not change drops out. Memory that ranks share does not count. This program is at
//! once the benchmark, the `elasticdl` command and the job's worker.
//!
//! With the defaults, eight workers need 2 GiB together.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use elasticdl::{
    AdamW, Gradients, Loss, Model, NamedTensor, Optimizer, Sgd, UpdateRule, UserError,
};
use elasticdl_tests::{Command, counting_data, print, run_benchmark};
use serde_json::{Map, Value, json};

#[derive(Parser)]
struct Arguments {
    /// Parameters of the larger model
    #[arg(long, default_value_t = 8 << 20)]
    parameters: usize,
    /// Workers of the jobs
    #[arg(long, value_delimiter = ',', default_value = "4,8")]
    workers: Vec<u32>,
    /// Optimizer of this worker
    #[arg(long, value_enum, default_value = "adamw", hide = true)]
    optimizer: Rule,
    /// Also write the result to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Rule {
    Adamw,
    Sgd,
}

/// A model whose gradient has no zero, so that each page of each buffer is in use.
struct Sized {
    parameters: usize,
    rule: Rule,
}

impl Model for Sized {
    elasticdl_tests::read_counting_data!();

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.parameters])]
    }

    fn gradients(
        &mut self,
        _: &[f32],
        batch: Vec<u64>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        gradients.sum().iter_mut().for_each(|sum| *sum += 1.0);
        Ok(Loss::Sum(batch.len() as f64))
    }

    fn optimizer(&self) -> impl UpdateRule {
        match self.rule {
            Rule::Adamw => Optimizer::from(AdamW::new(1e-3)),
            Rule::Sgd => Sgd::new(1e-3).into(),
        }
    }

    /// The resident memory of this process that is not shared, in KiB.
    fn summary(&mut self, _: &[f32]) -> Result<Option<String>, UserError> {
        let status = fs::read_to_string("/proc/self/status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        Ok(line.map(|line| line.trim().trim_end_matches(" kB").to_owned()))
    }
}

fn main() -> ExitCode {
    let model = || {
        let Arguments { parameters, optimizer: rule, .. } = Arguments::parse();
        Sized { parameters, rule }
    };
    run_benchmark(model, || measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    counting_data(&data, STEPS * BATCH, 1)?;
    let mut result = Map::from_iter([("parameters".to_owned(), json!(arguments.parameters))]);
    for (rule, is_sharded, key) in [
        (Rule::Adamw, false, "bytes_per_param"),
        (Rule::Sgd, false, "bytes_per_param_sgd"),
        (Rule::Adamw, true, "bytes_per_param_sharded"),
        (Rule::Sgd, true, "bytes_per_param_sharded_sgd"),
    ] {
        let mut of_rule = Map::new();
        for &workers in &arguments.workers {
            let [small, large] =
                [arguments.parameters / 8, arguments.parameters].map(|parameters| {
                    (parameters, train(parameters, workers, (rule, is_sharded), &data))
                });
            let more = large.1?.saturating_sub(small.1?) as f64;
            let each = more / (large.0 - small.0) as f64;
            let how = if is_sharded { ", sharded" } else { "" };
            print(&format!("{rule:?}{how}, {workers} workers: {each:.2} bytes per parameter"));
            of_rule.insert(format!("w{workers}"), json!(each));
        }
        result.insert(key.to_owned(), Value::Object(of_rule));
    }
    let result = Value::Object(result).to_string();
    print(&result);
    if let Some(path) = &arguments.json {
        fs::write(path, result)?;
    }
    Ok(())
}

/// Resident bytes of the first rank at the end of a job.
fn train(
    parameters: usize,
    workers: u32,
    (rule, is_sharded): (Rule, bool),
    data: &Path,
) -> Result<u64, Box<dyn Error>> {
    let this = std::env::current_exe()?;
    let rule = rule.to_possible_value().ok_or("no optimizer is hidden")?;
    let program = [
        this.clone().into_os_string(),
        "--parameters".into(),
        parameters.to_string().into(),
        "--optimizer".into(),
        rule.get_name().into(),
    ];
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(this, folder.path().join("job"), program);
    if is_sharded {
        command = command.flag("shard-optimizer");
    }
    let ended = command
        .flag("quiet")
        .option("checkpoint-dir", "none")
        .option("num-workers", workers.to_string())
        .option("training-data", data)
        .option("global-batch-size", BATCH.to_string())
        .run();
    ended.assert_outcome(0, "completed");
    let kib = ended.summary().model_summary.as_ref().ok_or("the model has no summary")?;
    Ok(kib.parse::<u64>()? << 10)
}

const STEPS: u64 = 8;

/// Records of a step: some for each worker.
const BATCH: u64 = 16;
