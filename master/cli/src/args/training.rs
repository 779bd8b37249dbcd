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

    /// Measure how many workers pay, from --min-workers to --max-workers, beginning with
    /// --num-workers.
    ///
    /// The job tries a quarter more workers, or one pod, and keeps them if each adds at least 60 %
    /// of what a worker makes on average, in records/s. If they add less than 40 %, it also tries
    /// fewer. It then measures again after ten minutes, with pauses of up to two hours. Each number
    /// is measured over 18 steps or more that take six seconds or more. Events and `elasticdl
    /// status` say what was found. `elasticdl scale` sets the number of workers, and the most that
    /// are tried from then on. While workers wait for capacity, nothing is tried, and a trial for
    /// which there is no capacity ends. With --minibatch-size a step has more records the more
    /// workers there are, which counts as a gain.
    #[arg(long, help_heading = "Workers")]
    pub(crate) autoscale: bool,

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
