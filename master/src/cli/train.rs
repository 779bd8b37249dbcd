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
use super::resilience::{ResilienceOptions, WireDtypeArg};
use super::signals::{Signals, Stop, StopEscalation};
use super::validation::ValidationOptions;
use super::{
    EXIT_FAILED, EXIT_OK, EXIT_USAGE, Failure, background, dry_run, print_error, print_warning,
};
use crate::event_loop::{JobResult, Master};
use crate::job::{self, Outcome, Time};
use crate::jobdir::{self, AbandonedJob, JobDir, JobStart};
use crate::listener::ServerConfig;
use crate::local::{Launcher, ProgramCopy};
use crate::metrics;
use crate::progress::Progress;
use crate::report::{self, Paths};
use crate::tensorboard::{self, EventFile};

/// Arguments of `elasticdl train`.
#[derive(Args, Debug)]
#[command(
    override_usage = "elasticdl train --local --training-data <URI> [OPTIONS] \
        -- <PROGRAM> [ARGS]...\n       \
        elasticdl train --image <IMG> --training-data <URI> [OPTIONS] \
        -- <PROGRAM> [ARGS]...\n       \
        elasticdl train --resume <JOB>",
    after_long_help = AFTER_HELP,
    mut_args(cluster::conflicting_with_local)
)]
pub struct TrainArgs {
    /// Run the master and the workers as processes of this machine, without a cluster.
    #[arg(long, help_heading = WHERE)]
    pub local: bool,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub cluster: ClusterArgs,

