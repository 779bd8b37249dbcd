//! What a job's pods have printed.

use futures::AsyncReadExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{ListParams, LogParams};

use super::anchor::Anchor;
use super::client::{Cluster, ClusterError};
use super::objects::{self, LAUNCH_LABEL, TASK, Task};
use crate::job::LaunchId;

/// Whose logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The newest master's.
    Master,
    /// The worker's that was started as this launch.
    Worker(LaunchId),
}

/// Hands what `source` has printed to `write`, until that is false; with `follow`, until the pod ends.
///
/// # Errors
/// There is no such job or pod, or [`ClusterError`].
pub async fn copy(
    cluster: &Cluster,
    anchor: &Anchor,
    job: &str,
    source: Source,
    follow: bool,
    mut write: impl FnMut(&[u8]) -> bool,
) -> Result<(), ClusterError> {
    let anchor = anchor.read().await?;
    let uid = anchor.metadata.uid.unwrap_or_default();
    let (selector, what) = match source {
        Source::Master => (objects::master_selector(job), "a pod of the master".to_owned()),
        Source::Worker(launch) => {
            let task =
                anchor.data.as_ref().and_then(|data| serde_json::from_str::<Task>(data.get(TASK)?).ok());
            let launch = task.map_or(launch, |task| first_of_pod(launch, task.job.workers_per_pod));
            let selector = format!("{},{LAUNCH_LABEL}={}", objects::worker_selector(&uid), launch.0);
            (selector, format!("a pod of the launch {}", launch.0))
        }
    };
    let pods: Api<Pod> = cluster.api();
    let doing = format!("read the logs of {what}");
    let list = pods.list(&ListParams::default().labels(&selector)).await;
    let list = list.map_err(|e| cluster.explain(&doing, e))?;
    let newest = list.items.into_iter().max_by_key(|pod| pod.metadata.creation_timestamp.clone());
    let name = newest.and_then(|pod| pod.metadata.name).ok_or_else(|| ClusterError::Refused {
        doing: doing.clone(),
        message: "there is none (the last 16 that have ended are kept)".into(),
    })?;
    let params = LogParams { follow, ..LogParams::default() };
    let stream = pods.log_stream(&name, &params).await.map_err(|e| cluster.explain(&doing, e))?;
    let mut stream = std::pin::pin!(stream);
    let mut buffer = vec![0; 16 << 10];
    loop {
        match stream.read(&mut buffer).await {
            Ok(0) => return Ok(()),
            Ok(len) if write(&buffer[..len]) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(ClusterError::Unreachable { doing, message: error.to_string() }),
        }
    }
}

/// The launch that names the pod: its workers print into one log.
fn first_of_pod(launch: LaunchId, workers_per_pod: u32) -> LaunchId {
    let per_pod = u64::from(workers_per_pod.max(1));
    LaunchId(launch.0.saturating_sub(1) / per_pod * per_pod + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workers_of_a_pod_have_one_log() {
        let first = |launch, per_pod| first_of_pod(LaunchId(launch), per_pod).0;
        assert_eq!([1, 2, 3, 4, 7].map(|launch| first(launch, 1)), [1, 2, 3, 4, 7]);
        assert_eq!([1, 2, 3, 4, 7].map(|launch| first(launch, 3)), [1, 1, 1, 4, 7]);
    }
}
