//! The thread of a process group: collective operations, one after the other.
//!
//! ```text
//!  Python                        this thread              watch
//!    begin_…(memory, done) ──►   collective operation     ends the ring at the deadline
//!                          ◄──   done(error)
//! ```
//!
//! It holds Python's lock only for `done`, so that neither of the two waits for the other while the
//! program computes.
//!
//! **Invariant:** the thread has ended before Python does: a thread that then waits for Python's
//! lock is ended by Python, which aborts the process.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use elasticdl::external::{ProgramRing, WorkerError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::borrowed::Borrowed;

/// The queue of a process group's operations.
#[derive(Debug)]
pub(crate) struct Operations {
    queue: Mutex<Option<Sender<Operation>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// An operation that was begun.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) act: Act,
    /// Time until the ring is ended.
    pub(crate) limit: Duration,
    /// Is called with an error or None.
    pub(crate) done: Py<PyAny>,
}

/// What an operation does.
#[derive(Debug)]
pub(crate) enum Act {
    /// Replaces floats by their sum over all ranks.
    AllReduce(Borrowed),
    /// Waits for all ranks.
    Barrier,
    /// Replaces memory by that of a rank.
    Broadcast(usize, Borrowed),
    /// Calls a function of Python, which uses the ring.
    Call(Py<PyAny>),
}

impl Operations {
    /// Starts the thread.
    pub(crate) fn start(ring: Arc<ProgramRing>) -> PyResult<Self> {
        let (queue, operations) = channel();
        let deadline = Arc::new(Deadline::default());
        let (running, ended) = channel();
        let watched = (Arc::clone(&ring), Arc::clone(&deadline));
        thread::Builder::new().name("ring-watch".into()).spawn(move || {
            let (ring, deadline) = watched;
            watch(&ring, &deadline, &ended);
        })?;
        let thread = thread::Builder::new().name("ring".into()).spawn(move || {
            run(&ring, &deadline, operations);
            drop(running);
        })?;
        Ok(Self { queue: Mutex::new(Some(queue)), thread: Mutex::new(Some(thread)) })
    }

    /// Begins an operation after those that were begun before.
    pub(crate) fn begin(&self, operation: Operation) -> PyResult<()> {
        let ended = || PyRuntimeError::new_err("the process group was shut down");
        self.queue().as_ref().ok_or_else(ended)?.send(operation).map_err(|_| ended())
    }

    /// Ends the thread after the operations that were begun, and waits for it, unless it is the
    /// caller.
    pub(crate) fn shut_down(&self, py: Python<'_>) {
        *self.queue() = None;
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let other = thread.take_if(|thread| thread.thread().id() != thread::current().id());
        drop(thread);
        if let Some(thread) = other {
            // A panic was reported by its thread.
            let _ = py.detach(|| thread.join());
        }
    }

    fn queue(&self) -> MutexGuard<'_, Option<Sender<Operation>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn run(ring: &ProgramRing, deadline: &Deadline, operations: Receiver<Operation>) {
    while let Ok(Operation { mut act, limit, done }) = operations.recv() {
        deadline.set(Some(Instant::now() + limit));
        let result = match &mut act {
            Act::AllReduce(memory) => {
                memory.floats().and_then(|floats| ring.all_reduce(floats).map_err(error_of))
            }
            Act::Barrier => ring.all_gather(&[]).map(drop).map_err(error_of),
            Act::Broadcast(root, memory) => ring.broadcast(*root, memory.bytes()).map_err(error_of),
            Act::Call(function) => {
                let called = Python::try_attach(|py| function.call0(py).map(drop));
                called.unwrap_or(Ok(()))
            }
        };
        deadline.set(None);
        let result = result.map_err(|error| {
            if deadline.is_passed() {
                return PyRuntimeError::new_err(format!(
                    "no result after {} s",
                    limit.as_secs_f64()
                ));
            }
            error
        });
        let mut ended = Some((act, done));
        let attached = Python::try_attach(|py| {
            let Some((act, done)) = ended.take() else { return };
            let error = result.err().map(|error| error.into_value(py));
            if let Err(error) = done.call1(py, (error,)) {
                error.print(py);
            }
            drop((act, done));
        });
        if attached.is_none() {
            // Python ends; what refers to its objects can't be dropped any more.
            std::mem::forget((ended, operations));
            return;
        }
    }
}

/// The deadline of the operation that runs.
#[derive(Debug, Default)]
struct Deadline {
    /// And whether one has passed.
    state: Mutex<(Option<Instant>, bool)>,
}

impl Deadline {
    fn set(&self, at: Option<Instant>) {
        self.state().0 = at;
    }

    /// Whether the ring was ended at a deadline.
    fn is_passed(&self) -> bool {
        self.state().1
    }

    fn state(&self) -> MutexGuard<'_, (Option<Instant>, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the ring when an operation takes longer than its limit.
fn watch(ring: &ProgramRing, deadline: &Deadline, ended: &Receiver<()>) {
    while ended.recv_timeout(WATCH_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let mut state = deadline.state();
        if state.0.is_some_and(|at| at < Instant::now()) {
            state.1 = true;
            ring.abort();
            return;
        }
    }
}

fn error_of(error: WorkerError) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

const WATCH_INTERVAL: Duration = Duration::from_millis(500);
