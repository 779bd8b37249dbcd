//! A worker's part in the training of a model.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use elasticdl_collective::Endpoint;
use elasticdl_data::worker::set_stop_flag;
use elasticdl_data::{Dataset, Purpose};
use elasticdl_proto::{OnNonfinite, ParamDtype, Welcome, WireDtype, Work, WorkerOptions};
use elasticdl_tables::{ChunkLayout, Chunks, Table};

use super::export_best;
use crate::audit::check_audited;
use crate::checkpoint::BestMetric;
use crate::control::Control;
#[cfg(feature = "gpu")]
use crate::device::{Device, DeviceState};
use crate::donor::{Donor, PART_FLOATS_MAX, TRANSFER_IDLE_TIMEOUT};
use crate::environment::Environment;
use crate::exact_sum::ExactSum;
use crate::exported_tables;
use crate::exports::{ExportPlaces, Exports};
use crate::external::Bridge;
use crate::failure::{Failure, call_user};
use crate::gap::GapTimer;
use crate::machine::{Machine, System};
use crate::model::{Model, NamedTensor, tables_of};
use crate::ordered_reader::{OrderedReader, order_of};
use crate::prefetch::Prefetch;
use crate::program;
use crate::session::audit::AuditPlan;
use crate::session::evaluation::Plan;
use crate::session::origin::Origin;
use crate::session::plan::StepSize;
use crate::session::{Exit, JobPlan, Session};
use crate::split::open_reader;
use crate::tensor::ModelSize;
use crate::tensors::{HostState, Tensors};
use crate::trainer::{
    Checkpointing, JobKey, RowTables, ShardedOptimizer, Trainer, Validation, is_on_gpu,
};
use crate::update::UpdateRule;

/// What is known of a training job before its model is asked.
pub(super) struct Training<'a> {
    pub(super) environment: &'a Environment,
    pub(super) control: &'a Control,
    pub(super) job: JobKey<'a>,
    /// Where the model is exported.
    pub(super) export: Option<&'a String>,
    pub(super) dataset: Dataset,
    /// The model's tensors.
    pub(super) layout: Vec<NamedTensor>,
}

impl Training<'_> {
    /// Trains until the job is over for this worker.
    pub(super) fn run<M: Model>(self, mut model: M, endpoint: Endpoint) -> Result<Exit, Failure> {
        let Self { environment, control, job, export, dataset, layout } = self;
        let Welcome { worker, serves_tables, ref options, .. } = control.welcome;
        let rule = rule_of(&model).map_err(Failure::fatal)?;
        let validation =
            options.validation.as_ref().map(|spec| Validation::open(&model, options, spec));
        let validation = validation.transpose().map_err(Failure::fatal)?;
        let evaluation = validation.as_ref().map(|validation| &validation.plan);
        let best = export_best(options).cloned().zip(evaluation.map(BestMetric::from));
        let size = ModelSize::new(NamedTensor::count(&layout), &*rule);
        let reader = call_user("reader()", || Ok(open_reader(&model, options, Purpose::Train)?));
        let reader = reader.map_err(Failure::fatal)?;
        let order = order_of(&reader, options, &dataset).map_err(Failure::fatal)?;
        let specs = tables_of(&mut model).map_err(Failure::fatal)?;
        let has_tables = !specs.is_empty();
        let audit = (options.audit > 0).then_some(AuditPlan {
            seed: options.seed,
            per_million: options.audit,
            of_program: model.as_bridge().is_some(),
        });
        let plan = JobPlan { has_tables, audit, ..plan_of(options, &dataset, evaluation) };
        let sources = model.as_bridge().map_or_else(Vec::new, |bridge| bridge.sources().to_vec());
        let origin = program::origin(&environment.location.node, &sources, &layout, &specs, &*rule);
        let origin = Origin { serves_tables, ..origin };
        set_stop_flag(Arc::clone(&control.stops));
        let division = model.as_bridge().and_then(|bridge| bridge.division());
        let settings = model.as_bridge().map_or("", |bridge| bridge.settings());
        let program = program::with_settings(&origin.program, settings);
        let (data, name) = (dataset.clone(), order.name());
        let checkpoints = Checkpointing::new(
            options,
            job,
            data,
            (name, (size, model.as_bridge())),
            program,
            evaluation,
            specs.clone(),
        )?;
        let ahead = options.batch.share(READ_AHEAD_WORLD).saturating_mul(2);
        let reader = OrderedReader::new(reader, dataset, Arc::clone(&order));
        let prefetch = Prefetch::new(reader, ahead)
            .map_err(|error| Failure::local(format!("no thread for the reader: {error}")))?;
        let shards = options.shard_optimizer;
        check_model(&mut model, options).map_err(Failure::fatal)?;
        let is_half = options.param_dtype == ParamDtype::Bf16;
        if let Some(half) = model.as_half_model().filter(|_| is_half) {
            call_user("build()", || half.begin()).map_err(Failure::fatal)?;
        }
        let on_host = |state| Tensors::Host { group: None, state };
        let tensors = match shards {
            true if is_half => on_host(HostState::sharded_half(size.parameters)),
            true => on_host(sharded_state(&mut model, size.parameters)?),
            false => tensors_on(&mut model, size, options.wire_dtype)?,
        };
        let exact = exact_sum(options, &tensors).map_err(Failure::fatal)?;
        let places = ExportPlaces {
            last: export.cloned(),
            best,
            run: checkpoints.run.clone(),
            fallback: environment.job_dir.clone().map(PathBuf::from),
        };
        let mut session = Session::new(worker, plan).on_gpu(tensors.is_on_gpu()).of(origin);
        session.ready(size.parameters as u64);
        let machine: Arc<dyn Machine> = Arc::new(System);
        let mut tables = RowTables::new(worker.0, options, specs);
        if let (Some(tables), Some(_)) = (&mut tables, model.as_bridge()) {
            // A program's thread computes; it can't name the ids of the next step meanwhile.
            tables.looks_ahead = false;
        }
        let sharded = shards.then(|| {
            let layout = ChunkLayout::new(size.parameters, rule.slots() + usize::from(is_half));
            let first = division.map_or(0, |division| division.first);
            let chunks = Chunks::of_optimizer(worker.0, layout.from(first));
            ShardedOptimizer::new(chunks, &*rule, model.bucket_len())
        });
        let trainer = Trainer {
            tensors,
            model,
            rule,
            seed: options.seed,
            session,
            exact,
            audited: Vec::new(),
            summed: Ok(0),
            order,
            records: Box::new(prefetch),
            exports: Exports::new(places, layout),
            links: Box::new(endpoint),
            allreduce_transport: None,
            donor: Donor::new(TRANSFER_IDLE_TIMEOUT, PART_FLOATS_MAX, Arc::clone(&machine)),
            checkpoints,
            validation,
            tables,
            fed: None,
            sharded,
            source: None,
            is_used: false,
            incoming: None,
            dial_limit: options.worker_timeout.unwrap_or(DIAL_LIMIT).max(DIAL_LIMIT),
            inbox: &control.inbox,
            outbox: control.outbox.clone(),
            started: machine.now(),
            machine,
            gap: GapTimer::default(),
        };
        trainer.run()
    }
}

