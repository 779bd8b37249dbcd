//! What every command needs of its process: exit codes, failures, output and a runtime.

use std::borrow::Cow;
use std::io::{self, Write as _, stderr, stdout};

use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::runtime::{Builder, Runtime};

use crate::job::Summary;
use crate::kube::client::ClusterError;
use crate::progress::LogFormat;

/// Failure of a command.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    /// Error message: what is wrong, where, and what would be right.
    pub(crate) text: String,
}

impl Failure {
    /// A failure because of invalid input; nothing was started.
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { code: EXIT_USAGE, text: text.into() }
    }

    /// A failure of a master that finds the objects of its job missing or damaged.
    pub(crate) fn damaged(text: impl Into<String>) -> Self {
        Self { code: EXIT_DAMAGED, text: text.into() }
    }

    /// A failure with input that may be valid.
    pub(crate) fn failed(text: impl Into<String>) -> Self {
        Self { code: EXIT_FAILED, text: text.into() }
    }
}

impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        match error {
            ClusterError::Exists(_)
            | ClusterError::Missing { .. }
            | ClusterError::NoSuchJob { .. }
            | ClusterError::NoConfig(_) => Self::usage(error.to_string()),
            error => Self::failed(error.to_string()),
        }
    }
}

/// What a command prints of a job that it follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Console {
    /// Errors only.
    pub(crate) quiet: bool,
    pub(crate) format: LogFormat,
    /// Also what workers print.
    pub(crate) tee: bool,
}

impl Console {
    /// Format of progress and events; `None` if they are not printed.
    pub(crate) fn progress(self) -> Option<LogFormat> {
        (!self.quiet).then_some(self.format)
    }
}

/// Exit code of the master of an ended job. A job that the user has stopped is complete for the
/// cluster, unless its state is lost.
pub(crate) fn code_of_summary(summary: &Summary) -> u8 {
    match &*summary.state {
        // A stop that could not wait for the group.
        "stopped" if summary.state_lost.is_some_and(|lost| lost.at_step == summary.steps) => {
            EXIT_FAILED
        }
        "completed" | "stopped" => EXIT_OK,
        "refused" => EXIT_USAGE,
        _ => EXIT_FAILED,
    }
}

/// Lets this process, and those that it starts, open as many files as the system allows: a master
/// has a connection for each worker.
pub(crate) fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // The limit stays as it is if the system refuses.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Creates a runtime for this thread.
pub(crate) fn new_runtime() -> Result<Runtime, Failure> {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::failed(format!("can't start the runtime: {e}")))
}

/// Converts an error of the operating system to "can't `what`".
pub(crate) fn cannot(what: &str) -> impl Fn(io::Error) -> Failure {
    move |e| Failure::failed(format!("can't {what}: {e}"))
}

/// Prints an answer. Returns the exit code.
pub(crate) fn print(text: &str) -> Result<u8, Failure> {
    let mut out = stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reader has what it wanted, as `head` does.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(EXIT_OK),
        written => written.map(|()| EXIT_OK).map_err(cannot("write the answer")),
    }
}

/// Prints text to standard error, which may be closed. Control characters, which may come from a
/// data file or a program, are escaped.
pub(crate) fn print_line(text: &str) {
    let _ = writeln!(stderr(), "{}", escaped(text));
}

fn escaped(text: &str) -> Cow<'_, str> {
    let is_active = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(is_active) {
        return Cow::Borrowed(text);
    }
    let escape = |c: char| if is_active(c) { c.escape_default().to_string() } else { c.into() };
    Cow::Owned(text.chars().map(escape).collect())
}

pub(crate) fn print_error(text: &str) {
    print_line(&format!("error: {text}"));
}

pub(crate) fn print_warning(text: &str) {
    print_line(&format!("warning: {text}"));
}

pub(crate) const EXIT_FAILED: u8 = 1;
/// Another master holds the leader Lease of the job.
pub(crate) const EXIT_FENCED: u8 = 3;
/// Exit code of a master whose token the API server refuses; its Job starts one with another token.
pub(crate) const EXIT_UNAUTHORIZED: u8 = 4;
/// Exit code of a master that finds the objects of its job missing or damaged.
pub(crate) const EXIT_DAMAGED: u8 = 5;
/// The terminal was closed.
pub(crate) const EXIT_HUNG_UP: u8 = 129;
pub(crate) const EXIT_INTERRUPTED: u8 = 130;
pub(crate) const EXIT_OK: u8 = 0;
pub(crate) const EXIT_TERMINATED: u8 = 143;
/// The same code as clap's for usage errors.
pub(crate) const EXIT_USAGE: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_data_cannot_control_the_terminal() {
        let shown = escaped("line 1: \u{1b}[2J\u{1f}\u{8b}\r\n\tit must be a number, not `ü\u{7}`");
        let expected = "line 1: \\u{1b}[2J\\u{1f}\\u{8b}\\r\n\tit must be a number, not `ü\\u{7}`";
        assert_eq!(shown, expected);
    }
}
