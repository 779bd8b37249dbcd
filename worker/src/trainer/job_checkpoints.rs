//! The checkpoints of a job, as its options name them: the folder that the trainer writes to, the
//! one that the job starts from, and what a checkpoint there must match.

use std::sync::Arc;

use bytes::Bytes;
use elasticdl_collective::Secret;
use elasticdl_data::Dataset;
use elasticdl_data::storage::Storage;
use elasticdl_proto::{OrderName, ParamDtype, WorkerOptions};
use elasticdl_tables::Table;

use crate::checkpoint::{
    BestMetric, CheckpointWriter, JobFingerprint, Locations, RestoreError, Retention, check,
};
use crate::external::Division;
use crate::failure::{Failure, call_user};
use crate::machine::{CheckpointStore, StoredCheckpoints};
use crate::model::{Model, NamedTensor, tables_of};
use crate::ordered_reader::order_of;
use crate::session::evaluation::Plan;
use crate::session::origin::Program;
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
}

/// What tells the runs of jobs apart: a job that is started again has another secret.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobKey<'a> {
    pub(crate) name: &'a str,
    pub(crate) secret: &'a Secret,
}

impl Checkpointing {
    /// Checks that a new job could start from the configured checkpoint.
    ///
    /// # Errors
    /// The fault and the remedy.
    pub(crate) fn check<M: Model>(
        options: &WorkerOptions,
        job: JobKey<'_>,
        dataset: &Dataset,
        model: &mut M,
    ) -> Result<(), String> {
        if options.checkpoints.is_none() && options.resume_from.is_none() {
            return Ok(());
        }
        let parameters = call_user("tensors()", || Ok(NamedTensor::count(&model.tensors())))?;
        let size = call_user("optimizer()", || Ok(ModelSize::new(parameters, &model.optimizer())))?;
        let division = model.as_bridge().and_then(|bridge| bridge.division());
        let reader = call_user("reader()", || Ok(model.reader()))?;
        let order = order_of(&reader, options, dataset)?.name();
        let (locations, fingerprint) =
            locate(options, job, dataset.clone(), order, (size, division)).map_err(|f| f.error)?;
        let fingerprint = JobFingerprint { tables: tables_of(model)?, ..fingerprint };
        check(&locations, &fingerprint).map_err(|error| match error {
            RestoreError::Refused(error) | RestoreError::Storage(error) => error,
        })?;
        // Finds a location without write access before there is work to lose.
        let Some(own) = &locations.own else { return Ok(()) };
        own.write(PROBE, vec![Bytes::from_static(b"a test of write access")])
            .map_err(|error| format!("--checkpoint-dir can't be written to: {error}"))?;
        if let Err(error) = own.remove(PROBE) {
            tracing::warn!(%error, "checkpoints can be written, but not removed");
        }
        Ok(())
    }

    /// Opens the locations that the job's `options` name.
    pub(crate) fn new(
        options: &WorkerOptions,
        job: JobKey<'_>,
        dataset: Dataset,
        (order, size): (OrderName, (ModelSize, Option<Division>)),
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
    (size, division): (ModelSize, Option<Division>),
) -> Result<(Locations, JobFingerprint), Failure> {
    let open = |option: &str, address: &str| {
        Storage::open(address).map_err(|error| Failure::local(format!("{option} {error}")))
    };
    let own =
        options.checkpoints.as_ref().map(|spec| open("--checkpoint-dir", &spec.dir)).transpose()?;
    let from = options.resume_from.as_ref().map(|from| open("--resume-from", from)).transpose()?;
    let fingerprint = JobFingerprint {
        job: job.name.to_owned(),
        run: format!("{:08x}", job.secret.fingerprint("checkpoints")),
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
    };
    let exclusive = options.checkpoints.as_ref().is_some_and(|spec| spec.exclusive);
    Ok((Locations { own, from, exclusive, passed_over: Vec::new() }, fingerprint))
}

/// Name of the file that tests write access. It is not a valid name of a checkpoint.
const PROBE: &str = "probe";
