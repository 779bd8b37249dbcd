//! The checkpoints of a job, as its options name them: the folder that the trainer writes to, the
//! one that the job starts from, and what a checkpoint there must match.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use elasticdl_collective::Secret;
use elasticdl_data::Dataset;
use elasticdl_data::storage::Storage;
use elasticdl_proto::{CheckpointTimes, OrderName, ParamDtype, Welcome, WorkerOptions};
use elasticdl_tables::Table;

use crate::checkpoint::{
    BestMetric, CheckpointWriter, JobFingerprint, Locations, Probe, RestoreError, Retention, check,
};
use crate::external::Bridge;
use crate::failure::{Failure, call_user};
use crate::machine::{CheckpointStore, StoredCheckpoints};
use crate::model::{Model, NamedTensor, tables_of};
use crate::ordered_reader::order_of;
use crate::session::evaluation::Plan;
use crate::session::origin::Program;
use crate::session::reports::micros;
use crate::tensor::ModelSize;

/// The checkpoints of a job.
#[derive(Debug)]
pub(crate) struct Checkpointing {
    pub(crate) store: Box<dyn CheckpointStore>,
    /// Identity of the job's run.
    pub(crate) run: String,
    /// What decides which model is the best, if one is exported.
    pub(crate) best_metric: Option<BestMetric>,
    /// Whether a checkpoint of another build is as good as one of this build.
    pub(crate) allows_mixed_builds: bool,
    pub(crate) timed: TimedCheckpoint,
}

/// The times of the checkpoint that this worker takes part in. Those of another one are unknown: 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TimedCheckpoint {
    step: u64,
    times: CheckpointTimes,
    /// When the phase that has not ended began.
    since: Duration,
}

impl TimedCheckpoint {
    /// Training has stopped for so long, until `now`, to copy the state after `step`.
    pub(super) fn copied(step: u64, took: Duration, now: Duration) -> Self {
        let times = CheckpointTimes { copy_us: micros(took), ..CheckpointTimes::default() };
        Self { step, times, since: now }
    }

    /// All parts of the checkpoint of `step` are written.
    pub(super) fn written(&mut self, step: u64, now: Duration) {
        if self.step == step {
            self.times.write_us = micros(now.saturating_sub(self.since));
            self.since = now;
        }
    }

    /// The manifest of the checkpoint of `step` is written. Returns its times.
    pub(super) fn published(&self, step: u64, now: Duration) -> CheckpointTimes {
        let publish_us = micros(now.saturating_sub(self.since));
        let times = CheckpointTimes { publish_us, ..self.times };
        if self.step == step { times } else { CheckpointTimes::default() }
    }
}

/// What tells the runs of jobs apart: a job that is started again has another secret.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobKey<'a> {
    pub(crate) name: &'a str,
    pub(crate) secret: &'a Secret,
}

impl JobKey<'_> {
    fn run(&self) -> String {
        format!("{:08x}", self.secret.fingerprint("checkpoints"))
    }
}

impl Checkpointing {
    /// Checks that a new job could start from the configured checkpoint, and that it can write
    /// checkpoints. Returns the file by which other workers know their folder.
    ///
    /// # Errors
    /// The fault and the remedy.
    pub(crate) fn check<M: Model>(
        options: &WorkerOptions,
        job: JobKey<'_>,
        dataset: &Dataset,
        model: &mut M,
    ) -> Result<Option<Probe>, String> {
        if options.checkpoints.is_none() && options.resume_from.is_none() {
            return Ok(None);
        }
        let parameters = call_user("tensors()", || Ok(NamedTensor::count(&model.tensors())))?;
        let size = call_user("optimizer()", || Ok(ModelSize::new(parameters, &model.optimizer())))?;
        let reader = call_user("reader()", || Ok(model.reader()))?;
        let order = order_of(&reader, options, dataset)?.name();
        let (locations, fingerprint) =
            locate(options, job, dataset.clone(), order, (size, model.as_bridge()))
                .map_err(|f| f.error)?;
        let fingerprint = JobFingerprint { tables: tables_of(model)?, ..fingerprint };
        check(&locations, &fingerprint).map_err(|error| match error {
            RestoreError::Refused(error) | RestoreError::Storage(error) => error,
        })?;
        // Finds a location without write access before there is work to lose.
        let probe = locations.own.map(|own| Probe::write(&own, &job.run())).transpose();
        probe.map_err(|error| format!("--checkpoint-dir can't be written to: {error}"))
    }

