//! What can happen in the simulated world.

use elasticdl_proto::Generation;

use super::super::*;

/// An event without a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Break(LaunchId),
    Complete(LaunchId),
    Down(LaunchId),
    Finish(Generation),
    Form(Generation),
    Hello(LaunchId),
    Reap(LaunchId),
    Return(LaunchId),
    Step(Generation),
    Switch(Generation),
    Unanswered(LaunchId),
    Up(LaunchId),
}

/// An injected fault or a user command.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Fault {
    Partition(LaunchId),
    Exit(LaunchId, Exit),
    Fail(LaunchId),
    Freeze(LaunchId),
    Glitch(LaunchId),
    Leave(LaunchId),
    /// The master dies at once, or after this many of the next event's actions.
    MasterDies(Option<usize>),
    /// The stream of a worker is reset; the master notices at once or when the worker reconnects.
    Reset(LaunchId),
    Scale(Scaling),
    Stop,
}
