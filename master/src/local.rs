//! Workers as processes of this machine.
//!
//! Each worker leads a process group of its own, so that a Ctrl-C at the terminal reaches the master alone,
//! and so that whatever a worker started goes with it.
//!
//! **Invariant:** no process outlives `Processes`, however it ends: each one is owned by a task that kills
//! its group when it is dropped. (A master that is killed itself can't see to that: its workers look for another master
//! for a while, and one that comes takes over their processes, which are not its children.)

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::job::{Exit, LaunchId};
use crate::jobdir::{self, JobDir};

/// What a job's workers are started as.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program, with its path.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Added to the master's own environment; `ELASTICDL_LAUNCH` and `ELASTICDL_INDEX` are added to it for each launch.
    pub env: Vec<(OsString, OsString)>,
    /// Folder of their logs.
    pub logs: PathBuf,
    /// The file in which each process is noted.
    pub processes: PathBuf,
}

/// A process that was started. Its id alone may be another one's by now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// Its id.
    pub pid: u32,
    /// When, in the system's ticks since it came up.
    pub at: u64,
}

impl Started {
    /// The process `pid`; `None` if it has ended.
    fn look_up(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // After the name, which is in brackets and may hold anything: the third field, the state, and what follows.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let runs = !matches!(fields.next()?, "Z" | "X");
        let at = fields.nth(STAT_STARTTIME - STAT_STATE - 1)?.parse().ok()?;
        runs.then_some(Self { pid, at })
    }
}

impl Launcher {
    /// Starts `program` with `args` for the job in `dir`. Workers end by themselves when their master has
    /// been gone for `master_timeout`.
    #[must_use]
    pub fn new(program: PathBuf, args: Vec<OsString>, dir: &JobDir, master_timeout: Duration) -> Self {
        let env = vec![
            ("ELASTICDL_TOKEN_FILE".into(), dir.token_path().into()),
            ("ELASTICDL_MASTER_TIMEOUT_MS".into(), master_timeout.as_millis().to_string().into()),
        ];
        Self { program, args, env, logs: dir.logs(), processes: dir.processes_path() }
    }

    fn spawn(&self, launch: LaunchId, index: u32) -> io::Result<Child> {
        let log = File::create(jobdir::worker_log(&self.logs, launch))?;
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env("ELASTICDL_LAUNCH", launch.0.to_string())
            .env("ELASTICDL_INDEX", index.to_string())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0);
        // One rank computes with one thread unless the user says otherwise: ranks share this machine's cores.
        if std::env::var_os(RAYON_THREADS).is_none() {
            command.env(RAYON_THREADS, "1");
        }
        command.spawn()
    }
}

/// The processes that this master has started and that have not ended.
#[derive(Debug)]
pub(crate) struct Processes {
    launcher: Launcher,
    /// Dropping a sender kills its process.
    running: BTreeMap<LaunchId, oneshot::Sender<()>>,
    tasks: JoinSet<(LaunchId, Exit)>,
}

impl Processes {
    pub(crate) fn new(launcher: Launcher) -> Self {
        Self { launcher, running: BTreeMap::new(), tasks: JoinSet::new() }
    }

    /// Starts one, at the place `index` of the job's. Never fails here: a process that can't be started ends at once, as [`Exit::NotStarted`].
    pub(crate) fn start(&mut self, launch: LaunchId, index: u32) {
        let (kill, killed) = oneshot::channel();
        let launcher = self.launcher.clone();
        self.running.insert(launch, kill);
        self.tasks.spawn(async move {
            // Messages to workers that wait in the same turn go first: a fork is milliseconds.
            tokio::task::yield_now().await;
            (launch, supervise(&launcher, (launch, index), killed).await)
        });
    }

    /// Takes over one that another master has started, if it still runs; its end is reported like that of any other.
    pub(crate) fn adopt(&mut self, launch: LaunchId, started: Option<Started>) {
        let (kill, killed) = oneshot::channel();
        self.running.insert(launch, kill);
        self.tasks.spawn(async move {
            if let Some(started) = started {
                watch(launch, started, killed).await;
            }
            (launch, Exit::Unknown)
        });
    }

    /// Kills one, with everything that it started; its end is reported by [`Processes::next_ended`].
    pub(crate) fn kill(&mut self, launch: LaunchId) {
        self.running.remove(&launch);
    }

