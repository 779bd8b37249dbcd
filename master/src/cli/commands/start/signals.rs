//! Signals that stop a local job.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::process::{EXIT_INTERRUPTED, EXIT_TERMINATED};
use crate::event_loop::UserCommand;

/// Signal that requested the stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Interrupted,
    Terminated,
}

impl Stop {
    pub(super) fn exit_code(self) -> u8 {
        match self {
            Self::Interrupted => EXIT_INTERRUPTED,
            Self::Terminated => EXIT_TERMINATED,
        }
    }
}

/// Escalation of signals: the first one stops the job at the end of the step, any later one at
/// once.
#[derive(Debug, Default)]
pub(super) struct StopEscalation {
    pub(super) first: Option<Stop>,
}

impl StopEscalation {
    pub(super) fn command(&mut self, stop: Stop) -> UserCommand {
        if self.first.is_some() {
            return UserCommand::Kill;
        }
        self.first = Some(stop);
        UserCommand::Stop
    }
}

/// Handlers of the signals that stop a job.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    pub(super) async fn next(&mut self) -> Stop {
        tokio::select! {
            _ = self.interrupt.recv() => Stop::Interrupted,
            _ = self.terminate.recv() => Stop::Terminated,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_stops_and_sets_the_exit_code_and_the_second_kills() {
        let mut escalation = StopEscalation::default();
        let commands = [Stop::Terminated, Stop::Interrupted, Stop::Interrupted]
            .map(|stop| escalation.command(stop));
        assert_eq!(commands, [UserCommand::Stop, UserCommand::Kill, UserCommand::Kill]);
        assert_eq!(escalation.first.map(Stop::exit_code), Some(143));
        assert_eq!(Stop::Interrupted.exit_code(), 130);
    }
}
