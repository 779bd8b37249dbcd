//! Backends that run workers: processes of this machine, or pods of a cluster.

use std::io;

use tracing::info;

use crate::backend_event::BackendEvent;
use crate::job::LaunchId;
use crate::jobdir::ProcessIdentity;
use crate::kube::pods::Pods;
use crate::kube::priority_tiers::Weight;
use crate::listener::ServerConfig;
use crate::local::{Launcher, Processes};

/// Starts, kills and watches the launches of a job.
#[derive(Debug)]
pub(crate) enum WorkerBackend {
    Pods(Pods),
    Processes(Processes),
}

impl WorkerBackend {
    /// Processes that `launcher` starts, which find the master at the listener's address.
    ///
    /// # Errors
    /// The listener has no address.
    pub(crate) fn processes(
        mut launcher: Launcher,
        job: &str,
        server_config: &ServerConfig,
    ) -> io::Result<Self> {
        let address = server_config.listener.local_addr()?;
        launcher.env.push(("ELASTICDL_MASTER".into(), address.to_string().into()));
        launcher.env.push(("ELASTICDL_JOB".into(), job.into()));
        info!(job, %address, "master listens");
        Ok(Self::Processes(Processes::new(launcher)))
    }

    /// Starts `launch` in the slot `index` of the job. Never fails here: a launch that can't be
    /// started ends at once with [`Exit::NotStarted`]. `avoid`: nodes to which others are
    /// preferred.
    pub(crate) fn start(&mut self, launch: LaunchId, index: u32, avoid: Vec<String>) {
        match self {
            Self::Pods(pods) => {
                avoid.into_iter().for_each(|node| pods.avoid(node));
                pods.start(launch, index);
            }
            Self::Processes(processes) => processes.start(launch, index, &avoid),
        }
    }

    /// From now on the first `min_workers` workers are the core of the job.
    pub(crate) fn set_core(&self, min_workers: u32) {
        match self {
            Self::Pods(pods) => pods.set_core(min_workers),
            // Processes have no priority.
            Self::Processes(_) => {}
        }
    }

    /// From now on the job has this weight.
    pub(crate) fn set_weight(&self, weight: Weight) {
        match self {
            Self::Pods(pods) => pods.set_weight(weight),
            Self::Processes(_) => {}
        }
    }

    /// Takes over a launch that a former master started.
    pub(crate) fn adopt(&mut self, launch: LaunchId, process: Option<ProcessIdentity>) {
        match self {
            // The caller takes over pods with `Pods::adopt`.
            Self::Pods(pods) => pods.adopt(launch, None),
            Self::Processes(processes) => processes.adopt(launch, process),
        }
    }

    /// Kills `launch`; [`WorkerBackend::next`] reports its end.
    pub(crate) fn kill(&mut self, launch: LaunchId) {
        match self {
            Self::Pods(pods) => pods.kill(launch),
            Self::Processes(processes) => processes.kill(launch),
        }
    }

    /// Waits for the next event; for ever while there is no launch. Cancel safe.
    pub(crate) async fn next(&mut self) -> (LaunchId, BackendEvent) {
        match self {
            Self::Pods(pods) => pods.next().await,
            Self::Processes(processes) => processes.next().await,
        }
    }

    /// Records that a launch has sent its hello.
    pub(crate) fn on_hello(&self, launch: LaunchId) {
        match self {
            // The state of the pod tells whether its program runs.
            Self::Pods(_) => {}
            Self::Processes(processes) => processes.on_hello(launch),
        }
    }

    /// Whether the launches are processes of this machine.
    pub(crate) fn are_processes(&self) -> bool {
        matches!(self, Self::Processes(_))
    }

    /// The process of `launch`, if it runs on this machine.
    pub(crate) fn pid(&self, launch: LaunchId) -> Option<u32> {
        match self {
            Self::Pods(_) => None,
            Self::Processes(processes) => processes.pid(launch),
        }
    }

    /// Ends all launches and waits for their ends, within a time limit.
    pub(crate) async fn end(self) {
        match self {
            Self::Pods(pods) => pods.end().await,
            Self::Processes(processes) => processes.end().await,
        }
    }
}
