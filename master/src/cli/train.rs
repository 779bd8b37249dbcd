//! `elasticdl train`.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Write as _, stdout};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use clap::Args;
use clap::builder::ArgPredicate;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use super::checkpoint::CheckpointOptions;
use super::client::directory_of;
use super::cluster::{self, ClusterArgs};
use super::job_options::{self, LocalJob};
use super::resilience::ResilienceOptions;
use super::signals::{Signals, Stop, StopEscalation};
use super::validation::ValidationOptions;
use super::{
    EXIT_FAILED, EXIT_OK, EXIT_USAGE, Failure, background, dry_run, print_error, print_warning,
};
use crate::event_loop::{JobResult, Master};
use crate::job::{self, Outcome, Time, WireDtype};
use crate::jobdir::{self, AbandonedJob, JobDir, JobStart};
use crate::listener::ServerConfig;
use crate::local::{Launcher, ProgramCopy};
use crate::metrics;
use crate::progress::Progress;
use crate::report::{self, Paths};
use crate::tensorboard::{self, EventFile};

/// What `elasticdl train` is told.
#[derive(Args, Debug)]
#[command(
    override_usage = "elasticdl train --local --training-data <URI> [OPTIONS] -- <PROGRAM> [ARGS]...\n       \
                      elasticdl train --image <IMG> --training-data <URI> [OPTIONS] -- <PROGRAM> [ARGS]...\n       \
                      elasticdl train --resume <JOB>",
    after_long_help = AFTER_HELP,
    mut_args(cluster::conflicting_with_local)
)]
pub struct TrainArgs {
    /// Run master and workers as processes of this machine; without a cluster.
    #[arg(long, help_heading = WHERE)]
    pub local: bool,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub cluster: ClusterArgs,

    /// The job's name: lower-case letters, digits and `-`, at most 40. [default: PROGRAM's name and
    /// 6 random digits]
    ///
    /// `elasticdl status` and `elasticdl scale` find the job by it.
    #[arg(long, value_name = "NAME", value_parser = job_options::parse_job_name, help_heading = WHERE)]
    pub job_name: Option<String>,

    /// Directory for the job's logs, summary and token. [default: ~/.local/state/elasticdl/NAME]
    ///
    /// Made if it is not there. The default follows $XDG_STATE_HOME; without it and without $HOME
    /// it is ./.elasticdl/NAME. It must be empty, or a job's: one job can run in a directory at a
    /// time, and the next one replaces what that has written. `elasticdl delete` removes what the
    /// job has written, and nothing else.
    #[arg(long, value_name = "DIR", help_heading = WHERE)]
    pub job_dir: Option<PathBuf>,

