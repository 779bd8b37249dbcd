//! What a user requests.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::names::TASK;
use crate::job::JobSpec;
use crate::kube::gang::GangOptions;
use crate::kube::options::PodOptions;
use crate::kube::priority_tiers::PriorityTiers;

/// A job to be run in a cluster.
#[derive(Clone, Debug)]
pub struct Request {
    /// Namespace of its objects.
    pub namespace: String,
    /// What to train.
    pub task: Task,
    /// The training program and its arguments.
    pub program: Vec<String>,
    /// Options of its pods.
    pub pods: PodOptions,
}

/// The master's input, stored in the anchor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Specification of the job.
    pub job: JobSpec,
    /// Workers end by themselves when their master has been silent for this long.
    pub master_timeout: Duration,
    /// The workers' priority classes by slot.
    pub priority_tiers: Option<PriorityTiers>,
    /// Port on which the master serves metrics.
    pub metrics_port: u16,
    /// Whether the master serves metrics at all.
    pub serve_metrics: bool,
    /// Folder in which the master writes events for TensorBoard. It is in a volume of the workers,
    /// which the master then mounts, too.
    pub tensorboard_dir: Option<PathBuf>,
    /// How the pods of the workers are placed together. `None`: each by itself.
    pub gang: Option<GangOptions>,
}

impl Task {
    /// The task in an anchor; `None` if there is none that this release can read.
    #[must_use]
    pub fn in_anchor(data: &BTreeMap<String, String>) -> Option<Self> {
        serde_json::from_str(data.get(TASK)?).ok()
    }
}
