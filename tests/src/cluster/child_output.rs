//! A command that runs concurrently with the test, and its output.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// A command that follows a job. Dropping it ends it.
#[derive(Debug)]
pub struct ChildOutput {
    child: Child,
    /// Standard output and standard error, in the order in which they were written.
    output: File,
}

impl ChildOutput {
    /// Starts the command.
    ///
    /// # Panics
    /// It can't be started.
    #[must_use]
    pub fn start(mut command: Command) -> Self {
        let output = tempfile::tempfile().expect("a temporary file can be created");
        let copy = || output.try_clone().expect("a descriptor can be duplicated");
        command.stdout(copy()).stderr(copy());
        Self { child: command.spawn().expect("the command under test starts"), output }
    }

    /// Process id of the command.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What the command has printed so far.
    ///
    /// # Panics
    /// The temporary file can't be read.
    #[must_use]
    pub fn text(&self) -> String {
        let len = self.output.metadata().expect("an open file has metadata").len();
        let mut bytes = vec![0; usize::try_from(len).expect("a short file")];
        // At an offset: the command writes at the position that the descriptors share.
        self.output.read_exact_at(&mut bytes, 0).expect("the file has as many bytes");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits for the command's end, and returns its exit code and its output.
    ///
    /// # Panics
    /// It does not end within four minutes.
    #[must_use]
    pub fn wait(mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + Duration::from_secs(240);
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child can be asked for") {
                break status;
            }
            assert!(Instant::now() < deadline, "the command does not end: {}", self.text());
            std::thread::sleep(Duration::from_millis(20));
        };
        (status.code(), self.text())
    }
}

impl Drop for ChildOutput {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
