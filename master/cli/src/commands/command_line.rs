//! The command line, and the command that it selects.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use elasticdl_proto::LogFormat;
use toml::Table;

use super::checkpoint::{self, CheckpointArgs};
use super::completions::{self, CompletionsArgs};
use super::convert::{self, ConvertArgs};
use super::dashboard::{self, DashboardArgs};
use super::debug::{self, DebugArgs};
use super::delete::{self, DeleteArgs};
use super::doctor::{self, DoctorArgs};
use super::evaluate::{self, EvaluateArgs};
use super::host_process;
use super::lineage::{self, LineageArgs};
use super::list::{self, ListArgs};
use super::logs::{self, LogsArgs};
use super::man::{self, ManArgs};
use super::master::{self, MasterArgs};
use super::predict::{self, PredictArgs};
use super::report::{self, ReportArgs};
use super::scale::{self, ScaleArgs};
use super::start::{self, DeclareArgs, StartRequest};
use super::status::{self, StatusArgs};
use super::stop::{self, StopArgs};
use super::suspend;
use super::train::{self, TrainArgs};
use super::zoo::{self, ZooArgs};
use crate::args::{Arguments, PRINT_CONFIG, to_config_file};
use crate::backend::NamedJob;
use crate::process::{Failure, log_format, print, print_error, print_line, set_log_format};

/// Elastic synchronous training: workers join and leave at any time, and every record counts
/// exactly once.
///
/// A job is one master and a changing number of workers. Each worker runs your program; the workers
/// all-reduce their gradients and take every step together. When a worker is killed or joins, the
/// others continue within milliseconds.
#[derive(Debug, Parser)]
#[command(
    name = "elasticdl",
    version = env!("ELASTICDL_VERSION"),
    max_term_width = 100,
    after_help = "See `elasticdl COMMAND --help` for the options and examples of a command."
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
    /// Print a shell completion script for `elasticdl`.
    Completions(CompletionsArgs),
    /// Write the model of a checkpoint as a safetensors file, or rows of tables as Parquet.
    Convert(ConvertArgs),
    /// Open the dashboard of a running job: print its link.
    ///
    /// The page shows progress, curves, memberships, workers, the use of time, and events, and can
    /// scale and stop the job. The master of a local job serves it on 127.0.0.1. The link contains
    /// a key: anyone with the link can watch and control the job.
    Dashboard(DashboardArgs),
    /// Show what the workers of a running job do, and why it hangs: their threads, links, messages.
    ///
    /// The workers are asked, also those that hang. A worker that can't answer is shown by what the
    /// kernel says of its process.
    Debug(DebugArgs),
    /// Carry out the job that a Job of `batch/v1` declares, or a TrainJob of Kubeflow. The Job's
    /// pod runs this command.
    #[command(hide = true)]
    Declare(DeclareArgs),
    /// Delete a job: its objects and pods in a cluster, or the files that it wrote to its
    /// directory.
    Delete(DeleteArgs),
    /// Check whether jobs can run on this machine and in the cluster, and show how to fix problems.
    Doctor(DoctorArgs),
    /// Evaluate a model: compute the means of its metrics over a data set.
    ///
    /// PROGRAM is your training program; the model is one that it trained and exported.
    /// Workers lease shards of the data one by one. A worker that is killed is replaced, and the
    /// result stays bit-identical.
    Evaluate(Box<EvaluateArgs>),
    /// Run a worker on this host. `elasticdl train --hosts` runs this command there.
    #[command(hide = true)]
    HostProcess {
        #[arg(last = true)]
        worker: Vec<OsString>,
    },
    /// Show when a record was trained: epoch, step, position, workers, and the checkpoint before.
    ///
    /// The order of the records is a function, which is inverted: nothing is searched or listed, so
    /// this takes as long for a thousand million records as for a thousand. The job may be running,
    /// or have ended.
    Lineage(LineageArgs),
    /// List the jobs of this machine and of the cluster.
    List(ListArgs),
    /// Print the log of a job's master, of one of its workers, or of all workers.
    Logs(LogsArgs),
    /// Write the manual pages of all commands to a folder.
    #[command(hide = true)]
    Man(ManArgs),
    /// Run the master of a job in its pod. The pod of `elasticdl train --image` runs this command.
    #[command(hide = true)]
    Master(MasterArgs),
    /// Write a model's prediction for each record of a data set.
    ///
    /// PROGRAM is your training program; the model is one that it trained and exported.
    /// Workers lease shards of the data one by one and write a file for each. A worker that is
    /// killed is replaced, and every record gets exactly one row.
    Predict(Box<PredictArgs>),
    /// Write the dashboard of an ended job as one file.
    Report(ReportArgs),
    /// Resume a suspended job: start workers, which continue from its newest checkpoint.
    ///
    /// (A job whose master died is resumed by `elasticdl train --resume`.)
    Resume(NamedJob),
    /// Change the number of workers of a running job, or its limits.
    ///
    /// The master starts workers, or releases some at the end of a step: first those that have not
    /// joined, then those of the highest slots. (A worker that replaces a lost one has its slot.)
    /// No step is lost either way. The next master of the job takes over the present limits.
    Scale(ScaleArgs),
    /// Show the status of a running job, or the summary of an ended job.
    Status(StatusArgs),
    /// Stop a running job at the end of its current step.
    Stop(StopArgs),
    /// Suspend a running job: write a checkpoint, end its workers, and keep its master waiting.
    ///
    /// The workers end at the end of a step, once a checkpoint of that step is written, so nothing
    /// is trained twice. `elasticdl status` then shows `suspended`; `elasticdl resume` continues.
    /// Evaluate and predict jobs need no checkpoint: unfinished shards are processed again.
    Suspend(NamedJob),
    /// Train a model: start a job, show its progress, wait for its end.
    ///
    /// PROGRAM is your training program, built with the elasticdl worker library. It is started
    /// once per worker. The master publishes the membership of the group; the workers divide the
    /// records of every step and take the step together. A worker that crashes or is killed is
    /// replaced while the others continue, and every record of an epoch still counts exactly once.
    Train(Box<TrainArgs>),
    /// Create a crate for your own model, and build its image.
    Zoo(ZooArgs),
}

