//! A command that runs concurrently with the test, and its output.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::kubectl::text;

/// A command that follows a job. Dropping it ends it.
#[derive(Debug)]
pub struct ChildOutput(Option<Child>);

impl ChildOutput {
    /// Starts the command.
    ///
    /// # Panics
    /// It can't be started.
    #[must_use]
    pub fn start(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(Some(command.spawn().expect("the command under test starts")))
    }

    /// Process id of the command.
    ///
    /// # Panics
    /// Never, before `wait`.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.as_ref().expect("not waited for").id()
    }

    /// Waits for the command's end, and returns its exit code and its output.
    ///
    /// # Panics
    /// It does not end within four minutes.
    #[must_use]
    pub fn wait(mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + Duration::from_secs(240);
        let child = self.0.as_mut().expect("not waited for");
        while child.try_wait().expect("a child can be asked for").is_none() {
            assert!(Instant::now() < deadline, "the command does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        let output =
            self.0.take().expect("not waited for").wait_with_output().expect("it has ended");
        (output.status.code(), text(&output))
    }
}

impl Drop for ChildOutput {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
