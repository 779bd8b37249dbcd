//! Where workers run: as processes of this machine, or as pods of a cluster.

use crate::job::{Exit, LaunchId, Wait};
use crate::kube::pods::Pods;
use crate::local::{ProcessIdentity, Processes};

/// The launches of a job: started, ended, and watched.
#[derive(Debug)]
pub(crate) enum WorkerBackend {
    Pods(Pods),
    Processes(Processes),
}

/// What became of a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BackendEvent {
    Ended(Exit),
    /// It was taken away: by whom, or what for. May come after its end.
    Explained(String),
    /// It is being taken away, but its program still runs.
    Terminating(String),
    /// It has been asked for, with this priority class.
    Created(Option<String>),
    /// It has ended, and these are the last lines that it has printed; its end follows.
    OutputTail(String),
    Running,
    Waiting(Wait),
}

impl WorkerBackend {
    /// Starts one, at the place `index` of the job's. Never fails here: what can't be started ends
    /// at once, as [`Exit::NotStarted`].
    pub(crate) fn start(&mut self, launch: LaunchId, index: u32) {
        match self {
            Self::Pods(pods) => pods.start(launch, index),
            Self::Processes(processes) => processes.start(launch, index),
        }
    }

    /// Takes over a process that another master has started.
    pub(crate) fn adopt(&mut self, launch: LaunchId, process: Option<ProcessIdentity>) {
        match self {
            // Pods are taken over as they are found: `Pods::adopt`.
            Self::Pods(pods) => pods.adopt(launch, None),
            Self::Processes(processes) => processes.adopt(launch, process),
        }
    }

    /// Ends one at once; its end is told by [`WorkerBackend::next`].
    pub(crate) fn kill(&mut self, launch: LaunchId) {
        match self {
            Self::Pods(pods) => pods.kill(launch),
            Self::Processes(processes) => processes.kill(launch),
        }
    }

    /// Waits for the next thing to happen; for ever, if none runs. Safe to drop at any time.
    pub(crate) async fn next(&mut self) -> (LaunchId, BackendEvent) {
        match self {
            Self::Pods(pods) => pods.next().await,
            Self::Processes(processes) => processes.next().await,
        }
    }

    /// Some launch has said hello.
    pub(crate) fn on_hello(&mut self) {
        match self {
            // A pod's program is judged by its pod.
            Self::Pods(_) => {}
            Self::Processes(processes) => processes.on_hello(),
        }
    }

    /// Ends all, and waits for that as long as it usually takes.
    pub(crate) async fn end(self) {
        match self {
            Self::Pods(pods) => pods.end().await,
            Self::Processes(processes) => processes.end().await,
        }
    }
}
