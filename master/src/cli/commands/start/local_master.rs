//! Runs the master of a local job in this process, to the end of the job.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use super::local_job::LocalJob;
use super::page::{self, LocalPage};
use super::request::StartRequest;
use super::signals::{Signals, Stop, StopEscalation};
use crate::cli::commands::exporters::Exporters;
use crate::cli::process::{
    Console, EXIT_FAILED, EXIT_OK, EXIT_USAGE, Failure, cannot, code_of_summary, new_runtime,
    print_warning, raise_open_files,
};
use crate::cli::render::{Paths, print_job_error, print_summary, summary_to_json, warnings};
use crate::dashboard::JobOptions;
use crate::event_loop::{JobResult, Master};
use crate::job::{JobSpec, Outcome, Time};
use crate::jobdir::{self, AbandonedJob, JobDir, JobDirError, JobStart, ProgramCopy, directory_of};
use crate::listener::{Identity, ServerConfig};
use crate::local::Launcher;
use crate::metrics;
use crate::mlflow;
use crate::progress::Progress;
use crate::worker_output::WorkerOutput;

/// Runs a new job. Returns the exit code.
pub(super) fn start(request: StartRequest) -> Result<u8, Failure> {
    let mut job = LocalJob::new(request)?;
    job.refuse_to_replace()?;
    if job.job_dir.to_str().is_none() {
        let dir = job.job_dir.display();
        let text = format!("the job's directory, {dir}, is not UTF-8; choose another --job-dir");
        return Err(Failure::usage(text));
    }
    let is_new = !job.job_dir.exists();
    let dir = JobDir::create(&job.job_dir).map_err(|e| Failure::usage(e.to_string()))?;
    job.keep_checkpoints_in(dir.path());
    let (console, root, mut has_run) = (job.console, dir.path().to_path_buf(), false);
    let wanted = job.summary.clone();
    let ended = LocalStart::of(job).and_then(|job| run(job, wanted, &dir, console, &mut has_run));
    if ended.is_err() && !has_run {
        dir.restore_earlier();
    }
    if ended.is_err() && is_new && !has_run && !jobdir::has_begun(&root) {
        // Nothing of a job that was refused stays, and `elasticdl list` does not show it.
        drop(dir);
        let _ = jobdir::delete(&root);
    }
    ended
}

/// Resumes the job whose master has died. Returns the exit code.
pub(super) fn resume(job: &Path, console: Console) -> Result<u8, Failure> {
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
    let wanted = abandoned.start.summary.clone().map(PathBuf::from);
    let job = LocalStart {
        spec: abandoned.record.spec().clone(),
        start: abandoned.start.clone(),
        abandoned: Some(Box::new(abandoned)),
    };
    run(job, wanted, &dir, console, &mut false)
}

/// `wanted`: path of the additional summary. `has_run`: set when the job has ended, whatever can't
/// be written after it.
fn run(
    job: LocalStart,
    wanted: Option<PathBuf>,
    dir: &JobDir,
    console: Console,
    has_run: &mut bool,
) -> Result<u8, Failure> {
    log_to_file(dir)?;
    raise_open_files();
    let runtime = new_runtime()?;
    let (ended, stop) = runtime.block_on(lead(job, dir, console))?;
    *has_run = true;
    // Drops what background tasks hold, before the report is written.
    drop(runtime);
    // No worker is started from here on. The copy need not exist, and leaves room for the summary.
    let _ = std::fs::remove_file(dir.program_path());
    let written = write_summaries(wanted.as_deref(), dir, &ended);
    let has_trained = ended.summary.steps > 0 || ended.summary.records.counted > 0;
    let refused = if has_trained {
        dir.forget_earlier();
        None
    } else {
        dir.restore_earlier()
    };
    let (logs, own) = match &refused {
        Some(folder) => (folder.join("logs"), folder.join("summary.json")),
        None => (dir.logs(), dir.summary_path()),
    };
    let summary = wanted.unwrap_or(own);
    let paths = Paths { logs: Some(&logs), summary: Some(&summary) };
    print_summary(console, &ended.summary, paths);
    if let Some(error) = &ended.summary.error {
        // With --quiet the table, which names the folder of the logs, is not printed.
        let with_logs = console.quiet && ended.outcome == Outcome::Failed;
        let error = if with_logs { add_logs(error, &logs) } else { error.clone() };
        print_job_error(console, ended.summary.wall_s, &error);
    }
    warnings(&ended.summary).iter().for_each(|warning| print_warning(warning));
    if let Some(folder) = refused {
        print_warning(&format!(
            "this job did not start, and the earlier job in {} is as it was; the files of this one \
             are in {}",
            dir.path().display(),
            folder.display()
        ));
    }
    written?;
    Ok(match ended.outcome {
        Outcome::Completed => EXIT_OK,
        Outcome::Failed => EXIT_FAILED,
        Outcome::InvalidInput => EXIT_USAGE,
        Outcome::Stopped => match code_of_summary(&ended.summary) {
            // A policy of the user's stopped it.
            EXIT_OK if ended.summary.stop_reason.is_some() => EXIT_OK,
            EXIT_OK => stop.unwrap_or(Stop::Interrupted).exit_code(),
            lost => lost,
        },
    })
}