/// The part of the session's decisions that the job's options make.
fn plan_of(options: &WorkerOptions, dataset: &Dataset, evaluation: Option<&Plan>) -> JobPlan {
    JobPlan {
        records: dataset.files.iter().map(|file| file.records).sum(),
        epochs: options.epochs,
        max_steps: options.max_steps,
        size: StepSize { batch: options.batch, micro_batch: options.micro_batch_records().get() },
        checkpoints: options.checkpoints.as_ref().map(|spec| spec.every),
        evaluation: evaluation.cloned(),
        skips_nonfinite: options.on_nonfinite == OnNonfinite::Skip,
        allows_mixed_builds: options.allow_mixed_builds,
        exports_best: export_best(options).is_some(),
        has_tables: false,
        shards_optimizer: options.shard_optimizer,
        audit: None,
    }
}

/// Checks that the model can be trained with the options, before there is work to lose.
pub(super) fn check_model<M: Model>(model: &mut M, options: &WorkerOptions) -> Result<(), String> {
    if !options.work.trains() {
        return Ok(());
    }
    let (rule, tables) = (rule_of(model)?, tables_of(model)?);
    if options.shard_optimizer {
        check_sharding(model, &*rule, &tables)?;
    }
    if options.audit > 0 {
        check_audited(model, &tables)?;
    }
    if options.param_dtype == ParamDtype::Bf16 {
        check_half(model, options.shard_optimizer)?;
    }
    check_options(&tables, options)
}

/// Checks that the options go with the model's tables, if it has any.
fn check_options(tables: &[Table], options: &WorkerOptions) -> Result<(), String> {
    if let (Some(_), true) = (options.export_changes_since, tables.is_empty()) {
        return Err("--export-changes-since is about rows of tables, and the model has none".into());
    }
    if options.table_servers > 0 && tables.is_empty() {
        return Err("--table-servers: the model has no tables whose rows they could hold; start \
                    the job without"
            .into());
    }
    let last = match &options.work {
        Work::Train { export } => export.as_ref(),
        _ => None,
    };
    let last = last.map(|address| (address, options.export_changes_since.is_some()));
    let best = export_best(options).map(|address| (address, false));
    for (address, of_changes) in last.into_iter().chain(best).filter(|_| !tables.is_empty()) {
        exported_tables::check_names(tables)?;
        exported_tables::check_place(address, of_changes)?;
    }
    Ok(())
}

