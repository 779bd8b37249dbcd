//! Life cycle of a worker: hello, data set, model, training.

mod training;

use std::iter;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticdl_collective::{Endpoint, EndpointOptions, Secret, address_towards};
use elasticdl_data::worker::set_stop_flag;
use elasticdl_data::{Dataset, Reader as _, Skipped};
use elasticdl_proto::{
    LinkEncryption, MasterMessage, SkippedRecords, WireDtype, Work, WorkerMessage, WorkerOptions,
};

use self::training::Training;
use crate::audit::try_twice;
use crate::checkpoint::Probe;
use crate::control::{Control, dataset};
use crate::conversion::Conversion;
use crate::descriptors;
use crate::environment::{EXIT_DONE, EXIT_FAILED, EXIT_MASTER_LOST, EXIT_USAGE, Environment};
use crate::failure::{Failure, call_user};
use crate::inference::{self, Trained};
use crate::log_output::log;
use crate::messages::ControlEvent;
use crate::model::{Model, tensors_of};
use crate::ordered_reader::order_of;
use crate::outputs;
use crate::session::Exit;
use crate::split::{open_reader, purpose_of};
use crate::supervisor::{self, Supervisor};
use crate::trained_model;
use crate::trainer::{Checkpointing, JobKey, Validation};