    /// This machine's address on which the master is reached, by workers and by `elasticdl status`
    /// and `scale`.
    ///
    /// Workers that PROGRAM starts elsewhere (a container, a network namespace) need one that they
    /// can reach. They take part with their own address on the way to it. The port is a free one.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1", value_parser = job_options::parse_listen,
          help_heading = WHERE)]
    pub listen: IpAddr,

    /// Go on with a job whose master died: its name, or the path of its directory (with a `/`).
    ///
    /// Its workers have gone on meanwhile, for up to --master-timeout; they keep what they have
    /// trained, and nobody is restarted. The job goes on as it was started, so that no other option
    /// is taken but --quiet.
    #[arg(long, value_name = "JOB", conflicts_with_all = JOB_OPTIONS, help_heading = WHERE)]
    pub resume: Option<PathBuf>,

    /// Workers to keep running. [default: 2]
    ///
    /// Where pods hold several workers, by default at least one pod's.
    #[arg(long, value_name = "N", value_parser = job_options::parse_workers, help_heading = WORKERS)]
    pub num_workers: Option<u32>,

    /// With fewer workers than this, the others wait. [default: 1]
    ///
    /// Where pods hold several workers, by default one pod's.
    #[arg(long, value_name = "N", value_parser = job_options::parse_workers, help_heading = WORKERS)]
    pub min_workers: Option<u32>,

    /// `elasticdl scale` can go up to this. [default: twice --num-workers, at least 8]
    #[arg(long, value_name = "N", value_parser = job_options::parse_workers, help_heading = WORKERS)]
    pub max_workers: Option<u32>,

    /// Crashes and errors of workers, without progress between them, after which the job fails.
    ///
    /// Each is followed by a new worker. Workers that someone kills are replaced without being
    /// counted.
    #[arg(long, value_name = "N", default_value = "3", help_heading = WORKERS)]
    pub max_worker_restarts: u32,

    /// A worker that is stopped or cut off for longer than this, and holds the others up, is
    /// evicted and replaced.
    ///
    /// By the default it is out within a second. A worker whose model computes is not silent,
    /// however long it takes, and one that only the master cannot hear trains on.
    #[arg(long, value_name = "DURATION", default_value = "800ms", value_parser = job_options::parse_worker_timeout,
          help_heading = WORKERS)]
    pub worker_timeout: Duration,

    /// Workers end by themselves when their master has been gone for this long, e.g. `30s` or
    /// `2min`.
    ///
    /// Until then they train the records that they have, and wait for another one (see --resume).
    /// In a cluster, another one is there as soon as it has a place and its predecessor is known to
    /// be gone. [default: 30s; with --image 15min, which is more than a cluster takes to replace a
    /// lost node's master]
    #[arg(long, value_name = "DURATION", default_value = "30s", hide_default_value = true,
          default_value_if("image", ArgPredicate::IsPresent, "15min"), value_parser = job_options::parse_timeout,
          help_heading = WORKERS)]
    pub master_timeout: Duration,

    /// As what gradients travel between workers: bf16 and f16 halve the bytes, for networks that
    /// are slow.
    ///
    /// Sums are f32 where they are added, and rounded each time they leave a worker: over N workers
    /// an element is off by at most N/256 of the largest partial sum with bf16, N/2048 with f16,
    /// which is infinite above 65504. All workers get the same bits.
    #[arg(long, value_name = "DTYPE", value_enum, default_value = "f32", help_heading = WORKERS)]
    pub wire_dtype: WireDtype,

    /// Connections between two workers that are neighbours in the ring, 1 to 16: for networks that
    /// give each one a share of its own, or lose packets.
    ///
    /// Each carries a part of every gradient of 256 KiB per connection or more. Workers that share
    /// memory do without.
    #[arg(long, alias = "streams", value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u8).range(1..=16),
          help_heading = WORKERS)]
    pub channels: u8,

    /// Where the training data is, as PROGRAM's reader understands it: mostly a file or a folder.
    #[arg(long, value_name = "URI", required_unless_present = "resume", help_heading = DATA)]
    pub training_data: Option<String>,

    /// Passes over the data.
    #[arg(long, value_name = "N", default_value = "1", value_parser = job_options::parse_epochs,
          help_heading = DATA)]
    pub num_epochs: u32,

    /// Stop after exactly this many steps, if the data has not ended before. [default: no limit]
    #[arg(long, value_name = "N", value_parser = job_options::parse_steps, help_heading = DATA)]
    pub max_steps: Option<u64>,

    /// Records of a step over all workers, however many there are. [default: 64]
    #[arg(long, value_name = "RECORDS", value_parser = job_options::parse_batch, conflicts_with = "minibatch_size",
          help_heading = DATA)]
    pub global_batch_size: Option<u64>,

    /// Records of a step per worker: the step grows with the number of workers.
    #[arg(long, value_name = "RECORDS", value_parser = job_options::parse_batch, help_heading = DATA)]
    pub minibatch_size: Option<u64>,

    /// Records of a shard, the unit in which data is shuffled and handed out. [default: from the
    /// size of the data]
    #[arg(long, value_name = "RECORDS", value_parser = job_options::parse_shard, help_heading = DATA)]
    pub records_per_shard: Option<u64>,

    /// Draw a new order of shards for each epoch. This is the default.
    #[arg(long, overrides_with = "no_shuffle", help_heading = DATA)]
    pub shuffle: bool,

    /// Take shards in the order of the data.
    #[arg(long, overrides_with = "shuffle", help_heading = DATA)]
    pub no_shuffle: bool,

    /// Seed of all that is drawn: the order of shards, the initial parameters.
    #[arg(long, value_name = "N", default_value = "0", help_heading = DATA)]
    pub seed: u64,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub checkpoints: CheckpointOptions,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub resilience: ResilienceOptions,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub validation: ValidationOptions,

    /// Also write the summary (JSON) to this file. [default: only DIR/summary.json]
    #[arg(long, value_name = "FILE", help_heading = OUTPUT)]
    pub summary: Option<PathBuf>,

    /// Write the final model here: a safetensors file, a path or s3://, gs://, az://.
    ///
    /// Workers write it, so in a cluster the path must lie in a --volume. It is there as a whole or
    /// not at all, also when the job is stopped before its end; what cannot be written to is found
    /// out before the training.
    #[arg(long, value_name = "URI", value_parser = job_options::parse_uri, help_heading = OUTPUT)]
    pub export: Option<String>,

    /// Serve metrics for Prometheus on this port, at /metrics; 0 takes a free one. [default: with
    /// --image 7071, else none]
    ///
    /// With --local the address is that of --listen. In a cluster the master's pod and Service name
    /// the port `metrics`, and the pod has the usual annotations.
    #[arg(long, value_name = "PORT", help_heading = OUTPUT)]
    pub metrics_port: Option<u16>,

    /// Write loss, speed and number of workers for TensorBoard into this folder, a point each
    /// second at most.
    ///
    /// In a cluster the folder must lie in a --volume.
    #[arg(long, value_name = "DIR", help_heading = OUTPUT)]
    pub tensorboard_dir: Option<PathBuf>,

    /// Print nothing but errors.
    #[arg(long, short, help_heading = OUTPUT)]
    pub quiet: bool,

    /// What is done with the data, where it is not training.
    #[arg(skip)]
    pub(super) work: Option<job::Work>,

    /// The training program (looked up in $PATH if it has no `/`; in a cluster: in the image) and
    /// its arguments.
    #[arg(last = true, required_unless_present = "resume", value_names = ["PROGRAM", "ARGS"])]
    pub program: Vec<OsString>,
}

