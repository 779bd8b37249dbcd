//! A command that runs concurrently with the test, and its output.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A command that runs. Dropping it ends it.
#[derive(Debug)]
pub struct ChildOutput {
    child: Child,
    /// Standard output and standard error, in the order in which they were written.
    output: File,
}

impl ChildOutput {
    /// Starts the command.
    pub fn start(mut command: Command) -> Self {
        // A file never fills up as a pipe does, and has an end although a process that was left
        // behind still holds it.
        let output = tempfile::tempfile().expect("a temporary file can be created");
        let copy = || output.try_clone().expect("a descriptor can be duplicated");
        command.stdin(Stdio::null()).stdout(copy()).stderr(copy());
        Self { child: command.spawn().expect("the command under test starts"), output }
    }

    /// Process id of the command.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What the command has printed so far.
    pub fn text(&self) -> String {
        let len = self.output.metadata().expect("an open file has metadata").len();
        let mut bytes = vec![0; usize::try_from(len).expect("a short file")];
        // At an offset: the command writes at the position that the descriptors share.
        self.output.read_exact_at(&mut bytes, 0).expect("the file has as many bytes");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether the command is running.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child can be asked for").is_none()
    }

    /// Kills the command.
    pub fn kill(&mut self) {
        self.child.kill().expect("a child can be killed");
        self.child.wait().expect("a child can be waited for");
    }

    /// As [`wait_within`](Self::wait_within), four minutes.
    pub fn wait(self) -> (Option<i32>, String) {
        self.wait_within(Duration::from_secs(240))
    }

    /// Waits for the command's end, and returns its exit code and its output.
    pub fn wait_within(mut self, limit: Duration) -> (Option<i32>, String) {
        assert!(self.ends_within(limit), "the command does not end: {}", self.text());
        let status = self.child.wait().expect("a child can be waited for");
        (status.code(), self.text())
    }

    /// Waits until the command has ended; `false` if it has not within `limit`.
    pub fn ends_within(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while self.is_running() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

impl Drop for ChildOutput {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
