//! `elasticdl host-process`: runs a worker on this host, for the master of a job on another one.
//!
//! Its input says what to run. The worker is of this process's group, so that who ends the group
//! ends the worker, too. When no process reads what it prints any more, as when its connection is
//! gone, both end. If this process is killed, the system kills the worker: it would keep the
//! connection open, and nothing would end it later.

use std::env::current_exe;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read as _, stdin, stdout};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio, id};

use elasticdl_master::local::hosts::HostLaunch;
use elasticdl_master::local::{env_of_slot, processes_of_group, share_of_cores};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, getpgrp, getpid, getppid, kill_process, kill_process_group,
    pidfd_open, set_parent_process_death_signal,
};
use serde_json::Deserializer;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use crate::process::{Failure, cannot};
use crate::scratch::Scratch;

/// Runs the worker to its end. Returns its exit code; 128 and its number for a signal, as shells.
///
/// With arguments, this process is to become the worker of the process that the first one names:
/// the others are the program and its arguments.
pub(super) fn run(worker: &[OsString]) -> Result<u8, Failure> {
    if let [parent, program, args @ ..] = worker {
        let doing = format!("start {}", program.display());
        return Err(cannot(&doing)(become_worker(parent, program, args)));
    }
    handle_term().map_err(cannot("handle SIGTERM"))?;
    // Some starters (mpirun) pass on what they read, and never its end.
    let input = Deserializer::from_reader(stdin().take(LAUNCH_BYTES_MAX));
    let launch = match input.into_iter().next() {
        Some(Ok(launch)) => launch,
        read => {
            let why = read.and_then(Result::err).map(|error| format!(": {error}"));
            let why = why.unwrap_or_default();
            let error = format!("the master of a job starts this command, of its own build{why}");
            return Err(Failure::usage(error));
        }
    };
    run_launch(launch)
}

/// Lets the worker leave in order where SIGTERM is sent to all processes, as by Slurm: this one
/// ends when the worker has. The worker does not inherit it.
fn handle_term() -> io::Result<()> {
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let _entered = runtime.enter();
    // The handler stays for the life of the process.
    signal(SignalKind::terminate()).map(drop)
}

fn run_launch(launch: HostLaunch) -> Result<u8, Failure> {
    let folder = Path::new(&launch.folder);
    if !folder.is_dir() {
        return Err(Failure::failed(format!(
            "this host has no folder {}, the working directory of the job: a host needs the \
             program, its files and the data at the same paths",
            folder.display()
        )));
    }
    let temporary = std::env::temp_dir();
    let files = Scratch::create(&temporary, SCRATCH).and_then(|files| {
        for (variable, contents) in &launch.files {
            let path = files.path.join(variable);
            fs::write(&path, contents).map_err(cannot(&format!("write {}", path.display())))?;
        }
        Ok(files)
    });
    let files = files.map_err(|failure| {
        let text = format!("{}; on this host, TMPDIR may name another folder", failure.text);
        Failure { text, ..failure }
    })?;
    let program = launch.program.display().to_string();
    let mut worker = start(launch, &files).map_err(cannot(&format!("start {program}")))?;
    let ended = wait(&mut worker);
    end_others();
    let ended = ended.map_err(cannot(&format!("wait for {program}")))?;
    let signal = ended.signal().and_then(|signal| u8::try_from(signal).ok());
    // ssh's own code means that the connection was lost.
    let code = || (ended.code().unwrap_or(1) as u8).min(CODE_MAX);
    Ok(signal.map_or_else(code, |signal| 128 + signal))
}

/// Becomes the program, which ends with its parent. Returns why not.
fn become_worker(parent: &OsStr, program: &OsStr, args: &[OsString]) -> io::Error {
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return error.into();
    }
    // The parent may have ended before.
    if getppid().is_none_or(|id| *id.as_raw_nonzero().to_string() != *parent) {
        return io::Error::other("the process that has started it is gone");
    }
    Command::new(program).args(args).exec()
}

fn start(launch: HostLaunch, scratch: &Scratch) -> io::Result<Child> {
    let HostLaunch { program, args, env, folder, files, slot: (slot, slots) } = launch;
    let mut command = Command::new(current_exe()?);
    command.args(["host-process", "--", &id().to_string()]).arg(program);
    for (variable, _) in files {
        command.env(&variable, scratch.path.join(&variable));
    }
    command.args(args).envs(env).current_dir(folder).stdin(Stdio::null());
    command.envs(env_of_slot(slot, share_of_cores(slots))).spawn()
}

/// Waits for the worker's end, and ends it if no process reads what it prints.
fn wait(worker: &mut Child) -> io::Result<ExitStatus> {
    let id = Pid::from_child(worker);
    let process = pidfd_open(id, PidfdFlags::empty())?;
    // What is polled for no event still tells that its other end is closed.
    let output = stdout();
    let mut polled = [
        PollFd::new(&process, PollFlags::IN),
        PollFd::from_borrowed_fd(output.as_fd(), PollFlags::empty()),
    ];
    loop {
        match poll(&mut polled, None) {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        if polled[1].revents().intersects(PollFlags::ERR | PollFlags::HUP) {
            let _ = kill_process_group(getpgrp(), Signal::KILL);
        }
        if !polled[0].revents().is_empty() {
            return worker.wait();
        }
    }
}

/// Ends the other processes of this group, such as those that the worker has left: they keep the
/// connection open. The shell that has started this process ends by itself.
fn end_others() {
    let spared = [Some(getpid()), getppid()];
    let others = processes_of_group(getpgrp()).filter(|process| !spared.contains(&Some(*process)));
    for process in others {
        // It may have ended.
        let _ = kill_process(process, Signal::KILL);
    }
}

const CODE_MAX: u8 = 254;
/// More is no launch.
const LAUNCH_BYTES_MAX: u64 = 16 << 20;
/// Names of the folders with a worker's token begin with this.
const SCRATCH: &str = "elasticdl-host-";