/// Checks that the optimizer's state of this model can be divided over the workers.
fn check_sharding<M: Model>(
    model: &mut M,
    rule: &dyn UpdateRule,
    tables: &[Table],
) -> Result<(), String> {
    let is_divided = model.as_bridge().map(|bridge| bridge.division().is_some());
    let why = if is_divided == Some(false) {
        "a program without an optimizer of PyTorch keeps its state in arrays of its own"
    } else if !tables.is_empty() {
        "the model has tables, whose rows are divided by themselves"
    } else if is_divided.is_none() && !rule.is_elementwise() {
        "the model's update rule does not say that it is element-wise \
         (UpdateRule::is_elementwise), so it may need all parameters at once"
    } else {
        return Ok(());
    };
    Err(format!("--shard-optimizer can't be used for this job: {why}; train it without"))
}

/// Checks that the model can compute with parameters in bf16.
fn check_half<M: Model>(model: &mut M, shards_optimizer: bool) -> Result<(), String> {
    let is_on_gpu = is_on_gpu(model);
    let why = match model.as_half_model() {
        _ if !shards_optimizer => "it needs --shard-optimizer",
        _ if is_on_gpu => "the model computes on a GPU",
        Some(_) => return Ok(()),
        None => "only candle models have parameters of that type",
    };
    Err(format!("--param-dtype bf16 can't be used for this job: {why}"))
}

/// The model's update rule, with settings that are in their ranges.
fn rule_of<M: Model>(model: &M) -> Result<Box<dyn UpdateRule>, String> {
    call_user("optimizer()", || {
        let rule = model.optimizer();
        rule.as_optimizer().map_or(Ok(()), |optimizer| optimizer.check())?;
        Ok(Box::new(rule) as Box<dyn UpdateRule>)
    })
}

/// The buffers, where the model computes.
fn tensors_on<M: Model>(
    model: &mut M,
    size: ModelSize,
    #[cfg_attr(not(feature = "gpu"), expect(unused))] wire: WireDtype,
) -> Result<Tensors, Failure> {
    #[cfg(feature = "gpu")]
    if let Some(gpu) = gpu_of(model)? {
        let memory = model.as_bridge().and_then(Bridge::take_device_memory);
        let state = DeviceState::new(&gpu, size, wire, memory);
        let state = Box::new(state.map_err(Failure::local)?);
        return Ok(Tensors::Device { group: None, state, nccl: crate::trainer::nccl_policy() });
    }
    let state = match model.as_bridge().and_then(Bridge::take_memory) {
        Some(memory) => HostState::in_memory(memory),
        None => HostState::new(size),
    };
    Ok(Tensors::Host { group: None, state })
}

/// The buffers of a worker that has a part of the optimizer's state: they are on the host, apart
/// from those that a model on a GPU computes with.
fn sharded_state<M: Model>(model: &mut M, parameters: usize) -> Result<HostState, Failure> {
    let state = match model.as_bridge().and_then(Bridge::take_memory) {
        Some(memory) => HostState::sharded_in_memory(memory),
        None => HostState::sharded(parameters),
    };
    #[cfg(feature = "gpu")]
    if let Some(gpu) = gpu_of(model)? {
        let memory = model.as_bridge().and_then(Bridge::take_device_memory);
        let buffers = DeviceState::of_computation(&gpu, parameters, memory);
        return Ok(state.computing_on(buffers.map_err(Failure::local)?));
    }
    Ok(state)
}

/// The GPU that the model computes on, if it does.
#[cfg(feature = "gpu")]
fn gpu_of<M: Model>(model: &mut M) -> Result<Option<Device>, Failure> {
    let gpu = call_user("as_device_model()", || {
        Ok(model.as_device_model().map(|on_gpu| on_gpu.device().clone()))
    });
    gpu.map_err(Failure::fatal)
}

/// The sum of a job whose results do not depend on its workers; `None` for other jobs.
fn exact_sum(options: &WorkerOptions, tensors: &Tensors) -> Result<Option<ExactSum>, String> {
    let Some((_, micro_batches)) = options.check_deterministic()? else { return Ok(None) };
    if tensors.is_on_gpu() {
        return Err(
            "--deterministic: this model computes on a GPU, whose results can differ from \
                    one run to the next; train it on CPUs"
                .into(),
        );
    }
    Ok(Some(ExactSum::new(tensors.size().parameters, micro_batches)))
}

/// Lower bound of the timeout for the dial of a donor: a lost first packet is sent again after a
/// second.
const DIAL_LIMIT: Duration = Duration::from_secs(2);

/// The reader keeps about two steps of a rank's share ready, for a group of this size.
const READ_AHEAD_WORLD: usize = 2;
