//! The options of a job that its master and its workers share.

use std::num::NonZeroU64;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::WorkerId;

/// The master's first message on a stream: the worker is admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Id of the worker.
    pub worker: WorkerId,
    /// Fencing token: the number of this master among the job's masters, which grows with each one.
    /// A worker that a newer master has welcomed rejects this one. 0 if the master states none.
    pub incarnation: u64,
    /// Options of the job.
    pub options: WorkerOptions,
}

/// The options of a job that concern its workers. Places are paths or URIs, as workers see them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerOptions {
    /// Location of the training data, as the program's reader understands it.
    pub training_data: String,
    /// Passes over the data.
    pub epochs: u32,
    /// Number of steps after which the job ends, unless its data ends earlier.
    pub max_steps: Option<u64>,
    /// Number of records of a step.
    pub batch: Batch,
    /// Seed of all random choices.
    pub seed: u64,
    /// Longest interval between two messages of the worker; `None` for no heartbeats.
    pub heartbeat: Option<Duration>,
    /// Time after which a worker that is stopped or partitioned is evicted. A peer that answers no
    /// connection attempt for as long counts as unreachable.
    pub worker_timeout: Option<Duration>,
    /// How long a worker waits, after SIGTERM, for its release by the group; `None` from a master
    /// that does not say.
    pub leave_timeout: Option<Duration>,
    /// Location and interval of checkpoints; `None` if the job writes none.
    pub checkpoints: Option<CheckpointSpec>,
    /// A checkpoint, or a folder of checkpoints, from which the job starts.
    pub resume_from: Option<String>,
    /// What is evaluated, and when; `None` for nothing.
    pub validation: Option<ValidationSpec>,
    /// What the job does with its data.
    pub work: Work,
    /// Data type of gradients on the wire.
    pub wire_dtype: WireDtype,
    /// Number of parallel connections between neighbours in the ring: 1 to
    /// [`CHANNELS_MAX`](crate::limits::CHANNELS_MAX).
    pub channels: u8,
    /// Whether a step whose gradient is not finite is skipped. Otherwise it ends the job.
    pub skips_nonfinite: bool,
}

/// Number of records of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Batch {
    /// This many over all ranks, whatever their number.
    Global(NonZeroU64),
    /// This many on each rank.
    PerWorker(NonZeroU64),
}

impl Batch {
    /// Number of records of one rank's share in a group of `world_size` ranks; at least 1.
    #[must_use]
    pub fn share(self, world_size: usize) -> u64 {
        match self {
            Self::Global(records) => records.get().div_ceil(world_size.max(1) as u64),
            Self::PerWorker(records) => records.get(),
        }
    }
}

/// Where and when checkpoints are written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointSpec {
    /// A path or an address of an object store, as the workers see it.
    pub dir: String,
    /// Interval.
    pub every: CheckpointEvery,
    /// Number of complete checkpoints that are retained; at least 1.
    pub keep: u32,
    /// Whether the folder belongs to this job alone: earlier runs' checkpoints do not block it and
    /// are deleted after its first one.
    #[serde(default)]
    pub exclusive: bool,
}

/// The interval between checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckpointEvery {
    /// This number of steps.
    Steps(NonZeroU64),
    /// This time.
    Time(Duration),
}

/// What is evaluated, and when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidationSpec {
    /// Location of the validation data, as the program's reader understands it.
    pub data: String,
    /// Number of steps between evaluations; `None` to evaluate only at the end.
    pub every: Option<u64>,
    /// The metric that selects the best model.
    pub metric: String,
    /// Whether the highest value is the best; otherwise the lowest.
    pub highest: bool,
    /// Number of evaluations without improvement after which the job ends.
    pub patience: Option<u32>,
}

/// What a job does with its data. Places are paths or URIs, as the workers see them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// Evaluates a model: the means of its metrics over all records.
    Evaluate {
        /// An exported model.
        model: String,
    },
    /// Writes the predictions of a model: one row per record, one file per shard.
    Predict {
        /// An exported model.
        model: String,
        /// The folder for the files.
        output: String,
        /// Format of the files.
        format: Format,
    },
    /// Trains a model.
    Train {
        /// Where the final model is written.
        export: Option<String>,
    },
}

impl Work {
    /// Whether workers form a group, and take steps together.
    #[must_use]
    pub fn trains(&self) -> bool {
        matches!(self, Self::Train { .. })
    }
}

impl Default for Work {
    fn default() -> Self {
        Self::Train { export: None }
    }
}

/// The file format of predictions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Format {
    /// Comma-separated values, the columns' names in the first line.
    Csv,
    /// A JSON object in each line.
    Jsonl,
    /// Parquet.
    #[default]
    Parquet,
}

/// The data type of gradients on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum WireDtype {
    /// Rounded to 8 bits of precision.
    Bf16,
    /// Rounded to 11 bits of precision, up to 65504.
    F16,
    /// Not rounded.
    #[default]
    F32,
}