    /// Waits for the next process to end; for ever, if none runs. Safe to drop at any time.
    pub(crate) async fn next_ended(&mut self) -> (LaunchId, Exit) {
        let Some(ended) = self.tasks.join_next().await else {
            return std::future::pending().await;
        };
        let (launch, exit) = ended.expect("a supervising task neither panics nor is aborted");
        self.running.remove(&launch);
        (launch, exit)
    }

    /// Kills all and waits for them, for as long as the system takes to end a killed process.
    pub(crate) async fn end(mut self) {
        self.running.clear();
        let all_ended = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(END_TIMEOUT, all_ended).await.is_err() {
            warn!("processes that were killed have not ended; leaving them to the system");
        }
    }
}

/// Runs one process to its end, which `killed` hastens.
async fn supervise(
    launcher: &Launcher,
    (launch, index): (LaunchId, u32),
    killed: oneshot::Receiver<()>,
) -> Exit {
    let mut process = match launcher.spawn(launch, index) {
        Ok(child) => Process(child),
        Err(error) => return Exit::NotStarted(format!("{}: {error}", launcher.program.display())),
    };
    let group = process.pid();
    info!(launch = launch.0, pid = process.0.id(), "worker process started");
    if let Some(started) = process.0.id().and_then(Started::look_up)
        && let Err(error) = jobdir::note_process(&launcher.processes, launch, started)
    {
        warn!(launch = launch.0, %error, "can't note the process: another master would not find it");
    }
    let ended = tokio::select! {
        ended = process.0.wait() => ended,
        _ = killed => {
            process.kill_group();
            process.0.wait().await
        }
    };
    // What it started does not outlive it. (A group's number is not given out again while it has a member.)
    if let Some(group) = group {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    let exit = match ended {
        Ok(status) => exit_of(status),
        // Waiting for a child fails only if someone else in this process has waited for it.
        Err(error) => Exit::NotStarted(format!("its end was not seen: {error}")),
    };
    info!(launch = launch.0, ?exit, "worker process ended");
    exit
}

/// Waits for the end of a process that is no child, which `killed` hastens.
async fn watch(launch: LaunchId, started: Started, killed: oneshot::Receiver<()>) {
    let Some(pid) = i32::try_from(started.pid).ok().and_then(Pid::from_raw) else {
        return;
    };
    // In this order: what the descriptor stands for keeps its id, so it is the one that is looked at.
    let descriptor = rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from);
    if Started::look_up(started.pid) != Some(started) {
        return;
    }
    let group = Stranger(pid);
    let mut end = match descriptor.and_then(end_of) {
        Ok(end) => end,
        Err(error) => {
            warn!(launch = launch.0, pid = started.pid, %error, "can't watch a process that is no child; killing it");
            return;
        }
    };
    info!(launch = launch.0, pid = started.pid, "worker process taken over");
    // The thread tells, or fails to wait; either way there is nothing more to wait for.
    tokio::select! {
        _ = &mut end => {}
        _ = killed => {
            group.kill();
            let _ = end.await;
        }
    }
    // As for a child, what it started goes with it.
    drop(group);
    info!(launch = launch.0, pid = started.pid, "worker process ended");
}

/// The end of the process that `descriptor` stands for. A thread waits for it, which ends with the process: a descriptor
/// of a process can be polled and nothing else.
fn end_of(descriptor: OwnedFd) -> io::Result<oneshot::Receiver<()>> {
    let (ended, end) = oneshot::channel();
    std::thread::Builder::new().name("process".into()).spawn(move || {
        let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
        while rustix::event::poll(&mut polled, None) == Err(Errno::INTR) {}
        // Nobody may be waiting any more.
        let _ = ended.send(());
    })?;
    Ok(end)
}

/// A process that is no child, and that leads its own process group; takes it along when dropped.
struct Stranger(Pid);

impl Stranger {
    fn kill(&self) {
        // Fails only if the group has ended by itself.
        let _ = rustix::process::kill_process_group(self.0, Signal::KILL);
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A child that leads its own process group, and takes it along when dropped.
struct Process(Child);

impl Process {
    fn kill_group(&self) {
        if let Some(pid) = self.pid() {
            // Fails only if the group has ended by itself.
            let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        }
    }

    /// `None` when its end has been seen.
    fn pid(&self) -> Option<Pid> {
        self.0.id().and_then(|id| Pid::from_raw(id.cast_signed()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            self.kill_group();
            // Not reaped here: that is left to the runtime, which holds the child.
            let _ = rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        }
    }
}

fn exit_of(status: ExitStatus) -> Exit {
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, Some(signal)) => Exit::Signal(signal),
        (None, None) => Exit::NotStarted("it neither exited nor was killed".into()),
    }
}

const END_TIMEOUT: Duration = Duration::from_secs(5);
const RAYON_THREADS: &str = "RAYON_NUM_THREADS";
/// Numbers of fields in a process's `stat`, as its manual counts them.
const STAT_STATE: usize = 3;
const STAT_STARTTIME: usize = 22;

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::path::Path;

