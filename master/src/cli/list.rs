//! `elasticdl list`.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::Value;

use super::client::print;
use super::cluster::{ClusterTarget, to_failure};
use super::render::StatusJson;
use super::{Failure, new_runtime};
use crate::jobdir::{self, LookupError};
use crate::kube::anchor::{self, STATUS, SUMMARY};
use crate::kube::client::{Cluster, ClusterError};
use crate::kube::master_pods::{self, MasterHealth};
use crate::progress::one_line;

/// Arguments of `elasticdl list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// List only the jobs of this machine.
    #[arg(long, conflicts_with_all = ["namespace", "context"])]
    pub local: bool,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// Lists all jobs. Returns the exit code.
pub(super) fn list(args: &ListArgs) -> Result<u8, Failure> {
    let mut rows = Vec::new();
    if !args.target.is_given() {
        rows.extend(local_rows(&jobdir::default_root()));
    }
    if args.target.is_given() || (!args.local && Cluster::is_configured()) {
        let listed = new_runtime()?.block_on(async {
            let cluster = Cluster::connect(&args.target.choice()).await?;
            let anchors = anchor::list_all(&cluster).await?;
            let failed = master_pods::failed_jobs(&cluster).await;
            let mut rows = Vec::new();
            for anchor in anchors {
                let has_status = anchor.data.as_ref().is_some_and(|data| data.contains_key(STATUS));
                let name = anchor.metadata.name.clone().unwrap_or_default();
                let mut health =
                    MasterHealth { failed: failed.get(&name).cloned(), obstacle: None };
                if !has_status {
                    health = master_pods::inspect(&cluster, &name).await;
                }
                rows.extend(cluster_row(&cluster.namespace, anchor, health));
            }
            Ok::<_, ClusterError>(rows)
        });
        rows.extend(listed.map_err(to_failure)?);
    }
    print(&to_table(&rows))
}

/// One line of the list: namespace, name, state, progress, workers.
type Row = [String; 5];

fn local_rows(root: &Path) -> Vec<Row> {
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

fn cluster_row(namespace: &str, anchor: ConfigMap, health: MasterHealth) -> Option<Row> {
    let name = anchor.metadata.name?;
    let data = anchor.data.unwrap_or_default();
    let status = data.get(STATUS).and_then(|text| serde_json::from_str::<StatusJson>(text).ok());
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

fn to_table(rows: &[Row]) -> String {
    let head = ["NAMESPACE", "JOB", "STATE", "PROGRESS", "WORKERS"].map(String::from);
    let all: Vec<&Row> = std::iter::once(&head).chain(rows).collect();
    let width =
        |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    for row in all {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        writeln!(text, "{}", cells.join("  ").trim_end()).expect("a string takes any text");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_of_a_list_are_aligned() {
        let row = |state: &str| ["ns", "job", state, "-", "3/4"].map(String::from);
        let expected = "\
NAMESPACE  JOB  STATE      PROGRESS  WORKERS
ns         job  running    -         3/4
ns         job  completed  -         3/4
";
        assert_eq!(to_table(&[row("running"), row("completed")]), expected);
    }
}
