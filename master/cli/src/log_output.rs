//! The log of a master in a pod: standard error, as far as that takes it.
//!
//! **Invariant:** a line of the log neither fails nor blocks the master: a line that standard error
//! does not take is dropped. It is a pipe whose reader may be gone or stopped, as on a node with a
//! full disk.

use std::io::{self, Write};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Standard error for lines that may be dropped.
pub(crate) struct LogOutput;

impl Write for LogOutput {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut stderr = io::stderr().lock();
        // A pipe that is ready takes so much without blocking.
        for part in line.chunks(PIPE_BUF) {
            let mut polled = [PollFd::new(&stderr, PollFlags::OUT)];
            let is_polled = poll(&mut polled, Some(&Timespec::default())).is_ok();
            if !is_polled || polled[0].revents() != PollFlags::OUT {
                break;
            }
            // A full disk, for example.
            let _ = stderr.write_all(part);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Linux' `PIPE_BUF`.
const PIPE_BUF: usize = 4096;
