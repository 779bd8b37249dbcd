//! The options of a job that its master and its workers share.

use std::borrow::Cow;
use std::fmt;
use std::num::{NonZeroU16, NonZeroU64};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::WorkerId;
use crate::limits::{
    AUDIT_MAX, BATCH_RECORDS_MAX, CHANNELS_MAX, EPOCHS_MAX, MICRO_BATCHES_MAX, TABLE_LAG_MAX,
    TABLE_REPLICAS, TABLE_REPLICAS_MAX,
};

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
///
/// They are a part of the persisted job, and travel to workers as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Records of a micro-batch, the unit in which a step is split over the ranks; `None` for
    /// [the default](Self::micro_batch_records).
    pub micro_batch: Option<NonZeroU64>,
    /// Whether the sum of a step's gradients is exact, and so does not depend on the ranks.
    pub deterministic: bool,
    /// A worker that is stopped or partitioned for less than this is never evicted; one that is so
    /// for a sixth longer always is. A peer that answers no connection attempt for as long counts
    /// as unreachable. `None` disables evictions.
    pub worker_timeout: Option<Duration>,
    /// How long workers may take from SIGTERM to their end.
    pub grace_period: Duration,
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
    /// How a step whose gradient is not finite is handled.
    pub on_nonfinite: OnNonfinite,
    /// Whether workers of different builds may train together.
    pub allow_mixed_builds: bool,
    /// Which links between workers are encrypted.
    pub link_encryption: LinkEncryption,
    /// Number of bad records that the reader skips; 0 if the first one ends the job.
    pub bad_records_max: u64,
    /// Number of workers that hold each row of the model's tables: 1 to
    /// [`TABLE_REPLICAS_MAX`](crate::limits::TABLE_REPLICAS_MAX).
    pub table_replicas: u8,
    /// What a group does all of whose copies of some rows are lost.
    pub on_rows_lost: OnRowsLost,
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
            worker_timeout: None,
            grace_period: Duration::from_secs(30),
            checkpoints: None,
            resume_from: None,
            validation: None,
            work: Work::default(),
            wire_dtype: WireDtype::F32,
            channels: 1,
            on_nonfinite: OnNonfinite::default(),
            allow_mixed_builds: false,
            link_encryption: LinkEncryption::default(),
            bad_records_max: 0,
            table_replicas: TABLE_REPLICAS,
            on_rows_lost: OnRowsLost::default(),
            shard_optimizer: false,
            param_dtype: ParamDtype::F32,
            table_memory: None,
            export_changes_since: None,
            table_lag: 0,
            table_servers: 0,
            audit: 0,
        }
    }

    /// Longest interval between two messages of a worker; `None` for no heartbeats.
    #[must_use]
    pub fn heartbeat(&self) -> Option<Duration> {
        self.worker_timeout.map(|timeout| (timeout / 10).max(Duration::from_millis(1)))
    }

    /// How long a worker that received SIGTERM waits for its release before it ends by itself:
    /// within the grace period, so that it need not be killed.
    #[must_use]
    pub fn leave_timeout(&self) -> Duration {
        self.grace_period - (self.grace_period / 5).min(LEAVE_MARGIN)
    }

    /// How long the group may take to release a leaving worker before the master releases it
    /// anyway: a little less than the worker waits.
    #[must_use]
    pub fn leave_wait(&self) -> Duration {
        self.grace_period - (self.grace_period / 5 * 2).min(LEAVE_MARGIN * 2)
    }

    /// Records of a micro-batch: by default 1, and more where sums are exact.
    #[must_use]
    pub fn micro_batch_records(&self) -> NonZeroU64 {
        let exact = self.check_deterministic().ok().flatten();
        let of_exact = exact.map(|(micro_batch, _)| micro_batch);
        of_exact.or(self.micro_batch).unwrap_or(NonZeroU64::MIN)
    }

    /// Records of a micro-batch and number of micro-batches in a step of a job whose sums are
    /// exact; `None` for other jobs.
    ///
    /// # Errors
    /// The option that such a job can't have, with what would be right.
    pub fn check_deterministic(&self) -> Result<Option<(NonZeroU64, u64)>, String> {
        if !self.deterministic {
            return Ok(None);
        }
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
        Ok(Some((micro_batch, count)))
    }

    /// Checks what can be checked before the data is seen.
    ///
    /// # Errors
    /// The first field that is wrong, with what would be right.
    pub fn check(&self) -> Result<(), SpecError> {
        let number = u64::from;
        let split = self.validation.as_ref().and_then(|validation| validation.split);
        for (option, value, possible, wanted) in [
            ("--channels", number(self.channels), 1..=number(CHANNELS_MAX), "from 1 to 16"),
            (
                "--table-replicas",
                number(self.table_replicas),
                1..=number(TABLE_REPLICAS_MAX),
                "from 1 to 3",
            ),
            ("--table-lag", number(self.table_lag), 0..=number(TABLE_LAG_MAX), "from 0 to 16"),
            ("--audit", self.audit.into(), 0..=AUDIT_MAX.into(), "at most 1000000"),
            ("--num-epochs", self.epochs.into(), 1..=EPOCHS_MAX.into(), "from 1 to 1048576"),
            ("--max-steps", self.max_steps.unwrap_or(1), 1..=u64::MAX, "at least 1"),
            (
                "--global-batch-size or --minibatch-size",
                self.batch.share(1),
                1..=BATCH_RECORDS_MAX,
                "at most 4294967296",
            ),
            (
                "--micro-batch",
                self.micro_batch.map_or(1, NonZeroU64::get),
                1..=BATCH_RECORDS_MAX,
                "at most 4294967296",
            ),
            (
                "--validation-split",
                split.map_or(0, |split| split.get().into()),
                0..=999,
                "at most 999",
            ),
        ] {
            if !possible.contains(&value) {
                return Err(SpecError { option, value: value.to_string(), wanted: wanted.into() });
            }
        }
        if self.param_dtype == ParamDtype::Bf16 && !self.shard_optimizer {
            let wanted = "f32 without --shard-optimizer".into();
            return Err(SpecError { option: "--param-dtype", value: "bf16".into(), wanted });
        }
        Ok(())
    }
}

