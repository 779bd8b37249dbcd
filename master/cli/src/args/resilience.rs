//! Options for the handling of faults.

use clap::Args;
use elasticdl_master::job::{OnNonfinite, SuccessPolicy};

use super::values::{self, Choices};

/// Fault tolerance options of `elasticdl train`.
#[derive(Args, Debug)]
#[command(next_help_heading = "Fault tolerance")]
pub(crate) struct ResilienceOptions {
    /// Action if the gradient or loss of a step, summed over all workers, contains a NaN or an
    /// infinity.
    ///
    /// fail: the job ends before the step is applied, with exit code 1 and an error that names the
    /// step, the workers and their records. The state before the step is checkpointed and exported.
    /// skip: the step is skipped, and its records count as trained; the summary counts skipped
    /// steps. Checkpoints and exported models never contain a NaN or an infinity.
    #[arg(long, value_name = "WHAT", default_value = "fail",
          value_parser = values::choice(ON_NONFINITE))]
    pub(crate) on_nonfinite: OnNonfinite,

    /// Restart training from step 0 if all workers are lost and there is no checkpoint of their
    /// state.
    ///
    /// Without this option the job fails in that case and reports the lost steps. If there are
    /// checkpoints, training always resumes from the newest one. Until the first checkpoint is due,
    /// training always starts again: no more than one interval of --checkpoint-every is repeated.
    /// For a job without checkpoints this applies to the first five minutes.
    #[arg(long)]
    pub(crate) restart_without_checkpoint: bool,

    /// Let workers of different builds train together.
    ///
    /// Without this option a worker is excluded if its executable, its Python sources, its version
    /// of elasticdl, its tensors or its optimizer settings differ from those of the group, for
    /// example because an image tag has moved. This counts as a failure of the worker. Use this
    /// option if machines of different architectures need different executables.
    #[arg(long)]
    pub(crate) allow_mixed_builds: bool,

    /// Which members of the group must report the final state before the job is complete.
    ///
    /// all: every member, and their states are compared. lowest-rank: the member of rank 0, which
    /// exports the model and writes the last checkpoint; a member that hangs or crashes at the very
    /// end, for example in the program's own code after training, then has no effect.
    #[arg(long, value_name = "WHO", default_value = "all",
          value_parser = values::choice(SUCCESS_POLICIES))]
    pub(crate) success_policy: SuccessPolicy,
}

/// Values of `--on-nonfinite`.
const ON_NONFINITE: Choices<OnNonfinite> = &[
    ("fail", OnNonfinite::Fail, "The job fails before the step is applied"),
    ("skip", OnNonfinite::Skip, "The step is skipped, and its records count as trained"),
];
/// Values of `--success-policy`.
const SUCCESS_POLICIES: Choices<SuccessPolicy> = &[
    ("all", SuccessPolicy::All, "Every member"),
    ("lowest-rank", SuccessPolicy::LowestRank, "The member of rank 0"),
];
