//! The specification of a job.

use std::num::NonZeroU64;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use elasticdl_proto::LogFormat;
use elasticdl_proto::limits::WORKERS_MAX;
pub use elasticdl_proto::{
    Batch, CheckpointEvery, CheckpointSpec, Format, LinkEncryption, OnNonfinite, OnRowsLost,
    ParamDtype, Shuffle, ShuffleMode, SpecError, ValidationSpec, WireDtype, Work, WorkerOptions,
};
use serde::{Deserialize, Serialize};

use super::policies::Policies;
use super::scaling::Scaling;

/// A job as submitted. [`JobSpec::check`] succeeds before a [`Job`](super::Job) is created from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// The job's name.
    pub name: String,
    /// The options that concern the workers, too.
    #[serde(flatten)]
    pub options: WorkerOptions,
    /// Workers to keep, from `min_workers` to `max_workers`.
    pub num_workers: u32,
    /// Minimum number of members: with fewer the group waits.
    pub min_workers: u32,
    /// `num_workers` can be raised up to this.
    pub max_workers: u32,
    /// Whether the number of workers is measured and changed while the job runs: `num_workers` is
    /// the first one.
    #[serde(default)]
    pub autoscale: bool,
    /// Workers beyond `num_workers` that follow the group's state, and take the place of members
    /// that are lost.
    pub spares: u32,
    /// Nodes on which no worker is started where another one has capacity.
    #[serde(default)]
    pub avoid_hosts: Vec<String>,
    /// Workers that start and leave together; numbers of workers are multiples of it.
    pub workers_per_pod: u32,
    /// Records of a shard of an inference job; `None` chooses from the size of the data set.
    pub records_per_shard: Option<NonZeroU64>,
    /// Failures of workers (crashes and errors of the user's code, not preemption) after which the
    /// job fails.
    pub max_worker_restarts: u32,
    /// A member that computes for longer than this while the group waits for it is evicted. `None`:
    /// a limit that is learned from the job's own steps.
    pub step_timeout: Option<Duration>,
    /// How long a worker may take from its start until it joins the job.
    pub start_timeout: Duration,
    /// How long a worker without a master continues to train and searches for one before it ends.
    pub master_timeout: Duration,
    /// Whether the job restarts from step 0 when all workers are lost with a state of which there
    /// is no checkpoint. Otherwise it fails.
    pub restart_without_checkpoint: bool,
    /// What exit codes mean, and when the job ends before its data.
    pub policies: Policies,
    /// Form of the logs of its masters and workers.
    #[serde(default)]
    pub log_format: LogFormat,
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
            options: WorkerOptions::new(training_data, batch),
            num_workers,
            min_workers: 1,
            max_workers: num_workers,
            autoscale: false,
            spares: 0,
            avoid_hosts: Vec::new(),
            workers_per_pod: 1,
            records_per_shard: None,
            max_worker_restarts: 0,
            step_timeout: None,
            start_timeout: Duration::from_secs(60),
            master_timeout: Duration::from_secs(30),
            restart_without_checkpoint: false,
            policies: Policies::default(),
            log_format: LogFormat::default(),
        }
    }

    /// Slots of the table servers: those after all workers'.
    #[must_use]
    pub fn server_slots(&self) -> Range<u32> {
        let first = self.max_workers + self.spares;
        first..first + self.options.table_servers
    }

    /// Whether a model is exported: the last one, or the best.
    pub(crate) fn exports(&self) -> bool {
        let best = self.options.validation.as_ref().and_then(|spec| spec.export_best.as_ref());
        best.is_some() || matches!(self.options.work, Work::Train { export: Some(_) })
    }

    /// Checks what can be checked before the data is seen.
    ///
    /// # Errors
    /// The first option that is wrong, with what would be right.
    pub fn check(&self) -> Result<(), SpecError> {
        let one_of = |option, value: String, wanted: &'static str| {
            Err(SpecError { option, value, wanted: wanted.into() })
        };
        if self.name.is_empty() {
            return one_of("--job-name", String::new(), "a name");
        }
        if self.min_workers == 0 {
            return one_of("--min-workers", "0".into(), "at least 1");
        }
        if self.max_workers > WORKERS_MAX {
            return one_of("--max-workers", self.max_workers.to_string(), "at most 16384");
        }
        let beside = [("--spares", self.spares), ("--table-servers", self.options.table_servers)];
        let mut room = WORKERS_MAX - self.max_workers;
        let most = room.min(self.max_workers * SPARES_PER_WORKER_MAX);
        if self.spares > most {
            let max_workers = self.max_workers;
            let wanted = format!("at most {most} with --max-workers {max_workers}").into();
            return Err(SpecError { option: "--spares", value: self.spares.to_string(), wanted });
        }
        for (option, number) in beside {
            let Some(left) = room.checked_sub(number) else {
                return one_of(option, number.to_string(), "with --max-workers at most 16384");
            };
            room = left;
            if number > 0 && !self.options.work.trains() {
                return one_of(option, number.to_string(), "0 without training");
            }
        }
        if self.autoscale && !self.options.work.trains() {
            return one_of("--autoscale", "true".into(), "false without training");
        }
        if !self.limits().contains(&self.num_workers) {
            return one_of(
                "--num-workers",
                self.num_workers.to_string(),
                "from --min-workers to --max-workers",
            );
        }
        if !(1..=MAX_WORKERS_PER_POD).contains(&self.workers_per_pod) {
            return one_of("--workers-per-pod", self.workers_per_pod.to_string(), "from 1 to 64");
        }
        let numbers = [
            ("--min-workers", self.min_workers),
            ("--num-workers", self.num_workers),
            ("--max-workers", self.max_workers),
        ];
        if let Some((option, number)) =
            numbers.into_iter().chain(beside).find(|(_, n)| !n.is_multiple_of(self.workers_per_pod))
        {
            return one_of(option, number.to_string(), "a multiple of --workers-per-pod");
        }
        self.options.check()?;
        if let Some((option, text)) =
            self.places().into_iter().find(|(_, text)| text.len() > PLACE_BYTES_MAX)
        {
            let shown: String = text.chars().take(PLACE_SHOWN_MAX).collect();
            return one_of(option, format!("{shown}…"), "at most 4096 bytes long");
        }
        Ok(())
    }
}

