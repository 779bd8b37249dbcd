//! What the workers of a local job print, as lines: the logs of all workers, followed.
//!
//! **Invariant:** a program that prints without end costs bounded time and memory: of each log at
//! most a given number of bytes is read at once, and the rest is skipped with a line that says so.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use elasticdl_proto::log_line_as_text;

use crate::job::LaunchId;
use crate::jobdir;

/// The logs of a job's workers, and how far they have been read.
#[derive(Debug)]
pub struct WorkerOutput {
    folder: PathBuf,
    /// Bytes of a log that are read at once.
    bytes_max: u64,
    /// Whether only lines count that begin with [`MARK`].
    is_marked: bool,
    tails: BTreeMap<u64, Tail>,
}

/// How far a log has been read.
#[derive(Debug, Default)]
struct Tail {
    position: u64,
    /// The line that has not ended.
    open: Vec<u8>,
}

impl WorkerOutput {
    /// All that the logs in `folder` have and get.
    pub fn all(folder: PathBuf) -> Self {
        Self { folder, bytes_max: u64::MAX, is_marked: false, tails: BTreeMap::new() }
    }

    /// What the logs in `folder` get from now on, at most 64 KiB of each at once. `is_marked`: only
    /// lines that a program has meant for the console, which begin with a record separator.
    pub fn from_now(folder: PathBuf, is_marked: bool) -> Self {
        let mut output = Self { folder, bytes_max: BYTES_MAX, is_marked, tails: BTreeMap::new() };
        for (worker, path) in output.logs() {
            let position = fs::metadata(path).map_or(0, |found| found.len());
            output.tails.insert(worker, Tail { position, open: Vec::new() });
        }
        output
    }

    /// Whether it is only of lines that a program has meant for the console.
    pub fn is_marked(&self) -> bool {
        self.is_marked
    }

    /// Passes each new line, with its worker's number, to `print`; with `ends`, also the last lines
    /// that do not end.
    pub fn poll(&mut self, ends: bool, print: &mut dyn FnMut(u64, &str)) {
        for (worker, path) in self.logs() {
            let tail = self.tails.entry(worker).or_default();
            // A log that can't be read now may be later.
            let left_out = tail.read(&path, self.bytes_max).unwrap_or_default();
            if left_out > 0 && !self.is_marked {
                print(worker, &format!("({left_out} bytes more are in {})", path.display()));
            }
            tail.take_lines(ends, self.is_marked, &mut |line| print(worker, line));
        }
    }

    /// Number and path of each worker's log.
    fn logs(&self) -> BTreeMap<u64, PathBuf> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let worker = |path: PathBuf| {
            let name = path.file_name()?.to_str()?;
            let number = name.strip_prefix("worker-")?.strip_suffix(".log")?.parse().ok()?;
            (path == jobdir::worker_log(&self.folder, LaunchId(number))).then_some((number, path))
        };
        entries.filter_map(|entry| worker(entry.path())).collect()
    }
}

impl Tail {
    /// Reads what is new, at most `bytes_max` bytes. Returns the number of bytes that were skipped
    /// before them.
    fn read(&mut self, path: &Path, bytes_max: u64) -> io::Result<u64> {
        let len = fs::metadata(path)?.len();
        if len < self.position {
            // The log was moved away, and begins anew.
            self.position = 0;
        }
        let left_out = (len - self.position).saturating_sub(bytes_max);
        if len == self.position {
            return Ok(0);
        }
        if left_out > 0 {
            self.open.clear();
        }
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(self.position + left_out))?;
        let read = file.take(len - self.position - left_out).read_to_end(&mut self.open)?;
        self.position += left_out + read as u64;
        Ok(left_out)
    }

    fn take_lines(&mut self, ends: bool, is_marked: bool, print: &mut dyn FnMut(&str)) {
        let complete = self.open.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let is_long = self.open.len() - complete > LINE_BYTES_MAX;
        let taken = if ends || is_long { self.open.len() } else { complete };
        let lines: Vec<u8> = self.open.drain(..taken).collect();
        for line in lines.split_inclusive(|&byte| byte == b'\n') {
            if is_marked && line.first() != Some(&MARK) {
                continue;
            }
            let line = line.strip_suffix(b"\n").unwrap_or(line);
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            // A program that overwrites its line, as a progress bar does, means the newest text.
            let from = line.iter().rposition(|&byte| byte == b'\r').map_or(0, |at| at + 1);
            print(&plain(&String::from_utf8_lossy(&line[from..]), LINE_BYTES_MAX));
        }
    }
}