/// Leads the job to its end. Also returns the signal that stopped it.
async fn lead(
    mut job: LocalStart,
    dir: &JobDir,
    console: Console,
) -> Result<(JobResult, Option<Stop>), Failure> {
    let Listeners { workers, metrics, dashboard } = job.listen().await?;
    // Commands that find the address find the certificate.
    let identity = job.identity(dir)?;
    let JobStart { address, metrics: scraped, dashboard: browsed, .. } = job.start;
    dir.publish(address, browsed).map_err(|e| Failure::failed(e.to_string()))?;
    let mut signals = Signals::new().map_err(cannot("handle signals"))?;
    let (publish, published) = watch::channel(None);
    let output = console.tee.then(|| WorkerOutput::from_now(dir.logs()));
    let progress = match console.progress() {
        Some(format) => Progress::on_stderr_with(format, output),
        None => Progress::quiet(),
    };
    let progress = progress.publishing(publish);
    let scraped = scraped.map(|address| format!("metrics at http://{address}/metrics"));
    for text in job.notices(dir).into_iter().chain(scraped) {
        info!("{text}");
        progress.notice(Time::default(), text);
    }
    let spec = job.spec.clone();
    let events = job.start.tensorboard_dir.as_deref().map(Path::new);
    let (exporters, tracked) = Exporters::start(&spec.name, events, job.parameters(), &published)?;
    if let Some(listener) = metrics {
        // The task ends with the runtime.
        tokio::spawn(metrics::serve(listener, Some(published.clone()), Arc::new(|| true)));
    }
    let (page, mut requested) = LocalPage::start(dashboard, &spec, dir, job.options(), published)?;
    page.announce(browsed, console, &progress);
    let server_config = ServerConfig { listener: workers, token: dir.token().clone(), identity };
    let master = job.into_master(dir, server_config, progress)?.with_tracking(tracked);
    let (commands, received) = mpsc::channel(COMMANDS_MAX);
    let run = master.run(received);
    tokio::pin!(run);
    let mut escalation = StopEscalation::new(spec.grace_period);
    let mut ended = loop {
        tokio::select! {
            ended = &mut run => break ended,
            stop = signals.next() => {
                // The channel is full only if earlier signals, which already request the end, are
                // still queued.
                if let Some(command) = escalation.command(Instant::now(), stop) {
                    let _ = commands.try_send(command);
                }
            }
            Some(request) = requested.recv() => {
                page::handle(request, &spec, &mut escalation, &commands);
            }
        }
    };
    ended.summary.tracking_error = exporters.finish(ended.summary.tracking_error).await;
    page.end().await;
    Ok((ended, escalation.first()))
}

/// A job that this process leads: a new one, or one whose master has died.
struct LocalStart {
    spec: JobSpec,
    /// Its addresses are those that are wanted until [`LocalStart::listen`] has returned, which
    /// sets the ports that were given.
    start: JobStart,
    abandoned: Option<Box<AbandonedJob>>,
}

