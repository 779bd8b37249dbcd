//! Whether the end of a worker's process is its own fault, and when another may take its place.
//!
//! Preemption is not a failure: a process that somebody ended from outside is replaced at once, however often. What ends
//! by its own doing is counted; too much of it fails the job, and each replacement waits longer than the one before.

use std::time::Duration;

use super::event::Exit;
use super::time::Time;

/// Failures so far, and replacements that wait.
#[derive(Debug)]
pub(super) struct Restarts {
    max: u32,
    counted: u32,
    /// When each waiting replacement may start.
    waiting: Vec<Time>,
}

/// More failures than the job allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooMany {
    pub(super) counted: u32,
    pub(super) max: u32,
}

impl Restarts {
    /// `counted`: failures before now.
    pub(super) fn new(max: u32, counted: u32) -> Self {
        Self { max, counted, waiting: Vec::new() }
    }

    /// Counts a failure; returns when the replacement may start.
    ///
    /// # Errors
    /// The job has failed.
    pub(super) fn count(&mut self, now: Time) -> Result<Time, TooMany> {
        self.counted = self.counted.saturating_add(1);
        if self.counted > self.max {
            return Err(TooMany { counted: self.counted, max: self.max });
        }
        let start = now + delay(self.counted);
        if start > now {
            self.waiting.push(start);
        }
        Ok(start)
    }

    /// Replacements that may not start yet.
    pub(super) fn waiting(&mut self, now: Time) -> usize {
        self.waiting.retain(|&start| start > now);
        self.waiting.len()
    }

    /// Failures so far.
    pub(super) fn counted(&self) -> u32 {
        self.counted
    }
}

/// Whether a process that was not told to end did so by its own doing.
pub(super) fn is_own_fault(exit: &Exit) -> bool {
    match exit {
        Exit::Code(_) | Exit::NotStarted(_) | Exit::OverLimit(_) => true,
        Exit::Signal(signal) => !matches!(signal, &SIGHUP | &SIGINT | &SIGKILL | &SIGTERM),
        Exit::Taken(_) | Exit::Unknown => false,
    }
}

/// How a process ended, for the user.
pub(super) fn describe(exit: &Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exited with code {code}"),
        Exit::NotStarted(error) => format!("could not be started: {}", super::story::clip(error)),
        Exit::OverLimit(what) => format!("went over a limit: {}", super::story::clip(what)),
        Exit::Taken(what) => format!("was taken away: {}", super::story::clip(what)),
        Exit::Signal(signal) => match NAMES.iter().find(|(number, _)| number == signal) {
            Some((_, name)) => format!("killed by {name}"),
            None => format!("killed by signal {signal}"),
        },
        Exit::Unknown => "ended, nobody knows how".into(),
    }
}

/// How long the replacement for the `counted`th failure (from 1) waits.
fn delay(counted: u32) -> Duration {
    match counted {
        0 | 1 => Duration::ZERO,
        n => DELAY_FIRST.saturating_mul(1 << (n - 2).min(16)).min(DELAY_MAX),
    }
}

const DELAY_FIRST: Duration = Duration::from_millis(250);
const DELAY_MAX: Duration = Duration::from_secs(5);

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;
/// Numbers that Linux gives them on all common machines.
const NAMES: [(i32, &str); 9] = [
    (SIGHUP, "SIGHUP"),
    (SIGINT, "SIGINT"),
    (4, "SIGILL"),
    (6, "SIGABRT"),
    (7, "SIGBUS"),
    (8, "SIGFPE"),
    (SIGKILL, "SIGKILL"),
    (11, "SIGSEGV"),
    (SIGTERM, "SIGTERM"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_process_does_itself_is_its_fault() {
        let table = [
            (Exit::Code(0), true),
            (Exit::Code(1), true),
            (Exit::Code(101), true),
            (Exit::NotStarted("no such file".into()), true),
            (Exit::OverLimit("memory".into()), true),
            (Exit::Taken("preempted".into()), false),
            (Exit::Signal(1), false),
            (Exit::Signal(2), false),
            (Exit::Signal(4), true),
            (Exit::Signal(6), true),
            (Exit::Signal(7), true),
            (Exit::Signal(8), true),
            (Exit::Signal(9), false),
            (Exit::Signal(11), true),
            (Exit::Signal(15), false),
            (Exit::Signal(31), true),
            (Exit::Unknown, false),
        ];
        for (exit, own) in table {
            assert_eq!(is_own_fault(&exit), own, "{exit:?}");
        }
    }

    #[test]
    fn replacements_wait_twice_as_long_each_time_and_never_over_5_s() {
        let mut restarts = Restarts::new(40, 0);
        let now = Time(Duration::from_secs(100));
        let mut delays = Vec::new();
        for _ in 0..40 {
            delays.push(restarts.count(now).unwrap().since(now).as_millis());
        }
        assert_eq!(delays[..8], [0, 250, 500, 1000, 2000, 4000, 5000, 5000]);
        assert!(delays[8..].iter().all(|&ms| ms == 5000));
        assert_eq!(restarts.waiting(now), 39);
        assert_eq!(restarts.waiting(now + Duration::from_millis(250)), 38);
        assert_eq!(restarts.waiting(now + Duration::from_secs(5)), 0);
        assert_eq!(restarts.count(now), Err(TooMany { counted: 41, max: 40 }));
    }
}