/// The last lines of a log, or of its end, without control characters; `None` if it has none.
pub(crate) fn last_lines(text: &str) -> Option<String> {
    let printed: Vec<String> = text
        .lines()
        .map(|line| log_line_as_text(line).unwrap_or_else(|| line.into()))
        .map(|line| plain(&line, LAST_LINE_BYTES_MAX))
        .filter(|line| !line.trim().is_empty())
        .collect();
    let last = printed[printed.len().saturating_sub(LAST_LINES_MAX)..].join("\n");
    (!last.is_empty()).then_some(last)
}

/// `line` without escape sequences and other control characters, truncated to about `bytes_max`.
pub(crate) fn plain(line: &str, bytes_max: usize) -> String {
    let mut text = String::new();
    let mut rest = line.chars();
    while let Some(c) = rest.next() {
        match c {
            // An escape sequence such as `ESC [ 31 m` ends with a letter.
            '\u{1b}' => drop(rest.by_ref().find(char::is_ascii_alphabetic)),
            '\t' => text.push(' '),
            c if c.is_control() => {}
            c => text.push(c),
        }
        if text.len() >= bytes_max {
            text.push('…');
            break;
        }
    }
    text.trim_end().to_owned()
}

/// First byte of a line for the console, as `job.print()` writes it in Python.
const MARK: u8 = 0x1e;
/// Bytes of a log that are shown at once while a job runs.
const BYTES_MAX: u64 = 64 << 10;
/// Length at which a line is cut.
const LINE_BYTES_MAX: usize = 4 << 10;
pub(crate) const LAST_LINES_MAX: usize = 8;
pub(crate) const LAST_LINE_BYTES_MAX: usize = 160;

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn poll(output: &mut WorkerOutput, ends: bool) -> Vec<(u64, String)> {
        let mut lines = Vec::new();
        output.poll(ends, &mut |worker, line| lines.push((worker, line.into())));
        lines
    }

    fn write(path: &Path, text: &[u8]) {
        File::options().append(true).create(true).open(path).unwrap().write_all(text).unwrap();
    }

    #[test]
    fn each_line_of_each_worker_is_passed_on_once() {
        let folder = tempfile::tempdir().unwrap();
        let log = |name: &str| folder.path().join(name);
        write(&log("worker-2.log"), b"before\n");
        write(&log("master.log"), b"no worker's\n");
        write(&log("worker-02.log"), b"no worker's\n");
        let mut output = WorkerOutput::from_now(folder.path().into(), false);
        let mut marked = WorkerOutput::from_now(folder.path().into(), true);
        assert_eq!(
            poll(&mut WorkerOutput::all(folder.path().into()), false),
            [(2, "before".into())]
        );
        write(&log("worker-2.log"), b"\x1b[31mone\x1b[0m\ntw");
        write(&log("worker-10.log"), b"10 %\r20 %\r\n\x1eloss 1\n");
        assert_eq!(
            poll(&mut output, false),
            [(2, "one".into()), (10, "20 %".into()), (10, "loss 1".into()),]
        );
        assert_eq!(poll(&mut output, false), []);
        assert_eq!(poll(&mut marked, false), [(10, "loss 1".into())]);
        write(&log("worker-2.log"), b"o\nthree");
        assert_eq!(poll(&mut output, false), [(2, "two".into())]);
        // The log was moved away.
        fs::write(log("worker-2.log"), "new\n").unwrap();
        assert_eq!(poll(&mut output, true), [(2, "threenew".into())]);
    }

    #[test]
    fn a_program_that_prints_megabytes_is_shown_in_part() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("worker-1.log");
        let mut output = WorkerOutput::from_now(folder.path().into(), false);
        write(&path, "0123456789abcde\n".repeat(1 << 20).as_bytes());
        let lines = poll(&mut output, false);
        let left_out = (16 << 20) - BYTES_MAX;
        assert_eq!(lines[0].1, format!("({left_out} bytes more are in {})", path.display()));
        assert_eq!(lines.len() as u64, 1 + BYTES_MAX / 16);
        // A line without an end takes bounded memory.
        write(&path, &[b'x'; 1 << 14]);
        let long = poll(&mut output, false);
        assert!(long.len() == 1 && long[0].1.len() < LINE_BYTES_MAX + 4, "{}", long.len());
    }
}
