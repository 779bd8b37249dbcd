//! Workers as processes of this machine.
//!
//! Each worker leads its own process group, so that a Ctrl-C at the terminal reaches the master
//! alone, and so that the children of a worker are killed with it.
//!
//! **Invariant:** no process outlives `Processes`: each process is owned by a task that kills its
//! group when the task is dropped. The exception is a master that is killed or panics: its workers
//! search for another master for a while, and a successor takes over their processes, which are not
//! its children.

mod activity;
mod log;
mod oom;

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use elasticdl_proto::gpu_instance;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tracing::{info, warn};

use self::activity::Activity;
use self::oom::OomKills;
use crate::backend_event::BackendEvent;
use crate::job::{Exit, LaunchId};
use crate::jobdir::{self, JobDir, Owner, ProcessIdentity, ProgramCopy, ProgramSource};

/// How a job's worker processes are started.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// Path of the program.
    pub program: PathBuf,
    /// Arguments of the program.
    pub args: Vec<OsString>,
    /// Environment variables in addition to the master's own; each launch further gets
    /// `ELASTICDL_LAUNCH` and `ELASTICDL_INDEX`.
    pub env: Vec<(OsString, OsString)>,
    /// The job whose directory has the files below.
    pub owner: Owner,
    /// Folder of the workers' logs.
    pub logs: PathBuf,
    /// File that lists the started processes.
    pub processes: PathBuf,
    /// Copy of the program's file from when the job began.
    pub copy: Option<ProgramCopy>,
    /// Number of threads with which a worker computes, unless the master's environment sets it.
    pub threads: usize,
}

impl Launcher {
    /// A launcher of `program` with `args` for the job in `dir`. A worker exits when it has had no
    /// master for `master_timeout`.
    #[must_use]
    pub fn new(
        program: PathBuf,
        args: Vec<OsString>,
        dir: &JobDir,
        master_timeout: Duration,
    ) -> Self {
        let mut env = vec![
            ("ELASTICDL_JOB_DIR".into(), dir.path().into()),
            ("ELASTICDL_TOKEN_FILE".into(), dir.token_path().into()),
            ("ELASTICDL_MASTER_TIMEOUT_MS".into(), master_timeout.as_millis().to_string().into()),
        ];
        if let Some(ca) = dir.ca_path() {
            env.push(("ELASTICDL_CA_FILE".into(), ca.into()));
            env.push(("ELASTICDL_MASTER_NAME".into(), jobdir::MASTER_DNS_NAME.into()));
        }
        Self {
            program,
            args,
            env,
            owner: dir.owner().clone(),
            logs: dir.logs(),
            processes: dir.processes_path(),
            copy: None,
            threads: 1,
        }
    }

    /// Starts workers from `copy` when the file at the program's path has been replaced.
    pub(crate) fn with_copy(self, copy: Option<ProgramCopy>) -> Self {
        Self { copy, ..self }
    }

    /// Divides the cores of this machine among `workers` workers: each computes with its share.
    pub(crate) fn sharing_cores(self, workers: u32) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self { threads: share_of(cores, workers), ..self }
    }

    /// The program and its first argument, which for Python is the script.
    fn command_line(&self) -> String {
        let program = self.program.file_name().unwrap_or(self.program.as_os_str());
        let words = std::iter::once(program).chain(self.args.first().map(OsString::as_os_str));
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    fn source(&self) -> ProgramSource<'_> {
        self.copy.as_ref().map_or(ProgramSource::Original, |copy| copy.source(&self.program))
    }

    fn spawn(&self, launch: LaunchId, index: u32) -> io::Result<Child> {
        if self.owner.is_replaced() {
            return Err(io::Error::other(
                "the job's directory was removed or renamed, and is now that of another job",
            ));
        }
        let log = log::create(&jobdir::worker_log(&self.logs, launch)).or_else(|error| {
            // A full disk: a worker without a log trains as well.
            warn!(launch = launch.0, %error, "the worker's output is not kept");
            std::fs::File::options().write(true).open("/dev/null")
        })?;
        let mut command = match self.source() {
            ProgramSource::Copy(copy) => Command::new(copy),
            ProgramSource::Replaced | ProgramSource::Original => Command::new(&self.program),
        };
        command
            .arg0(&self.program)
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env("ELASTICDL_LAUNCH", launch.0.to_string())
            .env("ELASTICDL_INDEX", index.to_string())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0);
        let instance = gpu_instance(index, |name| std::env::var(name).ok());
        command.envs(instance.map(|instance| ("CUDA_VISIBLE_DEVICES", instance)));
        // What a program in Python prints reaches its log at once.
        if std::env::var_os(UNBUFFERED).is_none() {
            command.env(UNBUFFERED, "1");
        }
        // More threads than cores would make the ranks wait for each other.
        for variable in THREADS {
            if std::env::var_os(variable).is_none() {
                command.env(variable, self.threads.to_string());
            }
        }
        command.spawn()
    }
}

