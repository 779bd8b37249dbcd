//! Metadata of a job's objects: labels and owners.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::names::{ELASTICDL, JOB_LABEL, ROLE_LABEL};
use super::request::Request;

pub(super) fn metadata(request: &Request, name: &str, role: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.into()),
        namespace: Some(request.namespace.clone()),
        labels: Some(own_labels(&request.task.job.name, role)),
        ..ObjectMeta::default()
    }
}

/// Builds the metadata of an object that the anchor owns.
pub(crate) fn owned(anchor: &ObjectMeta, name: &str, role: &str) -> ObjectMeta {
    let mut labels = anchor.labels.clone().unwrap_or_default();
    labels.extend(own_labels(anchor.name.as_deref().unwrap_or_default(), role));
    ObjectMeta {
        name: Some(name.into()),
        namespace: anchor.namespace.clone(),
        labels: Some(labels),
        owner_references: Some(vec![anchor_owner(anchor)]),
        ..ObjectMeta::default()
    }
}

pub(super) fn own_labels(job: &str, role: &str) -> BTreeMap<String, String> {
    let labels = [
        ("app.kubernetes.io/component", role),
        ("app.kubernetes.io/instance", job),
        ("app.kubernetes.io/managed-by", ELASTICDL),
        ("app.kubernetes.io/name", ELASTICDL),
        ("app.kubernetes.io/part-of", ELASTICDL),
        ("app.kubernetes.io/version", env!("CARGO_PKG_VERSION")),
        (JOB_LABEL, job),
        (ROLE_LABEL, role),
    ];
    labels.map(|(key, value)| (key.into(), value.into())).into()
}

pub(super) fn anchor_owner(anchor: &ObjectMeta) -> OwnerReference {
    owner("v1", "ConfigMap", anchor)
}

/// `blockOwnerDeletion` stays unset: where it is checked, it needs a permission that users usually
/// lack.
pub(super) fn owner(api_version: &str, kind: &str, meta: &ObjectMeta) -> OwnerReference {
    OwnerReference {
        api_version: api_version.into(),
        kind: kind.into(),
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}
