//! Signals that stop a local job.

use std::time::{Duration, Instant};

use crate::event_loop::UserCommand;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit::{EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_TERMINATED};

/// Signal that requested the stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The terminal was closed.
    HungUp,
    /// By SIGINT, as for Ctrl-C.
    Interrupted,
    /// By SIGTERM.
    Terminated,
}

impl Stop {
    /// Exit code of a process that this signal has ended.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::HungUp => EXIT_HUNG_UP,
            Self::Interrupted => EXIT_INTERRUPTED,
            Self::Terminated => EXIT_TERMINATED,
        }
    }
}

/// Escalation of signals: the first one stops the job at the end of the step, a later one at once.
///
/// Programs send one request as several signals: `timeout` signals its child and the group, a
/// terminal signals the group and a shell passes Ctrl-C on. So signals within [`ONE_REQUEST`] are
/// one. And what stops services repeats SIGTERM without a person who is impatient, so SIGTERM and
/// SIGHUP end the job at once only after the grace period.
#[derive(Debug)]
pub(super) struct StopEscalation {
    first: Option<(Stop, Instant)>,
    grace_period: Duration,
}

impl StopEscalation {
    pub(super) fn new(grace_period: Duration) -> Self {
        Self { first: None, grace_period }
    }

    /// The first signal or request, if there was one.
    pub(super) fn first(&self) -> Option<Stop> {
        self.first.map(|(stop, _)| stop)
    }

    /// What follows from `stop` at `now`.
    pub(super) fn command(&mut self, now: Instant, stop: Stop) -> Option<UserCommand> {
        let Some((_, begun)) = self.first else {
            self.first = Some((stop, now));
            return Some(match stop {
                Stop::Interrupted => UserCommand::Interrupt,
                Stop::HungUp | Stop::Terminated => UserCommand::Stop,
            });
        };
        let patience = match stop {
            Stop::Interrupted => ONE_REQUEST,
            Stop::HungUp | Stop::Terminated => self.grace_period.max(ONE_REQUEST),
        };
        (now.saturating_duration_since(begun) >= patience).then_some(UserCommand::Kill)
    }
}

/// Handlers of the signals that stop a job.
pub(super) struct Signals {
    /// `None` if the command was started so that it survives its terminal, as by `nohup`.
    hangup: Option<Signal>,
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(super) fn new() -> std::io::Result<Self> {
        let is_ignored = is_hangup_ignored();
        // A file that exceeds the user's limit is an error of the write, not the end of the master.
        // A handler stays when its stream is dropped.
        drop(signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?);
        Ok(Self {
            hangup: (!is_ignored).then(|| signal(SignalKind::hangup())).transpose()?,
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    pub(super) async fn next(&mut self) -> Stop {
        let hung_up = async {
            match &mut self.hangup {
                Some(hangup) => drop(hangup.recv().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = hung_up => Stop::HungUp,
            _ = self.interrupt.recv() => Stop::Interrupted,
            _ = self.terminate.recv() => Stop::Terminated,
        }
    }
}

/// Whether this process ignores SIGHUP.
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignores_hangup(&status)
}

/// Whether the process with this `/proc/PID/status` ignores SIGHUP, signal 1.
fn ignores_hangup(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & 1 == 1)
}

/// Signals that arrive within this time of the first one are one request.
pub(super) const ONE_REQUEST: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    fn commands(signals: &[(u64, Stop)]) -> Vec<Option<UserCommand>> {
        let mut escalation = StopEscalation::new(Duration::from_secs(30));
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        signals.iter().map(|&(ms, stop)| escalation.command(at(ms), stop)).collect()
    }

    #[test]
    fn the_first_signal_stops_and_sets_the_exit_code() {
        let mut escalation = StopEscalation::new(Duration::from_secs(30));
        assert_eq!(escalation.first(), None);
        escalation.command(Instant::now(), Stop::Terminated);
        escalation.command(Instant::now(), Stop::Interrupted);
        assert_eq!(escalation.first().map(Stop::exit_code), Some(143));
        assert_eq!([Stop::Interrupted, Stop::HungUp].map(Stop::exit_code), [130, 129]);
    }

    #[test]
    fn signals_within_two_seconds_are_one_request() {
        use Stop::{HungUp, Interrupted, Terminated};
        let (stop, kill) = (Some(UserCommand::Stop), Some(UserCommand::Kill));
        let typed = Some(UserCommand::Interrupt);
        assert_eq!(commands(&[(0, Terminated), (20, Terminated)]), [stop, None]);
        assert_eq!(
            commands(&[
                (0, Interrupted),
                (20, Interrupted),
                (1999, Interrupted),
                (2000, Interrupted)
            ]),
            [typed, None, None, kill]
        );
        assert_eq!(commands(&[(0, HungUp), (20, Terminated)]), [stop, None]);
    }

    #[test]
    fn only_a_person_ends_a_job_at_once_within_the_grace_period() {
        use Stop::{HungUp, Interrupted, Terminated};
        let (stop, kill) = (Some(UserCommand::Stop), Some(UserCommand::Kill));
        assert_eq!(
            commands(&[
                (0, Terminated),
                (29_999, Terminated),
                (29_999, HungUp),
                (30_000, Terminated)
            ]),
            [stop, None, None, kill]
        );
        assert_eq!(commands(&[(0, Terminated), (3000, Interrupted)]), [stop, kill]);
    }

    #[test]
    fn a_command_under_nohup_survives_its_terminal() {
        assert!(ignores_hangup("Name:\tx\nSigIgn:\t0000000000001001\n"));
        assert!(!ignores_hangup("SigIgn:\t0000000000001000\n") && !ignores_hangup(""));
    }
}
