//! Events of the simulated world.

use elasticdl::session::transport_switch::NcclBuild;

use super::checkpoints::CheckpointWork;
use super::faults::Undo;
use super::network::LinkId;
use super::thread::ThreadId;

/// An event at some point in time. `p` is the index of a process, in the order of their starts.
#[derive(Debug)]
pub(crate) enum Event {
    /// A packet reaches the kernel of the link's end `to`.
    Arrive { link: LinkId, to: usize },
    /// A joiner's link to its donor breaks.
    BreakFetch { p: usize },
    /// A worker is due to send a heartbeat.
    Heartbeat { p: usize },
    /// The control thread has waited long enough for the master to end the stream.
    CloseDue { p: usize },
    /// The control thread polls its stream and the trainer's messages.
    Control { p: usize },
    /// A signal kills the process.
    Die { p: usize, signal: i32 },
    /// As `Master`, for the one that has been replaced.
    FormerMaster,
    /// The fault plan is polled.
    InjectFault,
    /// A ping on the stream `link` should have been answered by now.
    KeepAlive { p: usize, link: LinkId },
    /// A part of a checkpoint, or its manifest, is written.
    CheckpointWritten { p: usize, work: Box<CheckpointWork> },
    /// A temporary fault ends.
    Heal(Undo),
    /// A leaving worker was not released in time.
    LeaveDue { p: usize },
    /// The master's task polls its inputs and its timers.
    Master,
    /// A process has built its NCCL communicator of this generation, or has given up.
    Nccl { p: usize, generation: u64, build: NcclBuild },
    /// A worker was dialled, and its acceptor reads the handshake.
    Acceptor { p: usize, link: LinkId },
    /// A worker without a stream probes for a master.
    Probe { p: usize },
    /// The system of the master notices that a process has ended.
    Reap { p: usize },
    /// A process has been created and runs.
    Start { p: usize },
    /// SIGTERM reaches the process.
    Terminate { p: usize },
    /// A thread continues, unless another wake-up came first.
    Thread { thread: ThreadId, ticket: u32 },
}

impl Event {
    /// The process whose threads handle the event.
    pub(crate) fn runs_in(&self) -> Option<usize> {
        match *self {
            Self::Heartbeat { p }
            | Self::CloseDue { p }
            | Self::Control { p }
            | Self::KeepAlive { p, .. }
            | Self::CheckpointWritten { p, .. }
            | Self::LeaveDue { p }
            | Self::Nccl { p, .. }
            | Self::Acceptor { p, .. }
            | Self::Probe { p }
            | Self::Start { p }
            | Self::Terminate { p } => Some(p),
            Self::Thread { thread, .. } => Some(thread.p),
            Self::Arrive { .. } | Self::BreakFetch { .. } | Self::Die { .. } => None,
            Self::InjectFault => None,
            Self::FormerMaster | Self::Heal(_) | Self::Master | Self::Reap { .. } => None,
        }
    }
}