const AFTER_HELP: &str = "\
Examples:
  Train for two epochs with four workers, 256 records per step:
      elasticdl train --local --num-workers 4 --training-data data/mnist \\
          --num-epochs 2 --global-batch-size 256 -- ./target/release/mnist

  Give the job a name, then look at it and enlarge it from another terminal:
      elasticdl train --local --job-name mnist --training-data data -- ./mnist --hidden 64
      elasticdl status mnist
      elasticdl scale mnist --num-workers 6

  Go on with it after its master was killed, within the --master-timeout:
      elasticdl train --resume mnist

  Keep a checkpoint every 200 steps, and later train two epochs more from the newest one:
      elasticdl train --local --training-data data --checkpoint-dir ckpt --checkpoint-every 200 -- ./mnist
      elasticdl train --local --training-data data --resume-from ckpt --checkpoint-dir ckpt \\
          --num-epochs 3 -- ./mnist

  Train in a cluster, and see first what would be made there:
      elasticdl train --image mnist:1 --volume claim_name=data,mount_path=/data \\
          --training-data /data/mnist --num-workers 4 --dry-run -- mnist
      elasticdl train --image mnist:1 --volume claim_name=data,mount_path=/data \\
          --training-data /data/mnist --num-workers 4 -- mnist

Ending:
  With --local, Ctrl-C (or SIGTERM) finishes the step and stops; a second one ends at once.
  In a cluster it ends the command alone; `elasticdl stop` stops the job.

Exit codes:
  0    the job came to the end of its data or steps
  1    the job failed
  2    the command line or the data can't be used; nothing was trained
  130  stopped by Ctrl-C; in a cluster: the job goes on
  143  stopped by SIGTERM";

