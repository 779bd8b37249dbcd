//! The jobs of this machine and of a cluster.

use std::fs;
use std::path::{Path, PathBuf};

use elasticdl_proto::Status;
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::Value;

use crate::cli::process::{Failure, new_runtime};
use crate::cli::render::JobRow;
use crate::jobdir::{self, LookupError};
use crate::kube::anchor::{self, STATUS, SUMMARY};
use crate::kube::client::{Cluster, ClusterChoice};
use crate::kube::master_pods::{self, MasterHealth};
use crate::progress::one_line;

/// The jobs of a namespace.
pub(crate) fn cluster_jobs(choice: &ClusterChoice) -> Result<Vec<JobRow>, Failure> {
    new_runtime()?.block_on(async {
        let cluster = Cluster::connect(choice).await?;
        let anchors = anchor::list_all(&cluster).await?;
        let failed = master_pods::failed_jobs(&cluster).await;
        let mut rows = Vec::new();
        for anchor in anchors {
            let has_status = anchor.data.as_ref().is_some_and(|data| data.contains_key(STATUS));
            let name = anchor.metadata.name.clone().unwrap_or_default();
            let health = if has_status {
                MasterHealth { failed: failed.get(&name).cloned(), obstacle: None }
            } else {
                master_pods::inspect(&cluster, &name).await
            };
            rows.extend(cluster_row(&cluster.namespace, anchor, health));
        }
        Ok(rows)
    })
}

/// The jobs of this machine.
pub(crate) fn local_jobs(root: &Path) -> Vec<JobRow> {
    let mut names: Vec<_> =
        fs::read_dir(root).into_iter().flatten().flatten().map(|e| e.path()).collect();
    names.sort();
    let row = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        let state = match jobdir::look_up(&path) {
            Ok(_) if jobdir::is_running(&path) => "running".into(),
            Err(LookupError::NoSuchJob { .. }) => return None,
            Err(LookupError::NotRunning { summary: Some(summary), .. }) => {
                let summary: Option<Value> = serde_json::from_slice(&fs::read(summary).ok()?).ok();
                summary?["state"].as_str()?.to_owned()
            }
            _ => "lost".into(),
        };
        Some(["(this machine)".into(), name, state, "-".into(), "-".into()])
    };
    names.into_iter().filter_map(row).collect()
}

fn cluster_row(namespace: &str, anchor: ConfigMap, health: MasterHealth) -> Option<JobRow> {
    let name = anchor.metadata.name?;
    let data = anchor.data.unwrap_or_default();
    let status = data.get(STATUS).and_then(|text| serde_json::from_str::<Status>(text).ok());
    let failed = health.failed.filter(|_| !data.contains_key(SUMMARY));
    let (state, progress, workers) = match status {
        Some(status) if failed.is_some() => {
            let progress = format!("{:.1} %", status.progress * 100.0);
            ("failed (no master)".into(), progress, format!("-/{}", status.workers_desired))
        }
        Some(status) => {
            let members = status.workers.iter().filter(|w| w.rank.is_some()).count();
            let progress = format!("{:.1} %", status.progress * 100.0);
            (status.state.into_owned(), progress, format!("{members}/{}", status.workers_desired))
        }
        None if failed.is_some() => ("failed (no master)".into(), "-".into(), "-".into()),
        None => {
            let why = health.obstacle.map(|why| format!(" (no master: {})", one_line(&why)));
            (format!("submitted{}", why.unwrap_or_default()), "-".into(), "-".into())
        }
    };
    Some([namespace.into(), name, state, progress, workers])
}
