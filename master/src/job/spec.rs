//! The specification of a job.

use std::num::NonZeroU64;
use std::ops::Range;
use std::time::Duration;

use elasticdl_proto::limits::{
    CHANNELS_MAX, TABLE_LAG_MAX, TABLE_REPLICAS, TABLE_REPLICAS_MAX, WORKERS_MAX,
};
pub use elasticdl_proto::{
    Batch, CheckpointEvery, CheckpointSpec, Format, LinkEncryption, ParamDtype, Shuffle,
    ShuffleMode, ValidationSpec, WireDtype, Work,
};
use elasticdl_proto::{Deterministic, WorkerOptions};
use serde::{Deserialize, Serialize};

use super::policies::Policies;

/// A job as submitted. [`JobSpec::check`] succeeds before a [`Job`](super::Job) is created from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// The job's name.
    pub name: String,
    /// Where the training data is, as the program's reader understands it.
    pub training_data: String,
    /// Workers to keep, from `min_workers` to `max_workers`.
    pub num_workers: u32,
    /// Minimum number of members: with fewer the group waits.
    pub min_workers: u32,
    /// `num_workers` can be raised up to this.
    pub max_workers: u32,
    /// Workers that start and leave together; numbers of workers are multiples of it.
    pub workers_per_pod: u32,
    /// Passes over the data.
    pub epochs: u32,
    /// Number of steps after which the job ends, unless its data ends earlier.
    pub max_steps: Option<u64>,
    /// How many records make a step.
    pub batch: Batch,
    /// Records of a shard of an inference job; `None` chooses from the size of the data set.
    pub records_per_shard: Option<NonZeroU64>,
    /// The order in which an epoch's records are trained.
    pub shuffle: Shuffle,
    /// Seed of all random choices.
    pub seed: u64,
    /// Records of a micro-batch, the unit in which a step is split over the workers; `None`: single
    /// records.
    pub micro_batch: Option<NonZeroU64>,
    /// Whether the results depend on nothing but the data, the options and the program.
    pub deterministic: bool,
    /// Failures of workers (crashes and errors of the user's code, not preemption) after which the
    /// job fails.
    pub max_worker_restarts: u32,
    /// A worker that is stopped for less than this is never evicted; one that is stopped for a
    /// sixth longer always is. `None` disables evictions.
    pub worker_timeout: Option<Duration>,
    /// A member that computes for longer than this while the group waits for it is evicted. `None`:
    /// a limit that is learned from the job's own steps.
    pub step_timeout: Option<Duration>,
    /// How long a worker may take from its start until it joins the job.
    pub start_timeout: Duration,
    /// How long a worker without a master continues to train and searches for one before it ends.
    pub master_timeout: Duration,
    /// Where and when checkpoints are written; `None` for never.
    pub checkpoints: Option<CheckpointSpec>,
    /// A checkpoint, or a folder of checkpoints, from which the job starts.
    pub resume_from: Option<String>,
    /// What is evaluated, and when; `None` for nothing.
    pub validation: Option<ValidationSpec>,
    /// What the job does with its data.
    pub work: Work,
    /// As what gradients travel between workers.
    pub wire_dtype: WireDtype,
    /// Links between two workers that are neighbours in the ring, where sums go over TCP: 1 to 16.
    pub channels: u8,
    /// How a step whose gradient is not finite is handled.
    pub on_nonfinite: OnNonfinite,
    /// Whether workers of different builds may train together.
    pub allow_mixed_builds: bool,
    /// Whether the job restarts from step 0 when all workers are lost with a state of which there
    /// is no checkpoint. Otherwise it fails.
    pub restart_without_checkpoint: bool,
    /// Which links between workers are encrypted.
    pub link_encryption: LinkEncryption,
    /// Number of bad records that the reader skips; 0 if the first one ends the job.
    pub bad_records_max: u64,
    /// Number of workers that hold each row of the model's tables: 1 to [`TABLE_REPLICAS_MAX`].
    pub table_replicas: u8,
    /// What a group does all of whose copies of some rows are lost.
    pub on_rows_lost: OnRowsLost,
    /// Whether the optimizer's state is divided over the workers, each part on two of them.
    #[serde(default)]
    pub shard_optimizer: bool,
    /// Data type of the parameters that each worker computes with.
    #[serde(default)]
    pub param_dtype: ParamDtype,
    /// The most memory that the rows of tables may take on a worker, in bytes; `None`: any.
    pub table_memory: Option<u64>,
    /// The step after which rows of tables were touched that are exported; `None`: all rows are.
    pub export_changes_since: Option<u64>,
    /// Number of commits by which the rows of tables that a step reads are older than the last one:
    /// at most [`TABLE_LAG_MAX`].
    #[serde(default)]
    pub table_lag: u8,
    /// Workers, besides `num_workers`, that hold the rows of tables and compute no records.
    #[serde(default)]
    pub table_servers: u32,
    /// Parts per million of the steps whose gradients are computed by two workers each, and
    /// compared: 0 to 1,000,000.
    #[serde(default)]
    pub audit: u32,
    /// How long workers may take from SIGTERM to their end.
    pub grace_period: Duration,
    /// What exit codes mean, and when the job ends before its data.
    pub policies: Policies,
}

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