/// Runs a job from its command line to its end; the exit code.
pub(super) fn train(args: TrainArgs) -> Result<u8, Failure> {
    if let Some(image) = args.cluster.image.clone() {
        return cluster::train(&args, &image);
    }
    if args.cluster.dry_run {
        return dry_run::show(args);
    }
    if args.cluster.detach {
        return background::start(args);
    }
    background::leave_terminal()?;
    let (work, dir) = match &args.resume {
        Some(job) => Work::resume(job, args.quiet)?,
        None => Work::begin(args)?,
    };
    log_to_file(&dir)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::failed(format!("can't start the runtime: {e}")))?;
    let (ended, stop) = runtime.block_on(run(work.task, &dir, work.quiet))?;
    // Whatever a task still holds goes now, before the report.
    drop(runtime);
    let written = write_summaries(work.summary.as_deref(), &dir, &ended);
    if written.is_ok() {
        // No worker will be started any more. There may be no copy.
        let _ = std::fs::remove_file(dir.program_path());
    }
    if !work.quiet {
        let (logs, summary) = (dir.logs(), dir.summary_path());
        let summary = work.summary.as_deref().unwrap_or(&summary);
        let paths = Paths { logs: Some(&logs), summary: Some(summary) };
        let mut table = Vec::new();
        report::write_table(&mut table, &ended.summary, paths).expect("a vector takes any bytes");
        // Nobody may be reading any more.
        let _ = stdout().write_all(&table);
    }
    if let Some(error) = &ended.summary.error {
        // The table, which says where the logs are, is not shown.
        let with_logs = work.quiet && ended.outcome == Outcome::Failed;
        print_error(&if with_logs { add_logs(error, &dir.logs()) } else { error.clone() });
    }
    report::warnings(&ended.summary).iter().for_each(|warning| print_warning(warning));
    written?;
    Ok(match ended.outcome {
        Outcome::Completed => EXIT_OK,
        Outcome::Failed => EXIT_FAILED,
        Outcome::Refused => EXIT_USAGE,
        Outcome::Stopped => stop.unwrap_or(Stop::Interrupted).exit_code(),
    })
}

/// What this process is to do.
struct Work {
    task: Task,
    /// Where the user wants the summary, besides the job's directory.
    summary: Option<PathBuf>,
    quiet: bool,
}

enum Task {
    Begin(Box<LocalJob>),
    Resume(Box<AbandonedJob>),
}

impl Work {
    fn begin(args: TrainArgs) -> Result<(Self, JobDir), Failure> {
        let mut job = LocalJob::new(args)?;
        let dir = JobDir::create(&job.job_dir).map_err(|e| Failure::usage(e.to_string()))?;
        job.keep_checkpoints_in(dir.path());
        let (summary, quiet) = (job.summary.clone(), job.quiet);
        Ok((Self { task: Task::Begin(Box::new(job)), summary, quiet }, dir))
    }

    fn resume(job: &Path, quiet: bool) -> Result<(Self, JobDir), Failure> {
        let (dir, abandoned) =
            JobDir::resume(&directory_of(job)).map_err(|e| Failure::usage(e.to_string()))?;
        // Relative paths in the job's options and in its program's arguments mean what they meant.
        let folder = &abandoned.start.folder;
        std::env::set_current_dir(folder).map_err(|e| {
            Failure::usage(format!(
                "can't go to {}, where the job was started: {e}",
                Path::new(folder).display()
            ))
        })?;
        let summary = abandoned.start.summary.clone().map(PathBuf::from);
        Ok((Self { task: Task::Resume(Box::new(abandoned)), summary, quiet }, dir))
    }
}