    use super::*;

    const LAUNCH: LaunchId = LaunchId(4);

    /// A launcher of shell scripts, and a pipe with a name that scripts open as `$PIPE`.
    struct Shell {
        folder: tempfile::TempDir,
    }

    impl Shell {
        fn new() -> Self {
            let shell = Self { folder: tempfile::tempdir().unwrap() };
            let made = std::process::Command::new("mkfifo").arg(shell.pipe()).status().unwrap();
            assert!(made.success());
            shell
        }

        fn pipe(&self) -> PathBuf {
            self.folder.path().join("pipe")
        }

        fn log(&self) -> String {
            fs::read_to_string(jobdir::worker_log(self.folder.path(), LAUNCH)).unwrap()
        }

        fn start(&self, script: &str) -> Processes {
            self.start_program(Path::new("/bin/sh"), &["-c", script])
        }

        fn start_program(&self, program: &Path, args: &[&str]) -> Processes {
            let mut processes = Processes::new(Launcher {
                program: program.into(),
                args: args.iter().map(Into::into).collect(),
                env: vec![("PIPE".into(), self.pipe().into())],
                logs: self.folder.path().into(),
                processes: self.folder.path().join("processes"),
            });
            processes.start(LAUNCH, 3);
            processes
        }

        /// Waits until a script has opened the pipe.
        async fn opened(&self) -> File {
            let pipe = self.pipe();
            tokio::task::spawn_blocking(|| File::open(pipe)).await.unwrap().unwrap()
        }
    }

    /// Waits until no process has the pipe open any more.
    async fn all_gone(mut pipe: File) {
        let read = tokio::task::spawn_blocking(move || pipe.read_to_end(&mut Vec::new()));
        assert_eq!(read.await.unwrap().unwrap(), 0);
    }

    /// Starts a child that keeps the pipe open for ever, then goes on.
    const LEAVE_A_CHILD: &str = "exec 3>$PIPE; sleep 100000 &";

    #[tokio::test]
    async fn how_a_process_ended_is_told() {
        let shell = Shell::new();
        for (script, exit) in [
            ("exit 0", Exit::Code(0)),
            ("exit 3", Exit::Code(3)),
            ("kill -KILL $$", Exit::Signal(9)),
            ("kill -SEGV $$", Exit::Signal(11)),
        ] {
            assert_eq!(shell.start(script).next_ended().await, (LAUNCH, exit), "{script}");
        }
        let absent = shell.folder.path().join("absent");
        let (_, exit) = shell.start_program(&absent, &[]).next_ended().await;
        let Exit::NotStarted(why) = exit else { panic!("{exit:?}") };
        assert!(why.starts_with(&absent.display().to_string()), "{why}");
    }

    #[tokio::test]
    async fn a_process_gets_its_environment_and_writes_to_its_log() {
        let shell = Shell::new();
        let script = "echo launch $ELASTICDL_LAUNCH at $ELASTICDL_INDEX in $PIPE with $RAYON_NUM_THREADS; read x; echo said $x >&2";
        assert_eq!(shell.start(script).next_ended().await.1, Exit::Code(0));
        let threads = std::env::var(RAYON_THREADS).unwrap_or_else(|_| "1".into());
        let expected = format!("launch 4 at 3 in {} with {threads}\nsaid\n", shell.pipe().display());
        assert_eq!(shell.log(), expected);
    }

    #[tokio::test]
    async fn a_killed_process_takes_along_what_it_started() {
        let shell = Shell::new();
        let mut processes = shell.start(&format!("{LEAVE_A_CHILD} wait"));
        let pipe = shell.opened().await;
        processes.kill(LAUNCH);
        assert_eq!(processes.next_ended().await, (LAUNCH, Exit::Signal(9)));
        all_gone(pipe).await;
    }

    #[tokio::test]
    async fn a_process_that_ends_by_itself_takes_along_what_it_started() {
        let shell = Shell::new();
        let mut processes = shell.start(&format!("{LEAVE_A_CHILD} exit 5"));
        let pipe = shell.opened().await;
        assert_eq!(processes.next_ended().await, (LAUNCH, Exit::Code(5)));
        all_gone(pipe).await;
    }

