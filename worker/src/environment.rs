//! What a launcher tells a worker process through its environment.

use std::path::PathBuf;
use std::time::Duration;

/// A worker's place in a job, as its launcher set it.
#[derive(Clone)]
pub(crate) struct Environment {
    /// The master, `host:port`.
    pub(crate) master: String,
    pub(crate) job: String,
    pub(crate) launch: u64,
    /// The job's secret, in hex.
    pub(crate) token: String,
    /// A master that is gone for longer ends this process.
    pub(crate) master_timeout: Duration,
}

impl std::fmt::Debug for Environment {
    /// Without the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { master, job, launch, token: _, master_timeout } = self;
        write!(f, "Environment {{ {job} launch {launch}, master {master}, timeout {master_timeout:?} }}")
    }
}

impl Environment {
    /// Reads it through `variable` (usually the process's environment).
    ///
    /// # Errors
    /// What is missing or wrong, for the user's eyes.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let need = |name: &str| variable(name).ok_or_else(|| format!("{name} is not set"));
        let number = |name: &str| -> Result<u64, String> {
            need(name)?.parse().map_err(|_| format!("{name} is not a number"))
        };
        let path = PathBuf::from(need("ELASTICDL_TOKEN_FILE")?);
        let token = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self {
            master: need("ELASTICDL_MASTER")?,
            job: need("ELASTICDL_JOB")?,
            launch: number("ELASTICDL_LAUNCH")?,
            token: token.trim().to_string(),
            master_timeout: Duration::from_millis(number("ELASTICDL_MASTER_TIMEOUT_MS")?),
        })
    }

    /// How long a worker that was told to end waits for the group to let it go.
    pub(crate) fn leave_timeout(&self) -> Duration {
        self.master_timeout.min(Duration::from_secs(5))
    }
}

/// The job is done, or this worker left in order.
pub(crate) const EXIT_DONE: u8 = 0;
/// The user's code failed, or the job can't go on; the master was told why.
pub(crate) const EXIT_FAILED: u8 = 1;
/// The program was not started by a launcher, or with a wrong environment.
pub(crate) const EXIT_USAGE: u8 = 2;
/// No master, or none that wants this worker.
pub(crate) const EXIT_MASTER_LOST: i32 = 70;
/// Told to end, and not let go in time.
pub(crate) const EXIT_TERMINATED: i32 = 143;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let missing = Environment::read(|_| None).unwrap_err();
        assert_eq!(missing, "ELASTICDL_TOKEN_FILE is not set");
    }
}