impl JobSpec {
    /// The limits of the number of workers.
    pub(crate) fn limits(&self) -> RangeInclusive<u32> {
        self.min_workers..=self.max_workers
    }

    /// Returns the specification of this job, which keeps `wanted` workers now, after a change: it
    /// has the new number of workers and the new limits.
    ///
    /// # Errors
    /// Why the job can't be changed so, and what would be right.
    pub fn scaled(&self, wanted: u32, change: Scaling) -> Result<Self, String> {
        let min_workers = change.min_workers.unwrap_or(self.min_workers);
        let max_workers = change.max_workers.unwrap_or(self.max_workers);
        if min_workers > max_workers {
            return Err(format!(
                "min-workers {min_workers} is more than max-workers {max_workers}; lower the first \
                 or raise the second"
            ));
        }
        let num_workers =
            change.num_workers.unwrap_or_else(|| wanted.clamp(min_workers, max_workers));
        let scaled = Self { num_workers, min_workers, max_workers, ..self.clone() };
        if !scaled.limits().contains(&num_workers) {
            let then = match num_workers > max_workers {
                true => "raise max-workers",
                false => "lower min-workers",
            };
            return Err(format!(
                "this job takes {min_workers} to {max_workers} workers, not {num_workers}: {then} \
                 to {num_workers}, too"
            ));
        }
        let per_pod = self.workers_per_pod;
        let numbers = [num_workers, min_workers, max_workers];
        if let Some(number) = numbers.into_iter().find(|n| !n.is_multiple_of(per_pod)) {
            return Err(format!(
                "a pod of this job holds {per_pod} workers, so it takes a multiple of {per_pod}, \
                 not {number}: {}",
                multiples_near(number, per_pod)
            ));
        }
        if max_workers != self.max_workers && self.options.table_servers > 0 {
            return Err(format!(
                "a job with table servers keeps its max-workers {}: their slots come after those \
                 of the workers",
                self.max_workers
            ));
        }
        if min_workers != self.min_workers && self.policies.starts_core_together {
            return Err(format!(
                "this job keeps its min-workers {}: its scheduler places them as one group, \
                 whose size can't change",
                self.min_workers
            ));
        }
        scaled.check().map_err(|error| error.to_string())?;
        Ok(scaled)
    }
}

impl JobSpec {
    /// Paths and addresses, with their options: each becomes part of the persisted job.
    fn places(&self) -> Vec<(&'static str, &str)> {
        let mut places = vec![
            ("--job-name", self.name.as_str()),
            ("--training-data", self.options.training_data.as_str()),
        ];
        places.extend(
            self.options.checkpoints.as_ref().map(|c| ("--checkpoint-dir", c.dir.as_str())),
        );
        places.extend(self.options.resume_from.as_deref().map(|path| ("--resume-from", path)));
        if let Some(validation) = &self.options.validation {
            places.push(("--validation-data", &validation.data));
            places.push(("--best-metric", &validation.metric));
            places.extend(validation.export_best.as_deref().map(|path| ("--export-best", path)));
        }
        match &self.options.work {
            Work::Evaluate { model } => places.push(("--model", model)),
            Work::Predict { model, output, .. } => {
                places.extend([("--model", model.as_str()), ("--predictions", output)])
            }
            Work::Train { export } => {
                places.extend(export.as_deref().map(|path| ("--export", path)))
            }
        }
        places
    }
}

/// The number of workers and the limits that a job was submitted with.
impl From<&JobSpec> for Scaling {
    fn from(spec: &JobSpec) -> Self {
        Self {
            num_workers: Some(spec.num_workers),
            min_workers: Some(spec.min_workers),
            max_workers: Some(spec.max_workers),
        }
    }
}

/// The multiples of `of` next to `number`, as text.
pub fn multiples_near(number: u32, of: u32) -> String {
    match number / of * of {
        0 => of.to_string(),
        below => format!("{below} or {}", below.saturating_add(of)),
    }
}

/// The maximum length of a path on common systems.
/// More workers can't be lost before others have started in their places.
const SPARES_PER_WORKER_MAX: u32 = 2;
const PLACE_BYTES_MAX: usize = 4096;
const PLACE_SHOWN_MAX: usize = 60;

/// No machine has more GPUs.
pub const MAX_WORKERS_PER_POD: u32 = 64;
