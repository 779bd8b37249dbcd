//! The PodGroups of a job, at the API server.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use serde_json::Value;
use tracing::{info, warn};

use crate::kube::client::{Cluster, is_code};
use crate::kube::gang::GangOptions;
use crate::kube::objects::{PRIORITY_CLASS, pod_group};
use crate::kube::priority_tiers;

/// Creates and deletes PodGroups, and pods with fields that older servers do not know.
#[derive(Clone, Debug)]
pub(super) struct PodGroups {
    cluster: Cluster,
    options: GangOptions,
    /// Metadata of their owner.
    anchor: ObjectMeta,
    /// Gangs whose PodGroups exist.
    created: Arc<Mutex<BTreeSet<String>>>,
}

impl PodGroups {
    pub(super) fn new(cluster: &Cluster, options: GangOptions, anchor: ObjectMeta) -> Self {
        Self { cluster: cluster.clone(), options, anchor, created: Arc::default() }
    }

    /// Creates the PodGroup of `gang`, unless it exists or the scheduler has none.
    pub(super) async fn ensure(&self, gang: &str) -> Result<(), kube::Error> {
        let is_created = self.created().contains(gang);
        let group = pod_group(&self.options, gang, &self.anchor);
        let Some(mut group) = group.filter(|_| !is_created) else {
            return Ok(());
        };
        let path = self.path();
        let mut answer = self.cluster.post(&path, &group).await;
        if let Err(kube::Error::Api(status)) = &answer
            && let Some(class) = priority_tiers::missing_class(&status.message)
        {
            warn!(class, gang, "the cluster has no such priority class: the PodGroup has none");
            if let Some(spec) = group["spec"].as_object_mut() {
                spec.remove(PRIORITY_CLASS);
            }
            answer = self.cluster.post(&path, &group).await;
        }
        match answer {
            Ok(_) => info!(gang, "PodGroup created"),
            // Another creation was faster, or an answer was lost.
            Err(error) if is_code(&error, 409) => {}
            Err(error) => return Err(error),
        }
        self.created().insert(gang.into());
        Ok(())
    }

    /// Creates a pod.
    pub(super) async fn create_pod(&self, api: &Api<Pod>, pod: &Pod) -> Result<Pod, kube::Error> {
        let created: Value =
            self.cluster.post(api.resource_url(), &self.options.pod_to_json(pod)).await?;
        serde_json::from_value(created).map_err(kube::Error::SerdeError)
    }

    /// Deletes the PodGroup of `gang`, if the scheduler has any.
    pub(super) async fn delete(&self, gang: &str) -> Result<(), kube::Error> {
        self.created().remove(gang);
        if self.options.scheduler.group_api().is_none() {
            return Ok(());
        }
        match self.cluster.delete(&format!("{}/{gang}", self.path())).await {
            Err(error) if !is_code(&error, 404) => Err(error),
            _ => Ok(()),
        }
    }

    /// Path of the PodGroups of the namespace.
    fn path(&self) -> String {
        let group = self.options.scheduler.group_api().map_or("", |api| api.group);
        let (version, namespace) = (&self.options.version, &self.cluster.namespace);
        format!("/apis/{group}/{version}/namespaces/{namespace}/podgroups")
    }

    fn created(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        self.created.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