async fn run(task: Task, dir: &JobDir, quiet: bool) -> Result<(JobResult, Option<Stop>), Failure> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: std::io::Error| Failure::failed(format!("can't {what}: {e}"))
    };
    let listener = match &task {
        Task::Begin(job) => TcpListener::bind((job.listen, 0)).await.map_err(|e| {
            let wanted = "it must be an address of this machine";
            Failure::usage(format!("can't listen on --listen {}: {e}; {wanted}", job.listen))
        })?,
        Task::Resume(abandoned) => {
            let address = abandoned.start.address;
            bind_again(address)
                .await
                .map_err(failed(&format!("listen at {address}, where workers look")))?
        }
    };
    let address = listener.local_addr().map_err(failed("learn the listener's address"))?;
    let scraped = match &task {
        Task::Begin(job) => job.metrics,
        Task::Resume(abandoned) => abandoned.start.metrics,
    };
    let scraped = match scraped {
        Some(address) => match (TcpListener::bind(address).await, &task) {
            (Ok(listener), _) => Some(listener),
            (Err(e), Task::Begin(_)) => {
                let wanted = "choose another --metrics-port";
                return Err(Failure::usage(format!(
                    "can't serve metrics at {address}: {e}; {wanted}"
                )));
            }
            (Err(error), Task::Resume(_)) => {
                warn!(%error, %address, "metrics are not served");
                None
            }
        },
        None => None,
    };
    let metrics = scraped.as_ref().and_then(|listener| listener.local_addr().ok());
    dir.publish(address).map_err(|e| Failure::failed(e.to_string()))?;
    let mut signals = Signals::new().map_err(failed("handle signals"))?;
    let (publish, published) = watch::channel(None);
    let progress =
        if quiet { Progress::quiet() } else { Progress::on_stderr() }.publishing(publish);
    if let Some(address) = metrics {
        let text = format!("metrics at http://{address}/metrics");
        info!("{text}");
        progress.notice(Time::default(), text);
    }
    let events = match &task {
        Task::Begin(job) => event_file(job.tensorboard_dir.as_deref(), &job.spec.name)?,
        Task::Resume(abandoned) => {
            let folder = abandoned.start.tensorboard_dir.as_deref().map(Path::new);
            event_file(folder, &abandoned.record.spec().name)?
        }
    };
    if let Some(listener) = scraped {
        // It ends with the runtime.
        tokio::spawn(metrics::serve(listener, published.clone(), std::sync::Arc::new(|| true)));
    }
    let events = events.map(|events| tokio::spawn(tensorboard::follow(events, published)));
    let launcher = |program: &OsString, args: &[OsString], timeout| {
        Launcher::new(program.into(), args.to_vec(), dir, timeout)
    };
    let server_config = ServerConfig { listener, token: dir.token().clone(), identity: None };
    let master = match task {
        Task::Begin(job) => {
            let start = start_of(&job, dir, address, metrics);
            let start = start.map_err(failed("learn the current directory"))?;
            dir.persist_start(&start).map_err(|e| Failure::failed(e.to_string()))?;
            let launcher = launcher(&start.program, &start.args, start.master_timeout);
            let launcher = launcher.with_copy(start.copy);
            Master::new(job.spec, server_config, launcher, progress)
        }
        Task::Resume(abandoned) => {
            let JobStart { program, args, master_timeout, began, copy, .. } = &abandoned.start;
            let launcher = launcher(program, args, *master_timeout).with_copy(copy.clone());
            // A clock that was set back makes the job younger, and nothing else.
            let age = SystemTime::now().duration_since(*began).unwrap_or_default();
            Master::resume(*abandoned, age, server_config, launcher, progress)
        }
    };
    let master = master
        .map_err(failed("start the master"))?
        .with_persisted_job_file(dir.persisted_job_file());
    let (interrupts, interrupted) = mpsc::channel(INTERRUPTS_MAX);
    let run = master.run(interrupted);
    tokio::pin!(run);
    let mut patience = StopEscalation::default();
    let ended = loop {
        tokio::select! {
            ended = &mut run => break ended,
            stop = signals.next() => {
                // Full only if the master has not yet taken those before, which ask for the end
                // already.
                let _ = interrupts.try_send(patience.interrupt(stop));
            }
        }
    };
    if let Some(events) = events {
        // The last point.
        let _ = events.await;
    }
    Ok((ended, patience.first))
}