/// Runs this process as a worker of the job that launched it and trains `model`. It is the whole
/// `main` of a user's program.
///
/// Returns when the job is over for this worker. Without a launcher it prints how to start one. If
/// the launcher wants several workers, as in a pod with several GPUs, this process starts them and
/// drops `model`: a model should acquire no resources before.
pub fn run<M: Model>(mut model: M) -> ExitCode {
    let is_logging = log("info,object_store=warn");
    let variable = |name: &str| std::env::var(name).ok();
    if let Some(conversion) = Conversion::read(variable) {
        return conversion.run(&mut model);
    }
    let environment = match is_logging.and_then(|()| Supervisor::read(variable)) {
        Ok(Some(supervisor)) => {
            // The workers need the resources that the model holds.
            drop(model);
            let program = match std::env::current_exe() {
                Ok(program) => program.into_os_string(),
                Err(error) => {
                    tracing::error!(%error, "the path of this program is unknown");
                    return ExitCode::from(EXIT_FAILED);
                }
            };
            let words: Vec<_> = iter::once(program).chain(std::env::args_os().skip(1)).collect();
            return ExitCode::from(supervisor.run(&words));
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
    let code = match work(model, &environment) {
        Ok(Exit::Left) => {
            tracing::info!("left; the group continues without this worker");
            EXIT_DONE
        }
        Ok(Exit::Outdated) => {
            tracing::warn!("this worker's state is older than the group can repair; it ends");
            EXIT_MASTER_LOST as u8
        }
        Ok(Exit::Shutdown(reason)) => {
            tracing::info!(reason, "shut down");
            EXIT_DONE
        }
        Err(End::Failed(error)) => {
            tracing::error!(error, "this worker failed");
            EXIT_FAILED
        }
        Err(End::NoMaster(error)) => {
            tracing::error!(error, "this worker ends");
            EXIT_MASTER_LOST as u8
        }
    };
    #[cfg(feature = "gpu")]
    if !is_nccl_released() {
        elasticdl_collective::exit_at_once(code.into());
    }
    ExitCode::from(code)
}

/// Waits until NCCL has released the communicators of a worker that ends. Returns whether it has.
#[cfg(feature = "gpu")]
pub(crate) fn is_nccl_released() -> bool {
    let is_released = elasticdl_collective::nccl::wait_for_release(NCCL_RELEASE_TIME);
    if !is_released {
        tracing::warn!(limit = ?NCCL_RELEASE_TIME, "NCCL has not released its communicators");
    }
    is_released
}

/// How long a worker that ends waits for NCCL.
#[cfg(feature = "gpu")]
const NCCL_RELEASE_TIME: Duration = Duration::from_secs(5);

/// Why a worker ended early.
pub(crate) enum End {
    Failed(String),
    NoMaster(String),
}

fn work<M: Model>(model: M, environment: &Environment) -> Result<Exit, End> {
    let (listener, control) = join(environment)?;
    train_and_close(model, environment, listener, control)
}

/// Joins the job that launched this process.
pub(crate) fn join(environment: &Environment) -> Result<(TcpListener, Control), End> {
    descriptors::raise_limit();
    descriptors::check_to_join().map_err(End::Failed)?;
    let address = route(environment.master_timeout, || own_address(&environment.master))
        .map_err(End::NoMaster)?;
    let listener = TcpListener::bind((address, 0))
        .map_err(|error| End::Failed(format!("{address}: {error}")))?;
    let address: SocketAddr =
        listener.local_addr().map_err(|error| End::Failed(format!("{address}: {error}")))?;
    let control = Control::open(environment, address).map_err(End::NoMaster)?;
    tracing::info!(worker = control.welcome.worker.0, %address, "welcomed");
    Ok((listener, control))
}

/// Trains until the job is over for this worker, and reports a failure to the master.
pub(crate) fn train_and_close<M: Model>(
    model: M,
    environment: &Environment,
    listener: TcpListener,
    control: Control,
) -> Result<Exit, End> {
    let mut probe = None;
    let trained = train(model, environment, listener, &control, &mut probe);
    if let Err(failure) = &trained {
        control.outbox.send(failure.to_message());
    }
    set_stop_flag(Arc::clone(&control.stops));
    if let (true, Some(probe)) = (control.close(), probe) {
        probe.remove();
    }
    trained.map_err(|failure| End::Failed(failure.error))
}

fn train<M: Model>(
    mut model: M,
    environment: &Environment,
    listener: TcpListener,
    control: &Control,
    probe: &mut Option<Probe>,
) -> Result<Exit, Failure> {
    let options = &control.welcome.options;
    if matches!(options.work, Work::Train { .. }) {
        descriptors::check(options.channels).map_err(Failure::local)?;
    }
    let secret = Secret::new(environment.token.as_bytes());
    let endpoint = open_endpoint(environment, &secret, listener, control)?;
    let job = JobKey { name: &environment.job, secret: &secret };
    let has_hosts = !environment.location.node.is_empty();
    let dataset = match prepare(&mut model, control, job, has_hosts, probe)? {
        Ok(dataset) => dataset,
        Err(exit) => return Ok(exit),
    };
    let layout = tensors_of(&mut model).map_err(Failure::fatal)?;
    match &options.work {
        Work::Train { export } => {
            Training { environment, control, job, export: export.as_ref(), dataset, layout }
                .run(model, endpoint)
        }
        Work::Evaluate { model: weights } | Work::Predict { model: weights, .. } => {
            let trained = Trained::load(weights, &mut model, &layout).map_err(Failure::fatal)?;
            inference::work(model, trained, dataset, control)
        }
    }
}

/// Opens the endpoint of this worker's groups, whose parts the control stream's thread needs, too.
fn open_endpoint(
    environment: &Environment,
    secret: &Secret,
    listener: TcpListener,
    control: &Control,
) -> Result<Endpoint, Failure> {
    let (worker, options) = (control.welcome.worker, &control.welcome.options);
    let settings = EndpointOptions {
        dial_limit: options.worker_timeout,
        wire_dtype: wire_dtype(options.wire_dtype),
        link_encryption: link_encryption(options.link_encryption),
        has_digests: options.audit > 0,
        channels: options.channels,
        ..EndpointOptions::new(&environment.job, worker.0, secret.clone())
    };
    let endpoint = Endpoint::from_listener(listener, settings)
        .map_err(|error| Failure::local(error.to_string()))?;
    let _ = control.fence.set(endpoint.fence());
    let _ = control.progress.set(endpoint.progress());
    let _ = control.joiners.set(endpoint.joiners());
    Ok(endpoint)
}

/// Answers the master until the data set is known. `has_hosts`: workers may be on several hosts.
fn prepare<M: Model>(
    model: &mut M,
    control: &Control,
    job: JobKey<'_>,
    has_hosts: bool,
    probe: &mut Option<Probe>,
) -> Result<Result<Dataset, Exit>, Failure> {
    loop {
        match control.inbox.recv() {
            Ok(ControlEvent::Message(MasterMessage::Describe, _)) => {
                let options = &control.welcome.options;
                let source = &options.training_data;
                let purpose = purpose_of(&options.work);
                let described = outputs::check(options).and_then(|()| {
                    call_user("reading the data set", || {
                        let mut reader = open_reader(model, options, purpose)?;
                        let dataset = reader.describe(source)?;
                        Ok((reader, dataset))
                    })
                });
                let described = described.and_then(|(mut reader, dataset)| {
                    report_skipped(&dataset.skipped, control);
                    check_places(options)?;
                    training::check_model(model, options)?;
                    inference::try_first(model, &options.work, &mut reader, &dataset)?;
                    try_twice(model, options, &mut reader, &dataset)?;
                    *probe = Checkpointing::check(options, job, &dataset, model)?;
                    probe.take_if(|_| !has_hosts).inspect(Probe::remove);
                    check_evaluation(model, options)?;
                    let trains = options.work.trains();
                    let order = trains.then(|| order_of(&reader, options, &dataset)).transpose()?;
                    Ok((dataset::pack(dataset)?, order.map(|order| order.name())))
                });
                let (list, order) = match described {
                    Ok((list, order)) => (Ok(list), order),
                    Err(error) => (Err(error), None),
                };
                control.outbox.send(WorkerMessage::Described(list, order));
            }
            Ok(ControlEvent::Message(MasterMessage::Prepare(list), _)) => {
                if has_hosts && probe.is_none() {
                    let Control { stops, welcome, .. } = control;
                    Checkpointing::check_shared(welcome, job, stops)?;
                }
                return Ok(Ok(dataset::unpack(&list)));
            }
            Ok(ControlEvent::Message(MasterMessage::Shutdown { reason, .. }, _)) => {
                return Ok(Err(Exit::Shutdown(reason)));
            }
            // Messages for members of a group do not matter here.
            Ok(ControlEvent::Message(..)) => {}
            // The messages that follow reach this master, which repeats what was lost with the
            // stream.
            Ok(ControlEvent::Reconnected) => {
                let returned = WorkerMessage::Reconnected { step: 0 };
                control.outbox.send(returned);
            }
            Err(_) => return Ok(Err(Exit::Shutdown("the control stream's thread ended".into()))),
        }
    }
}

/// Finds errors of the evaluation before training.
fn check_evaluation<M: Model>(model: &mut M, options: &WorkerOptions) -> Result<(), String> {
    match &options.validation {
        Some(spec) => Validation::open(&*model, options, spec)?.check(model, options.seed),
        None => Ok(()),
    }
}

/// Tells the master which records the data set does not contain.
fn report_skipped(skipped: &Skipped, control: &Control) {
    let Skipped { bad, nulls, first, files, first_file, .. } = skipped.clone();
    if bad + nulls + files > 0 {
        let first_file = first_file.unwrap_or_default();
        let skipped = SkippedRecords { bad, nulls, first, files, first_file };
        control.outbox.send(WorkerMessage::RecordsSkipped(skipped));
    }
}

fn wire_dtype(dtype: WireDtype) -> elasticdl_collective::WireDtype {
    match dtype {
        WireDtype::Bf16 => elasticdl_collective::WireDtype::Bf16,
        WireDtype::F16 => elasticdl_collective::WireDtype::F16,
        WireDtype::F32 => elasticdl_collective::WireDtype::F32,
    }
}

fn link_encryption(choice: LinkEncryption) -> elasticdl_collective::LinkEncryption {
    match choice {
        LinkEncryption::Auto => elasticdl_collective::LinkEncryption::Auto,
        LinkEncryption::Off => elasticdl_collective::LinkEncryption::Off,
        LinkEncryption::On => elasticdl_collective::LinkEncryption::On,
    }
}

/// Where the best model so far is written.
fn export_best(options: &WorkerOptions) -> Option<&String> {
    options.validation.as_ref()?.export_best.as_ref()
}

/// Finds errors before the work that would otherwise fail after it.
fn check_places(options: &WorkerOptions) -> Result<(), String> {
    if let Some(best) = export_best(options) {
        outputs::check_file(best).map_err(|error| format!("--export-best: {error}"))?;
    }
    match &options.work {
        Work::Train { export: Some(export) } => {
            outputs::check_model(export).map_err(|error| format!("--export: {error}"))
        }
        Work::Train { export: None } => Ok(()),
        Work::Evaluate { model } => {
            trained_model::check(model).map_err(|error| format!("--model: {error}"))
        }
        Work::Predict { model, output, format, .. } => {
            trained_model::check(model).map_err(|error| format!("--model: {error}"))?;
            inference::check_output(output, *format)
                .map_err(|error| format!("--predictions: {error}"))
        }
    }
}

/// The address that `look` finds, with retries for `limit`: in the first moments of a pod it may
/// have no route, and the master no name.
fn route(
    limit: Duration,
    mut look: impl FnMut() -> Result<IpAddr, String>,
) -> Result<IpAddr, String> {
    let deadline = Instant::now() + limit;
    loop {
        match look() {
            Err(error) if Instant::now() < deadline => {
                tracing::debug!(error, "no route to the master yet");
                std::thread::sleep(ROUTE_PAUSE);
            }
            found => return found,
        }
    }
}

/// Address of this host on the route to the master, at which peers reach this worker.
fn own_address(master: &str) -> Result<IpAddr, String> {
    let failed = |error: std::io::Error| format!("master at {master}: {error}");
    let to = master.to_socket_addrs().map_err(failed)?.next();
    let to = to.ok_or_else(|| format!("master at {master}: the name has no address"))?;
    address_towards(to).map_err(failed)
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

/// Pause between two looks for a route to the master.
const ROUTE_PAUSE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn a_route_that_is_there_after_a_moment_is_found() {
        let mut left = 2;
        let mut look = || match left {
            0 => Ok(Ipv4Addr::LOCALHOST.into()),
            _ => {
                left -= 1;
                Err("network is unreachable".to_owned())
            }
        };
        assert_eq!(route(Duration::ZERO, &mut look), Err("network is unreachable".into()));
        assert_eq!(route(Duration::from_secs(60), look), Ok(Ipv4Addr::LOCALHOST.into()));
    }
}
