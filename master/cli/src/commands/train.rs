//! `elasticdl train`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, Args};

use super::start::{self, StartRequest, WorkOptions};
use crate::args::{
    ClusterOptions, JobOptions, OutputOptions, TrainingOptions, TuningOptions, WorkerOptions,
    parse_steps, usual_in_short_help,
};
use crate::process::Failure;

/// Arguments of `elasticdl train`.
#[derive(Args, Debug)]
#[command(
    override_usage = "elasticdl train --local --training-data <URI> [OPTIONS] \
        -- <PROGRAM> [ARGS]...\n       \
        elasticdl train --image <IMG> --training-data <URI> [OPTIONS] \
        -- <PROGRAM> [ARGS]...\n       \
        elasticdl train --resume <JOB>",
    after_help = "All options, details and examples: elasticdl train --help-all",
    after_long_help = AFTER_HELP,
    disable_help_flag = true,
    mut_args(not_with_resume),
    mut_args(usual_in_short_help)
)]
pub(crate) struct TrainArgs {
    /// The training program and its arguments. Without a `/` the program is looked up in $PATH; in
    /// a cluster, in the image.
    #[arg(last = true, required_unless_present = "resume", value_names = ["PROGRAM", "ARGS"])]
    pub(crate) program: Vec<OsString>,

    #[command(flatten)]
    pub(crate) job: JobOptions,

    /// Resume a job whose master died: the job's name, or the path of its directory (with a `/`).
    ///
    /// The workers continue to train for up to --master-timeout. They keep their state and are not
    /// restarted. The job keeps its options; only --quiet, --log-format, --tee and --detach can be
    /// given.
    #[arg(long, value_name = "JOB", help_heading = "Job")]
    pub(crate) resume: Option<PathBuf>,

    /// Make step N of a job once more, by one process of this machine, and print its records and
    /// its mean loss.
    ///
    /// PROGRAM is that of the job, which --job-name or --job-dir names. Options that decide the
    /// steps, such as --seed, are those of the job: one that is given must agree, and so must the
    /// files of the data and their numbers of records. A warning names another PROGRAM, other ARGS,
    /// and files of both that were written since the job began. The process trains from the newest
    /// intact checkpoint of the job before the step: one in its --checkpoint-dir or --resume-from;
    /// without one, from the beginning. Nothing of the job is changed, exported or tracked. If the
    /// job has recorded the step's loss, as it does of its first step and its last one, both are
    /// compared: with --deterministic they are equal, bit for bit, and the exit code is 1 if not.
    /// Needs --global-batch-size.
    #[arg(long, value_name = "N", help_heading = "Job", value_parser = parse_steps,
          conflicts_with_all = ["detach", "dry_run", "image", "minibatch_size"])]
    pub(crate) replay_step: Option<u64>,

    #[command(flatten)]
    pub(crate) training: TrainingOptions,

    #[command(flatten)]
    pub(crate) workers: WorkerOptions,

    #[command(flatten)]
    pub(crate) output: OutputOptions,

    #[command(flatten)]
    pub(crate) cluster: ClusterOptions,

    #[command(flatten)]
    pub(crate) tuning: TuningOptions,
}

/// Starts or resumes a training job. `is_given` tells whether the user gives the option of an id.
/// Returns the exit code.
pub(super) fn train(args: TrainArgs, is_given: &dyn Fn(&str) -> bool) -> Result<u8, Failure> {
    match (&args.resume, args.replay_step) {
        (Some(job), _) => start::resume(job, &args.job, &args.output),
        (None, Some(step)) => start::replay(args.into(), step, is_given),
        (None, None) => start::start(args.into()),
    }
}

impl From<TrainArgs> for StartRequest {
    fn from(args: TrainArgs) -> Self {
        let TrainArgs { program, job, training, workers, output, cluster, tuning, .. } = args;
        let work = WorkOptions::Training(Box::new(training), tuning);
        Self { program, job, work, workers, output, cluster }
    }
}

/// Makes an option conflict with `--resume`: the job keeps the options that it was started with.
fn not_with_resume(arg: Arg) -> Arg {
    match arg.get_id().as_str() {
        "resume" | "local" | "detach" | "log_format" | "quiet" | "tee" => arg,
        _ => arg.conflicts_with("resume"),
    }
}

const AFTER_HELP: &str = "\
Examples:
  Train for two epochs with four workers, 256 records per step:
      elasticdl train --local --num-workers 4 --training-data data/mnist \\
          --num-epochs 2 --global-batch-size 256 -- ./target/release/mnist

  Name the job, then show its status and scale it from another terminal:
      elasticdl train --local --job-name mnist --training-data data -- ./mnist --hidden 64
      elasticdl status mnist
      elasticdl scale mnist --num-workers 6

  Resume it after its master was killed, within --master-timeout:
      elasticdl train --resume mnist

  Write a checkpoint every 200 steps, and later train two more epochs from the newest one:
      elasticdl train --local --training-data data --checkpoint-dir ckpt --checkpoint-every 200 \\
          -- ./mnist
      elasticdl train --local --training-data data --resume-from ckpt --checkpoint-dir ckpt \\
          --num-epochs 3 -- ./mnist

  Train in a cluster, and first print the objects that would be created there:
      elasticdl train --image mnist:1 --volume claim_name=data,mount_path=/data \\
          --training-data /data/mnist --num-workers 4 --dry-run -- mnist
      elasticdl train --image mnist:1 --volume claim_name=data,mount_path=/data \\
          --training-data /data/mnist --num-workers 4 -- mnist

Stopping:
  With --local, Ctrl-C, SIGTERM, or the end of the terminal (SIGHUP) stops the job at the end of the
  step, with its last checkpoint. Ctrl-C again after 2 s, or SIGTERM again after --grace-period,
  stops it at once. With --detach the job survives the terminal. In a cluster, Ctrl-C ends only this
  command; `elasticdl stop` stops the job.

Exit codes:
  0    the job completed: it reached the end of its data or --max-steps
  1    the job failed, or was stopped and lost its state
  2    invalid command line or data; nothing was trained
  129  stopped by SIGHUP
  130  stopped by Ctrl-C; in a cluster: the command ended and the job continues
  143  stopped by SIGTERM";
