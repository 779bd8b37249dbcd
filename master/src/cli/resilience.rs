//! Options about what a job does when something goes wrong.

use std::time::Duration;

use clap::Args;

use super::job_options;
use crate::job::OnNonfinite;

/// What `elasticdl train` is told about trouble.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub struct ResilienceOptions {
    /// What becomes of a step whose gradient or loss, summed over all workers, holds a NaN or an
    /// infinity.
    ///
    /// fail: the job ends before the step is applied, with exit code 1 and an error that names the
    /// step, the workers and their records; the state before the step is kept in a checkpoint, and
    /// exported. skip: the step is left out, and its records count as trained; the summary says how
    /// many steps were. Checkpoints and exported models never hold a NaN or an infinity.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "fail")]
    pub on_nonfinite: OnNonfinite,

    /// Where all workers are lost, and with them a state of which there is no checkpoint, start
    /// again from nothing.
    ///
    /// Otherwise the job fails then, and says how many steps are lost. With checkpoints, training
    /// goes on from the newest one, with or without this option.
    #[arg(long)]
    pub restart_without_checkpoint: bool,

    /// How long workers may take to end that are told to: in a cluster, the pods'
    /// terminationGracePeriodSeconds.
    ///
    /// A worker that gets SIGTERM leaves at the end of a step, or as soon as another one has the
    /// state. When all workers that hold the state get it, as on a spot notice, they keep a
    /// checkpoint first, if there is a place for checkpoints. So this must be longer than a step
    /// and the writing of a checkpoint.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = job_options::parse_timeout)]
    pub grace_period: Duration,
}

const HEADING: &str = "Trouble";