    /// Name of the job: lower-case letters, digits and `-`, at most 40 characters. [default:
    /// PROGRAM's name and 6 random digits]
    ///
    /// `elasticdl status`, `scale` and the other commands take this name.
    #[arg(long, value_name = "NAME", value_parser = job_options::parse_job_name,
          help_heading = WHERE)]
    pub job_name: Option<String>,

    /// Directory for the job's logs, summary and token. [default: ~/.local/state/elasticdl/NAME]
    ///
    /// It is created if it does not exist. The default follows $XDG_STATE_HOME; without it and
    /// without $HOME it is ./.elasticdl/NAME. An existing directory must be empty or belong to an
    /// earlier job, whose files are replaced. One job at a time can run in a directory. `elasticdl
    /// delete` removes the files that jobs have written, and nothing else.
    #[arg(long, value_name = "DIR", help_heading = WHERE)]
    pub job_dir: Option<PathBuf>,

    /// Address of this machine on which the master listens, for workers and for the other commands.
    ///
    /// Workers that PROGRAM starts elsewhere (in a container, in a network namespace) must be able
    /// to reach it. Each of them takes part with its own address on the route to the master. The
    /// port is chosen by the system.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1",
          value_parser = job_options::parse_listen,
          help_heading = WHERE)]
    pub listen: IpAddr,

    /// Resume a job whose master died: the job's name, or the path of its directory (with a `/`).
    ///
    /// The workers have continued to train for up to --master-timeout. They keep their state and
    /// are not restarted. The job keeps its options; only --quiet and --detach can be given.
    #[arg(long, value_name = "JOB", conflicts_with_all = JOB_OPTIONS, help_heading = WHERE)]
    pub resume: Option<PathBuf>,

    /// Number of workers to keep running. [default: 2]
    ///
    /// With several workers per pod, the default is rounded up to a multiple of --workers-per-pod.
    #[arg(long, value_name = "N", value_parser = job_options::parse_workers,
          help_heading = WORKERS)]
    pub num_workers: Option<u32>,

    /// Least number of workers to train with; with fewer, training pauses. [default: 1]
    ///
    /// With several workers per pod, the default is the workers of one pod.
    #[arg(long, value_name = "N", value_parser = job_options::parse_workers,
          help_heading = WORKERS)]
    pub min_workers: Option<u32>,

    /// Largest number that `elasticdl scale` accepts. [default: twice --num-workers, at least 8]
    #[arg(long, value_name = "N", value_parser = job_options::parse_workers,
          help_heading = WORKERS)]
    pub max_workers: Option<u32>,

    /// Number of worker failures, without progress between them, after which the job fails.
    ///
    /// A worker that crashes or exits with an error is replaced and counts as a failure. A worker
    /// that is killed from outside is replaced and does not count.
    #[arg(long, value_name = "N", default_value = "3", help_heading = WORKERS)]
    pub max_worker_restarts: u32,

    /// Evict a worker that is stopped or unreachable for longer than this while other workers wait
    /// for it; at least 100ms.
    ///
    /// With the default, the worker is evicted and replaced within a second. A worker whose model
    /// computes for a long time still sends heartbeats. A worker that only the master cannot reach
    /// continues to train.
    #[arg(long, value_name = "DURATION", default_value = "800ms",
          value_parser = job_options::parse_worker_timeout,
          help_heading = WORKERS)]
    pub worker_timeout: Duration,

    /// How long workers continue without a master before they exit, e.g. `30s` or `2min`; at least
    /// 1s. [default: 30s; with --image 15min]
    ///
    /// Until then they train the records that they hold leases for, and wait for the next master
    /// (see --resume). In a cluster the next master starts as soon as its pod is scheduled and its
    /// predecessor is known to have ended. The default with --image is longer than a cluster takes
    /// to replace the master of a lost node.
    #[arg(long, value_name = "DURATION", default_value = "30s", hide_default_value = true,
          default_value_if("image", ArgPredicate::IsPresent, "15min"),
          value_parser = job_options::parse_timeout, help_heading = WORKERS)]
    pub master_timeout: Duration,

    /// Data type of gradients on the wire: bf16 and f16 halve the traffic, for slow networks.
    ///
    /// Sums are computed in f32 and rounded each time they leave a worker: over N workers an
    /// element is off by at most N/256 of the largest partial sum with bf16, and N/2048 with f16,
    /// which is infinite above 65504. All workers get bit-identical results.
    #[arg(long, value_name = "DTYPE", value_enum, default_value = "f32", help_heading = WORKERS)]
    pub wire_dtype: WireDtypeArg,

    /// Number of connections between two neighbours in the ring, 1 to 16.
    ///
    /// More than one helps in networks that limit the bandwidth of each connection, or that lose
    /// packets. A gradient of at least 256 KiB per connection is split over them. Workers that
    /// share memory do not use them.
    #[arg(long, alias = "streams", value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u8).range(1..=16),
          help_heading = WORKERS)]
    pub channels: u8,

    /// Training data, as PROGRAM's reader understands it: usually a file, a folder or a URI.
    #[arg(long, value_name = "URI", required_unless_present = "resume", help_heading = DATA)]
    pub training_data: Option<String>,

    /// Number of passes over the data.
    #[arg(long, value_name = "N", default_value = "1", value_parser = job_options::parse_epochs,
          help_heading = DATA)]
    pub num_epochs: u32,

    /// Stop after this many steps, unless the data ends earlier. [default: no limit]
    #[arg(long, value_name = "N", value_parser = job_options::parse_steps, help_heading = DATA)]
    pub max_steps: Option<u64>,

    /// Records per step over all workers, independent of their number. [default: 64]
    #[arg(long, value_name = "RECORDS", value_parser = job_options::parse_batch,
          conflicts_with = "minibatch_size",
          help_heading = DATA)]
    pub global_batch_size: Option<u64>,

    /// Records per step and worker: the global batch grows with the number of workers.
    #[arg(long, value_name = "RECORDS", value_parser = job_options::parse_batch,
          help_heading = DATA)]
    pub minibatch_size: Option<u64>,

    /// Records per shard, the unit in which data is shuffled and leased to workers. [default: from
    /// the size of the data]
    #[arg(long, value_name = "RECORDS", value_parser = job_options::parse_shard,
          help_heading = DATA)]
    pub records_per_shard: Option<u64>,

    /// Shuffle the shards in each epoch. This is the default.
    #[arg(long, overrides_with = "no_shuffle", help_heading = DATA)]
    pub shuffle: bool,

    /// Lease shards in the order of the data.
    #[arg(long, overrides_with = "shuffle", help_heading = DATA)]
    pub no_shuffle: bool,

    /// Seed of everything random: the order of shards and the initial parameters.
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

    /// Write the final model to this safetensors file: a path or s3://, gs://, az://.
    ///
    /// A worker writes it, so in a cluster a path must lie in a --volume. The file appears complete
    /// or not at all, and also when the job is stopped early. Write access is checked before
    /// training starts.
    #[arg(long, value_name = "URI", value_parser = job_options::parse_uri, help_heading = OUTPUT)]
    pub export: Option<String>,

    /// Serve Prometheus metrics on this port, at /metrics; 0 chooses a free port. [default: with
    /// --image 7071, else none]
    ///
    /// With --local the address is that of --listen. In a cluster the master's pod and Service name
    /// the port `metrics`, and the pod has the usual prometheus.io annotations.
    #[arg(long, value_name = "PORT", help_heading = OUTPUT)]
    pub metrics_port: Option<u16>,

    /// Write loss, throughput and number of workers for TensorBoard to this folder, at most once
    /// per second.
    ///
    /// In a cluster the folder must lie in a --volume.
    #[arg(long, value_name = "DIR", help_heading = OUTPUT)]
    pub tensorboard_dir: Option<PathBuf>,

    /// Print errors only.
    #[arg(long, short, help_heading = OUTPUT)]
    pub quiet: bool,

    /// What the job does with the data, if it does not train.
    #[arg(skip)]
    pub(super) work: Option<job::Work>,

    /// The training program and its arguments. Without a `/` the program is looked up in $PATH; in
    /// a cluster, in the image.
    #[arg(last = true, required_unless_present = "resume", value_names = ["PROGRAM", "ARGS"])]
    pub program: Vec<OsString>,
}

