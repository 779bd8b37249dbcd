//! A pod of several workers: the program is started once for each, each on a GPU of its own.
//!
//! ```text
//!  supervisor (a pod's first process) ──starts──► workers LAUNCH, LAUNCH + 1, …: ordinary ranks
//!       SIGTERM, SIGINT ──────────forwarded──►
//! ```
//!
//! The workers end together, because their pod is replaced as a whole. When one fails, the others
//! get SIGTERM, so that the workers of other pods need not wait for their silence, and are killed
//! if they take too long. The supervisor exits with the code of the first worker that failed, which
//! becomes the exit code of the pod.
//!
//! **Invariants:** no worker outlives the supervisor, however that ends. Knows nothing about the
//! job.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::process::Command;
use std::time::{Duration, Instant};

use elasticdl_proto::gpu_instance;
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, getppid, kill_process,
    set_parent_process_death_signal, wait,
};
use tokio::signal::unix::{SignalKind, signal};

use crate::environment::{EXIT_DONE, EXIT_FAILED, EXIT_TERMINATED};

/// Settings of a pod of several workers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Supervisor {
    workers: u32,
    /// Launch id of the first worker; the others follow.
    first: u64,
    /// Threads of each worker, if the pod's share of CPUs is known and the user has not set the
    /// number.
    threads: Vec<(&'static str, u32)>,
}

/// The running workers, and the outcome of the others.
#[derive(Debug, Default)]
struct Children {
    running: BTreeSet<i32>,
    /// Exit code of the first worker that failed.
    failure: Option<u8>,
    /// Whether all workers were signalled from outside. The sender then enforces its own deadline.
    is_signalled: bool,
    /// Time at which the remaining workers are killed.
    kill_at: Option<Instant>,
}

impl Supervisor {
    /// Reads the settings through `variable` (usually the process's environment); `None` if this
    /// process is itself a worker.
    ///
    /// # Errors
    /// A description of the fault, for display to the user.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, String> {
        let number = |name: &str| -> Result<Option<u64>, String> {
            let parse = |text: String| {
                text.parse().map_err(|_| format!("{name} is `{text}`, not a number"))
            };
            variable(name).map(parse).transpose()
        };
        let Some(workers) = number(WORKERS)? else { return Ok(None) };
        if !(1..=WORKERS_MAX).contains(&workers) {
            return Err(format!("{WORKERS} is {workers}; it must be from 1 to {WORKERS_MAX}"));
        }
        if workers == 1 {
            return Ok(None);
        }
        let first = number("ELASTICDL_LAUNCH")?.ok_or("ELASTICDL_LAUNCH is not set")?;
        let share = |cpus: u64| u32::try_from(cpus / workers).unwrap_or(u32::MAX).max(1);
        let threads = number(CPUS)?.map(share);
        let threads =
            THREADS.map(|name| Some((name, threads.filter(|_| variable(name).is_none())?)));
        let threads = threads.into_iter().flatten().collect();
        Ok(Some(Self { workers: workers as u32, first, threads }))
    }

    /// Runs the workers, each of which is `program` with its arguments, until all have ended.
    /// Returns the exit code of the pod.
    pub(crate) fn run(&self, program: &[OsString]) -> u8 {
        // This thread must start the workers: they are killed when the thread that started them
        // ends.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        match runtime.and_then(|runtime| runtime.block_on(self.supervise(program))) {
            Ok(code) => code,
            Err(error) => {
                tracing::error!(%error, "the workers of this pod can't be started");
                EXIT_FAILED
            }
        }
    }

    async fn supervise(&self, program: &[OsString]) -> io::Result<u8> {
        // Installed before the first worker starts, so that no signal is missed.
        let mut child = signal(SignalKind::child())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut children = Children::default();
        for index in 0..self.workers {
            match self.command(program, index)?.spawn() {
                Ok(worker) => children.running.insert(worker.id().cast_signed()),
                Err(error) => {
                    children.send(Signal::KILL);
                    return Err(error);
                }
            };
        }
        loop {
            while let Some((pid, status)) = next_ended()? {
                if children.on_ended(Instant::now(), pid.as_raw_nonzero().get(), code_of(status)) {
                    children.send(Signal::TERM);
                }
            }
            if children.running.is_empty() {
                return Ok(children.failure.unwrap_or(EXIT_DONE));
            }
            let kill_at = children.kill_at.map(tokio::time::Instant::from_std);
            let deadline =
                tokio::time::sleep_until(kill_at.unwrap_or_else(tokio::time::Instant::now));
            tokio::select! {
                _ = child.recv() => {}
                _ = terminate.recv() => children.forward(Signal::TERM),
                _ = interrupt.recv() => children.forward(Signal::INT),
                () = deadline, if kill_at.is_some() => {
                    tracing::warn!("the workers did not leave in time; killing them");
                    children.kill_at = None;
                    children.send(Signal::KILL);
                }
            }
        }
    }

    /// The worker of this index.
    fn command(&self, program: &[OsString], index: u32) -> io::Result<Command> {
        let (program, arguments) = program.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("ELASTICDL_LAUNCH", (self.first + u64::from(index)).to_string())
            .env("ELASTICDL_INDEX", index.to_string())
            .env(SUPERVISOR, getpid().as_raw_nonzero().to_string())
            .env_remove(WORKERS);
        let instance = gpu_instance(index, |name| std::env::var(name).ok());
        command.envs(instance.map(|instance| ("CUDA_VISIBLE_DEVICES", instance)));
        command.envs(self.threads.iter().map(|(name, threads)| (name, threads.to_string())));
        Ok(command)
    }
}