/// The running processes that this master has started or taken over.
#[derive(Debug)]
pub(crate) struct Processes {
    launcher: Arc<Launcher>,
    running: BTreeMap<LaunchId, Running>,
    tasks: JoinSet<ProcessExit>,
    flags: Arc<SharedFlags>,
    notices: (mpsc::UnboundedSender<Notice>, mpsc::UnboundedReceiver<Notice>),
    ready: VecDeque<Notice>,
}

type Notice = (LaunchId, BackendEvent);

/// A process that has not ended.
#[derive(Debug)]
struct Running {
    /// Dropping it kills the process.
    _kill: oneshot::Sender<()>,
    known: Arc<KnownProcess>,
}

/// What is known of a process, shared with the task that supervises it.
#[derive(Debug, Default)]
struct KnownProcess {
    /// Whether it has sent its hello.
    has_joined: AtomicBool,
    /// Its id; 0 before its start.
    pid: AtomicU32,
}

/// State that all supervising tasks share.
#[derive(Debug, Default)]
struct SharedFlags {
    /// A launch has sent its hello, so the program is an elasticdl program.
    hello_received: AtomicBool,
    /// A notice about the replacement of the program's file has been sent.
    change_reported: AtomicBool,
    /// Kills for lack of memory, as far as they are attributed to a process.
    oom_kills: OomKills,
}

/// The end of a process.
#[derive(Debug)]
struct ProcessExit {
    launch: LaunchId,
    exit: Exit,
    /// Last lines of its output.
    output_tail: Option<String>,
}

impl Processes {
    pub(crate) fn new(launcher: Launcher) -> Self {
        Self {
            launcher: Arc::new(launcher),
            running: BTreeMap::new(),
            tasks: JoinSet::new(),
            flags: Arc::default(),
            notices: mpsc::unbounded_channel(),
            ready: VecDeque::new(),
        }
    }

    /// Starts `launch` in the slot `index` of the job. Never fails here: a process that can't be
    /// started ends at once with [`Exit::NotStarted`].
    pub(crate) fn start(&mut self, launch: LaunchId, index: u32) {
        let (killed, known) = self.track(launch);
        let (launcher, flags) = (Arc::clone(&self.launcher), Arc::clone(&self.flags));
        let notices = self.notices.0.clone();
        self.tasks.spawn(async move {
            // Yields to queued messages to workers first, because a fork takes milliseconds.
            tokio::task::yield_now().await;
            let notify = |event: BackendEvent| {
                // The receiver may have been dropped.
                let _ = notices.send((launch, event));
            };
            supervise(&launcher, (launch, index), (&flags, &known), notify, killed).await
        });
    }

    /// Adds a running launch.
    fn track(&mut self, launch: LaunchId) -> (oneshot::Receiver<()>, Arc<KnownProcess>) {
        let (kill, killed) = oneshot::channel();
        let known = Arc::<KnownProcess>::default();
        let running = Running { _kill: kill, known: Arc::clone(&known) };
        self.running.insert(launch, running);
        (killed, known)
    }

    /// The id of the process of a launch that runs.
    pub(crate) fn pid(&self, launch: LaunchId) -> Option<u32> {
        let pid = self.running.get(&launch)?.known.pid.load(Ordering::Relaxed);
        Some(pid).filter(|&pid| pid != 0)
    }

    /// Records that a launch has sent its hello.
    pub(crate) fn on_hello(&self, launch: LaunchId) {
        self.flags.hello_received.store(true, Ordering::Relaxed);
        if let Some(running) = self.running.get(&launch) {
            running.known.has_joined.store(true, Ordering::Relaxed);
        }
    }

    /// Takes over a process that a former master started, if it still runs; its end is reported
    /// like that of any other process.
    pub(crate) fn adopt(&mut self, launch: LaunchId, started: Option<ProcessIdentity>) {
        let (killed, known) = self.track(launch);
        known.pid.store(started.as_ref().map_or(0, |started| started.pid), Ordering::Relaxed);
        self.on_hello(launch);
        self.tasks.spawn(async move {
            if let Some(started) = started {
                supervise_adopted(launch, started, killed).await;
            }
            ProcessExit { launch, exit: Exit::Unknown, output_tail: None }
        });
    }