const AFTER_HELP: &str = "\
Examples:
  Train for two epochs with four workers, 256 records per step:
      elasticdl train --local --num-workers 4 --training-data data/mnist \\
          --num-epochs 2 --global-batch-size 256 -- ./target/release/mnist

  Name the job, then show its status and scale it from another terminal:
      elasticdl train --local --job-name mnist --training-data data -- ./mnist --hidden 64
      elasticdl status mnist
      elasticdl scale mnist --num-workers 6

  Resume it after its master was killed, within --master-timeout:
      elasticdl train --resume mnist

  Write a checkpoint every 200 steps, and later train two more epochs from the newest one:
      elasticdl train --local --training-data data --checkpoint-dir ckpt --checkpoint-every 200 \\
          -- ./mnist
      elasticdl train --local --training-data data --resume-from ckpt --checkpoint-dir ckpt \\
          --num-epochs 3 -- ./mnist

  Train in a cluster, and first print the objects that would be created there:
      elasticdl train --image mnist:1 --volume claim_name=data,mount_path=/data \\
          --training-data /data/mnist --num-workers 4 --dry-run -- mnist
      elasticdl train --image mnist:1 --volume claim_name=data,mount_path=/data \\
          --training-data /data/mnist --num-workers 4 -- mnist

Stopping:
  With --local, Ctrl-C (or SIGTERM) stops the job at the end of the step; a second one stops it at
  once. In a cluster, Ctrl-C ends only this command; `elasticdl stop` stops the job.

Exit codes:
  0    the job completed: it reached the end of its data or --max-steps
  1    the job failed
  2    invalid command line or data; nothing was trained
  130  stopped by Ctrl-C; in a cluster: the command ended and the job continues
  143  stopped by SIGTERM";