impl JobSpec {
    /// A job of up to `num_workers` workers that trains for one epoch. It evicts no worker,
    /// replaces none that fails, and writes no checkpoint.
    #[must_use]
    pub fn new(
        name: impl Into<String>,
        training_data: impl Into<String>,
        num_workers: u32,
        batch: Batch,
    ) -> Self {
        Self {
            name: name.into(),
            training_data: training_data.into(),
            num_workers,
            min_workers: 1,
            max_workers: num_workers,
            workers_per_pod: 1,
            epochs: 1,
            max_steps: None,
            batch,
            records_per_shard: None,
            shuffle: Shuffle::default(),
            seed: 0,
            micro_batch: None,
            deterministic: false,
            max_worker_restarts: 0,
            worker_timeout: None,
            step_timeout: None,
            start_timeout: Duration::from_secs(60),
            master_timeout: Duration::from_secs(30),
            checkpoints: None,
            resume_from: None,
            validation: None,
            work: Work::default(),
            wire_dtype: WireDtype::F32,
            channels: 1,
            on_nonfinite: OnNonfinite::default(),
            allow_mixed_builds: false,
            restart_without_checkpoint: false,
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
            grace_period: Duration::from_secs(30),
            policies: Policies::default(),
        }
    }

    /// Slots of the table servers: those after all workers'.
    pub(crate) fn server_slots(&self) -> Range<u32> {
        self.max_workers..self.max_workers + self.table_servers
    }