    /// Kills the process group of `launch`; [`Processes::next`] reports the end.
    pub(crate) fn kill(&mut self, launch: LaunchId) {
        self.running.remove(&launch);
    }

    /// Waits for the next event of a process; for ever while none runs. Cancel safe.
    pub(crate) async fn next(&mut self) -> Notice {
        if let Some(ready) = self.ready.pop_front() {
            return ready;
        }
        tokio::select! {
            biased;
            Some(notice) = self.notices.1.recv() => notice,
            Some(ended) = self.tasks.join_next() => {
                let ProcessExit { launch, exit, output_tail } =
                    ended.expect("a supervising task neither panics nor is aborted");
                self.running.remove(&launch);
                let ended = (launch, BackendEvent::Ended(exit));
                match output_tail {
                    Some(lines) => {
                        self.ready.push_back(ended);
                        (launch, BackendEvent::OutputTail(lines))
                    }
                    None => ended,
                }
            }
        }
    }

    /// Kills all processes and waits for their ends, up to `END_TIMEOUT`.
    pub(crate) async fn end(mut self) {
        self.running.clear();
        let all_ended = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(END_TIMEOUT, all_ended).await.is_err() {
            warn!("processes that were killed have not ended; leaving them to the system");
        }
    }
}

/// Runs one process to its end; kills it when `killed` resolves.
async fn supervise(
    launcher: &Launcher,
    (launch, index): (LaunchId, u32),
    (flags, known): (&SharedFlags, &KnownProcess),
    notify: impl Fn(BackendEvent),
    killed: oneshot::Receiver<()>,
) -> ProcessExit {
    let program = launcher.program.display();
    let from = match launcher.source() {
        ProgramSource::Original => None,
        ProgramSource::Copy(_) => Some("the job's own copy of the program"),
        ProgramSource::Replaced => Some("another program than the first launch"),
    };
    if let Some(from) = from.filter(|_| !flags.change_reported.swap(true, Ordering::Relaxed)) {
        let text = format!("started from {from}, as {program} has changed since the job began");
        notify(BackendEvent::Noted(text));
    }
    let mut process = match launcher.spawn(launch, index) {
        Ok(child) => ChildGroup(child),
        Err(error) => {
            return ProcessExit {
                launch,
                exit: Exit::NotStarted(format!("{program}: {error}")),
                output_tail: None,
            };
        }
    };
    let group = process.pid();
    known.pid.store(process.0.id().unwrap_or_default(), Ordering::Relaxed);
    info!(launch = launch.0, pid = process.0.id(), "worker process started");
    if let Some(started) = process.0.id().and_then(ProcessIdentity::look_up)
        && let Err(error) = jobdir::note_process(&launcher.processes, launch, started)
    {
        warn!(launch = launch.0, %error,
            "can't note the process: another master would not find it");
    }
    let start = watch_start(launcher, group, (flags, &known.has_joined), &notify);
    let log_path = jobdir::worker_log(&launcher.logs, launch);
    let ended = tokio::select! {
        ended = process.0.wait() => ended,
        _ = killed => {
            process.kill_group();
            process.0.wait().await
        }
        never = start => match never {},
        never = log::keep_short(&log_path) => match never {},
    };
    // Its children do not outlive it. The system does not reuse a group's id while the group has a
    // member.
    if let Some(group) = group {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    let exit = match ended {
        Ok(status) => exit_of(status),
        // Waiting for a child fails only if other code in this process has reaped it.
        Err(error) => Exit::NotStarted(format!("its end was not seen: {error}")),
    };
    info!(launch = launch.0, ?exit, "worker process ended");
    if matches!(exit, Exit::Signal(_)) && flags.oom_kills.take_one() {
        notify(BackendEvent::Explained("killed by the system, as memory ran out".into()));
    }
    let output_tail = matches!(exit, Exit::Code(_) | Exit::Signal(_))
        .then(|| log::last_lines(&log_path))
        .flatten();
    ProcessExit { launch, exit, output_tail }
}

/// Reports that a process that has not joined the job is busy. After a while it reminds the user of
/// what a program has to do.
async fn watch_start(
    launcher: &Launcher,
    group: Option<Pid>,
    (flags, has_joined): (&SharedFlags, &AtomicBool),
    notify: &impl Fn(BackendEvent),
) -> Infallible {
    let began = tokio::time::Instant::now();
    let (mut known, mut is_told) = (Activity::default(), false);
    while let Some(group) = group.filter(|_| !has_joined.load(Ordering::Relaxed)) {
        tokio::time::sleep(ACTIVITY_INTERVAL).await;
        let now = Activity::of_group(group);
        if now.is_busy_since(&known) {
            notify(BackendEvent::Busy);
        }
        known = now;
        let is_due = !is_told && began.elapsed() >= HELLO_HINT;
        if is_due && !flags.hello_received.load(Ordering::Relaxed) {
            is_told = true;
            notify(BackendEvent::Noted(format!(
                "started {} s ago and has not joined the job yet: {} must call elasticdl::run() \
                 (Rust) or elasticdl.torch.join() (Python)",
                HELLO_HINT.as_secs(),
                launcher.command_line()
            )));
        }
    }
    std::future::pending().await
}

/// Waits for the end of a process that is not a child; kills it when `killed` resolves.
async fn supervise_adopted(
    launch: LaunchId,
    started: ProcessIdentity,
    killed: oneshot::Receiver<()>,
) {
    let Some(pid) = i32::try_from(started.pid).ok().and_then(Pid::from_raw) else {
        return;
    };
    // The descriptor is opened before the look-up. It keeps the id from being reused, so both refer
    // to the same process.
    let descriptor = rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from);
    if !started.has_its_id() {
        return;
    }
    let group = AdoptedGroup(pid);
    let mut end = match descriptor.and_then(exit_receiver) {
        Ok(end) => end,
        Err(error) => {
            warn!(launch = launch.0, pid = started.pid, %error, "can't watch a process that is not \
                a child; killing it");
            return;
        }
    };
    info!(launch = launch.0, pid = started.pid, "worker process taken over");
    // The channel closes if the thread fails to wait; then there is nothing more to wait for.
    tokio::select! {
        _ = &mut end => {}
        _ = killed => {
            group.kill();
            let _ = end.await;
        }
    }
    // As with a child, its own children are killed too.
    drop(group);
    info!(launch = launch.0, pid = started.pid, "worker process ended");
}