/// Runs the command that the arguments of this process name. Returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    ExitCode::from(run().unwrap_or_else(|error| {
        print_error(&error.text);
        error.code
    }))
}

fn run() -> Result<u8, Failure> {
    let mut cli = Cli::command();
    cli.build();
    let words: Vec<OsString> = std::env::args_os().collect();
    set_log_format(format_in(&words));
    let arguments = Arguments::read(words, &cli)?;
    let matches = match Cli::command().try_get_matches_from(&arguments.all) {
        Ok(matches) => matches,
        Err(error) => {
            set_log_format(format_in(&arguments.all));
            if let Some(origin) = arguments.origin(&error) {
                print_line(&format!("{origin}:"));
            }
            return refuse(&error);
        }
    };
    if let Some((name, matches)) = matches.subcommand().filter(|(_, job)| prints_config(job)) {
        let command = cli.find_subcommand(name).expect("clap has found it");
        return print(&to_config_file(command, matches)?);
    }
    let format = matches.subcommand().and_then(|(_, job)| job.try_get_one(LOG_FORMAT).ok()?);
    set_log_format(format.copied().unwrap_or_default());
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    match cli.command {
        Command::Checkpoint(args) => checkpoint::checkpoint(&args),
        Command::Completions(args) => completions::completions(&args, Cli::command()),
        Command::Convert(args) => convert::convert(&args),
        Command::Dashboard(args) => dashboard::dashboard(&args),
        Command::Debug(args) => debug::debug(&args),
        Command::Declare(args) => start::declare(args, read_start),
        Command::HostProcess { worker } => host_process::run(&worker),
        Command::Delete(args) => delete::delete(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Evaluate(args) => evaluate::evaluate(*args),
        Command::Lineage(args) => lineage::lineage(&args),
        Command::List(args) => list::list(&args),
        Command::Logs(args) => logs::logs(&args),
        Command::Man(args) => man::man(&args, Cli::command()),
        Command::Master(args) => master::master(args),
        Command::Predict(args) => predict::predict(*args),
        Command::Report(args) => report::report(&args),
        Command::Resume(job) => suspend::set_suspended(&job, false),
        Command::Scale(args) => scale::scale(&args),
        Command::Status(args) => status::status(&args),
        Command::Stop(args) => stop::stop(&args),
        Command::Suspend(job) => suspend::set_suspended(&job, true),
        Command::Train(args) => train::train(*args, &|option| is_given(&matches, option)),
        Command::Zoo(args) => zoo::zoo(&args),
    }
}

/// Ends this process with what is wrong with its arguments, or with the help that they ask for.
fn refuse(error: &clap::Error) -> Result<u8, Failure> {
    if log_format() == LogFormat::Text || !error.use_stderr() {
        error.exit()
    }
    let text = error.to_string();
    Err(Failure::usage(text.trim_start_matches("error: ").trim_end()))
}

/// The form of messages that these arguments ask for, whether or not the others are right.
fn format_in(arguments: &[OsString]) -> LogFormat {
    let own = || arguments.iter().take_while(|word| *word != "--");
    let is_json = own().any(|word| word == "--log-format=json")
        || own().zip(own().skip(1)).any(|(word, next)| word == "--log-format" && next == "json");
    if is_json { LogFormat::Json } else { LogFormat::Text }
}

/// The job that `elasticdl train` would start with the options that `origin` has.
fn read_start(origin: &str, table: Table) -> Result<StartRequest, Failure> {
    let mut cli = Cli::command();
    cli.build();
    let train = cli.find_subcommand(TRAIN).expect("it is a command");
    let arguments = Arguments::of_table(train, origin, table)?;
    let parsed = Cli::try_parse_from(&arguments.all).map(|cli| cli.command);
    match parsed {
        Ok(Command::Train(args)) => Ok((*args).into()),
        Ok(other) => unreachable!("{TRAIN} is another command: {other:?}"),
        Err(error) => {
            let text = error.to_string();
            let what = text.trim_start_matches("error: ").split("\n\n").next();
            Err(Failure::usage(format!("{origin}: {}", what.unwrap_or_default())))
        }
    }
}

const TRAIN: &str = "train";
/// Id of the option of commands that start a job.
const LOG_FORMAT: &str = "log_format";

/// Whether `--print-config` is given to a command that has it.
fn prints_config(matches: &ArgMatches) -> bool {
    matches!(matches.try_get_one::<bool>(PRINT_CONFIG), Ok(Some(true)))
}

/// Whether the command's option of this id is given, on the command line or in a file of options.
fn is_given(matches: &ArgMatches, option: &str) -> bool {
    let source = matches.subcommand().and_then(|(_, command)| command.value_source(option));
    source == Some(ValueSource::CommandLine)
}

/// The job that `line`, without the program's name, would start.
#[cfg(test)]
pub(super) fn parse_start(line: &str) -> Result<StartRequest, String> {
    let words = std::iter::once("elasticdl").chain(line.split_whitespace());
    match Cli::try_parse_from(words).map_err(|e| e.to_string())?.command {
        Command::Train(args) => Ok((*args).into()),
        other => panic!("{other:?}"),
    }
}
