//! The clock and the threads of a worker's process.

use std::fmt::Debug;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// The clock and the threads of a process.
pub trait Machine: Debug + Send + Sync {
    /// The time.
    fn now(&self) -> Instant;

    /// Starts a thread that does `work`.
    ///
    /// # Errors
    /// The system starts no more threads.
    fn spawn(&self, name: &'static str, work: Box<dyn FnOnce() + Send>) -> io::Result<()>;

    /// Blocks this thread until `is_ready`, for `timeout` at most. `is_ready` gets the time for
    /// which it may block itself.
    fn block(&self, timeout: Duration, is_ready: &mut dyn FnMut(Duration) -> bool);
}

/// The operating system.
#[derive(Debug)]
pub(crate) struct System;

impl Machine for System {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn spawn(&self, name: &'static str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        thread::Builder::new().name(name.into()).spawn(work).map(drop)
    }

    fn block(&self, timeout: Duration, is_ready: &mut dyn FnMut(Duration) -> bool) {
        is_ready(timeout);
    }
}

/// Receives a message; blocks for `timeout` at most.
///
/// # Errors
/// As for [`Receiver::recv_timeout`].
pub(crate) fn receive<T>(
    machine: &dyn Machine,
    from: &Receiver<T>,
    timeout: Duration,
) -> Result<T, RecvTimeoutError> {
    let mut received = Err(RecvTimeoutError::Timeout);
    machine.block(timeout, &mut |wait| {
        received = from.recv_timeout(wait);
        !matches!(received, Err(RecvTimeoutError::Timeout))
    });
    received
}