impl Children {
    /// A process has ended: a worker, or an orphan of one. Returns whether to terminate the others.
    fn on_ended(&mut self, now: Instant, pid: i32, code: u8) -> bool {
        if !self.running.remove(&pid) {
            return false;
        }
        if code == EXIT_DONE || self.failure.is_some() {
            return false;
        }
        tracing::warn!(pid, code, others = self.running.len(), "a worker of this pod failed");
        self.failure = Some(code);
        let terminates_others = !self.is_signalled && !self.running.is_empty();
        if terminates_others {
            self.kill_at = Some(now + LEAVE_TIMEOUT);
        }
        terminates_others
    }

    fn forward(&mut self, sent: Signal) {
        self.is_signalled = true;
        self.send(sent);
    }

    /// No process in `running` has been reaped, so each id is still its own.
    fn send(&self, sent: Signal) {
        for pid in self.running.iter().filter_map(|&pid| Pid::from_raw(pid)) {
            let _ = kill_process(pid, sent);
        }
    }
}

/// Makes the kernel kill this process when its supervisor, if it has one, ends.
///
/// # Errors
/// The supervisor has already ended, or the system refuses.
pub(crate) fn die_with_supervisor(variable: impl Fn(&str) -> Option<String>) -> Result<(), String> {
    let Some(supervisor) = variable(SUPERVISOR) else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| error.to_string())?;
    // The supervisor may have ended before the call.
    match getppid().map(|parent| parent.as_raw_nonzero().to_string()) {
        Some(parent) if parent == supervisor => Ok(()),
        _ => Err(format!("the supervisor, process {supervisor}, is gone")),
    }
}

/// The next process that has ended, if any.
fn next_ended() -> io::Result<Option<(Pid, WaitStatus)>> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Err(Errno::INTR) => {}
            Err(Errno::CHILD) => return Ok(None),
            ended => return Ok(ended?),
        }
    }
}

/// Exit code by the convention of shells and containers.
fn code_of(status: WaitStatus) -> u8 {
    let code = status.exit_status().or_else(|| Some(128 + status.terminating_signal()?));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(EXIT_TERMINATED as u8)
}

/// Number of workers of the pod.
pub(crate) const WORKERS: &str = "ELASTICDL_WORKERS";
/// Number of CPUs that they share.
const CPUS: &str = "ELASTICDL_CPUS";
/// Process id of the supervisor, for a worker.
const SUPERVISOR: &str = "ELASTICDL_SUPERVISOR";
/// Variables with the number of threads of rayon, and of OpenMP and BLAS libraries.
const THREADS: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];
/// Time in which the remaining workers must leave: well below the time after which the master
/// deletes their pod, which would hide its exit code.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);
const WORKERS_MAX: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn read(set: &[(&str, &str)]) -> Result<Option<Supervisor>, String> {
        Supervisor::read(|name| {
            set.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).into())
        })
    }

    fn children() -> Children {
        Children { running: [10, 11, 12].into(), ..Children::default() }
    }

    #[test]
    fn a_number_of_workers_above_one_makes_a_supervisor() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[(WORKERS, "1")]), Ok(None));
        let launch = ("ELASTICDL_LAUNCH", "9");
        let threads = |more: &[(&str, &str)]| {
            let set = [&[(WORKERS, "4"), launch], more].concat();
            let Supervisor { workers, first, threads } = read(&set).unwrap().unwrap();
            assert_eq!((workers, first), (4, 9));
            threads
        };
        let [rayon, omp] = THREADS;
        assert_eq!(threads(&[]), []);
        assert_eq!(threads(&[(CPUS, "9")]), [(rayon, 2), (omp, 2)]);
        assert_eq!(threads(&[(CPUS, "1")]), [(rayon, 1), (omp, 1)]);
        assert_eq!(threads(&[(CPUS, "8"), (rayon, "3")]), [(omp, 2)]);
        for (value, wanted) in
            [("0", "from 1 to 64"), ("65", "from 1 to 64"), ("two", "not a number")]
        {
            let error = read(&[(WORKERS, value), launch]).unwrap_err();
            assert!(error.contains(WORKERS) && error.contains(wanted), "{error}");
        }
        assert_eq!(read(&[(WORKERS, "2")]).unwrap_err(), "ELASTICDL_LAUNCH is not set");
    }

    #[test]
    fn the_first_failure_is_the_pods_and_the_others_have_a_deadline() {
        let (mut children, now) = (children(), Instant::now());
        assert!(!children.on_ended(now, 99, 3), "no worker");
        assert!(!children.on_ended(now, 10, 0));
        assert_eq!((children.failure, children.kill_at), (None, None));
        assert!(children.on_ended(now, 11, 139));
        assert_eq!((children.failure, children.kill_at), (Some(139), Some(now + LEAVE_TIMEOUT)));
        assert!(!children.on_ended(now, 12, 1));
        assert_eq!((children.failure, children.running.len()), (Some(139), 0));
    }

    #[test]
    fn workers_that_were_signalled_from_outside_are_not_killed() {
        let (mut children, now) = (children(), Instant::now());
        children.is_signalled = true;
        assert!(!children.on_ended(now, 10, 143));
        assert_eq!((children.failure, children.kill_at), (Some(143), None));
    }

    #[test]
    fn the_last_worker_terminates_no_other() {
        let mut children = Children { running: [10].into(), ..Children::default() };
        assert!(!children.on_ended(Instant::now(), 10, 7));
        assert_eq!((children.failure, children.kill_at), (Some(7), None));
    }
}
