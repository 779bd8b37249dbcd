//! The master of a local job, in this process.

mod page;
mod signals;
mod standstill;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use self::page::LocalPage;
pub use self::signals::Stop;
use self::signals::{Signals, StopEscalation};
pub use self::standstill::Standstill;
use crate::dashboard::JobOptions;
use crate::event_loop::{JobResult, Master, MasterParts, restore};
use crate::exit::{Failure, cannot};
use crate::exporters::Exporters;
use crate::job::{Event, Job, JobSpec, Snapshot, Time};
use crate::job_store::JobStore;
use crate::jobdir::neighbours::Turn;
use crate::jobdir::{self, AbandonedJob, JobDir, JobDirError, JobStart, ProgramCopy};
use crate::listener::{Identity, ServerConfig};
use crate::local::Launcher;
use crate::progress::Progress;
use crate::worker_backend::WorkerBackend;
use crate::{metrics, mlflow};

/// A job that this process leads: a new one, or one whose master has died.
#[derive(Debug)]
pub struct LocalMaster {
    spec: JobSpec,
    /// Its addresses are those that are wanted until [`LocalMaster::listen`] has returned, which
    /// sets the ports that were given.
    start: JobStart,
    abandoned: Option<Box<AbandonedJob>>,
    /// Held until the record is written.
    turn: Option<Turn>,
    /// Whether commands don't find it by its name, and no server tracks it.
    is_apart: bool,
}

/// The end of a local job.
#[derive(Debug)]
pub struct LocalEnd {
    /// How the job has ended.
    pub result: JobResult,
    /// The signal that stopped it.
    pub stop: Option<Stop>,
    /// Notices a master that stands still.
    pub standstill: Standstill,
}

struct Listeners {
    workers: TcpListener,
    metrics: Option<TcpListener>,
    dashboard: Option<TcpListener>,
}

impl LocalMaster {
    /// The master of a new job, and the turn in which it was checked against others.
    #[must_use]
    pub fn new(spec: JobSpec, start: JobStart, turn: Option<Turn>) -> Self {
        Self { spec, start, abandoned: None, turn, is_apart: false }
    }

    /// The next master of a job whose master has died.
    #[must_use]
    pub fn resume(abandoned: AbandonedJob) -> Self {
        Self {
            spec: abandoned.record.spec().clone(),
            start: abandoned.start.clone(),
            abandoned: Some(Box::new(abandoned)),
            turn: None,
            is_apart: false,
        }
    }

    /// The same, for a job that is of no interest once this process has ended: commands don't find
    /// it by its name, and no server tracks it.
    #[must_use]
    pub fn apart(self) -> Self {
        Self { is_apart: true, ..self }
    }

