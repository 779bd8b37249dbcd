//! Whether a cluster has the scheduler that a job asks for, and its queue.

use serde_json::Value;

use super::client::{Cluster, ClusterError, is_code};
use super::gang::{GangOptions, GangScheduler, POD_GROUPS};

/// Sets the version of the scheduler's API that the cluster serves, and checks that the queue
/// exists.
///
/// # Errors
/// The cluster does not have the scheduler, or the queue; or [`ClusterError`].
pub async fn detect(cluster: &Cluster, gang: &mut GangOptions) -> Result<(), ClusterError> {
    match gang.scheduler.group_api() {
        Some(api) => {
            let mut served = None;
            for version in api.versions {
                if serves(cluster, api.group, version, POD_GROUPS).await? {
                    served = Some(*version);
                    break;
                }
            }
            let Some(version) = served else {
                return Err(missing(gang.scheduler, api.group, api.versions));
            };
            gang.version = version.into();
        }
        None => {
            let version = preferred(cluster, KUEUE).await?;
            version.ok_or_else(|| missing(gang.scheduler, KUEUE, &[]))?;
        }
    }
    check_queue(cluster, gang).await
}

/// Checks, as far as the user may read queues, that the queue exists.
async fn check_queue(cluster: &Cluster, gang: &GangOptions) -> Result<(), ClusterError> {
    let Some(queue) = &gang.queue else { return Ok(()) };
    let namespace = &cluster.namespace;
    let (kind, path) = match gang.scheduler {
        GangScheduler::Kueue => {
            let Some(version) = preferred(cluster, KUEUE).await? else { return Ok(()) };
            let folder = format!("/apis/{KUEUE}/{version}/namespaces/{namespace}");
            ("LocalQueue", format!("{folder}/localqueues/{queue}"))
        }
        GangScheduler::Volcano => {
            ("Queue", format!("/apis/scheduling.volcano.sh/{}/queues/{queue}", gang.version))
        }
        GangScheduler::Native => return Ok(()),
    };
    match cluster.get(&path).await {
        Err(error) if is_code(&error, 404) => Err(ClusterError::Missing {
            option: "--queue",
            kind,
            name: queue.clone(),
            namespace: namespace.clone(),
        }),
        // Permission to submit jobs does not imply permission to read queues.
        _ => Ok(()),
    }
}

/// Whether the cluster serves a resource.
async fn serves(
    cluster: &Cluster,
    group: &str,
    version: &str,
    resource: &str,
) -> Result<bool, ClusterError> {
    match cluster.get(&format!("/apis/{group}/{version}")).await {
        Ok(list) => {
            let resources = list["resources"].as_array().into_iter().flatten();
            Ok(resources.into_iter().any(|known| known["name"] == resource))
        }
        Err(error) if is_code(&error, 404) => Ok(false),
        Err(error) => Err(cluster.explain("ask which schedulers there are", error)),
    }
}

/// The version that the cluster prefers of an API group; `None` without the group.
async fn preferred(cluster: &Cluster, group: &str) -> Result<Option<String>, ClusterError> {
    match cluster.get(&format!("/apis/{group}")).await {
        Ok(found) => {
            let version: &Value = &found["preferredVersion"]["version"];
            Ok(version.as_str().map(str::to_owned))
        }
        Err(error) if is_code(&error, 404) => Ok(None),
        Err(error) => Err(cluster.explain("ask which schedulers there are", error)),
    }
}

fn missing(scheduler: GangScheduler, group: &str, versions: &[&str]) -> ClusterError {
    let name = scheduler.name();
    let served = match scheduler {
        GangScheduler::Kueue => format!("the API group {group}"),
        _ => format!("{POD_GROUPS} of {group} ({})", versions.join(", ")),
    };
    let advice = match scheduler {
        GangScheduler::Native => {
            "it needs Kubernetes 1.36 or later with the feature gate GenericWorkload"
        }
        _ => "install it, or ask the administrator of the cluster",
    };
    ClusterError::Refused {
        doing: format!("use --scheduler {name}"),
        message: format!("it does not serve {served}; {advice}"),
    }
}

const KUEUE: &str = "kueue.x-k8s.io";

#[cfg(test)]
mod tests;
