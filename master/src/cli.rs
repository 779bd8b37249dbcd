//! The `elasticdl` command line.

mod background;
mod checkpoint;
mod client;
mod cluster;
mod delete;
mod dry_run;
mod follow;
mod inference;
mod job_options;
mod list;
mod logs;
mod lookup;
mod master;
mod render;
mod resilience;
mod scale;
mod signals;
mod status;
mod stop;
mod train;
mod validation;
mod watch;
mod zoo;

use std::io::{Write as _, stderr};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub use checkpoint::{CheckpointArgs, CheckpointOptions};
pub use cluster::{ClusterArgs, ClusterTarget, Format, Labels, Tolerations, Volumes};
pub use delete::DeleteArgs;
pub use inference::{EvaluateArgs, FormatName, PredictArgs};
pub use list::ListArgs;
pub use logs::LogsArgs;
pub use master::MasterArgs;
pub use resilience::{OnNonfiniteArg, ResilienceOptions, WireDtypeArg};
pub use scale::ScaleArgs;
pub use status::StatusArgs;
pub use stop::StopArgs;
pub use train::TrainArgs;
pub use validation::{Metric, ValidationOptions};
pub use zoo::{BuildArgs, InitArgs, PushArgs, Source, Tool, ZooArgs, ZooCommand};

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
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// Commands of `elasticdl`.
#[derive(Debug, Subcommand)]
pub enum Command {
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
        Command::Evaluate(args) => inference::evaluate(*args),
        Command::List(args) => list::list(&args),
        Command::Logs(args) => logs::logs(&args),
        Command::Master(args) => master::master(&args),
        Command::Predict(args) => inference::predict(*args),
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

/// Failure of a command.
#[derive(Debug)]
struct Failure {
    code: u8,
    /// Error message: what is wrong, where, and what would be right.
    text: String,
}

impl Failure {
    /// A failure because of invalid input; nothing was started.
    fn usage(text: impl Into<String>) -> Self {
        Self { code: EXIT_USAGE, text: text.into() }
    }

    /// A failure with input that may be valid.
    fn failed(text: impl Into<String>) -> Self {
        Self { code: EXIT_FAILED, text: text.into() }
    }
}

fn new_runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::failed(format!("can't start the runtime: {e}")))
}

fn print_error(text: &str) {
    // Standard error may be closed.
    let _ = writeln!(stderr(), "error: {text}");
}

fn print_warning(text: &str) {
    let _ = writeln!(stderr(), "warning: {text}");
}

const EXIT_FAILED: u8 = 1;
/// Another master holds the leader Lease of the job.
const EXIT_FENCED: u8 = 3;
const EXIT_INTERRUPTED: u8 = 130;
const EXIT_OK: u8 = 0;
const EXIT_TERMINATED: u8 = 143;
/// The same code as clap's for usage errors.
const EXIT_USAGE: u8 = 2;