    /// The job's specification.
    #[must_use]
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// Leads the job in `dir` to its end. Once it listens, shows the job in what `progress` gives,
    /// with the link of its page if `shows_link`. Prints with `warn` while it stands still.
    ///
    /// # Errors
    /// The job can't be started. No worker was.
    pub async fn run(
        mut self,
        dir: &JobDir,
        progress: impl FnOnce() -> Progress,
        shows_link: bool,
        warn: fn(&str),
    ) -> Result<LocalEnd, Failure> {
        check_proc(Path::new("/proc/self/stat"))?;
        let Listeners { workers, metrics, dashboard } = self.listen().await?;
        // Commands that find the address find the certificate.
        let identity = self.identity(dir)?;
        let JobStart { address, metrics: scraped, dashboard: browsed, .. } = self.start;
        dir.publish(address, browsed).map_err(|e| Failure::failed(e.to_string()))?;
        let mut signals = Signals::new().map_err(cannot("handle signals"))?;
        let standstill = Standstill::watch(dir.path().display().to_string(), warn);
        let standstill = standstill.map_err(cannot("watch the master"))?;
        let (publish, published) = watch::channel(None);
        let progress = progress().publishing(publish);
        let scraped = scraped.map(|address| format!("metrics at http://{address}/metrics"));
        for text in self.notices(dir).into_iter().chain(scraped) {
            info!("{text}");
            progress.notice(Time::default(), text);
        }
        let mut spec = self.spec.clone();
        let shown = published.clone();
        let events = self.start.tensorboard_dir.as_deref().map(Path::new);
        let is_tracked = !self.is_apart;
        let variable = |name: &str| std::env::var(name).ok().filter(|_| is_tracked);
        let (exporters, tracked) =
            Exporters::start(&spec.name, events, self.parameters(), variable, &published)?;
        if let Some(listener) = metrics {
            // The task ends with the runtime.
            tokio::spawn(metrics::serve(listener, Some(published.clone()), Arc::new(|| true)));
        }
        let (page, mut requested) =
            LocalPage::start(dashboard, &spec, dir, self.options(), published)?;
        page.announce(browsed, shows_link, &progress);
        let server_config =
            ServerConfig { listener: workers, token: dir.token().clone(), identity };
        let master = self.into_master(dir, server_config, progress, tracked)?;
        let inspector = master.inspector();
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let run = master.run(received);
        let mut turns = tokio::time::interval(Standstill::TURN);
        tokio::pin!(run);
        let mut escalation = StopEscalation::new(spec.options.grace_period);
        let mut ended = loop {
            tokio::select! {
                ended = &mut run => break ended,
                _ = turns.tick() => standstill.turn(),
                stop = signals.next() => {
                    // The channel is full only if earlier signals, which already request the end,
                    // are still queued.
                    if let Some(command) = escalation.command(Instant::now(), stop) {
                        let _ = commands.try_send(command);
                    }
                }
                Some(request) = requested.recv() => {
                    // Users may have changed them since.
                    if let Some(Snapshot { status, .. }) = &*shown.borrow() {
                        spec.min_workers = status.workers_min;
                        spec.max_workers = status.workers_max;
                    }
                    page::handle(request, &spec, &mut escalation, &commands, &inspector);
                }
            }
        };
        // Trackers may need longer.
        standstill.rest();
        ended.summary.tracking_error = exporters.finish(ended.summary.tracking_error).await;
        page.end().await;
        Ok(LocalEnd { result: ended, stop: escalation.first(), standstill })
    }

    fn is_new(&self) -> bool {
        self.abandoned.is_none()
    }