    /// Checks that this worker sees the folder of checkpoints that the worker sees which has
    /// [checked](Self::check) it.
    ///
    /// # Errors
    /// It sees another one, or the storage refuses access.
    pub(crate) fn check_shared(
        welcome: &Welcome,
        job: JobKey<'_>,
        stops: &AtomicBool,
    ) -> Result<(), Failure> {
        let worker = welcome.worker;
        let Some(spec) = &welcome.options.checkpoints else { return Ok(()) };
        let dir = &spec.dir;
        let is_missing = open("--checkpoint-dir", dir).and_then(|own| {
            Probe::is_missing(&own, &job.run(), SHOWN_LATE, stops)
                .map_err(|error| Failure::local(format!("--checkpoint-dir: {error}")))
        });
        match is_missing? {
            // Of each worker another text, so that none confirms that of another: a group goes on.
            true => Err(Failure::fatal(format!(
                "--checkpoint-dir {dir}, as worker {worker} sees it, is another folder than that \
                 of the worker that began the job: it has none of the job's files; it must be \
                 storage that all hosts share, such as an object store, a network file system or a \
                 shared volume"
            ))),
            false => Ok(()),
        }
    }

    /// Opens the locations that the job's `options` name.
    pub(crate) fn new(
        options: &WorkerOptions,
        job: JobKey<'_>,
        dataset: Dataset,
        (order, size): (OrderName, (ModelSize, Option<&mut dyn Bridge>)),
        program: Program,
        evaluation: Option<&Plan>,
        tables: Vec<Table>,
    ) -> Result<Self, Failure> {
        let (locations, fingerprint) = locate(options, job, dataset, order, size)?;
        let (program, best_metric) = (Some(program), evaluation.map(BestMetric::from));
        let fingerprint = Arc::new(JobFingerprint { program, best_metric, tables, ..fingerprint });
        let writer = match (&locations.own, &options.checkpoints) {
            (Some(own), Some(spec)) => {
                let retention = Retention { keep: spec.keep as usize, exclusive: spec.exclusive };
                let writer =
                    CheckpointWriter::new(own.clone(), Arc::clone(&fingerprint), retention);
                Some(writer.map_err(|error| {
                    Failure::local(format!("no thread for checkpoints: {error}"))
                })?)
            }
            _ => None,
        };
        let (run, best_metric) = (fingerprint.run.clone(), fingerprint.best_metric.clone());
        Ok(Self {
            store: Box::new(StoredCheckpoints { locations, fingerprint, writer, wait: None }),
            run,
            best_metric,
            allows_mixed_builds: options.allow_mixed_builds,
            timed: TimedCheckpoint::default(),
        })
    }
}

/// Opens the possible locations of checkpoints, and builds the fingerprint that they must match,
/// without what a checkpoint need not match.
fn locate(
    options: &WorkerOptions,
    job: JobKey<'_>,
    dataset: Dataset,
    order: OrderName,
    (size, bridge): (ModelSize, Option<&mut dyn Bridge>),
) -> Result<(Locations, JobFingerprint), Failure> {
    let own =
        options.checkpoints.as_ref().map(|spec| open("--checkpoint-dir", &spec.dir)).transpose()?;
    let from = options.resume_from.as_ref().map(|from| open("--resume-from", from)).transpose()?;
    let bridge = bridge.as_deref();
    let division = bridge.and_then(|bridge| bridge.division());
    let fingerprint = JobFingerprint {
        job: job.name.to_owned(),
        run: job.run(),
        parameters: size.parameters,
        slots: size.slots,
        dataset,
        training_data: options.training_data.clone(),
        epochs: options.epochs,
        max_steps: options.max_steps,
        batch: options.batch,
        seed: options.seed,
        order,
        best_metric: None,
        program: None,
        tables: Vec::new(),
        shards_optimizer: options.shard_optimizer,
        chunks_have_parameters: options.param_dtype == ParamDtype::Bf16,
        whole: division.map_or(0, |of| size.slots - of.slots * (size.parameters - of.first)),
        first: division.map_or(0, |of| of.first),
        parts: bridge.map_or_else(Vec::new, |bridge| bridge.state_parts().to_vec()),
    };
    let exclusive = options.checkpoints.as_ref().is_some_and(|spec| spec.exclusive);
    Ok((Locations { own, from, exclusive, passed_over: Vec::new() }, fingerprint))
}

fn open(option: &str, address: &str) -> Result<Storage, Failure> {
    Storage::open(address).map_err(|error| Failure::local(format!("{option} {error}")))
}

/// Time after which a file system of a network shows a file that another host has written.
const SHOWN_LATE: Duration = Duration::from_secs(10);
