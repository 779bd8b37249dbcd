//! The options of a job that its master and its workers share.

use std::num::{NonZeroU16, NonZeroU64};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::WorkerId;
use crate::limits::{MICRO_BATCHES_MAX, TABLE_REPLICAS};

/// The master's first message on a stream: the worker is admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Id of the worker.
    pub worker: WorkerId,
    /// Fencing token: the number of this master among the job's masters, which grows with each one.
    /// A worker that a newer master has welcomed rejects this one. 0 if the master states none.
    pub incarnation: u64,
    /// Whether this worker is a table server: it holds rows of the model's tables, and computes no
    /// records.
    pub serves_tables: bool,
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
    /// The order in which an epoch's records are trained.
    pub shuffle: Shuffle,
    /// Records of a micro-batch, the unit in which a step is split over the ranks; `None`: single
    /// records.
    pub micro_batch: Option<NonZeroU64>,
    /// Whether the sum of a step's gradients is exact, and so does not depend on the ranks. The
    /// options then satisfy [`Deterministic::check`].
    pub deterministic: bool,
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
    /// Whether workers of different builds may train together.
    pub allows_mixed_builds: bool,
    /// Which links between workers are encrypted.
    pub link_encryption: LinkEncryption,
    /// Number of bad records that the reader skips; 0 if the first one ends the job.
    pub bad_records_max: u64,
    /// Number of workers that hold each row of the model's tables: 1 to
    /// [`TABLE_REPLICAS_MAX`](crate::limits::TABLE_REPLICAS_MAX).
    pub table_replicas: u8,
    /// Whether a group all of whose copies of some rows are lost goes on with those of a
    /// checkpoint. Otherwise it goes back.
    pub stale_rows: bool,
    /// Whether the optimizer's state is divided over the workers, each part on two of them.
    pub shard_optimizer: bool,
    /// Data type of the parameters that each worker computes with: other than f32 only with a
    /// divided optimizer.
    pub param_dtype: ParamDtype,
    /// The most memory that the rows of tables may take on a worker, in bytes; `None`: any.
    pub table_memory: Option<u64>,
    /// The step after which rows were touched that are exported; `None`: all rows are.
    pub export_changes_since: Option<u64>,
    /// Number of commits by which the rows that a step reads are older than the last one: at most
    /// [`TABLE_LAG_MAX`](crate::limits::TABLE_LAG_MAX).
    pub table_lag: u8,
    /// Number of workers that hold the rows of tables and compute no records.
    pub table_servers: u32,
    /// Parts per million of the steps whose gradients are computed by two workers each, and
    /// compared: 0 to [`AUDIT_MAX`](crate::limits::AUDIT_MAX).
    pub audit: u32,
}

impl WorkerOptions {
    /// The options of a job that trains for one epoch in batches of this size, and for which no
    /// other option is given.
    #[must_use]
    pub fn new(training_data: impl Into<String>, batch: Batch) -> Self {
        Self {
            training_data: training_data.into(),
            epochs: 1,
            max_steps: None,
            batch,
            seed: 0,
            shuffle: Shuffle::default(),
            micro_batch: None,
            deterministic: false,
            heartbeat: None,
            worker_timeout: None,
            leave_timeout: None,
            checkpoints: None,
            resume_from: None,
            validation: None,
            work: Work::default(),
            wire_dtype: WireDtype::F32,
            channels: 1,
            skips_nonfinite: false,
            allows_mixed_builds: false,
            link_encryption: LinkEncryption::default(),
            bad_records_max: 0,
            table_replicas: TABLE_REPLICAS,
            stale_rows: false,
            shard_optimizer: false,
            param_dtype: ParamDtype::F32,
            table_memory: None,
            export_changes_since: None,
            table_lag: 0,
            table_servers: 0,
            audit: 0,
        }
    }
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
    /// Number of records of a step in a group of `world_size` ranks.
    #[must_use]
    pub fn records(self, world_size: usize) -> u64 {
        match self {
            Self::Global(records) => records.get(),
            Self::PerWorker(records) => records.get().saturating_mul(world_size as u64),
        }
    }

    /// Number of records of one rank's share in a group of `world_size` ranks; at least 1.
    #[must_use]
    pub fn share(self, world_size: usize) -> u64 {
        match self {
            Self::Global(records) => records.get().div_ceil(world_size.max(1) as u64),
            Self::PerWorker(records) => records.get(),
        }
    }
}

/// The options that a job whose results do not depend on its workers is limited in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deterministic {
    /// Number of records of a step.
    pub batch: Batch,
    /// Records of a micro-batch; `None` for the default.
    pub micro_batch: Option<NonZeroU64>,
    /// Data type of gradients on the wire.
    pub wire_dtype: WireDtype,
}

