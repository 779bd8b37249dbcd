//! What every command needs of its process: exit codes, failures, output and a runtime.

use std::borrow::Cow;
use std::io::{self, Write as _, stderr, stdout};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use elasticdl_proto::LogFormat;
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::json;
use tokio::runtime::{Builder, Runtime};

pub(crate) use elasticdl_master::exit::{
    EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EXIT_USAGE, Failure, cannot,
    code_of_summary, unsaved_steps,
};

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

/// Lets this process, and those that it starts, open as many files as the system allows: a master
/// has a connection for each worker.
pub(crate) fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // The limit stays as it is if the system refuses.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Reads a file that an option names. A named pipe is refused, since its other end may never be
/// opened; the pipes of a shell's `<(…)` and of standard input, below /dev, are not.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let is_pipe = path.metadata()?.file_type().is_fifo();
    if is_pipe && !["/dev", "/proc"].iter().any(|system| path.starts_with(system)) {
        return Err(io::Error::other("it is a named pipe; name a file"));
    }
    std::fs::read_to_string(path)
}

/// Creates a runtime for this thread.
pub(crate) fn new_runtime() -> Result<Runtime, Failure> {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::failed(format!("can't start the runtime: {e}")))
}

/// How long threads that the system blocks, as those that resolve names, are awaited at the end of
/// a master.
pub(crate) const BLOCKED_MAX: Duration = Duration::from_secs(1);

/// Prints an answer. Returns the exit code.
pub(crate) fn print(text: &str) -> Result<u8, Failure> {
    let mut out = stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reader has what it wanted, as `head` does.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(EXIT_OK),
        written => written.map(|()| EXIT_OK).map_err(cannot("write the answer")),
    }
}

/// Sets the form of what this process prints on standard error from now on.
pub(crate) fn set_log_format(format: LogFormat) {
    IS_JSON.store(format == LogFormat::Json, Ordering::Relaxed);
}

/// The form of what this process prints on standard error.
pub(crate) fn log_format() -> LogFormat {
    if IS_JSON.load(Ordering::Relaxed) { LogFormat::Json } else { LogFormat::Text }
}

/// Whether lines on standard error are JSON objects.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// Prints text to standard error, which may be closed. Control characters, which may come from a
/// data file or a program, are escaped.
pub(crate) fn print_line(text: &str) {
    print_as("event", "", text);
}

/// `prefix`: before the text, where lines are no objects.
fn print_as(kind: &str, prefix: &str, text: &str) {
    if log_format() == LogFormat::Text {
        let _ = writeln!(stderr(), "{prefix}{}", escaped(text));
        return;
    }
    let time = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
    let _ = writeln!(stderr(), "{}", json!({"time": time, "kind": kind, "text": text.trim()}));
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
    print_as("error", "error: ", text);
}

pub(crate) fn print_warning(text: &str) {
    print_as("warning", "warning: ", text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_pipe_is_no_file_of_options_and_that_of_a_shell_is() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o600.into()).unwrap();
        assert!(read_text(&pipe).unwrap_err().to_string().contains("name a file"));
        let (read, mut write) = io::pipe().unwrap();
        write.write_all(b"text").unwrap();
        drop(write);
        let fd = std::os::fd::AsRawFd::as_raw_fd(&read);
        assert_eq!(read_text(Path::new(&format!("/dev/fd/{fd}"))).unwrap(), "text");
    }

    #[test]
    fn bytes_of_data_cannot_control_the_terminal() {
        let shown = escaped("line 1: \u{1b}[2J\u{1f}\u{8b}\r\n\tit must be a number, not `ü\u{7}`");
        let expected = "line 1: \\u{1b}[2J\\u{1f}\\u{8b}\\r\n\tit must be a number, not `ü\\u{7}`";
        assert_eq!(shown, expected);
    }
}