/// An invalid option of a job: correct it and submit again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError {
    /// The option, as the command line has it.
    pub option: &'static str,
    /// Its value.
    pub value: String,
    /// What would be right.
    pub wanted: Cow<'static, str>,
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { option, value, wanted } = self;
        write!(f, "{option} is {value:?}; it must be {wanted}")
    }
}

impl std::error::Error for SpecError {}

/// How a step is handled whose gradient, summed over all workers, or whose loss contains a NaN or
/// an infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnNonfinite {
    /// The job fails before the step is applied, with the state before it kept.
    #[default]
    Fail,
    /// Its records count as trained, and the parameters stay as they are.
    Skip,
}

/// What a group does if all copies of rows of tables are lost with their workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnRowsLost {
    /// It goes back to the newest checkpoint.
    #[default]
    GoBack,
    /// It goes on, with the rows of the newest checkpoint in place of the lost ones.
    Stale,
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
    pub split: Option<NonZeroU16>,
    /// Where the best model so far is written.
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

impl ShuffleMode {
    /// As users write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Block => "block",
            Self::None => "none",
            Self::Record => "record",
        }
    }
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

/// Time for a worker's final messages, and for the system to end it.
const LEAVE_MARGIN: Duration = Duration::from_secs(2);
/// Number of micro-batches in a step whose sum is exact, by default: each one's gradient is kept
/// until the step is summed.
const MICRO_BATCHES_DEFAULT: u64 = 16;

/// The training data of a job whose program finds its data by itself.
pub const DATA_OF_PROGRAM: &str = "(data of the program)";

#[cfg(test)]
mod tests {
    use super::*;

    fn check(batch: Batch, micro_batch: u64, wire_dtype: WireDtype) -> Result<(u64, u64), String> {
        let options = WorkerOptions {
            micro_batch: NonZeroU64::new(micro_batch),
            wire_dtype,
            deterministic: true,
            ..WorkerOptions::new("", batch)
        };
        let checked = options.check_deterministic()?.expect("it is deterministic");
        Ok((checked.0.get(), checked.1))
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
