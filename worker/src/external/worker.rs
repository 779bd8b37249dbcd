//! A worker that has joined a job, or that trains alone.

use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::num::NonZeroU64;
use std::time::Duration;

use elasticdl_proto::{
    Batch, DATA_OF_PROGRAM, LinkEncryption, Shuffle, ShuffleMode, Welcome, Work, WorkerId,
    WorkerOptions,
};

use super::events::Ended;
use super::model::ExternalModel;
use crate::control::Control;
use crate::environment::{EXIT_DONE, EXIT_MASTER_LOST, Environment};
use crate::failure::Failure;
use crate::log_output::log;
use crate::run::{self, End};
use crate::session::Exit;
use crate::supervisor::{self, Supervisor};

/// A worker, before it trains.
#[derive(Debug)]
pub struct Worker {
    environment: Environment,
    listener: TcpListener,
    control: Control,
    is_alone: bool,
}

/// Options of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobOptions {
    /// Passes over the data.
    pub epochs: u32,
    /// Number of records of a step over all workers; `None` if each worker has `per_worker`.
    pub global_batch: Option<u64>,
    /// Number of records of a step on each worker.
    pub per_worker: Option<u64>,
    /// Seed of all random choices.
    pub seed: u64,
    /// Whether records are shuffled.
    pub shuffles: bool,
    /// Whether sums must not depend on the workers.
    pub is_deterministic: bool,
    /// Whether the optimizer's state is divided over the workers.
    pub shards_optimizer: bool,
    /// Whether some gradients are [compared](super::Comparison) with those of other workers.
    pub audits: bool,
}

/// Options of a worker that trains alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AloneOptions {
    /// Passes over the data.
    pub epochs: u32,
    /// Number of steps after which training ends.
    pub max_steps: Option<u64>,
    /// Number of records of a step.
    pub global_batch: NonZeroU64,
    /// Seed of all random choices.
    pub seed: u64,
    /// Whether records are shuffled.
    pub shuffles: bool,
}

/// Why there is no worker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The environment, the job or the program is at fault; the text says which.
    #[error("{0}")]
    Failed(String),
    /// No master answered, or it refused this worker.
    #[error("{0}")]
    NoMaster(String),
}

impl Worker {
    /// Whether this process is the first one of a pod of several workers, which
    /// [`supervise`](Self::supervise) starts, rather than a worker itself.
    ///
    /// # Errors
    /// The environment is invalid.
    pub fn is_supervisor() -> Result<bool, WorkerError> {
        let supervisor = Supervisor::read(|name| std::env::var(name).ok());
        supervisor.map(|supervisor| supervisor.is_some()).map_err(WorkerError::Failed)
    }

    /// Starts the workers of this pod, each of which is `program` with its arguments, and returns
    /// the pod's exit code when all have ended.
    ///
    /// # Errors
    /// The environment is invalid, or not that of a pod of several workers.
    pub fn supervise(program: &[OsString]) -> Result<u8, WorkerError> {
        log("info,object_store=warn").map_err(WorkerError::Failed)?;
        let supervisor = Supervisor::read(|name| std::env::var(name).ok());
        let supervisor = supervisor.map_err(WorkerError::Failed)?;
        let missing = || WorkerError::Failed("this pod has one worker".into());
        Ok(supervisor.ok_or_else(missing)?.run(program))
    }

    /// Joins the job that launched this process; `None` if none has.
    ///
    /// # Errors
    /// The environment is invalid, no master answers, or the job asks for what such a worker can't
    /// do.
    pub fn join() -> Result<Option<Self>, WorkerError> {
        let variable = |name: &str| std::env::var(name).ok();
        if variable("ELASTICDL_MASTER").is_none() {
            return Ok(None);
        }
        log("info,object_store=warn").map_err(WorkerError::Failed)?;
        supervisor::die_with_supervisor(variable).map_err(WorkerError::Failed)?;
        let environment = Environment::read(variable).map_err(WorkerError::Failed)?;
        let (listener, control) = run::join(&environment)?;
        let options = &control.welcome.options;
        if options.validation.as_ref().is_some_and(|spec| spec.split.is_some()) {
            control.outbox.send(Failure::fatal(NO_SPLIT.into()).to_message());
            control.close();
            return Err(WorkerError::Failed(NO_SPLIT.into()));
        }
        Ok(Some(Self { environment, listener, control, is_alone: false }))
    }

    /// Reports that the program has failed before it could train. `is_refused`: as it does what no
    /// worker accepts, so the job ends, unless a group has formed.
    pub fn fail(self, error: String, is_refused: bool) {
        let failure = if is_refused { Failure::fatal(error) } else { Failure::local(error) };
        self.control.outbox.send(failure.to_message());
        self.control.close();
    }

