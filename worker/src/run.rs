//! Life cycle of a worker: hello, data set, model, training.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::process::ExitCode;

use elasticdl_collective::{Endpoint, Secret};
use elasticdl_proto::{MasterMessage, ValidationSpec, WireDtype, Work, WorkerMessage};

use crate::control::{Control, dataset};
use crate::core::evaluation;
use crate::core::session::{Exit, JobPlan, Session};
use crate::device::DeviceState;
use crate::environment::{EXIT_DONE, EXIT_FAILED, EXIT_MASTER_LOST, EXIT_USAGE, Environment};
use crate::failure::{Failure, call_user};
use crate::inference;
use crate::messages::ControlEvent;
use crate::model::Model;
use crate::prefetch::Prefetch;
use crate::reader::{Dataset, Reader};
use crate::supervisor::{self, Supervisor};
use crate::tensors::{HostState, Tensors};
use crate::trained_model;
use crate::trainer::{Checkpointing, Export, Trainer, TrainerParts, Validation};
use crate::weights;

/// Runs this process as a worker of the job that launched it and trains `model`. It is the whole
/// `main` of a user's program.
///
/// Returns when the job is over for this worker. Without a launcher it prints how to start one. If
/// the launcher wants several workers, as in a pod with several GPUs, this process starts them and
/// drops `model`: a model should acquire no resources before.
pub fn run<M: Model>(model: M) -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("ELASTICDL_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info,object_store=warn"));
    // A program that has set up its own logging keeps it.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
    let variable = |name: &str| std::env::var(name).ok();
    let environment = match Supervisor::read(variable) {
        Ok(Some(supervisor)) => {
            // The workers need the resources that the model holds.
            drop(model);
            return supervisor.run();
        }
        Ok(None) => {
            supervisor::die_with_supervisor(variable).and_then(|()| Environment::read(variable))
        }
        Err(reason) => Err(reason),
    };
    let environment = match environment {
        Ok(environment) => environment,
        Err(reason) => {
            usage(&reason);
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match work(model, &environment) {
        Ok(Exit::Left) => {
            tracing::info!("left; the group continues without this worker");
            ExitCode::from(EXIT_DONE)
        }
        Ok(Exit::Outdated) => {
            tracing::warn!("this worker's state is older than the group can repair; it ends");
            ExitCode::from(EXIT_MASTER_LOST as u8)
        }
        Ok(Exit::Shutdown(reason)) => {
            tracing::info!(reason, "shut down");
            ExitCode::from(EXIT_DONE)
        }
        Err(End::Failed(error)) => {
            tracing::error!(error, "this worker failed");
            ExitCode::from(EXIT_FAILED)
        }
        Err(End::NoMaster(error)) => {
            tracing::error!(error, "this worker ends");
            ExitCode::from(EXIT_MASTER_LOST as u8)
        }
    }
}

/// Why a worker ended early.
enum End {
    Failed(String),
    NoMaster(String),
}

fn work<M: Model>(model: M, environment: &Environment) -> Result<Exit, End> {
    let address = address_towards(&environment.master).map_err(End::NoMaster)?;
    let listener = TcpListener::bind((address, 0))
        .map_err(|error| End::Failed(format!("{address}: {error}")))?;
    let address: SocketAddr =
        listener.local_addr().map_err(|error| End::Failed(format!("{address}: {error}")))?;
    let control = Control::open(environment, address).map_err(End::NoMaster)?;
    tracing::info!(worker = control.welcome.worker.0, %address, "welcomed");
    let trained = train(model, environment, listener, &control);
    if let Err(failure) = &trained {
        control.outbox.send(failure.to_message());
    }
    control.close();
    trained.map_err(|failure| End::Failed(failure.error))
}

fn train<M: Model>(
    mut model: M,
    environment: &Environment,
    listener: TcpListener,
    control: &Control,
) -> Result<Exit, Failure> {
    let (worker, options) = (control.welcome.worker, &control.welcome.options);
    let secret = Secret::new(environment.token.as_bytes());
    let endpoint = Endpoint::from_listener(listener, &environment.job, worker.0, secret.clone())
        .and_then(|endpoint| {
            endpoint.with_wire_dtype(wire_dtype(options.wire_dtype)).with_channels(options.channels)
        })
        .map_err(|error| Failure::fatal(error.to_string()))?;
    let endpoint = match options.worker_timeout {
        Some(limit) => endpoint.with_dial_limit(limit),
        None => endpoint,
    };
    let _ = control.fence.set(endpoint.fence());
    let _ = control.progress.set(endpoint.progress());
    let prepared = match prepare(&model, control, (&environment.job, &secret))? {
        Ok(dataset) => dataset,
        Err(exit) => return Ok(exit),
    };
    let parameters =
        call_user("parameter_count()", || Ok(model.parameter_count())).map_err(Failure::fatal)?;
    let slots = call_user("slots()", || Ok(model.slots())).map_err(Failure::fatal)?;
    if parameters == 0 {
        // A model that failed to build reports the reason in the first method that returns an
        // error.
        let why = call_user("initialize()", || model.initialize(options.seed, &mut [])).err();
        return Err(Failure::fatal(
            why.unwrap_or_else(|| "parameter_count() is 0; a model has at least one".into()),
        ));
    }
    let layout = call_user("tensors()", || Ok(model.tensors())).map_err(Failure::fatal)?;
    weights::check(&layout, parameters).map_err(|error| Failure::fatal(error.to_string()))?;
    let export = match &options.work {
        Work::Train { export } => export,
        Work::Evaluate { model: weights } | Work::Predict { model: weights, .. } => {
            let mut values = vec![0.0; parameters];
            trained_model::load(weights, &layout, &mut values)
                .map_err(|error| Failure::fatal(format!("the model was not loaded: {error}")))?;
            return inference::work(model, values, prepared, control);
        }
    };
    call_user("optimizer()", || Ok(model.optimizer().check()?)).map_err(Failure::fatal)?;
    let validation = options.validation.as_ref().map(|spec| validate(&model, spec)).transpose();
    let validation = validation.map_err(Failure::fatal)?;
    let plan = JobPlan {
        records: prepared.files.iter().map(|f| f.records).sum(),
        epochs: options.epochs,
        max_steps: options.max_steps,
        batch: options.batch,
        checkpoints: options.checkpoints.as_ref().map(|kept| kept.every),
        evaluation: validation.as_ref().map(|validation| validation.plan.clone()),
    };
    let (job, size) = (environment.job.as_str(), (parameters, parameters * slots));
    let checkpoints = Checkpointing::new(options, (job, &secret), prepared.clone(), size)?;
    let reader = call_user("reader()", || Ok(model.reader())).map_err(Failure::fatal)?;
    let ahead = options.batch.share(READ_AHEAD_WORLD).saturating_mul(2);
    let prefetch = Prefetch::new(reader, prepared, ahead)
        .map_err(|error| Failure::fatal(format!("no thread for the reader: {error}")))?;
    let gpu = call_user("as_device_model()", || {
        Ok(model.as_device_model().map(|on_gpu| on_gpu.device().clone()))
    });
    let tensors = match gpu.map_err(Failure::fatal)? {
        Some(gpu) => {
            DeviceState::new(&gpu, parameters, slots).map(|state| Tensors::Device(Box::new(state)))
        }
        None => Ok(Tensors::Host(HostState::new(parameters, slots))),
    };
    let tensors = tensors.map_err(|error| Failure { error, ranges: Vec::new(), fatal: false })?;
    control.outbox.send(WorkerMessage::Ready { parameters: parameters as u64 });
    let trainer = Trainer::new(TrainerParts {
        model,
        seed: options.seed,
        session: Session::new(worker, plan).on_gpu(matches!(tensors, Tensors::Device(_))),
        tensors,
        prefetch,
        export: export.clone().map(|address| Export { address, layout }),
        skips_nonfinite: options.skips_nonfinite,
        endpoint,
        dial_limit: options.worker_timeout.unwrap_or(DIAL_LIMIT).max(DIAL_LIMIT),
        checkpoints,
        validation,
        inbox: &control.inbox,
        outbox: control.outbox.clone(),
    });
    trainer.run()
}

/// Answers the master until the data set is known.
fn prepare<M: Model>(
    model: &M,
    control: &Control,
    whose: (&str, &Secret),
) -> Result<Result<Dataset, Exit>, Failure> {
    loop {
        match control.inbox.recv() {
            Ok(ControlEvent::Message(MasterMessage::Describe, _)) => {
                let options = &control.welcome.options;
                let source = &options.training_data;
                let described =
                    call_user("reading the data set", || Ok(model.reader().describe(source)?));
                let described = described.and_then(|dataset| {
                    check_places(&options.work)?;
                    Checkpointing::check(options, whose, &dataset, model)?;
                    dataset::pack(dataset)
                });
                control.outbox.send(WorkerMessage::Described(described));
            }
            Ok(ControlEvent::Message(MasterMessage::Prepare(list), _)) => {
                return Ok(Ok(dataset::unpack(&list)));
            }
            Ok(ControlEvent::Message(MasterMessage::Shutdown(reason), _)) => {
                return Ok(Err(Exit::Shutdown(reason)));
            }
            // Messages for members of a group do not matter here.
            Ok(ControlEvent::Message(..)) => {}
            // The messages that follow reach this master, which repeats what was lost with the
            // stream.
            Ok(ControlEvent::Reconnected) => {
                let nothing = WorkerMessage::HeldLeases { step: 0, ranges: Vec::new() };
                control.outbox.send(nothing);
            }
            Err(_) => return Ok(Err(Exit::Shutdown("the control stream's thread ended".into()))),
        }
    }
}

/// Describes the validation data. Each worker does so itself.
fn validate<M: Model>(model: &M, spec: &ValidationSpec) -> Result<Validation<M::Reader>, String> {
    call_user("reading the validation data", || {
        let mut reader = model.reader();
        let dataset = reader.describe(&spec.data)?;
        let plan = evaluation::Plan {
            records: dataset.files.iter().map(|file| file.records).sum(),
            every: spec.every,
            metric: spec.metric.clone(),
            highest: spec.highest,
            patience: spec.patience,
        };
        Ok(Validation { plan, dataset, reader })
    })
}

fn wire_dtype(dtype: WireDtype) -> elasticdl_collective::WireDtype {
    match dtype {
        WireDtype::Bf16 => elasticdl_collective::WireDtype::Bf16,
        WireDtype::F16 => elasticdl_collective::WireDtype::F16,
        WireDtype::F32 => elasticdl_collective::WireDtype::F32,
    }
}

/// Finds errors before the work that would otherwise fail after it.
fn check_places(work: &Work) -> Result<(), String> {
    match work {
        Work::Train { export: Some(export) } => {
            weights::check_writable(export).map_err(|error| format!("--export: {error}"))
        }
        Work::Train { export: None } => Ok(()),
        Work::Evaluate { model } => {
            trained_model::check(model).map_err(|error| format!("--model: {error}"))
        }
        Work::Predict { model, output, .. } => {
            trained_model::check(model).map_err(|error| format!("--model: {error}"))?;
            inference::check_output(output).map_err(|error| format!("--predictions: {error}"))
        }
    }
}

/// Address of this host on the route to the master, at which peers reach this worker.
fn address_towards(master: &str) -> Result<IpAddr, String> {
    use std::net::{ToSocketAddrs, UdpSocket};
    let failed = |error: std::io::Error| format!("master at {master}: {error}");
    let to = master.to_socket_addrs().map_err(failed)?.next();
    let to = to.ok_or_else(|| format!("master at {master}: the name has no address"))?;
    // Connecting a datagram socket sends nothing; it makes the kernel choose a route.
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).map_err(failed)?;
    socket.connect(to).map_err(failed)?;
    Ok(socket.local_addr().map_err(failed)?.ip())
}

#[expect(
    clippy::print_stderr,
    reason = "a message to the user who started the program without a launcher"
)]
fn usage(reason: &str) {
    let program = std::env::args().next().unwrap_or_else(|| "PROGRAM".into());
    eprintln!(
        "This program is a worker of an elasticdl job ({reason}).\n\
         Start a job on this machine with:\n\n  \
         elasticdl train --local --num-workers 2 --training-data DATA -- {program}\n"
    );
}

/// Lower bound of the timeout for the dial of a donor: a lost first packet is sent again after a
/// second.
const DIAL_LIMIT: std::time::Duration = std::time::Duration::from_secs(2);

/// The reader keeps about two steps of a rank's share ready, for a group of this size.
const READ_AHEAD_WORLD: usize = 2;