/// Runs a job from its command line to its end. Returns the exit code.
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
    let (local_run, dir) = match &args.resume {
        Some(job) => LocalRun::resume(job, args.quiet)?,
        None => LocalRun::new_job(args)?,
    };
    log_to_file(&dir)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::failed(format!("can't start the runtime: {e}")))?;
    let (ended, stop) = runtime.block_on(run(local_run.source, &dir, local_run.quiet))?;
    // Drops what background tasks hold, before the report is written.
    drop(runtime);
    let written = write_summaries(local_run.summary.as_deref(), &dir, &ended);
    if written.is_ok() {
        // No worker is started from here on. The copy need not exist.
        let _ = std::fs::remove_file(dir.program_path());
    }
    if !local_run.quiet {
        let (logs, summary) = (dir.logs(), dir.summary_path());
        let summary = local_run.summary.as_deref().unwrap_or(&summary);
        let paths = Paths { logs: Some(&logs), summary: Some(summary) };
        let mut table = Vec::new();
        report::write_table(&mut table, &ended.summary, paths).expect("a vector takes any bytes");
        // Standard output may be closed.
        let _ = stdout().write_all(&table);
    }
    if let Some(error) = &ended.summary.error {
        // With --quiet the table, which names the folder of the logs, is not printed.
        let with_logs = local_run.quiet && ended.outcome == Outcome::Failed;
        print_error(&if with_logs { add_logs(error, &dir.logs()) } else { error.clone() });
    }
    report::warnings(&ended.summary).iter().for_each(|warning| print_warning(warning));
    written?;
    Ok(match ended.outcome {
        Outcome::Completed => EXIT_OK,
        Outcome::Failed => EXIT_FAILED,
        Outcome::InvalidInput => EXIT_USAGE,
        Outcome::Stopped => stop.unwrap_or(Stop::Interrupted).exit_code(),
    })
}

/// One run of a local master.
struct LocalRun {
    source: JobSource,
    /// Path of the additional summary (`--summary`).
    summary: Option<PathBuf>,
    quiet: bool,
}

enum JobSource {
    New(Box<LocalJob>),
    Resumed(Box<AbandonedJob>),
}

impl LocalRun {
    fn new_job(args: TrainArgs) -> Result<(Self, JobDir), Failure> {
        let mut job = LocalJob::new(args)?;
        let dir = JobDir::create(&job.job_dir).map_err(|e| Failure::usage(e.to_string()))?;
        job.keep_checkpoints_in(dir.path());
        let (summary, quiet) = (job.summary.clone(), job.quiet);
        Ok((Self { source: JobSource::New(Box::new(job)), summary, quiet }, dir))
    }

    fn resume(job: &Path, quiet: bool) -> Result<(Self, JobDir), Failure> {
        let (dir, abandoned) =
            JobDir::resume(&directory_of(job)).map_err(|e| Failure::usage(e.to_string()))?;
        // Relative paths in the job's options and in its program's arguments keep their meaning.
        let folder = &abandoned.start.folder;
        std::env::set_current_dir(folder).map_err(|e| {
            Failure::usage(format!(
                "can't go to {}, where the job was started: {e}",
                Path::new(folder).display()
            ))
        })?;
        let summary = abandoned.start.summary.clone().map(PathBuf::from);
        Ok((Self { source: JobSource::Resumed(Box::new(abandoned)), summary, quiet }, dir))
    }
}