fn event_file(folder: Option<&Path>, job: &str) -> Result<Option<EventFile>, Failure> {
    let create = |folder: &Path| {
        EventFile::create(folder, job).map_err(|e| {
            let wanted =
                "give --tensorboard-dir a folder that is there, or can be made, and is writable";
            Failure::usage(format!("can't write events to {}: {e}; {wanted}", folder.display()))
        })
    };
    folder.map(create).transpose()
}

/// How another master will have to start.
fn start_of(
    job: &LocalJob,
    dir: &JobDir,
    address: SocketAddr,
    metrics: Option<SocketAddr>,
) -> std::io::Result<JobStart> {
    let folder = std::env::current_dir()?;
    Ok(JobStart {
        program: job.program.clone().into(),
        args: job.args.clone(),
        summary: job.summary.as_ref().map(|path| folder.join(path).into()),
        tensorboard_dir: job.tensorboard_dir.as_ref().map(|path| folder.join(path).into()),
        folder: folder.into(),
        address,
        metrics,
        master_timeout: job.master_timeout,
        began: SystemTime::now(),
        copy: ProgramCopy::make(&job.program, dir.program_path()),
    })
}

/// Listens where the master before listened. A worker that looks for its master may have been given
/// just this port for its own end of the connection, and then gives it back when it has failed.
async fn bind_again(address: SocketAddr) -> std::io::Result<TcpListener> {
    let mut attempts = BIND_ATTEMPTS;
    loop {
        attempts -= 1;
        match TcpListener::bind(address).await {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && attempts > 0 => {
                tokio::time::sleep(BIND_PAUSE).await;
            }
            bound => return bound,
        }
    }
}

/// What the master does goes to its log, one line per change of state.
fn log_to_file(dir: &JobDir) -> Result<(), Failure> {
    let path = dir.master_log();
    // What the masters before this one did stays: a new job has cleared it.
    let file = File::options()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&path)
        .map_err(|e| Failure::usage(format!("can't write {}: {e}", path.display())))?;
    let logging =
        tracing_subscriber::fmt().with_ansi(false).with_writer(Mutex::new(file)).try_init();
    // A test in this process may have set another subscriber: its logs are its own affair.
    if let Err(error) = logging {
        warn!(%error, "the master's log is not written");
    }
    Ok(())
}

/// An error that says where the logs are.
fn add_logs(error: &str, logs: &Path) -> String {
    let separator = if error.contains('\n') { '\n' } else { ' ' };
    format!("{error}{separator}(logs: {})", logs.display())
}

fn write_summaries(wanted: Option<&Path>, dir: &JobDir, ended: &JobResult) -> Result<(), Failure> {
    let json = report::to_json(&ended.summary);
    for path in std::iter::once(&*dir.summary_path()).chain(wanted) {
        jobdir::write_atomically(path, &json).map_err(|e| {
            Failure::failed(format!("can't write the summary {}: {e}", path.display()))
        })?;
    }
    Ok(())
}

const BIND_ATTEMPTS: u32 = 20;
const BIND_PAUSE: Duration = Duration::from_millis(100);
const DATA: &str = "Data and steps";
const INTERRUPTS_MAX: usize = 4;
/// What a job keeps from its start.
const JOB_OPTIONS: [&str; 37] = [
    "validation_data",
    "evaluate_every",
    "best_metric",
    "early_stopping",
    "checkpoint_dir",
    "checkpoint_every",
    "checkpoint_keep",
    "resume_from",
    "on_nonfinite",
    "restart_without_checkpoint",
    "grace_period",
    "image",
    "job_name",
    "job_dir",
    "listen",
    "num_workers",
    "min_workers",
    "max_workers",
    "max_worker_restarts",
    "worker_timeout",
    "channels",
    "wire_dtype",
    "master_timeout",
    "training_data",
    "num_epochs",
    "max_steps",
    "global_batch_size",
    "minibatch_size",
    "records_per_shard",
    "shuffle",
    "no_shuffle",
    "seed",
    "summary",
    "export",
    "metrics_port",
    "tensorboard_dir",
    "program",
];
const OUTPUT: &str = "Output";
const WHERE: &str = "Job";
const WORKERS: &str = "Workers";
