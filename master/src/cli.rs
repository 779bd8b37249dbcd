//! The `elasticdl` command line.

mod background;
mod checkpoint;
mod client;
mod cluster;
mod dry_run;
mod follow;
mod inference;
mod job_options;
mod master;
mod remote;
mod render;
mod resilience;
mod signals;
mod status;
mod train;
mod validation;
mod watch;
mod zoo;

use std::io::{Write as _, stderr};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

pub use checkpoint::{CheckpointArgs, CheckpointOptions};
pub use client::ScaleArgs;
pub use cluster::{ClusterArgs, ClusterTarget, Format, Labels, Tolerations, Volumes};
pub use inference::{EvaluateArgs, FormatName, PredictArgs};
pub use master::MasterArgs;
pub use remote::{DeleteArgs, ListArgs, LogsArgs, StopArgs};
pub use resilience::ResilienceOptions;
pub use status::StatusArgs;
pub use train::TrainArgs;
pub use validation::{Metric, ValidationOptions};
pub use zoo::{BuildArgs, InitArgs, PushArgs, Source, Tool, ZooArgs, ZooCommand};

/// Elastic synchronous training: workers may come and go, every record counts exactly once.
///
/// A job is one master and a changing number of workers. The workers run your program, sum their
/// gradients, and take every step together; when one is killed or joins, the others go on within
/// milliseconds.
#[derive(Debug, Parser)]
#[command(
    name = "elasticdl",
    version,
    max_term_width = 100,
    after_help = "See `elasticdl COMMAND --help` for options and examples."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Have a running job write a checkpoint now, and wait for it; prints where it is.
    Checkpoint(CheckpointArgs),
    /// Remove a job and all that it has left: its pods and objects, or what it has written to its
    /// directory.
    Delete(DeleteArgs),
    /// Measure a model: the means of its metrics over a data set.
    ///
    /// PROGRAM is your training program, and the model one that it has trained and exported.
    /// Workers take shards of the data one by one; one that is killed is replaced, and the result
    /// stays the same to the bit.
    Evaluate(Box<EvaluateArgs>),
    /// Show the jobs of this machine and of the cluster.
    List(ListArgs),
    /// Show what a job's master or one of its workers has printed.
    Logs(LogsArgs),
    /// Run a job's master in its pod; `elasticdl train --image` sees to that.
    #[command(hide = true)]
    Master(MasterArgs),
    /// Write what a model predicts for each record of a data set.
    ///
    /// PROGRAM is your training program, and the model one that it has trained and exported.
    /// Workers take shards of the data one by one and write a file for each; one that is killed is
    /// replaced, and no row is missing or there twice.
    Predict(Box<PredictArgs>),
    /// Change the number of workers of a running job.
    ///
    /// The master starts workers, or lets the youngest ones finish their step and end, until there
    /// are as many. No step is lost either way.
    Scale(ScaleArgs),
    /// Show what a running job is doing.
    Status(StatusArgs),
    /// Let a running job finish its step and stop.
    Stop(StopArgs),
    /// Train a model: start a job, show its progress, wait for its end.
    ///
    /// PROGRAM is your training program, built with the elasticdl worker library. It is started
    /// once per worker; the master tells the workers who is in the group and which records to
    /// train, and they take every step together. A worker that crashes or is killed is replaced,
    /// and the others go on meanwhile; every record of an epoch is counted exactly once all the
    /// same.
    Train(Box<TrainArgs>),
    /// Make a model of your own: a crate, and its image.
    Zoo(ZooArgs),
}

/// Runs the command that this process's arguments ask for; its exit code.
#[must_use]
pub fn main() -> ExitCode {
    let code = match Cli::parse().command {
        Command::Checkpoint(args) => checkpoint::checkpoint(&args),
        Command::Delete(args) => remote::delete(&args),
        Command::Evaluate(args) => inference::evaluate(*args),
        Command::List(args) => remote::list(&args),
        Command::Logs(args) => remote::logs(&args),
        Command::Master(args) => master::master(&args),
        Command::Predict(args) => inference::predict(*args),
        Command::Scale(args) => client::scale(&args),
        Command::Status(args) => status::status(&args),
        Command::Stop(args) => remote::stop(&args),
        Command::Train(args) => train::train(*args),
        Command::Zoo(args) => zoo::zoo(&args),
    };
    ExitCode::from(code.unwrap_or_else(|error| {
        print_error(&error.text);
        error.code
    }))
}

/// Why a command did not do what was asked.
#[derive(Debug)]
struct Failure {
    code: u8,
    /// What is wrong, where, and what would be right.
    text: String,
}

impl Failure {
    /// The input is wrong; nothing was started.
    fn usage(text: impl Into<String>) -> Self {
        Self { code: EXIT_USAGE, text: text.into() }
    }

    /// The input may be right; it did not work.
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
    // With standard error closed there is nobody to tell.
    let _ = writeln!(stderr(), "error: {text}");
}

fn print_warning(text: &str) {
    let _ = writeln!(stderr(), "warning: {text}");
}

const EXIT_FAILED: u8 = 1;
/// Another master has the job.
const EXIT_FENCED: u8 = 3;
const EXIT_INTERRUPTED: u8 = 130;
const EXIT_OK: u8 = 0;
const EXIT_TERMINATED: u8 = 143;
/// As clap's own.
const EXIT_USAGE: u8 = 2;