async fn run(
    source: JobSource,
    dir: &JobDir,
    quiet: bool,
) -> Result<(JobResult, Option<Stop>), Failure> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: std::io::Error| Failure::failed(format!("can't {what}: {e}"))
    };
    let listener = match &source {
        JobSource::New(job) => TcpListener::bind((job.listen, 0)).await.map_err(|e| {
            let wanted = "it must be an address of this machine";
            Failure::usage(format!("can't listen on --listen {}: {e}; {wanted}", job.listen))
        })?,
        JobSource::Resumed(abandoned) => {
            let address = abandoned.start.address;
            bind_again(address)
                .await
                .map_err(failed(&format!("listen at {address}, where workers reconnect")))?
        }
    };
    let address = listener.local_addr().map_err(failed("learn the listener's address"))?;
    let scraped = match &source {
        JobSource::New(job) => job.metrics,
        JobSource::Resumed(abandoned) => abandoned.start.metrics,
    };
    let scraped = match scraped {
        Some(address) => match (TcpListener::bind(address).await, &source) {
            (Ok(listener), _) => Some(listener),
            (Err(e), JobSource::New(_)) => {
                let wanted = "choose another --metrics-port";
                return Err(Failure::usage(format!(
                    "can't serve metrics at {address}: {e}; {wanted}"
                )));
            }
            (Err(error), JobSource::Resumed(_)) => {
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
    let events = match &source {
        JobSource::New(job) => event_file(job.tensorboard_dir.as_deref(), &job.spec.name)?,
        JobSource::Resumed(abandoned) => {
            let folder = abandoned.start.tensorboard_dir.as_deref().map(Path::new);
            event_file(folder, &abandoned.record.spec().name)?
        }
    };
    if let Some(listener) = scraped {
        // The task ends with the runtime.
        tokio::spawn(metrics::serve(listener, published.clone(), std::sync::Arc::new(|| true)));
    }
    let events = events.map(|events| tokio::spawn(tensorboard::follow(events, published)));
    let launcher = |program: &OsString, args: &[OsString], timeout| {
        Launcher::new(program.into(), args.to_vec(), dir, timeout)
    };
    let server_config = ServerConfig { listener, token: dir.token().clone(), identity: None };
    let master = match source {
        JobSource::New(job) => {
            let start = start_of(&job, dir, address, metrics);
            let start = start.map_err(failed("learn the current directory"))?;
            dir.persist_start(&start).map_err(|e| Failure::failed(e.to_string()))?;
            let launcher = launcher(&start.program, &start.args, start.master_timeout);
            let launcher = launcher.with_copy(start.copy);
            Master::new(job.spec, server_config, launcher, progress)
        }
        JobSource::Resumed(abandoned) => {
            let JobStart { program, args, master_timeout, began, copy, .. } = &abandoned.start;
            let launcher = launcher(program, args, *master_timeout).with_copy(copy.clone());
            // A clock that was set back only makes the job's age too small.
            let age = SystemTime::now().duration_since(*began).unwrap_or_default();
            Master::resume(*abandoned, age, server_config, launcher, progress)
        }
    };
    let master = master
        .map_err(failed("start the master"))?
        .with_persisted_job_file(dir.persisted_job_file());
    let (commands, received) = mpsc::channel(COMMANDS_MAX);
    let run = master.run(received);
    tokio::pin!(run);
    let mut escalation = StopEscalation::default();
    let ended = loop {
        tokio::select! {
            ended = &mut run => break ended,
            stop = signals.next() => {
                // The channel is full only if earlier signals, which already request the end, are
                // still queued.
                let _ = commands.try_send(escalation.command(stop));
            }
        }
    };
    if let Some(events) = events {
        // Writes the last point.
        let _ = events.await;
    }
    Ok((ended, escalation.first))
}

fn event_file(folder: Option<&Path>, job: &str) -> Result<Option<EventFile>, Failure> {
    let create = |folder: &Path| {
        EventFile::create(folder, job).map_err(|e| {
            let wanted = "give --tensorboard-dir a writable folder, or one that can be created";
            Failure::usage(format!("can't write events to {}: {e}; {wanted}", folder.display()))
        })
    };
    folder.map(create).transpose()
}

/// What a later master needs to resume the job (see `--resume`).
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

/// Binds the address of the previous master. A worker that reconnects may hold this port as the
/// local end of its own connection attempt for a moment; it is free again when the attempt has
/// failed.
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

/// Directs the master's log to its file: one line per change of state.
fn log_to_file(dir: &JobDir) -> Result<(), Failure> {
    let path = dir.master_log();
    // Appends to the log of earlier masters of this job; a new job starts with an empty log.
    let file = File::options()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&path)
        .map_err(|e| Failure::usage(format!("can't write {}: {e}", path.display())))?;
    let logging =
        tracing_subscriber::fmt().with_ansi(false).with_writer(Mutex::new(file)).try_init();
    // A test in this process may have set another subscriber.
    if let Err(error) = logging {
        warn!(%error, "the master's log is not written");
    }
    Ok(())
}

/// The error, with the folder of the logs.
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
const COMMANDS_MAX: usize = 4;
/// Options that `--resume` does not take: the job keeps those that it was started with.
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
