//! A worker's process.

use std::collections::VecDeque;
use std::net::SocketAddr;

use elasticdl::session::control::ControlState;
use elasticdl_master::job::{Exit, LaunchId, WorkerMessage};
use elasticdl_proto::{Generation, WorkerId};

use super::endpoint::Endpoint;
use super::event::Event;
use super::network::LinkId;
use super::thread::Thread;
use super::trainer::Trainer;
use crate::simulation::clock::Micros;

/// One process. It stays in the list after its end.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) launch: LaunchId,
    /// The slot that it was started for.
    pub(crate) index: u32,
    /// The host that its pod is placed on; it counts only where one of them is bad.
    pub(crate) host: usize,
    pub(crate) worker: Option<WorkerId>,
    /// Exit status, once it has ended.
    pub(crate) exit: Option<Exit>,
    /// On a pod's first process: the exit of the first process of the pod that failed.
    pub(crate) pod_failure: Option<Exit>,
    pub(crate) paused: bool,
    /// Events that are handled when the process is resumed.
    pub(crate) deferred: Vec<Event>,
    /// Whether a fault has hit it, so that the master may evict it.
    pub(crate) is_degraded: bool,
    /// Whether a fault has hit the master or the connection to it.
    pub(crate) lost_contact: bool,
    /// Whether the newest group was published without it when a master last admitted it.
    pub(crate) returned_late: bool,
    /// The newest generation at the time when its links last broke.
    pub(crate) broke_in: Generation,
    /// Whether an earlier master than the current one has started it.
    pub(crate) is_adopted: bool,
    /// Whether the current master does not know it: its record is older than the process.
    pub(crate) is_unknown: bool,
    /// Whether the master has ordered its kill.
    pub(crate) is_kill_requested: bool,
    pub(crate) control: Control,
    pub(crate) woken: bool,
    pub(crate) stream: Option<LinkId>,
    pub(crate) control_state: ControlState,
    /// Messages that the trainer has queued for the master.
    pub(crate) outbox: VecDeque<WorkerMessage>,
    pub(crate) endpoint: Endpoint,
    pub(crate) trainer: Trainer,
    /// The trainer's thread, and those of its donor.
    pub(crate) threads: Vec<Thread>,
}

/// State of the control thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// The trainer is done; the process ends with this code when the master has received
    /// everything.
    Closing(i32),
    /// The handshake with the first master is in progress.
    Handshaking,
    /// The stream is open.
    Open,
    /// The handshake with another master is in progress.
    Reconnecting { since: Micros, pause: Micros },
    /// The stream ended at `since`; the thread probes for another master after `pause`.
    Searching { since: Micros, pause: Micros },
    /// The handshake has not begun.
    Starting,
}

impl Process {
    pub(crate) fn new(launch: LaunchId, index: u32) -> Self {
        Self {
            launch,
            index,
            host: 0,
            worker: None,
            exit: None,
            pod_failure: None,
            paused: false,
            deferred: Vec::new(),
            is_degraded: false,
            lost_contact: false,
            returned_late: false,
            broke_in: Generation::default(),
            is_adopted: false,
            is_unknown: false,
            is_kill_requested: false,
            control: Control::Starting,
            woken: false,
            stream: None,
            control_state: ControlState::default(),
            outbox: VecDeque::new(),
            endpoint: Endpoint::default(),
            trainer: Trainer::default(),
            threads: vec![Thread::default()],
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.exit.is_none()
    }

    /// Whether the master knows the process, and has not ordered its kill.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.is_kill_requested && !self.is_unknown
    }
}

/// The address at which peers reach process `p`.
pub(crate) fn address_of(p: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 1000 + p as u16))
}

/// The process that peers reach at `address`.
pub(crate) fn process_at(address: SocketAddr) -> usize {
    usize::from(address.port()) - 1000
}

/// Exit code of a worker that has found no master, or none that wants it.
pub(crate) const EXIT_MASTER_LOST: i32 = 70;
/// Exit code of a worker that got SIGTERM and was not released in time.
pub(crate) const EXIT_TERMINATED: i32 = 143;
