//! `elasticdl evaluate` and `elasticdl predict`: jobs whose workers form no group.
//!
//! The options for the cluster and the workers are those of `elasticdl train`. Options that only
//! apply to training are hidden here, and rejected.

use clap::{Arg, Args, ValueEnum};

use super::train::{self, TrainArgs};
use super::{Failure, job_options};
use crate::job::{Format, Work};

/// Arguments of `elasticdl evaluate`.
#[derive(Args, Debug)]
#[command(
    mut_args(without_training),
    override_usage = EVALUATE_USAGE,
    after_long_help = EVALUATE_HELP
)]
pub struct EvaluateArgs {
    /// Model: a safetensors file that `elasticdl train --export` has written, or the folder of one
    /// checkpoint; a path or s3://, gs://, az://.
    #[arg(long, value_name = "URI", value_parser = job_options::parse_uri, help_heading = MODEL)]
    pub model: String,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub job: TrainArgs,
}

/// Arguments of `elasticdl predict`.
#[derive(Args, Debug)]
#[command(
    mut_args(without_training),
    override_usage = PREDICT_USAGE,
    after_long_help = PREDICT_HELP
)]
pub struct PredictArgs {
    /// Model: a safetensors file that `elasticdl train --export` has written, or the folder of one
    /// checkpoint; a path or s3://, gs://, az://.
    #[arg(long, value_name = "URI", value_parser = job_options::parse_uri, help_heading = MODEL)]
    pub model: String,

    /// Folder for the predictions: a path or s3://, gs://, az://. It must be empty or not exist.
    ///
    /// Each shard has a file, `part-START-END`, named after the range of its records. Workers write
    /// the files, so in a cluster a path must lie in a --volume.
    #[arg(long, value_name = "URI", value_parser = job_options::parse_uri, help_heading = MODEL)]
    pub predictions: String,

    /// Format of the predictions.
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "parquet", help_heading = MODEL)]
    pub format: FormatName,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub job: TrainArgs,
}

/// Name of a format on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum FormatName {
    /// Comma-separated values with a header line.
    Csv,
    /// One JSON object per line.
    Jsonl,
    /// Parquet.
    Parquet,
}

pub(super) fn evaluate(args: EvaluateArgs) -> Result<u8, Failure> {
    let work = Work::Evaluate { model: args.model };
    train::train(TrainArgs { work: Some(work), ..args.job })
}

pub(super) fn predict(args: PredictArgs) -> Result<u8, Failure> {
    let format = match args.format {
        FormatName::Csv => Format::Csv,
        FormatName::Jsonl => Format::Jsonl,
        FormatName::Parquet => Format::Parquet,
    };
    let work = Work::Predict { model: args.model, output: args.predictions, format };
    train::train(TrainArgs { work: Some(work), ..args.job })
}

/// Hides and rejects options that only apply to training, and adapts the help of others.
fn without_training(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "training_data" => arg.long("data").help(DATA_HELP).long_help(DATA_HELP),
        "minibatch_size" => arg.help(BATCH_HELP).long_help(BATCH_HELP),
        "records_per_shard" => arg.help(SHARD_HELP).long_help(SHARD_HELP),
        "num_workers" => {
            arg.help("Number of workers to keep running; results do not depend on it. [default: 2]")
        }
        id if TRAINING.contains(&id) => arg.hide(true).conflicts_with("model"),
        _ => arg,
    }
}

/// Options of `train` that only apply to training.
const TRAINING: [&str; 21] = [
    "resume",
    "min_workers",
    "num_epochs",
    "max_steps",
    "global_batch_size",
    "shuffle",
    "no_shuffle",
    "export",
    "checkpoint_dir",
    "checkpoint_every",
    "checkpoint_keep",
    "resume_from",
    "on_nonfinite",
    "restart_without_checkpoint",
    "seed",
    "validation_data",
    "evaluate_every",
    "best_metric",
    "early_stopping",
    "channels",
    "wire_dtype",
];

const BATCH_HELP: &str = "Records per batch, unless the model asks for fewer. [default: 64]";
const DATA_HELP: &str =
    "Data, as PROGRAM's reader understands it: usually a file, a folder or a URI.";
const MODEL: &str = "Model";
const SHARD_HELP: &str = "Records per shard, the unit in which data is leased and results are \
    reported. [default: 4096, more for billions of records]";

const EVALUATE_USAGE: &str = "elasticdl evaluate --local --model <URI> --data <URI> [OPTIONS] \
    -- <PROGRAM> [ARGS]...\n       \
    elasticdl evaluate --image <IMG> --model <URI> --data <URI> [OPTIONS] \
    -- <PROGRAM> [ARGS]...";
const EVALUATE_HELP: &str = "\
Example:
  Evaluate an exported model with four workers, and save the result:
      elasticdl evaluate --local --num-workers 4 --model mnist.safetensors --data data/mnist-test \\
          --summary result.json -- ./target/release/mnist

The result is the mean of each metric over all records: `metrics` in the summary. It is
bit-identical for any number of workers, also if workers are killed.

Exit codes: those of `elasticdl train`.";
const PREDICT_USAGE: &str = "elasticdl predict --local --model <URI> --data <URI> \
    --predictions <URI> [OPTIONS] -- <PROGRAM> [ARGS]...\n       \
    elasticdl predict --image <IMG> --model <URI> --data <URI> \
    --predictions <URI> [OPTIONS] -- <PROGRAM> [ARGS]...";
const PREDICT_HELP: &str = "\
Example:
  Write predictions for all records of a folder as Parquet:
      elasticdl predict --local --num-workers 4 --model mnist.safetensors --data data/new \\
          --predictions out -- ./target/release/mnist

There is exactly one row for each record. The files, sorted by name, hold the rows in the order of
the records.

Exit codes: those of `elasticdl train`.";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory as _;

    use crate::cli::Cli;

    fn options(command: &str) -> BTreeSet<String> {
        let mut cli = Cli::command();
        let command = cli.find_subcommand_mut(command).unwrap();
        let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
        shown.filter_map(|arg| Some(arg.get_long()?.to_owned())).collect()
    }

    #[test]
    fn each_option_of_train_applies_to_inference_or_is_rejected() {
        let (train, evaluate, predict) =
            (options("train"), options("evaluate"), options("predict"));
        let rejected: Vec<&str> = train.difference(&evaluate).map(String::as_str).collect();
        let expected = [
            "best-metric",
            "channels",
            "checkpoint-dir",
            "checkpoint-every",
            "checkpoint-keep",
            "early-stopping",
            "evaluate-every",
            "export",
            "global-batch-size",
            "max-steps",
            "min-workers",
            "no-shuffle",
            "num-epochs",
            "on-nonfinite",
            "restart-without-checkpoint",
            "resume",
            "resume-from",
            "seed",
            "shuffle",
            "training-data",
            "validation-data",
            "wire-dtype",
        ];
        assert_eq!(rejected, expected, "an option of train alone belongs to TRAINING");
        let own: Vec<&str> = evaluate.difference(&train).map(String::as_str).collect();
        assert_eq!(own, ["data", "model"]);
        let more: Vec<&str> = predict.difference(&evaluate).map(String::as_str).collect();
        assert_eq!(more, ["format", "predictions"]);
    }
}