    /// Listens at the addresses of the job.
    async fn listen(&mut self) -> Result<Listeners, Failure> {
        let address = self.start.address;
        let workers = if self.is_new() {
            let cannot = |error| Failure::usage(cannot_listen(address.ip(), &error));
            TcpListener::bind(address).await.map_err(cannot)?
        } else {
            let listen = format!("listen at {address}, where workers reconnect");
            bind_again(address).await.map_err(cannot(&listen))?
        };
        check_reachable(address.ip()).await?;
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
        let register = || jobdir::register(&self.spec.name, dir.path()).err();
        let unnamed = if self.is_apart { None } else { register() };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = self.spec.num_workers as usize;
        let is_here = self.start.hosts.is_none();
        let crowded = (is_here && workers > cores.saturating_mul(CROWD)).then(|| {
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
        let began = self.start.began.at.duration_since(UNIX_EPOCH).unwrap_or_default();
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
        tracked: mpsc::Receiver<Event>,
    ) -> Result<Master, Failure> {
        let Self { spec, mut start, abandoned, turn, is_apart: _ } = self;
        let is_new = abandoned.is_none();
        if is_new {
            start.copy = ProgramCopy::make(Path::new(&start.program), dir.program_path());
            start = persist(start, dir)?;
        }
        let JobStart { program, args, master_timeout, copy, began, hosts, .. } = start;
        let launcher = Launcher::new(program.into(), args, dir, master_timeout)
            .with_copy(copy)
            .on_hosts(hosts)
            .sharing_cores(spec.num_workers)
            .logging(spec.log_format);
        let failed = cannot("start the master");
        let backend = WorkerBackend::processes(launcher, &spec.name, &server_config);
        let backend = backend.map_err(&failed)?;
        let (mut launches, mut processes) = (Vec::new(), BTreeMap::new());
        let (job, age) = match abandoned {
            None => (Job::new(spec), Duration::ZERO),
            Some(abandoned) => {
                launches.extend(abandoned.record.launches());
                processes = abandoned.processes;
                let age = began.age();
                (restore(abandoned.record, age).map_err(&failed)?, age)
            }
        };
        let mut job_store = JobStore::File(dir.persisted_job_file());
        if is_new {
            // Jobs that start later find it. A failure is reported with the next write.
            drop(job_store.save(&job));
        }
        drop(turn);
        let (term, tracked) = (None, Some(tracked));
        let mut master = Master::assemble(MasterParts {
            job,
            age,
            server_config,
            backend,
            job_store,
            term,
            progress,
            tracked,
        })
        .map_err(failed)?;
        for launch in launches {
            master.adopt(launch, processes.remove(&launch));
        }
        Ok(master)
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

/// Checks that processes can be told apart, by what `/proc` says of them.
fn check_proc(own: &Path) -> Result<(), Failure> {
    if own.is_file() {
        return Ok(());
    }
    Err(Failure::usage(
        "/proc is not mounted, where a local job finds out which of its processes run; mount it: \
         mount -t proc proc /proc",
    ))
}

/// Checks that processes of this machine reach each other at `ip`, as workers do their master.
async fn check_reachable(ip: IpAddr) -> Result<(), Failure> {
    let connected = async {
        let listener = TcpListener::bind((ip, 0)).await?;
        TcpStream::connect(listener.local_addr()?).await
    };
    let timed_out = || Err(io::Error::from(io::ErrorKind::TimedOut));
    let connected = tokio::time::timeout(REACH_TIMEOUT, connected).await;
    match connected.unwrap_or_else(|_| timed_out()) {
        Ok(_) => Ok(()),
        Err(error) => Err(Failure::usage(format!(
            "the processes of this machine can't reach each other at {ip}: {error}; bring the \
             loopback interface up: ip link set lo up"
        ))),
    }
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

/// Workers per core above which a notice names their number.
const CROWD: usize = 4;
/// How long a connection within this machine may take.
const REACH_TIMEOUT: Duration = Duration::from_secs(5);
const BIND_ATTEMPTS: u32 = 20;
const BIND_PAUSE: Duration = Duration::from_millis(100);
const COMMANDS_MAX: usize = 4;

fn cannot_listen(ip: IpAddr, error: &io::Error) -> String {
    let wanted = match error.kind() {
        io::ErrorKind::AddrNotAvailable => "; it must be an address of this machine",
        _ => "",
    };
    format!("can't listen on --listen {ip}: {error}{wanted}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_address_of_another_machine_is_to_be_replaced() {
        let text =
            |errno| cannot_listen([192, 0, 2, 1].into(), &io::Error::from_raw_os_error(errno));
        let [not_here, no_files] = [99, 24].map(text);
        assert!(not_here.ends_with("; it must be an address of this machine"), "{not_here}");
        assert!(no_files.ends_with("(os error 24)"), "{no_files}");
    }

    #[tokio::test]
    async fn a_machine_whose_processes_cannot_meet_or_be_told_apart_is_refused_with_the_remedy() {
        assert!(check_proc(Path::new("/proc/self/stat")).is_ok());
        let text = check_proc(Path::new("/nothing/self/stat")).unwrap_err().text;
        assert!(text.contains("mount -t proc"), "{text}");
        assert!(check_reachable([127, 0, 0, 1].into()).await.is_ok());
        // An address of documents, which no machine has.
        let text = check_reachable([192, 0, 2, 1].into()).await.unwrap_err().text;
        assert!(text.contains("ip link set lo up"), "{text}");
    }
}
