//! `elasticdl predict`.

use clap::{Args, ValueEnum};
use elasticdl_master::job::{Format, Work};

use super::start::{self, StartRequest};
use crate::args::{InferenceOptions, parse_uri, usual_in_short_help};
use crate::process::Failure;

/// Arguments of `elasticdl predict`.
#[derive(Args, Debug)]
#[command(
    override_usage = USAGE,
    after_help = "All options, details and examples: elasticdl predict --help-all",
    after_long_help = AFTER_HELP,
    disable_help_flag = true,
    mut_args(usual_in_short_help)
)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    pub(crate) inference: InferenceOptions,

    /// Folder for the predictions: a path or s3://, gs://, az://. It must be empty or not exist.
    ///
    /// Each shard has a file, `part-START-END`, named after the range of its records. Workers write
    /// the files, so in a cluster a path must lie in a --volume.
    #[arg(long, value_name = "URI", value_parser = parse_uri, help_heading = MODEL)]
    pub(crate) predictions: String,

    /// Format of the predictions.
    #[arg(long, value_name = "FORMAT", value_enum, default_value = "parquet",
          help_heading = MODEL)]
    pub(crate) format: FormatName,
}

/// Name of a format on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum FormatName {
    /// Comma-separated values with a header line.
    Csv,
    /// One JSON object per line.
    Jsonl,
    /// Parquet.
    Parquet,
}

/// Writes predictions. Returns the exit code.
pub(super) fn predict(args: PredictArgs) -> Result<u8, Failure> {
    let format = match args.format {
        FormatName::Csv => Format::Csv,
        FormatName::Jsonl => Format::Jsonl,
        FormatName::Parquet => Format::Parquet,
    };
    let work =
        Work::Predict { model: args.inference.model.clone(), output: args.predictions, format };
    start::start(StartRequest::inference(args.inference, work))
}

const MODEL: &str = "Model";
const USAGE: &str = "elasticdl predict --local --model <URI> --data <URI> \
    --predictions <URI> [OPTIONS] -- <PROGRAM> [ARGS]...\n       \
    elasticdl predict --image <IMG> --model <URI> --data <URI> \
    --predictions <URI> [OPTIONS] -- <PROGRAM> [ARGS]...";
const AFTER_HELP: &str = "\
Example:
  Write predictions for all records of a folder as Parquet:
      elasticdl predict --local --num-workers 4 --model mnist.safetensors --data data/new \\
          --predictions out -- ./target/release/mnist

There is exactly one row for each record. The files, sorted by name, hold the rows in the order of
the records.

A PyTorch program says how its model predicts with job.predictor(data, function); the program that
`elasticdl zoo init --python` writes does.

Exit codes: those of `elasticdl train`.";