struct Listeners {
    workers: TcpListener,
    metrics: Option<TcpListener>,
    dashboard: Option<TcpListener>,
}

impl LocalStart {
    /// The start of a new job.
    fn of(job: LocalJob) -> Result<Self, Failure> {
        let folder = std::env::current_dir().map_err(cannot("learn the current directory"))?;
        let start = JobStart {
            program: job.program.into(),
            args: job.args,
            summary: job.summary.map(|path| folder.join(path).into()),
            tensorboard_dir: job.tensorboard_dir.map(|path| folder.join(path).into()),
            folder: folder.into(),
            address: SocketAddr::new(job.listen, 0),
            metrics: job.metrics,
            dashboard: job.dashboard,
            master_timeout: job.master_timeout,
            began: SystemTime::now(),
            copy: None,
        };
        Ok(Self { spec: job.spec, start, abandoned: None })
    }

    fn is_new(&self) -> bool {
        self.abandoned.is_none()
    }

    /// Listens at the addresses of the job.
    async fn listen(&mut self) -> Result<Listeners, Failure> {
        let address = self.start.address;
        let workers = if self.is_new() {
            TcpListener::bind(address).await.map_err(|e| {
                let wanted = "it must be an address of this machine";
                Failure::usage(format!("can't listen on --listen {}: {e}; {wanted}", address.ip()))
            })?
        } else {
            let listen = format!("listen at {address}, where workers reconnect");
            bind_again(address).await.map_err(cannot(&listen))?
        };
        let (metrics, dashboard) =
            (self.listen_for_scrapes().await?, self.listen_for_browsers().await?);
        let at = |listener: &TcpListener| listener.local_addr();
        self.start.address = at(&workers).map_err(cannot("learn the listener's address"))?;
        self.start.metrics = metrics.as_ref().and_then(|listener| at(listener).ok());
        self.start.dashboard = dashboard.as_ref().and_then(|listener| at(listener).ok());
        Ok(Listeners { workers, metrics, dashboard })
    }

    /// Listens where metrics are served. A job that is resumed continues without them.
    async fn listen_for_scrapes(&self) -> Result<Option<TcpListener>, Failure> {
        let Some(address) = self.start.metrics else { return Ok(None) };
        match TcpListener::bind(address).await {
            Ok(listener) => Ok(Some(listener)),
            Err(e) if self.is_new() => {
                let wanted = "choose another --metrics-port";
                Err(Failure::usage(format!("can't serve metrics at {address}: {e}; {wanted}")))
            }
            Err(error) => {
                warn!(%error, %address, "metrics are not served");
                Ok(None)
            }
        }
    }

    /// Listens where the dashboard is served. A job that is resumed takes a free port if its own is
    /// taken. A job without a loopback interface has no dashboard.
    async fn listen_for_browsers(&self) -> Result<Option<TcpListener>, Failure> {
        let Some(address) = self.start.dashboard else { return Ok(None) };
        let listener = match TcpListener::bind(address).await {
            Err(_) if !self.is_new() => TcpListener::bind((address.ip(), 0)).await,
            bound => bound,
        };
        match listener {
            Ok(listener) => Ok(Some(listener)),
            Err(error) if address.port() == 0 => {
                warn!(%error, %address, "the dashboard is not served");
                Ok(None)
            }
            Err(e) => {
                let wanted = "choose another --dashboard-port, or none";
                let text = format!("can't serve the dashboard at {address}: {e}; {wanted}");
                Err(Failure::usage(text))
            }
        }
    }

    /// What the user should know before the job starts. Makes the job known by its name.
    fn notices(&self, dir: &JobDir) -> Vec<String> {
        if !self.is_new() {
            return Vec::new();
        }
        let unnamed = jobdir::register(&self.spec.name, dir.path()).err();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = self.spec.num_workers as usize;
        let crowded = (workers > cores.saturating_mul(CROWD)).then(|| {
            format!("{workers} workers share {cores} cores: fewer workers are likely to be faster")
        });
        unnamed.into_iter().chain(crowded).collect()
    }

