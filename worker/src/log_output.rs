//! The log of a worker: standard error, as far as that takes it.
//!
//! **Invariant:** a line of the log neither fails nor blocks a thread: a line that standard error
//! does not take is dropped. Standard error is a file on a disk that may be full, or a pipe whose
//! reader may be gone or stopped.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, panic, thread};

use elasticdl_proto::{LogFormat, LogLines, LogSource, bytes_of_hex, run_id};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing_subscriber::fmt::time::SystemTime;

use crate::supervisor::WORKERS;

/// Sets up logging to the standard error stream, in the format that [`LogFormat::VARIABLE`] names.
/// `filter`: unless `ELASTICDL_LOG` is set.
///
/// # Errors
/// There is no such format.
pub(crate) fn log(filter: &str) -> Result<(), String> {
    let variable = |name: &str| std::env::var(name).ok();
    let format = variable(LogFormat::VARIABLE).unwrap_or_else(|| LogFormat::Text.name().into());
    let format: LogFormat =
        format.parse().map_err(|why| format!("{}: {why}", LogFormat::VARIABLE))?;
    let filter = tracing_subscriber::EnvFilter::try_from_env("ELASTICDL_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(filter));
    // A program that has set up its own logging keeps it. The subscriber would report a failed
    // write by `eprintln!`, which panics if standard error fails.
    let is_set = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| LogOutput)
        .log_internal_errors(false)
        .with_ansi(false)
        .event_format(LogLines::new(format, source(variable), SystemTime))
        .try_init()
        .is_ok();
    if is_set && format == LogFormat::Json {
        panic::set_hook(Box::new(|panicked| {
            tracing::error!(thread = thread::current().name(), "{panicked}");
        }));
    }
    Ok(())
}

/// This process, by what its launcher has passed to it.
fn source(variable: impl Fn(&str) -> Option<String>) -> LogSource {
    let token = variable("ELASTICDL_TOKEN_FILE").and_then(|path| fs::read_to_string(path).ok());
    let token = token.and_then(|text| bytes_of_hex(text.trim().as_bytes()));
    // The launch of a supervisor is that of its first worker.
    let is_worker = variable(WORKERS).is_none_or(|workers| workers == "1");
    let launch = variable("ELASTICDL_LAUNCH").filter(|_| is_worker);
    LogSource {
        job: variable("ELASTICDL_JOB"),
        run_id: token.map(|token| run_id(&token).to_string()),
        worker: launch.and_then(|launch| launch.parse().ok()),
    }
}

/// Standard error for lines that may be dropped.
struct LogOutput;

impl Write for LogOutput {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        /// The newest line was dropped: the reader is not awaited again for each line.
        static IS_STALLED: AtomicBool = AtomicBool::new(false);
        let stderr = io::stderr().lock();
        let patience = if IS_STALLED.load(Ordering::Relaxed) { Duration::ZERO } else { PATIENCE };
        let is_written = write_in_time(stderr, line, patience);
        IS_STALLED.store(!is_written, Ordering::Relaxed);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes `line`, unless `to` fails or is not ready within `patience`. Returns whether it did.
fn write_in_time(mut to: impl Write + AsFd, line: &[u8], patience: Duration) -> bool {
    let limit = Timespec::try_from(patience).expect("it is a fraction of a second");
    // A pipe that is ready takes so much without blocking.
    line.chunks(PIPE_BUF).all(|part| {
        let mut polled = [PollFd::new(&to, PollFlags::OUT)];
        let is_ready = poll(&mut polled, Some(&limit)).is_ok_and(|_| {
            polled[0].revents().intersection(PollFlags::OUT | PollFlags::ERR) == PollFlags::OUT
        });
        is_ready && to.write_all(part).is_ok()
    })
}

const PATIENCE: Duration = Duration::from_millis(100);
/// Linux' `PIPE_BUF`: writes of no more than a page.
const PIPE_BUF: usize = 4096;

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn lines_that_a_full_disk_or_a_stopped_reader_does_not_take_are_dropped() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert!(!write_in_time(full, b"line\n", Duration::ZERO));
        let (reader, writer) = io::pipe().unwrap();
        let line = [b'x'; 3 * PIPE_BUF];
        let written = (0..1000).take_while(|_| write_in_time(&writer, &line, Duration::ZERO));
        let written = written.count();
        assert!((1..1000).contains(&written), "{written}");
        drop(reader);
        assert!(!write_in_time(&writer, b"line\n", Duration::ZERO), "its reader is gone");
    }
}