    /// A process that is no child of this one's runtime, in a group of its own, with a child that keeps the pipe open.
    fn stranger(shell: &Shell) -> std::process::Child {
        let mut command = std::process::Command::new("/bin/sh");
        command.args(["-c", &format!("{LEAVE_A_CHILD} wait")]).env("PIPE", shell.pipe());
        std::os::unix::process::CommandExt::process_group(&mut command, 0).spawn().unwrap()
    }

    fn none(shell: &Shell) -> Processes {
        let mut processes = shell.start("exit 0");
        processes.running.clear();
        processes.tasks.abort_all();
        processes.tasks = JoinSet::new();
        processes
    }

    #[tokio::test]
    async fn a_stranger_that_is_taken_over_is_watched_and_killed_like_a_child() {
        let shell = Shell::new();
        let mut child = stranger(&shell);
        let pipe = shell.opened().await;
        let mut processes = none(&shell);
        processes.adopt(LAUNCH, Started::look_up(child.id()));
        processes.kill(LAUNCH);
        assert_eq!(processes.next_ended().await, (LAUNCH, Exit::Unknown));
        all_gone(pipe).await;
        child.wait().unwrap();

        let mut child = stranger(&shell);
        let pipe = shell.opened().await;
        processes.adopt(LAUNCH, Started::look_up(child.id()));
        child.kill().unwrap();
        assert_eq!(processes.next_ended().await, (LAUNCH, Exit::Unknown));
        all_gone(pipe).await;
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn a_process_that_is_not_the_one_that_was_started_is_left_alone() {
        let shell = Shell::new();
        let mut child = stranger(&shell);
        let started = Started::look_up(child.id()).unwrap();
        let mut processes = none(&shell);
        processes.adopt(LAUNCH, Some(Started { at: started.at - 1, ..started }));
        assert_eq!(processes.next_ended().await, (LAUNCH, Exit::Unknown));
        processes.adopt(LAUNCH, None);
        assert_eq!(processes.next_ended().await, (LAUNCH, Exit::Unknown));
        drop(processes);
        assert_eq!(Started::look_up(child.id()), Some(started));
        let pipe = shell.opened().await;
        drop(Stranger(Pid::from_child(&child)));
        all_gone(pipe).await;
        child.wait().unwrap();
        assert_eq!(Started::look_up(child.id()), None);
    }

    #[tokio::test]
    async fn a_started_process_is_noted() {
        let shell = Shell::new();
        let mut processes = shell.start("read line < $PIPE; exit 0");
        let pipe = shell.pipe();
        let opened = tokio::task::spawn_blocking(move || File::options().write(true).open(pipe).unwrap());
        let pipe = opened.await.unwrap();
        let note = fs::read_to_string(shell.folder.path().join("processes")).unwrap();
        let fields: Vec<u64> = note.split_whitespace().map(|f| f.parse().unwrap()).collect();
        let [launch, pid, at] = fields[..] else { panic!("{note}") };
        let started = Started { pid: u32::try_from(pid).unwrap(), at };
        assert_eq!((launch, Started::look_up(started.pid)), (LAUNCH.0, Some(started)));
        drop(pipe);
        assert_eq!(processes.next_ended().await.1, Exit::Code(0));
    }

    #[tokio::test]
    async fn nothing_outlives_an_orderly_end() {
        let shell = Shell::new();
        let processes = shell.start(&format!("{LEAVE_A_CHILD} wait"));
        let pipe = shell.opened().await;
        processes.end().await;
        all_gone(pipe).await;
    }

    #[tokio::test]
    async fn nothing_outlives_a_drop() {
        let shell = Shell::new();
        let processes = shell.start(&format!("{LEAVE_A_CHILD} wait"));
        let pipe = shell.opened().await;
        drop(processes);
        all_gone(pipe).await;
    }

    #[test]
    fn nothing_outlives_a_panic_of_the_masters_task() {
        let shell = Shell::new();
        let (opened, pipe) = std::sync::mpsc::channel();
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            runtime().block_on(async {
                let _processes = shell.start(&format!("{LEAVE_A_CHILD} wait"));
                opened.send(shell.opened().await).unwrap();
                panic!("as planned");
            })
        }));
        assert!(panicked.is_err());
        runtime().block_on(all_gone(pipe.recv().unwrap()));
    }
}