/// Resolves when the process of `descriptor` ends. A thread waits for that, because a process
/// descriptor supports `poll` only; the thread ends with the process.
fn exit_receiver(descriptor: OwnedFd) -> io::Result<oneshot::Receiver<()>> {
    let (ended, end) = oneshot::channel();
    std::thread::Builder::new().name("process".into()).spawn(move || {
        let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
        while rustix::event::poll(&mut polled, None) == Err(Errno::INTR) {}
        // The receiver may have been dropped.
        let _ = ended.send(());
    })?;
    Ok(end)
}

/// The process group of a leader that is not a child; killed on drop.
struct AdoptedGroup(Pid);

impl AdoptedGroup {
    fn kill(&self) {
        // Fails only if the group has ended by itself.
        let _ = rustix::process::kill_process_group(self.0, Signal::KILL);
    }
}

impl Drop for AdoptedGroup {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The process group of a child; killed on drop.
struct ChildGroup(Child);

impl ChildGroup {
    fn kill_group(&self) {
        if let Some(pid) = self.pid() {
            // Fails only if the group has ended by itself.
            let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        }
    }

    /// Process id; `None` once the child has been reaped.
    fn pid(&self) -> Option<Pid> {
        self.0.id().and_then(|id| Pid::from_raw(id.cast_signed()))
    }
}

impl Drop for ChildGroup {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            self.kill_group();
            // The child is not reaped here; the runtime, which owns it, does that. One that waits
            // for a disk that hangs can't die before the disk answers.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
            let began = Instant::now();
            while let Ok(None) = rustix::process::waitid(WaitId::Pid(pid), options)
                && began.elapsed() < DEATH_MAX
            {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// The share of each of `workers` workers in `cores` cores, at least one.
fn share_of(cores: usize, workers: u32) -> usize {
    (cores / (workers.max(1) as usize)).max(1)
}

/// A shell that starts a program, such as a script of the user, gives its own code to the signal
/// that has ended the program, as containers do: 128 and its number.
fn exit_of(status: ExitStatus) -> Exit {
    match (status.code(), status.signal()) {
        (Some(code @ 129..=192), _) => Exit::Signal(code - 128),
        (Some(code), _) => Exit::Code(code),
        (None, Some(signal)) => Exit::Signal(signal),
        (None, None) => Exit::NotStarted("it neither exited nor was killed".into()),
    }
}

const END_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a killed process takes to die if nothing holds it.
const DEATH_MAX: Duration = Duration::from_secs(1);
/// A program that calls `run()` first sends its hello well before this time. Imports may take
/// longer.
const HELLO_HINT: Duration = Duration::from_secs(15);
/// How often a process that has not joined is looked at.
const ACTIVITY_INTERVAL: Duration = Duration::from_secs(2);
const UNBUFFERED: &str = "PYTHONUNBUFFERED";
const THREADS: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];

#[cfg(test)]
mod tests;
