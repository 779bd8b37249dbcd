//! Options for the handling of faults.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::job_options;
use crate::job::{OnNonfinite, WireDtype};

/// Fault tolerance options of `elasticdl train`.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub struct ResilienceOptions {
    /// Action when the gradient or loss of a step, summed over all workers, contains a NaN or an
    /// infinity.
    ///
    /// fail: the job ends before the step is applied, with exit code 1 and an error that names the
    /// step, the workers and their records. The state before the step is checkpointed and exported.
    /// skip: the step is skipped, and its records count as trained; the summary counts skipped
    /// steps. Checkpoints and exported models never contain a NaN or an infinity.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "fail")]
    pub on_nonfinite: OnNonfiniteArg,

    /// Restart training from step 0 when all workers are lost and there is no checkpoint of their
    /// state.
    ///
    /// Without this option the job fails in that case and reports the lost steps. If there are
    /// checkpoints, training resumes from the newest one, with or without this option.
    #[arg(long)]
    pub restart_without_checkpoint: bool,

    /// Time between SIGTERM and SIGKILL for a worker; at least 1s. In a cluster,
    /// terminationGracePeriodSeconds of the worker pods.
    ///
    /// On SIGTERM a worker leaves the group at the next step boundary, or as soon as another worker
    /// has the state. If all workers that hold the state receive SIGTERM, as on a spot notice, they
    /// write a checkpoint first, if checkpoints are enabled. The grace period must therefore be
    /// longer than a step and the writing of a checkpoint.
    #[arg(long, value_name = "DURATION", default_value = "30s",
          value_parser = job_options::parse_timeout)]
    pub grace_period: Duration,
}

/// A value of `--on-nonfinite`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum OnNonfiniteArg {
    /// The job fails before the step is applied, with the state before it kept.
    Fail,
    /// Its records count as trained, and the parameters stay as they are.
    Skip,
}

impl From<OnNonfiniteArg> for OnNonfinite {
    fn from(arg: OnNonfiniteArg) -> Self {
        match arg {
            OnNonfiniteArg::Fail => Self::Fail,
            OnNonfiniteArg::Skip => Self::Skip,
        }
    }
}

/// A value of `--wire-dtype`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum WireDtypeArg {
    /// Rounded to 8 bits of precision.
    Bf16,
    /// Rounded to 11 bits of precision, up to 65504.
    F16,
    /// As they are.
    F32,
}

impl From<WireDtypeArg> for WireDtype {
    fn from(arg: WireDtypeArg) -> Self {
        match arg {
            WireDtypeArg::Bf16 => Self::Bf16,
            WireDtypeArg::F16 => Self::F16,
            WireDtypeArg::F32 => Self::F32,
        }
    }
}

const HEADING: &str = "Fault tolerance";
