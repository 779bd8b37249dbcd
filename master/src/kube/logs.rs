//! Logs of a job's pods.

use futures::AsyncReadExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{ListParams, LogParams};

use super::anchor::{Anchor, MASTER};
use super::client::{Cluster, ClusterError};
use super::objects::{self, LAUNCH_LABEL, TASK, Task};
use super::retry::retry;
use crate::job::{LaunchId, PodId};

/// Pod whose log is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogSource {
    /// The newest master.
    Master,
    /// The worker with this launch.
    Worker(LaunchId),
}

/// Passes the log of `source` to `write` until it returns false; with `follow`, until the pod ends.
///
/// # Errors
/// There is no such job or pod, or [`ClusterError`].
pub async fn copy(
    cluster: &Cluster,
    anchor: &Anchor,
    job: &str,
    source: LogSource,
    follow: bool,
    mut write: impl FnMut(&[u8]) -> bool,
) -> Result<(), ClusterError> {
    let anchor = anchor.read().await?;
    let uid = anchor.metadata.uid.unwrap_or_default();
    let (selector, what) = match source {
        LogSource::Master => (objects::master_selector(job), "pod of the master".to_owned()),
        LogSource::Worker(launch) => {
            let task = anchor
                .data
                .as_ref()
                .and_then(|data| serde_json::from_str::<Task>(data.get(TASK)?).ok());
            let launch = task.map_or(launch, |task| first_of_pod(launch, task.job.workers_per_pod));
            let selector =
                format!("{},{LAUNCH_LABEL}={}", objects::worker_selector(&uid), launch.0);
            (selector, format!("pod of worker {}", launch.0))
        }
    };
    let pods: Api<Pod> = cluster.api();
    let doing = format!("read the logs of a {what}");
    let of_source = ListParams::default().labels(&selector);
    let read = async || pods.list(&of_source).await.map_err(|e| cluster.explain(&doing, e));
    let list = retry(&doing, read).await?;
    let leader = anchor
        .data
        .as_ref()
        .and_then(|data| data.get(MASTER))
        .filter(|_| source == LogSource::Master);
    let newest = newest(list.items, leader.map(String::as_str));
    let Some(name) = newest.and_then(|pod| pod.metadata.name) else {
        let of_job = ListParams::default().labels(&objects::worker_selector(&uid));
        let others = pods.list(&of_job).await.map(|list| list.items).unwrap_or_default();
        return Err(ClusterError::NoLog(no_log(&what, &others)));
    };
    // There may be sidecars.
    let container = match source {
        LogSource::Master => objects::MASTER,
        LogSource::Worker(_) => objects::WORKER,
    };
    let params = LogParams { container: Some(container.into()), follow, ..LogParams::default() };
    let open =
        async || pods.log_stream(&name, &params).await.map_err(|e| cluster.explain(&doing, e));
    let stream = retry(&doing, open).await?;
    let mut stream = std::pin::pin!(stream);
    let mut buffer = vec![0; 16 << 10];
    loop {
        match stream.read(&mut buffer).await {
            Ok(0) => return Ok(()),
            Ok(len) if write(&buffer[..len]) => {}
            Ok(_) => return Ok(()),
            Err(error) => {
                return Err(ClusterError::Unreachable { doing, message: error.to_string() });
            }
        }
    }
}

/// Says that there is no log, and of which workers there are logs.
fn no_log(what: &str, others: &[Pod]) -> String {
    let launch = |pod: &Pod| pod.metadata.labels.as_ref()?.get(LAUNCH_LABEL)?.parse().ok();
    let launches: Vec<u64> = others.iter().filter_map(launch).collect();
    let there = match (launches.iter().min(), launches.iter().max()) {
        (Some(first), Some(last)) if first < last => {
            format!("some of workers {first} to {last} have pods")
        }
        (Some(only), _) => format!("only worker {only} has one"),
        _ => "no worker has one".to_owned(),
    };
    format!(
        "there is no log, as there is no {what}: it was not created, or it was deleted, by a user \
         or with its node, or 16 others have ended since; {there}"
    )
}

/// Returns the pod of the newest master that has led the job, because a later one may have found
/// the job ended; else the newest that has run, else the newest.
fn newest(pods: Vec<Pod>, leader: Option<&str>) -> Option<Pod> {
    pods.into_iter().max_by_key(|pod| {
        let leads = leader.is_some() && pod.metadata.name.as_deref() == leader;
        let has_run =
            !matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), None | Some("Pending"));
        (leads, has_run, pod.metadata.creation_timestamp.clone())
    })
}

/// Returns the first launch of a pod, which names the pod: its workers share one log.
pub(crate) fn first_of_pod(launch: LaunchId, workers_per_pod: u32) -> LaunchId {
    PodId::of(launch, workers_per_pod).first()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_those_of_the_newest_master_that_has_led_the_job() {
        let pod = |name: &str, second: u32, phase: &str| {
            let created = format!("2024-05-01T10:00:{second:02}Z");
            let meta = serde_json::json!({"name": name, "creationTimestamp": created});
            serde_json::from_value::<Pod>(
                serde_json::json!({"metadata": meta, "status": {"phase": phase}}),
            )
            .unwrap()
        };
        let pods = || vec![pod("a", 1, "Failed"), pod("b", 2, "Failed"), pod("c", 3, "Pending")];
        let name = |leader| newest(pods(), leader).and_then(|pod| pod.metadata.name).unwrap();
        assert_eq!([name(Some("a")), name(Some("gone")), name(None)], ["a", "b", "b"]);
        assert_eq!(newest(vec![pod("c", 3, "Pending")], None).unwrap().metadata.name.unwrap(), "c");
    }

    #[test]
    fn a_log_that_is_gone_is_told_as_such_with_those_that_are_there() {
        let pod = |launch: &str| {
            let labels = serde_json::json!({LAUNCH_LABEL: launch});
            serde_json::from_value::<Pod>(serde_json::json!({"metadata": {"labels": labels}}))
        };
        let pods = ["10", "9", "11"].map(|launch| pod(launch).unwrap());
        let said = no_log("pod of worker 3", &pods);
        assert!(said.starts_with("there is no log, as there is no pod of worker 3: "), "{said}");
        assert!(said.ends_with("; some of workers 9 to 11 have pods"), "{said}");
        assert!(no_log("pod of worker 3", &pods[..1]).ends_with("; only worker 10 has one"));
        assert!(no_log("pod of worker 3", &[]).ends_with("; no worker has one"));
    }

    #[test]
    fn the_workers_of_a_pod_have_one_log() {
        let first = |launch, per_pod| first_of_pod(LaunchId(launch), per_pod).0;
        assert_eq!([1, 2, 3, 4, 7].map(|launch| first(launch, 1)), [1, 2, 3, 4, 7]);
        assert_eq!([1, 2, 3, 4, 7].map(|launch| first(launch, 3)), [1, 1, 1, 4, 7]);
    }
}
