//! Workers as processes of this machine, or of other hosts.
//!
//! Each worker leads its own process group, so that a Ctrl-C at the terminal reaches the master
//! alone, and so that the children of a worker are killed with it.
//!
//! **Invariant:** no process outlives `Processes`: each process is owned by a task that kills its
//! group when the task is dropped. The exception is a master that is killed or panics: its workers
//! search for another master for a while, and a successor takes over their processes, which are not
//! its children.

mod activity;
pub mod hosts;
mod launcher;
mod log;
mod oom;

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use elasticdl_proto::Location;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Child;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tracing::{info, warn};

use self::activity::Activity;
pub use self::activity::processes_of_group;
use self::hosts::{Host, Place, Places};
pub use self::launcher::{Launcher, env_of_slot, share_of_cores};
use self::oom::OomKills;
use crate::backend_event::BackendEvent;
use crate::job::{Exit, LaunchId};
use crate::jobdir::{self, ProcessIdentity, ProgramSource};

/// The running processes that this master has started or taken over.
#[derive(Debug)]
pub(crate) struct Processes {
    launcher: Arc<Launcher>,
    running: BTreeMap<LaunchId, Running>,
    tasks: JoinSet<ProcessExit>,
    flags: Arc<SharedFlags>,
    notices: (mpsc::UnboundedSender<Notice>, mpsc::UnboundedReceiver<Notice>),
    ready: VecDeque<Notice>,
    /// Which worker runs where, if there are other hosts.
    places: Option<Places>,
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
            places: launcher.hosts.as_ref().map(Places::new),
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
    pub(crate) fn start(&mut self, launch: LaunchId, index: u32, avoid: &[String]) {
        let (killed, known) = self.track(launch);
        let (launcher, flags) = (Arc::clone(&self.launcher), Arc::clone(&self.flags));
        let notices = self.notices.0.clone();
        let place = self.places.as_mut().map(|places| places.take(launch, avoid, Instant::now()));
        if let Some((hosts, place)) = self.launcher.hosts.as_ref().zip(place) {
            let node = hosts.hosts[place.host].name.clone();
            let location = Location { node, ..Location::default() };
            self.ready.push_back((launch, BackendEvent::Located(location)));
        }
        self.tasks.spawn(async move {
            // Yields to queued messages to workers first, because a fork takes milliseconds.
            tokio::task::yield_now().await;
            let notify = |event: BackendEvent| {
                // The receiver may have been dropped.
                let _ = notices.send((launch, event));
            };
            let launch = (launch, index, place);
            supervise(&launcher, launch, (&flags, &known), notify, killed).await
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

    /// The id of the process of a launch that runs on this machine.
    pub(crate) fn pid(&self, launch: LaunchId) -> Option<u32> {
        if self.places.is_some() {
            return None;
        }
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
                let known = self.running.remove(&launch).map(|running| running.known);
                if let Some(places) = &mut self.places {
                    let has_joined = known.is_none_or(|it| it.has_joined.load(Ordering::Relaxed));
                    places.give_back(launch, has_joined, Instant::now());
                }
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
    (launch, index, place): (LaunchId, u32, Option<Place>),
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
    // On another host the program is not known to have changed.
    let from = from.filter(|_| place.is_none());
    if let Some(from) = from.filter(|_| !flags.change_reported.swap(true, Ordering::Relaxed)) {
        let text = format!("started from {from}, as {program} has changed since the job began");
        notify(BackendEvent::Noted(text));
    }
    let told = place.map_or(Ok(None), |place| launcher.host_launch(launch, place));
    let spawned = told.and_then(|told| Ok((launcher.spawn(launch, index, place)?, told)));
    let mut process = match spawned {
        Ok((mut child, told)) => {
            if let Some((mut input, told)) = child.stdin.take().zip(told) {
                // If the host can't be reached, the command says why, and ends.
                tokio::spawn(async move { drop(input.write_all(&told).await) });
            }
            ChildGroup(child)
        }
        Err(error) => {
            return ProcessExit {
                launch,
                exit: Exit::NotStarted(match &launcher.hosts {
                    Some(hosts) => format!("{}: {error}", hosts.command[0]),
                    None => format!("{program}: {error}"),
                }),
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
    // What is known of a process of this machine says nothing of one on another host.
    let local = group.filter(|_| place.is_none());
    let start = watch_start(launcher, local, (flags, &known.has_joined), &notify);
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
    let lost = launcher.hosts.as_ref().zip(place).filter(|_| exit == Exit::Code(CONNECTION_LOST));
    let exit = match lost {
        Some((hosts, place)) => {
            let Host { name, .. } = &hosts.hosts[place.host];
            notify(BackendEvent::Explained(format!("the connection to {name} failed or ended")));
            Exit::Unknown
        }
        None => exit,
    };
    info!(launch = launch.0, ?exit, "worker process ended");
    if matches!(exit, Exit::Signal(_)) && place.is_none() && flags.oom_kills.take_one() {
        notify(BackendEvent::Explained("killed by the system, as memory ran out".into()));
    }
    let output_tail = (lost.is_some() || matches!(exit, Exit::Code(_) | Exit::Signal(_)))
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
        let is_busy = now.is_busy_since(&known);
        if is_busy {
            notify(BackendEvent::Busy);
        }
        known = now;
        let is_due = !is_told && !flags.hello_received.load(Ordering::Relaxed);
        if let Some(hint) = hint(began.elapsed(), is_busy).filter(|_| is_due) {
            is_told = true;
            let program = launcher.command_line();
            notify(BackendEvent::Noted(format!(
                "{hint}: {program} must call elasticdl::run() (Rust) or elasticdl.torch.join() \
                 (Python)"
            )));
        }
    }
    std::future::pending().await
}

/// What is said of a process that was started so long ago and has not joined; `None` if nothing is.
fn hint(since: Duration, is_busy: bool) -> Option<String> {
    let (limit, busy) = match is_busy {
        true => (HELLO_HINT_BUSY, ", but is busy: it imports, reads or computes"),
        false => (HELLO_HINT, ""),
    };
    let seconds = since.as_secs();
    (since >= limit)
        .then(|| format!("started {seconds} s ago and has not joined the job yet{busy}"))
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

/// What ssh exits with if the connection fails or ends: that is no failure of the program.
const CONNECTION_LOST: i32 = 255;
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a killed process takes to die if nothing holds it.
const DEATH_MAX: Duration = Duration::from_secs(1);
/// A program that calls `run()` first sends its hello well before this time.
const HELLO_HINT: Duration = Duration::from_secs(15);
/// Imports and data may take as long.
const HELLO_HINT_BUSY: Duration = Duration::from_secs(60);
/// How often a process that has not joined is looked at.
const ACTIVITY_INTERVAL: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
