//! What this worker does, for `elasticdl debug` and for the log of a worker that hangs.
//!
//! A thread of its own makes the report, so that a trainer that hangs is shown by another one:
//!
//! | from | what |
//! |---|---|
//! | the trainer, which notes each task that it begins | what it does, and since when |
//! | the group's [`Progress`], and storage | what it waits for |
//! | a signal to each thread in turn ([`stacks`]) | native stacks |
//! | a thread of Python's, or a signal ([`program`]) | Python's stacks |
//! | the kernel | states of threads, bytes of connections |
//!
//! **Invariant:** the report waits for no lock of another thread but the allocator's, and takes at
//! most some three seconds, whatever hangs.

pub(crate) mod activity;
mod links;
pub(crate) mod paces;
pub(crate) mod program;
mod stacks;
mod symbols;

use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::time::Duration;

use elasticdl_collective::Progress;
use elasticdl_data::worker::wait_status;
use elasticdl_proto::{KernelThread, Stall, StallReport, ThreadReport, WorkerReport};

use self::activity::CurrentActivity;
use self::links::Links;
use self::program::PythonStacks;
use self::stacks::Captured;
use self::symbols::Names;

/// What a report is made of.
#[derive(Clone, Debug)]
pub(crate) struct Inspector {
    pub(crate) activity: Arc<CurrentActivity>,
    /// The progress of the group's operations, once it exists.
    pub(crate) progress: Arc<OnceLock<Progress>>,
    /// Port of the master.
    pub(crate) master_port: Option<u16>,
}

impl Inspector {
    /// Reports what this process does, in JSON of at most `bytes_max`. `None` while another report
    /// is made.
    pub(crate) fn report(&self, bytes_max: usize) -> Option<WorkerReport> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = match ONE_AT_A_TIME.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }?;
        let before = Links::read();
        let activity = self.activity.report();
        let stall = self.progress.get().and_then(Progress::stall).map(stall_report);
        let storage = wait_status().storage;
        let mut python = program::read();
        let captured = stacks::capture_all();
        let omitted = captured.len().saturating_sub(THREADS_MAX) as u64;
        let shown = &captured[..captured.len().min(THREADS_MAX)];
        let names = Names::of(shown.iter().flat_map(Captured::addresses));
        let threads = shown.iter().map(|thread| report_of(thread, &names, &mut python));
        let mut threads: Vec<ThreadReport> = threads.collect();
        threads.extend(python.into_iter().map(only_python));
        before.await_sample(LINKS_SAMPLE);
        let links = Links::read().since(&before, self.master_port);
        let report = WorkerReport { activity, stall, storage, threads, omitted, links };
        Some(report.within(bytes_max))
    }
}

/// Where the trainer waits in a sum, as heartbeats tell it.
pub(crate) fn stall_of(stall: elasticdl_collective::Stall) -> Stall {
    let elasticdl_collective::Stall {
        generation,
        operation,
        received,
        sent,
        waits_for_next,
        far,
        since,
    } = stall;
    let generation = elasticdl_proto::Generation(generation);
    let far = far.map(|member| member.map(elasticdl_proto::WorkerId));
    Stall { generation, operation, received, sent, waits_for_next, far, since }
}

fn stall_report(stall: elasticdl_collective::Stall) -> StallReport {
    let for_s = seconds(stall.since);
    let stall = stall_of(stall);
    let Stall { generation, operation, received, sent, waits_for_next, .. } = stall;
    let far = stall.far.into_iter().flatten().collect();
    StallReport { generation, operation, received, sent, waits_for_next, far, for_s }
}

fn report_of(thread: &Captured, names: &Names, python: &mut PythonStacks) -> ThreadReport {
    ThreadReport {
        kernel: thread.kernel.clone(),
        frames: thread.addresses().map(|address| names.name(address)).collect(),
        python: thread.pthread.and_then(|id| python.remove(&id)).unwrap_or_default(),
    }
}

/// A thread of Python's that has not answered the signal.
fn only_python((id, python): (u64, Vec<String>)) -> ThreadReport {
    let name = format!("Python's thread {id:#x}");
    ThreadReport {
        kernel: KernelThread { name, ..KernelThread::default() },
        python,
        ..ThreadReport::default()
    }
}

fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

/// Most threads of a report.
const THREADS_MAX: usize = 256;
/// Time over which the bytes of connections are counted, at least.
const LINKS_SAMPLE: Duration = Duration::from_millis(300);
