//! Options for training only.

use clap::Args;

use super::{CheckpointOptions, ResilienceOptions, TrainingData, ValidationOptions, values};

/// Options for training.
#[derive(Args, Debug)]
pub(crate) struct TrainingOptions {
    #[command(flatten)]
    pub(crate) data: TrainingData,

    /// Minimum number of workers; with fewer, training pauses. [default: 1]
    ///
    /// With several workers per pod, the default is the workers of one pod.
    #[arg(long, value_name = "N", value_parser = values::parse_workers,
          help_heading = "Workers")]
    pub(crate) min_workers: Option<u32>,

    #[command(flatten)]
    pub(crate) checkpoints: CheckpointOptions,

    #[command(flatten)]
    pub(crate) validation: ValidationOptions,

    #[command(flatten)]
    pub(crate) resilience: ResilienceOptions,

    /// Write the final model to this safetensors file: a path or s3://, gs://, az://.
    ///
    /// A worker writes it atomically, also when the job is stopped early, so in a cluster a path
    /// must be in a --volume. A job that fails after its first step writes URI.failed instead.
    /// Write access is checked before training starts.
    #[arg(long, value_name = "URI", value_parser = values::parse_uri,
          help_heading = "Output")]
    pub(crate) export: Option<String>,
}
