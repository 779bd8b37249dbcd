//! Stacks of a program in Python, which its `faulthandler` writes to a file.
//!
//! A thread of Python's writes them on request, while it holds the interpreter's lock. If the lock
//! does not come in time, some code hangs with it: then no frame changes, and the handler of a
//! signal writes them, which needs no lock.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::stacks::{is_caught, signal_this_thread};

/// How the stacks of a program are read.
#[derive(Debug)]
pub struct ProgramStacks {
    /// A byte that is written to this pipe requests the stacks.
    pub ask: File,
    /// A byte of this pipe says that they are written.
    pub told: File,
    /// Where they are written.
    pub dump: File,
    /// Signal whose handler writes them to `dump`, too.
    pub signal: i32,
}

/// The lines of a thread's stack, by its id as pthreads have it.
pub(super) type PythonStacks = BTreeMap<u64, Vec<String>>;

/// Makes the stacks of the program a part of this worker's reports.
pub fn watch(stacks: ProgramStacks) {
    *PROGRAM.lock().unwrap_or_else(PoisonError::into_inner) = Some((stacks, Asked(false)));
}

/// Whether a request has no answer yet.
#[derive(Debug)]
struct Asked(bool);

/// The stacks of the program; empty if it is none in Python. One thread at a time may call this.
pub(super) fn read() -> PythonStacks {
    let mut program = PROGRAM.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((stacks, asked)) = &mut *program else { return PythonStacks::new() };
    stacks.read(asked).map(|text| parse(&text)).unwrap_or_default()
}

impl ProgramStacks {
    fn read(&mut self, asked: &mut Asked) -> std::io::Result<String> {
        if asked.0 && self.await_answer(Duration::ZERO)? {
            asked.0 = false;
        }
        self.dump.set_len(0)?;
        self.dump.rewind()?;
        let mut is_answered = false;
        if !asked.0 {
            self.ask.write_all(&[1])?;
            is_answered = self.await_answer(LOCK_LIMIT)?;
            asked.0 = !is_answered;
        }
        if !is_answered && is_caught(self.signal) {
            signal_this_thread(self.signal);
        }
        let bytes = self.dump.metadata()?.len().min(DUMP_BYTES_MAX);
        let mut text = vec![0; bytes as usize];
        self.dump.read_exact_at(&mut text, 0)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Waits for the answer to a request. Returns whether it came.
    fn await_answer(&mut self, limit: Duration) -> std::io::Result<bool> {
        let limit = Timespec::try_from(limit).expect("it is short");
        let mut told = [PollFd::new(&self.told, PollFlags::IN)];
        if poll(&mut told, Some(&limit))? == 0 {
            return Ok(false);
        }
        self.told.read_exact(&mut [0]).map(|()| true)
    }
}

/// The stacks in what `faulthandler` writes.
fn parse(text: &str) -> PythonStacks {
    let mut stacks = PythonStacks::new();
    let mut current = None;
    for line in text.lines() {
        if let Some((_, rest)) = line.split_once("hread 0x") {
            let digits = rest.split(|c: char| !c.is_ascii_hexdigit()).next().unwrap_or_default();
            current = u64::from_str_radix(digits, 16).ok();
        } else if let (Some(id), Some(frame)) = (current, frame_in(line)) {
            stacks.entry(id).or_default().push(frame);
        }
    }
    stacks.retain(|_, frames| !frames.iter().any(|frame| frame.starts_with(SERVER)));
    stacks
}

/// `  File "a.py", line 3 in step` as `step (a.py:3)`.
fn frame_in(line: &str) -> Option<String> {
    let (file, rest) = line.trim().strip_prefix("File \"")?.rsplit_once("\", line ")?;
    let (number, function) = rest.split_once(" in ")?;
    Some(format!("{function} ({file}:{number})").replace(char::is_control, " "))
}

static PROGRAM: Mutex<Option<(ProgramStacks, Asked)>> = Mutex::new(None);
/// The function of the thread that writes the stacks.
const SERVER: &str = "_serve_stacks ";
/// Python lets another thread run every 5 ms.
const LOCK_LIMIT: Duration = Duration::from_millis(700);
const DUMP_BYTES_MAX: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stacks_of_each_thread_but_the_writer_are_read() {
        let text = "Thread 0x00007f0a (most recent call first):\n  File \"/a b.py\", line 3 in \
                    step\n  File \"/a b.py\", line 9 in <module>\n\nThread 0x0000000b [pool] \
                    (most recent call first):\n  <no Python frame>\n\nCurrent thread 0x0c (most \
                    recent call first):\n  File \"/p.py\", line 7 in _serve_stacks\n";
        let frames = vec!["step (/a b.py:3)".to_owned(), "<module> (/a b.py:9)".to_owned()];
        assert_eq!(parse(text), PythonStacks::from([(0x7f0a, frames)]));
    }
}