    /// Identity with which the master serves TLS: that of the job's earlier masters, or a new one
    /// if it listens on the network.
    fn identity(&self, dir: &JobDir) -> Result<Option<Identity>, Failure> {
        if self.is_new() && !self.start.address.ip().is_loopback() {
            let made = dir.create_certificates(&self.spec.name);
            made.map_err(|error| Failure::failed(error.to_string()))?;
        }
        dir.identity().map_err(|error| Failure::failed(error.to_string()))
    }

    /// What the page says of the job's start.
    fn options(&self) -> JobOptions {
        let program = self.start.program.to_string_lossy().into_owned();
        let program = ("program".to_owned(), program);
        let options = std::iter::once(program).chain(self.parameters()).collect();
        let began = self.start.began.duration_since(UNIX_EPOCH).unwrap_or_default();
        JobOptions { began, options }
    }

    /// Options of the job, and arguments of its program, by which users compare jobs.
    fn parameters(&self) -> Vec<(String, String)> {
        let args: Vec<_> = self.start.args.iter().map(|arg| arg.to_string_lossy()).collect();
        mlflow::parameters(&self.spec, args.iter().map(|arg| &**arg))
    }

    /// Creates the master.
    fn into_master(
        self,
        dir: &JobDir,
        server_config: ServerConfig,
        progress: Progress,
    ) -> Result<Master, Failure> {
        let Self { spec, mut start, abandoned } = self;
        if abandoned.is_none() {
            start.copy = ProgramCopy::make(Path::new(&start.program), dir.program_path());
            start = persist(start, dir)?;
        }
        let JobStart { program, args, master_timeout, copy, began, .. } = start;
        let launcher = Launcher::new(program.into(), args, dir, master_timeout)
            .with_copy(copy)
            .sharing_cores(spec.num_workers);
        let master = match abandoned {
            None => Master::new(spec, server_config, launcher, progress),
            Some(abandoned) => {
                // A clock that was set back only makes the job's age too small.
                let age = SystemTime::now().duration_since(began).unwrap_or_default();
                Master::resume(*abandoned, age, server_config, launcher, progress)
            }
        };
        let master = master.map_err(cannot("start the master"))?;
        Ok(master.with_persisted_job_file(dir.persisted_job_file()))
    }
}

/// Persists how the job is started. Where the disk is too full for that, without a copy of the
/// program.
fn persist(start: JobStart, dir: &JobDir) -> Result<JobStart, Failure> {
    let failed = |error: JobDirError| Failure::failed(error.to_string());
    match dir.persist_start(&start) {
        Ok(()) => return Ok(start),
        Err(error) if start.copy.is_none() => return Err(failed(error)),
        Err(_) => {}
    }
    let _ = std::fs::remove_file(dir.program_path());
    let start = JobStart { copy: None, ..start };
    dir.persist_start(&start).map_err(failed)?;
    Ok(start)
}

/// Binds the address of the previous master. A worker that reconnects may hold this port as the
/// local end of its own connection attempt for a moment; it is free again when the attempt has
/// failed.
async fn bind_again(address: SocketAddr) -> io::Result<TcpListener> {
    let mut attempts = BIND_ATTEMPTS;
    loop {
        attempts -= 1;
        match TcpListener::bind(address).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && attempts > 0 => {
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
    // A line that does not fit on the disk is lost. The subscriber would report that by
    // `eprintln!`, which panics if no process reads standard error either.
    let logging = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(Mutex::new(file))
        .log_internal_errors(false)
        .try_init();
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

/// Workers per core from which on the user is told that they are many.
const CROWD: usize = 4;
fn write_summaries(wanted: Option<&Path>, dir: &JobDir, ended: &JobResult) -> Result<(), Failure> {
    let json = summary_to_json(&ended.summary);
    for path in std::iter::once(&*dir.summary_path()).chain(wanted) {
        jobdir::write_output(path, &json)
            .map_err(cannot(&format!("write the summary {}", path.display())))?;
    }
    Ok(())
}

const BIND_ATTEMPTS: u32 = 20;
const BIND_PAUSE: Duration = Duration::from_millis(100);
const COMMANDS_MAX: usize = 4;