impl Deterministic {
    /// Records of a micro-batch, and number of micro-batches in a step.
    ///
    /// # Errors
    /// The option that is wrong, with what would be right.
    pub fn check(self) -> Result<(NonZeroU64, u64), String> {
        let Batch::Global(batch) = self.batch else {
            return Err("the number of records of a step must not depend on the workers: use \
                        --global-batch-size in place of --minibatch-size"
                .into());
        };
        if self.wire_dtype != WireDtype::F32 {
            return Err("sums must not be rounded: use --wire-dtype f32".into());
        }
        let default = NonZeroU64::MIN.saturating_add((batch.get() - 1) / MICRO_BATCHES_DEFAULT);
        let micro_batch = self.micro_batch.unwrap_or(default);
        let count = batch.get().div_ceil(micro_batch.get());
        if count > MICRO_BATCHES_MAX {
            let least = batch.get().div_ceil(MICRO_BATCHES_MAX);
            return Err(format!(
                "a step of {batch} records would have {count} micro-batches; there may be \
                 {MICRO_BATCHES_MAX}: use --micro-batch {least} or more"
            ));
        }
        Ok((micro_batch, count))
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
    /// The validation data is this many thousandths of the training data, at `data`, and is not
    /// trained; `None` if all of `data` is validation data. At most 999.
    #[serde(default)]
    pub split: Option<NonZeroU16>,
    /// Where the best model so far is written.
    #[serde(default)]
    pub export_best: Option<String>,
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

/// Where a job that fails writes its model: beside `export`, which may hold the model of an
/// earlier, good job.
#[must_use]
pub fn failed_export(export: &str) -> String {
    format!("{export}.failed")
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

/// The order in which an epoch's records are trained. It depends on the seed and the epoch alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shuffle {
    /// What is shuffled.
    pub mode: ShuffleMode,
    /// Where blocks are shuffled: least number of records that are mixed at a time. `None` chooses
    /// a default.
    pub buffer: Option<NonZeroU64>,
}

impl Shuffle {
    /// In the order of the data.
    pub const NONE: Self = Self { mode: ShuffleMode::None, buffer: None };
}

/// What is shuffled in each epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShuffleMode {
    /// Records if the reader reads single records well, and blocks otherwise.
    #[default]
    Auto,
    /// Blocks of records, and the records within each few consecutive blocks.
    Block,
    /// Nothing.
    None,
    /// All records.
    Record,
}

/// Which links between workers are encrypted. Both sides of a link authenticate each other in any
/// case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkEncryption {
    /// Links between hosts.
    #[default]
    Auto,
    /// None.
    Off,
    /// All links.
    On,
}

/// The data type of the parameters that each worker computes with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ParamDtype {
    /// Rounded to 8 bits of precision.
    Bf16,
    /// Not rounded.
    #[default]
    F32,
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

/// Number of micro-batches in a step whose sum is exact, by default: each one's gradient is kept
/// until the step is summed.
const MICRO_BATCHES_DEFAULT: u64 = 16;

/// The training data of a job whose program finds its data by itself.
pub const DATA_OF_PROGRAM: &str = "(data of the program)";

#[cfg(test)]
mod tests {
    use super::*;

    fn check(batch: Batch, micro_batch: u64, wire_dtype: WireDtype) -> Result<(u64, u64), String> {
        let micro_batch = NonZeroU64::new(micro_batch);
        let checked = Deterministic { batch, micro_batch, wire_dtype }.check();
        checked.map(|(micro_batch, count)| (micro_batch.get(), count))
    }

    #[test]
    fn a_deterministic_job_has_a_bounded_number_of_micro_batches_of_a_fixed_size() {
        let batch = |records| Batch::Global(NonZeroU64::new(records).unwrap());
        assert_eq!(check(batch(64), 0, WireDtype::F32), Ok((4, 16)));
        assert_eq!(check(batch(65), 0, WireDtype::F32), Ok((5, 13)));
        assert_eq!(check(batch(1), 0, WireDtype::F32), Ok((1, 1)));
        assert_eq!(check(batch(4096), 4, WireDtype::F32), Ok((4, 1024)));
        let error = check(batch(4097), 4, WireDtype::F32).unwrap_err();
        assert!(error.ends_with("use --micro-batch 5 or more"), "{error}");
        assert!(check(batch(64), 0, WireDtype::Bf16).unwrap_err().contains("--wire-dtype f32"));
        let per_worker = Batch::PerWorker(NonZeroU64::MIN);
        let error = check(per_worker, 0, WireDtype::F32).unwrap_err();
        assert!(error.contains("--global-batch-size"), "{error}");
    }
}
