//! `elasticdl evaluate`.

use clap::Args;
use elasticdl_master::job::Work;

use super::start::{self, StartRequest};
use crate::args::{InferenceOptions, usual_in_short_help};
use crate::process::Failure;

/// Arguments of `elasticdl evaluate`.
#[derive(Args, Debug)]
#[command(
    override_usage = USAGE,
    after_help = "All options, details and examples: elasticdl evaluate --help-all",
    after_long_help = AFTER_HELP,
    disable_help_flag = true,
    mut_args(usual_in_short_help)
)]
pub(crate) struct EvaluateArgs {
    #[command(flatten)]
    pub(crate) inference: InferenceOptions,
}

/// Evaluates a model. Returns the exit code.
pub(super) fn evaluate(args: EvaluateArgs) -> Result<u8, Failure> {
    let work = Work::Evaluate { model: args.inference.model.clone() };
    start::start(StartRequest::inference(args.inference, work))
}

const USAGE: &str = "elasticdl evaluate --local --model <URI> --data <URI> [OPTIONS] \
    -- <PROGRAM> [ARGS]...\n       \
    elasticdl evaluate --image <IMG> --model <URI> --data <URI> [OPTIONS] \
    -- <PROGRAM> [ARGS]...";
const AFTER_HELP: &str = "\
Example:
  Evaluate an exported model with four workers, and save the result:
      elasticdl evaluate --local --num-workers 4 --model mnist.safetensors --data data/mnist-test \\
          --summary result.json -- ./target/release/mnist

The result is the mean of each metric over all records: `metrics` in the summary. It is
bit-identical for any number of workers, also if workers are killed.

A PyTorch program says how its model is evaluated with job.evaluator(data, function); the program
that `elasticdl zoo init --python` writes does.

Exit codes: those of `elasticdl train`.";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory as _;

    use crate::commands::command_line::Cli;

    fn options(command: &str) -> BTreeSet<String> {
        let mut cli = Cli::command();
        let command = cli.find_subcommand_mut(command).unwrap();
        let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
        shown.filter_map(|arg| Some(arg.get_long()?.to_owned())).collect()
    }

    #[test]
    fn options_that_only_training_has_are_no_options_of_inference() {
        let (train, evaluate, predict) =
            (options("train"), options("evaluate"), options("predict"));
        let rejected: Vec<&str> = train.difference(&evaluate).map(String::as_str).collect();
        let expected = [
            "allow-mixed-builds",
            "audit",
            "autoscale",
            "best-metric",
            "channels",
            "checkpoint-dir",
            "checkpoint-every",
            "checkpoint-keep",
            "deterministic",
            "early-stopping",
            "evaluate-every",
            "export",
            "export-best",
            "export-changes-since",
            "global-batch-size",
            "link-encryption",
            "max-steps",
            "micro-batch",
            "min-workers",
            "num-epochs",
            "on-nonfinite",
            "on-rows-lost",
            "param-dtype",
            "replay-step",
            "restart-without-checkpoint",
            "resume",
            "resume-from",
            "seed",
            "shard-optimizer",
            "shuffle",
            "spares",
            "table-lag",
            "table-memory",
            "table-replicas",
            "table-servers",
            "training-data",
            "validation-data",
            "validation-split",
            "wire-dtype",
        ];
        assert_eq!(
            rejected, expected,
            "the group of a new option decides to which commands it belongs"
        );
        let own: Vec<&str> = evaluate.difference(&train).map(String::as_str).collect();
        assert_eq!(own, ["data", "model", "records-per-shard"]);
        let more: Vec<&str> = predict.difference(&evaluate).map(String::as_str).collect();
        assert_eq!(more, ["format", "predictions"]);
    }
}
