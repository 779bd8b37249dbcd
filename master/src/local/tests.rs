use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::launcher::{THREADS, share_of};
use super::*;
use crate::jobdir::{Owner, ProgramCopy};

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
        let mut processes = Processes::new(self.launcher(program, args));
        processes.start(LAUNCH, 3, &[]);
        processes
    }

    fn launcher(&self, program: &Path, args: &[&str]) -> Launcher {
        Launcher {
            program: program.into(),
            args: args.iter().map(Into::into).collect(),
            env: vec![("PIPE".into(), self.pipe().into())],
            owner: Owner::of(self.folder.path()),
            logs: self.folder.path().into(),
            processes: self.folder.path().join("processes"),
            copy: None,
            threads: 3,
            hosts: None,
        }
    }

    /// Waits until a script has opened the pipe.
    async fn opened(&self) -> File {
        let pipe = self.pipe();
        tokio::task::spawn_blocking(|| File::open(pipe)).await.unwrap().unwrap()
    }
}

/// Waits for the next process to end.
async fn next_ended(processes: &mut Processes) -> (LaunchId, Exit) {
    loop {
        if let (launch, BackendEvent::Ended(exit)) = processes.next().await {
            return (launch, exit);
        }
    }
}

/// Waits until no process has the pipe open any more.
async fn all_gone(mut pipe: File) {
    let read = tokio::task::spawn_blocking(move || pipe.read_to_end(&mut Vec::new()));
    assert_eq!(read.await.unwrap().unwrap(), 0);
}

/// Starts a child that keeps the pipe open, and continues.
const LEAVE_A_CHILD: &str = "exec 3>$PIPE; sleep 100000 &";

#[tokio::test]
async fn the_exit_of_a_process_is_reported() {
    let shell = Shell::new();
    for (script, exit) in [
        ("exit 0", Exit::Code(0)),
        ("exit 3", Exit::Code(3)),
        ("kill -KILL $$", Exit::Signal(9)),
        ("kill -SEGV $$", Exit::Signal(11)),
        ("sh -c 'kill -KILL $$'; exit $?", Exit::Signal(9)),
    ] {
        assert_eq!(next_ended(&mut shell.start(script)).await, (LAUNCH, exit), "{script}");
    }
    let absent = shell.folder.path().join("absent");
    let (_, exit) = next_ended(&mut shell.start_program(&absent, &[])).await;
    let Exit::NotStarted(why) = exit else { panic!("{exit:?}") };
    assert!(why.starts_with(&absent.display().to_string()), "{why}");
}

#[tokio::test]
async fn a_process_gets_its_environment_and_writes_to_its_log() {
    let shell = Shell::new();
    let script = "echo launch $ELASTICDL_LAUNCH at $ELASTICDL_INDEX in $PIPE with \
        $RAYON_NUM_THREADS and $OMP_NUM_THREADS; read x; echo said $x >&2";
    assert_eq!(next_ended(&mut shell.start(script)).await.1, Exit::Code(0));
    let [rayon, omp] =
        THREADS.map(|variable| std::env::var(variable).unwrap_or_else(|_| "3".into()));
    let pipe = shell.pipe().display().to_string();
    let expected = format!("launch 4 at 3 in {pipe} with {rayon} and {omp}\nsaid\n");
    assert_eq!(shell.log(), expected);
}

#[test]
fn workers_share_the_cores_of_the_machine() {
    for (cores, workers, threads) in [(16, 4, 4), (16, 3, 5), (2, 4, 1), (1, 1, 1), (8, 0, 8)] {
        assert_eq!(share_of(cores, workers), threads, "{cores} cores, {workers} workers");
    }
}

