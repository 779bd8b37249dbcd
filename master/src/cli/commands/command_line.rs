//! The command line, and the command that it selects.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use super::checkpoint::{self, CheckpointArgs};
use super::delete::{self, DeleteArgs};
use super::evaluate::{self, EvaluateArgs};
use super::list::{self, ListArgs};
use super::logs::{self, LogsArgs};
use super::master::{self, MasterArgs};
use super::predict::{self, PredictArgs};
use super::scale::{self, ScaleArgs};
use super::status::{self, StatusArgs};
use super::stop::{self, StopArgs};
use super::train::{self, TrainArgs};
use super::zoo::{self, ZooArgs};
use crate::cli::process::print_error;

/// Elastic synchronous training: workers join and leave at any time, and every record counts
/// exactly once.
///
/// A job is one master and a changing number of workers. Each worker runs your program; the workers
/// all-reduce their gradients and take every step together. When a worker is killed or joins, the
/// others continue within milliseconds.
#[derive(Debug, Parser)]
#[command(
    name = "elasticdl",
    version,
    max_term_width = 100,
    after_help = "See `elasticdl COMMAND --help` for options and examples."
)]
pub(crate) struct Cli {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Commands of `elasticdl`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write a checkpoint of a running job now, wait for it, and print its location.
    Checkpoint(CheckpointArgs),
    /// Delete a job: its objects and pods in a cluster, or the files that it has written to its
    /// directory.
    Delete(DeleteArgs),
    /// Evaluate a model: compute the means of its metrics over a data set.
    ///
    /// PROGRAM is your training program, and the model one that it has trained and exported.
    /// Workers lease shards of the data one by one. A worker that is killed is replaced, and the
    /// result stays bit-identical.
    Evaluate(Box<EvaluateArgs>),
    /// List the jobs of this machine and of the cluster.
    List(ListArgs),
    /// Print the logs of a job's master or of one of its workers.
    Logs(LogsArgs),
    /// Run the master of a job in its pod. The pod of `elasticdl train --image` runs this command.
    #[command(hide = true)]
    Master(MasterArgs),
    /// Write a model's prediction for each record of a data set.
    ///
    /// PROGRAM is your training program, and the model one that it has trained and exported.
    /// Workers lease shards of the data one by one and write a file for each. A worker that is
    /// killed is replaced, and every record gets exactly one row.
    Predict(Box<PredictArgs>),
    /// Change the number of workers of a running job.
    ///
    /// The master starts workers, or releases the newest ones at the end of a step. No step is lost
    /// either way.
    Scale(ScaleArgs),
    /// Show the status of a running job.
    Status(StatusArgs),
    /// Stop a running job at the end of its current step.
    Stop(StopArgs),
    /// Train a model: start a job, show its progress, wait for its end.
    ///
    /// PROGRAM is your training program, built with the elasticdl worker library. It is started
    /// once per worker. The master publishes the membership of the group and leases shards of the
    /// data; the workers take every step together. A worker that crashes or is killed is replaced
    /// while the others continue, and every record of an epoch still counts exactly once.
    Train(Box<TrainArgs>),
    /// Create a crate for a model of your own, and build its image.
    Zoo(ZooArgs),
}

/// Runs the command that the arguments of this process name. Returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    let code = match Cli::parse().command {
        Command::Checkpoint(args) => checkpoint::checkpoint(&args),
        Command::Delete(args) => delete::delete(&args),
        Command::Evaluate(args) => evaluate::evaluate(*args),
        Command::List(args) => list::list(&args),
        Command::Logs(args) => logs::logs(&args),
        Command::Master(args) => master::master(&args),
        Command::Predict(args) => predict::predict(*args),
        Command::Scale(args) => scale::scale(&args),
        Command::Status(args) => status::status(&args),
        Command::Stop(args) => stop::stop(&args),
        Command::Train(args) => train::train(*args),
        Command::Zoo(args) => zoo::zoo(&args),
    };
    ExitCode::from(code.unwrap_or_else(|error| {
        print_error(&error.text);
        error.code
    }))
}

/// The job that `line`, without the program's name, would start.
#[cfg(test)]
pub(super) fn parse_start(line: &str) -> Result<super::start::StartRequest, String> {
    let words = std::iter::once("elasticdl").chain(line.split_whitespace());
    match Cli::try_parse_from(words).map_err(|e| e.to_string())?.command {
        Command::Train(args) => Ok((*args).into()),
        other => panic!("{other:?}"),
    }
}
