//! Which pod is meant: names are used again.

use k8s_openapi::api::core::v1::Pod;

/// Name and uid of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodRef {
    pub(crate) name: String,
    pub(crate) uid: String,
}

impl PodRef {
    pub(crate) fn of(pod: &Pod) -> Self {
        let name = pod.metadata.name.clone().unwrap_or_default();
        Self { name, uid: pod.metadata.uid.clone().unwrap_or_default() }
    }
}