#[tokio::test]
async fn the_last_output_of_a_process_is_reported_before_its_end() {
    let shell = Shell::new();
    let mut processes = shell.start("echo one; echo two >&2; exit 2");
    let expected =
        [BackendEvent::OutputTail("one\ntwo".into()), BackendEvent::Ended(Exit::Code(2))];
    for event in expected {
        assert_eq!(processes.next().await, (LAUNCH, event));
    }
    let log = jobdir::worker_log(shell.folder.path(), LAUNCH);
    assert_eq!(fs::metadata(log).unwrap().permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn a_program_that_never_sends_a_hello_is_reported_soon_and_started_again() {
    let shell = Shell::new();
    let mut processes = shell.start("exec sleep 100000");
    tokio::time::pause();
    let (launch, BackendEvent::Noted(text)) = processes.next().await else { panic!() };
    assert!(
        launch == LAUNCH && text.contains("has not joined the job yet: sh -c must call"),
        "{text}"
    );
    processes.kill(LAUNCH);
    assert_eq!(next_ended(&mut processes).await, (LAUNCH, Exit::Signal(9)));
    processes.start(LaunchId(5), 3, &[]);
    let (LaunchId(5), BackendEvent::Noted(_)) = processes.next().await else { panic!() };
    processes.kill(LaunchId(5));
    assert_eq!(next_ended(&mut processes).await, (LaunchId(5), Exit::Signal(9)));
    // A process that is killed after its hello is started again.
    let mut processes = shell.start("exec sleep 100000");
    processes.on_hello(LAUNCH);
    processes.kill(LAUNCH);
    next_ended(&mut processes).await;
    processes.start(LAUNCH, 3, &[]);
    processes.kill(LAUNCH);
    assert_eq!(next_ended(&mut processes).await, (LAUNCH, Exit::Signal(9)));
}

#[test]
fn a_program_that_imports_for_long_is_not_said_to_be_one_that_never_joins() {
    let hint = |seconds, is_busy| hint(Duration::from_secs(seconds), is_busy);
    assert_eq!([hint(14, false), hint(15, true), hint(59, true)], [const { None }; 3]);
    assert_eq!(hint(15, false).unwrap(), "started 15 s ago and has not joined the job yet");
    assert!(hint(60, true).unwrap().ends_with("is busy: it imports, reads or computes"));
}

#[tokio::test]
async fn a_rebuilt_program_is_started_from_its_copy() {
    let shell = Shell::new();
    let [program, copy] = ["program", "copy"].map(|name| shell.folder.path().join(name));
    fs::copy("/bin/cat", &program).unwrap();
    let kept = ProgramCopy::make(&program, copy).unwrap();
    let launcher = shell.launcher(&program, &["/proc/self/cmdline"]).with_copy(Some(kept));
    fs::remove_file(&program).unwrap();
    fs::write(&program, "#!/bin/sh\nexit 9").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut processes = Processes::new(launcher);
    for _ in 0..2 {
        processes.start(LAUNCH, 3, &[]);
        assert_eq!(next_ended(&mut processes).await, (LAUNCH, Exit::Code(0)));
        // Its `argv[0]` is still the original path.
        assert_eq!(shell.log(), format!("{}\0/proc/self/cmdline\0", program.display()));
    }
    processes.start(LAUNCH, 3, &[]);
    let reported = processes.flags.change_reported.load(Ordering::Relaxed);
    assert!(reported, "the change was not reported");
}

#[tokio::test]
async fn killing_a_process_kills_its_children() {
    let shell = Shell::new();
    let mut processes = shell.start(&format!("{LEAVE_A_CHILD} wait"));
    let pipe = shell.opened().await;
    processes.kill(LAUNCH);
    assert_eq!(next_ended(&mut processes).await, (LAUNCH, Exit::Signal(9)));
    all_gone(pipe).await;
}

#[tokio::test]
async fn the_end_of_a_process_kills_its_children() {
    let shell = Shell::new();
    let mut processes = shell.start(&format!("{LEAVE_A_CHILD} exit 5"));
    let pipe = shell.opened().await;
    assert_eq!(next_ended(&mut processes).await, (LAUNCH, Exit::Code(5)));
    all_gone(pipe).await;
}

/// A process that this runtime does not supervise, in its own group, with a child that keeps the
/// pipe open.
fn adopted_process(shell: &Shell) -> std::process::Child {
    let mut command = std::process::Command::new("/bin/sh");
    command.args(["-c", &format!("{LEAVE_A_CHILD} wait")]).env("PIPE", shell.pipe());
    std::os::unix::process::CommandExt::process_group(&mut command, 0).spawn().unwrap()
}

fn without_processes(shell: &Shell) -> Processes {
    let mut processes = shell.start("exit 0");
    processes.running.clear();
    processes.tasks.abort_all();
    processes.tasks = JoinSet::new();
    processes
}

#[tokio::test]
async fn an_adopted_process_is_watched_and_killed_like_a_child() {
    let shell = Shell::new();
    let mut child = adopted_process(&shell);
    let pipe = shell.opened().await;
    let mut processes = without_processes(&shell);
    processes.adopt(LAUNCH, ProcessIdentity::look_up(child.id()));
    processes.kill(LAUNCH);
    assert_eq!(next_ended(&mut processes).await, (LAUNCH, Exit::Unknown));
    all_gone(pipe).await;
    child.wait().unwrap();

    let mut child = adopted_process(&shell);
    let pipe = shell.opened().await;
    processes.adopt(LAUNCH, ProcessIdentity::look_up(child.id()));
    child.kill().unwrap();
    assert_eq!(next_ended(&mut processes).await, (LAUNCH, Exit::Unknown));
    all_gone(pipe).await;
    child.wait().unwrap();

    // It ends just before it is taken over.
    let mut child = adopted_process(&shell);
    let pipe = shell.opened().await;
    let started = ProcessIdentity::look_up(child.id());
    child.kill().unwrap();
    while ProcessIdentity::look_up(child.id()).is_some() {
        tokio::task::yield_now().await;
    }
    processes.adopt(LAUNCH, started);
    assert_eq!(next_ended(&mut processes).await, (LAUNCH, Exit::Unknown));
    all_gone(pipe).await;
    child.wait().unwrap();
}

#[tokio::test]
async fn a_process_that_reuses_a_pid_is_not_touched() {
    let shell = Shell::new();
    let mut child = adopted_process(&shell);
    let started = ProcessIdentity::look_up(child.id()).unwrap();
    let mut processes = without_processes(&shell);
    processes
        .adopt(LAUNCH, Some(ProcessIdentity { start_ticks: started.start_ticks - 1, ..started }));
    assert_eq!(next_ended(&mut processes).await, (LAUNCH, Exit::Unknown));
    processes.adopt(LAUNCH, None);
    assert_eq!(next_ended(&mut processes).await, (LAUNCH, Exit::Unknown));
    drop(processes);
    assert_eq!(ProcessIdentity::look_up(child.id()), Some(started));
    let pipe = shell.opened().await;
    drop(AdoptedGroup(Pid::from_child(&child)));
    all_gone(pipe).await;
    child.wait().unwrap();
    assert_eq!(ProcessIdentity::look_up(child.id()), None);
}

#[tokio::test]
async fn a_started_process_is_written_to_the_process_list() {
    let shell = Shell::new();
    let mut processes = shell.start("read line < $PIPE; exit 0");
    let pipe = shell.pipe();
    let opened =
        tokio::task::spawn_blocking(move || File::options().write(true).open(pipe).unwrap());
    let pipe = opened.await.unwrap();
    let note = fs::read_to_string(shell.folder.path().join("processes")).unwrap();
    let fields = note.split_whitespace().take(3).map(|f| f.parse().unwrap());
    let fields: Vec<u64> = fields.collect();
    let [launch, pid, at] = fields[..] else { panic!("{note}") };
    let started = ProcessIdentity { pid: u32::try_from(pid).unwrap(), start_ticks: at };
    assert_eq!((launch, ProcessIdentity::look_up(started.pid)), (LAUNCH.0, Some(started)));
    drop(pipe);
    assert_eq!(next_ended(&mut processes).await.1, Exit::Code(0));
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

#[tokio::test]
async fn no_worker_is_started_in_the_directory_of_another_job() {
    let shell = Shell::new();
    let token = shell.folder.path().join("token");
    fs::write(&token, "0".repeat(64)).unwrap();
    let mut processes = Processes::new(shell.launcher(Path::new("/bin/sh"), &["-c", "exit 0"]));
    fs::write(token, "1".repeat(64)).unwrap();
    processes.start(LAUNCH, 3, &[]);
    let (launch, exit) = next_ended(&mut processes).await;
    assert!(matches!(&exit, Exit::NotStarted(why) if why.contains("another job")), "{exit:?}");
    assert_eq!((launch, jobdir::worker_log(shell.folder.path(), LAUNCH).exists()), (LAUNCH, false));
}
