//! A service beside the jobs: pods of 3 CPUs, as many as it asks for, without a priority class. So
//! they precede the pods of all jobs.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::task::JoinSet;

use crate::Fault;
use crate::observed::SERVICE_LABEL;

/// The pods of the service, as a ReplicaSet would keep them. The real controllers would be limited
/// to 20 calls per second.
#[derive(Debug)]
pub(crate) struct Service {
    pods: Api<Pod>,
    /// Names of its pods, oldest first.
    names: Vec<String>,
    created: u32,
}

impl Service {
    pub(crate) fn new(client: Client, namespace: &str) -> Self {
        Self { pods: Api::namespaced(client, namespace), names: Vec::new(), created: 0 }
    }

    /// Creates or deletes pods, the newest first, until there are `count`.
    pub(crate) async fn scale(mut self, count: usize) -> Result<Self, Fault> {
        let mut calls = JoinSet::new();
        while self.names.len() < count {
            self.created += 1;
            let name = format!("service-{}", self.created);
            let (pods, pod) = (self.pods.clone(), pod(&name)?);
            calls.spawn(async move { pods.create(&PostParams::default(), &pod).await.map(drop) });
            self.names.push(name);
            wait_below(&mut calls, CALLS_MAX).await?;
        }
        while self.names.len() > count {
            let (pods, name) = (self.pods.clone(), self.names.pop().unwrap_or_default());
            calls
                .spawn(async move { pods.delete(&name, &DeleteParams::default()).await.map(drop) });
            wait_below(&mut calls, CALLS_MAX).await?;
        }
        wait_below(&mut calls, 1).await?;
        Ok(self)
    }
}

/// Waits until fewer than `count` calls are under way.
async fn wait_below(
    calls: &mut JoinSet<Result<(), kube::Error>>,
    count: usize,
) -> Result<(), Fault> {
    while calls.len() >= count {
        if let Some(ended) = calls.join_next().await {
            ended??;
        }
    }
    Ok(())
}

fn pod(name: &str) -> Result<Pod, serde_json::Error> {
    serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {SERVICE_LABEL: ""}},
        "spec": {
            "automountServiceAccountToken": false,
            "containers": [{
                "name": "service",
                "image": "none",
                "resources": {"requests": {"cpu": CPUS.to_string()}},
            }],
        },
    }))
}

/// CPUs of a pod.
pub(crate) const CPUS: u32 = 3;
const CALLS_MAX: usize = 32;