    /// Whether a model is exported: the last one, or the best.
    pub(crate) fn exports(&self) -> bool {
        let best = self.validation.as_ref().and_then(|spec| spec.export_best.as_ref());
        best.is_some() || matches!(self.work, Work::Train { export: Some(_) })
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

    /// The interval of a worker's heartbeats.
    #[must_use]
    pub fn heartbeat(&self) -> Option<Duration> {
        self.worker_timeout.map(|timeout| timeout / 10)
    }

    /// The options that a worker needs.
    #[must_use]
    pub fn worker_options(&self) -> WorkerOptions {
        WorkerOptions {
            training_data: self.training_data.clone(),
            epochs: self.epochs,
            max_steps: self.max_steps,
            batch: self.batch,
            seed: self.seed,
            shuffle: self.shuffle,
            micro_batch: self.micro_batch(),
            deterministic: self.deterministic,
            heartbeat: self.heartbeat(),
            worker_timeout: self.worker_timeout,
            leave_timeout: Some(self.leave_timeout()),
            checkpoints: self.checkpoints.clone(),
            resume_from: self.resume_from.clone(),
            validation: self.validation.clone(),
            work: self.work.clone(),
            wire_dtype: self.wire_dtype,
            channels: self.channels,
            skips_nonfinite: self.on_nonfinite == OnNonfinite::Skip,
            allows_mixed_builds: self.allow_mixed_builds,
            link_encryption: self.link_encryption,
            bad_records_max: self.bad_records_max,
            table_replicas: self.table_replicas,
            stale_rows: self.on_rows_lost == OnRowsLost::Stale,
            shard_optimizer: self.shard_optimizer,
            param_dtype: self.param_dtype,
            table_memory: self.table_memory,
            export_changes_since: self.export_changes_since,
            table_lag: self.table_lag,
            table_servers: self.table_servers,
            audit: self.audit,
        }
    }

    /// Records of a micro-batch; `None`: single records.
    fn micro_batch(&self) -> Option<NonZeroU64> {
        let exact = self.exact_sums().check().ok().filter(|_| self.deterministic);
        exact.map(|(micro_batch, _)| micro_batch).or(self.micro_batch)
    }

    fn exact_sums(&self) -> Deterministic {
        let Self { batch, micro_batch, wire_dtype, .. } = *self;
        Deterministic { batch, micro_batch, wire_dtype }
    }

    /// Checks whether the job can be scaled to `num_workers`.
    ///
    /// # Errors
    /// What would be right.
    pub fn check_scale(&self, num_workers: u32) -> Result<(), String> {
        let Self { min_workers: min, max_workers: max, workers_per_pod: per_pod, .. } = self;
        if !(min..=max).contains(&&num_workers) {
            return Err(format!(
                "this job takes {min} to {max} workers (--min-workers, --max-workers), not \
                 {num_workers}"
            ));
        }
        match num_workers.is_multiple_of(*per_pod) {
            true => Ok(()),
            false => Err(format!(
                "a pod of this job holds {per_pod} workers, so it takes a multiple of {per_pod}, \
                 not {num_workers}: {}",
                multiples_near(num_workers, *per_pod)
            )),
        }
    }

    /// Checks the options that a [deterministic](Self::deterministic) job is limited in.
    ///
    /// # Errors
    /// What would be right.
    pub fn check_deterministic(&self) -> Result<(), String> {
        if self.deterministic { self.exact_sums().check().map(drop) } else { Ok(()) }
    }

    /// Checks what can be checked before the data is seen.
    ///
    /// # Errors
    /// The first field that is wrong, with what would be right.
    pub fn check(&self) -> Result<(), SpecError> {
        let one_of = |field, value: String, wanted| Err(SpecError { field, value, wanted });
        if self.name.is_empty() {
            return one_of("name", String::new(), "a name");
        }
        if self.min_workers == 0 {
            return one_of("min_workers", "0".into(), "at least 1");
        }
        if self.max_workers > WORKERS_MAX {
            return one_of("max_workers", self.max_workers.to_string(), "at most 16384");
        }
        if self.table_servers > WORKERS_MAX - self.max_workers {
            let wanted = "with max_workers at most 16384";
            return one_of("table_servers", self.table_servers.to_string(), wanted);
        }
        if self.table_servers > 0 && !self.work.trains() {
            return one_of("table_servers", self.table_servers.to_string(), "0 without training");
        }
        if !(self.min_workers..=self.max_workers).contains(&self.num_workers) {
            return one_of(
                "num_workers",
                self.num_workers.to_string(),
                "from min_workers to max_workers",
            );
        }
        if !(1..=MAX_WORKERS_PER_POD).contains(&self.workers_per_pod) {
            return one_of("workers_per_pod", self.workers_per_pod.to_string(), "from 1 to 64");
        }
        let numbers = [
            ("min_workers", self.min_workers),
            ("num_workers", self.num_workers),
            ("max_workers", self.max_workers),
            ("table_servers", self.table_servers),
        ];
        if let Some((field, number)) =
            numbers.into_iter().find(|(_, n)| !n.is_multiple_of(self.workers_per_pod))
        {
            return one_of(field, number.to_string(), "a multiple of workers_per_pod");
        }
        if !(1..=CHANNELS_MAX).contains(&self.channels) {
            return one_of("channels", self.channels.to_string(), "from 1 to 16");
        }
        if !(1..=TABLE_REPLICAS_MAX).contains(&self.table_replicas) {
            return one_of("table_replicas", self.table_replicas.to_string(), "from 1 to 3");
        }
        if self.table_lag > TABLE_LAG_MAX {
            return one_of("table_lag", self.table_lag.to_string(), "from 0 to 16");
        }
        if self.param_dtype == ParamDtype::Bf16 && !self.shard_optimizer {
            return one_of("param_dtype", "bf16".into(), "f32 without --shard-optimizer");
        }
        if self.epochs == 0 {
            return one_of("epochs", "0".into(), "at least 1");
        }
        if self.max_steps == Some(0) {
            return one_of("max_steps", "0".into(), "at least 1");
        }
        if let Some((field, text)) =
            self.places().into_iter().find(|(_, text)| text.len() > PLACE_BYTES_MAX)
        {
            let shown: String = text.chars().take(PLACE_SHOWN_MAX).collect();
            return one_of(field, format!("{shown}…"), "at most 4096 bytes long");
        }
        Ok(())
    }
}

impl JobSpec {
    /// Paths and addresses, with their fields' names: each becomes part of the persisted job.
    fn places(&self) -> Vec<(&'static str, &str)> {
        let mut places =
            vec![("name", self.name.as_str()), ("training_data", self.training_data.as_str())];
        places.extend(self.checkpoints.as_ref().map(|c| ("checkpoints.dir", c.dir.as_str())));
        places.extend(self.resume_from.as_deref().map(|path| ("resume_from", path)));
        if let Some(validation) = &self.validation {
            places.push(("validation.data", &validation.data));
            places.push(("validation.metric", &validation.metric));
            places.extend(validation.export_best.as_deref().map(|path| ("export_best", path)));
        }
        match &self.work {
            Work::Evaluate { model } => places.push(("model", model)),
            Work::Predict { model, output, .. } => {
                places.extend([("model", model.as_str()), ("output", output)])
            }
            Work::Train { export } => places.extend(export.as_deref().map(|path| ("export", path))),
        }
        places
    }
}

/// The multiples of `of` next to `number`, as text.
pub fn multiples_near(number: u32, of: u32) -> String {
    match number / of * of {
        0 => of.to_string(),
        below => format!("{below} or {}", below.saturating_add(of)),
    }
}

/// An invalid field of a [`JobSpec`]: correct it and submit again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value:?}; it must be {wanted}")]
pub struct SpecError {
    /// The field.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// What would be right.
    pub wanted: &'static str,
}

/// The maximum length of a path on common systems.
const PLACE_BYTES_MAX: usize = 4096;
const PLACE_SHOWN_MAX: usize = 60;

/// Time for a worker's final messages, and for the system to end it.
const LEAVE_MARGIN: Duration = Duration::from_secs(2);
/// No machine has more GPUs.
pub const MAX_WORKERS_PER_POD: u32 = 64;