    /// A worker without a master, which trains in a group of one.
    ///
    /// # Errors
    /// The environment is invalid, or the system refuses a socket, a thread or random numbers.
    pub fn alone(options: AloneOptions) -> Result<Self, WorkerError> {
        log("warn").map_err(WorkerError::Failed)?;
        let failed = |error: std::io::Error| WorkerError::Failed(error.to_string());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let environment = Environment {
            master: String::new(),
            master_file: None,
            job: "alone".into(),
            launch: 0,
            // No other worker can know it.
            token: elasticdl_data::worker::random_digits(),
            tls: None,
            master_timeout: Duration::ZERO,
            location: Default::default(),
            job_dir: None,
        };
        let control = Control::alone(welcome(options), address).map_err(WorkerError::Failed)?;
        Ok(Self { environment, listener, control, is_alone: true })
    }

    /// Options of the job.
    pub fn options(&self) -> JobOptions {
        let options = &self.control.welcome.options;
        let (global_batch, per_worker) = match options.batch {
            Batch::Global(records) => (Some(records.get()), None),
            Batch::PerWorker(records) => (None, Some(records.get())),
        };
        let shuffles = options.shuffle.mode != ShuffleMode::None;
        let (epochs, seed) = (options.epochs, options.seed);
        let is_deterministic = options.deterministic;
        let (shards_optimizer, audits) = (options.shard_optimizer, options.audit > 0);
        JobOptions {
            epochs,
            global_batch,
            per_worker,
            seed,
            shuffles,
            is_deterministic,
            shards_optimizer,
            audits,
        }
    }

    /// What the job does: "evaluate", "predict" or "train".
    pub fn work(&self) -> &'static str {
        match &self.control.welcome.options.work {
            Work::Evaluate { .. } => "evaluate",
            Work::Predict { .. } => "predict",
            Work::Train { .. } => "train",
        }
    }

    /// Value of `--training-data` or `--data`; empty if there is none.
    pub fn data(&self) -> &str {
        let data = &self.control.welcome.options.training_data;
        if data == DATA_OF_PROGRAM { "" } else { data }
    }

    /// Value of `--validation-data`.
    pub fn validation_data(&self) -> Option<&str> {
        Some(&self.control.welcome.options.validation.as_ref()?.data)
    }

    /// Id of the worker in the job.
    pub fn id(&self) -> u64 {
        self.control.welcome.worker.0
    }

    /// Trains `model`. `finished`: how the work of its group ended, once it has.
    pub(super) fn train(
        self,
        model: ExternalModel,
        finished: impl Fn() -> Option<Option<String>>,
    ) -> Ended {
        let Self { environment, listener, control, is_alone } = self;
        let exit = run::train_and_close(model, &environment, listener, control);
        #[cfg(feature = "gpu")]
        end_nccl();
        match (exit, finished()) {
            (Err(End::Failed(error) | End::NoMaster(error)), _) => Ended::Failed(error),
            (Ok(Exit::Shutdown(_)), Some(None)) => Ended::Complete,
            (Ok(Exit::Shutdown(_)), Some(Some(error))) => Ended::Failed(error),
            (Ok(Exit::Shutdown(reason)), None) if is_alone => Ended::Failed(reason),
            (Ok(Exit::Shutdown(reason)), None) => {
                tracing::info!(reason, "shut down");
                Ended::Left(EXIT_DONE)
            }
            (Ok(Exit::Left), _) => {
                tracing::info!("left; the group continues without this worker");
                Ended::Left(EXIT_DONE)
            }
            (Ok(Exit::Outdated), _) => {
                tracing::warn!("this worker's state is older than the group can repair; it ends");
                Ended::Left(EXIT_MASTER_LOST as u8)
            }
        }
    }
}

/// Waits until NCCL has released the communicators of this process. Where it does not, the process
/// ends without destructors when it ends: the program may have work to do before.
#[cfg(feature = "gpu")]
pub fn end_nccl() {
    if !run::is_nccl_released() {
        elasticdl_collective::exit_at_once_at_end();
    }
}

impl From<End> for WorkerError {
    fn from(end: End) -> Self {
        match end {
            End::Failed(error) => Self::Failed(error),
            End::NoMaster(error) => Self::NoMaster(error),
        }
    }
}

/// Answer to `--validation-split`.
const NO_SPLIT: &str = "--validation-split: a Python program divides its data itself; start it \
                        with --validation-data, and give that data to job.evaluator()";

fn welcome(options: AloneOptions) -> Welcome {
    let AloneOptions { epochs, max_steps, global_batch, seed, shuffles } = options;
    let options = WorkerOptions {
        epochs,
        max_steps,
        seed,
        shuffle: if shuffles { Shuffle::default() } else { Shuffle::NONE },
        link_encryption: LinkEncryption::Off,
        ..WorkerOptions::new("", Batch::Global(global_batch))
    };
    Welcome { worker: WorkerId(1), incarnation: 0, serves_tables: false, options }
}
