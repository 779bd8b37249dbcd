//! Where pods run, by the labels of their nodes.
//!
//! The right to read nodes is optional: without it, workers know their node, and their zone if the
//! API server copies it to pods.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use elasticdl_proto::Location;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use tokio::time::timeout;
use tracing::info;

use super::calls::CALL_TIMEOUT;
use crate::kube::client::{Cluster, is_code};

/// Reads the labels of nodes, once for each.
#[derive(Clone, Debug)]
pub(super) struct Nodes {
    api: Api<Node>,
    known: Arc<Mutex<BTreeMap<String, Location>>>,
    /// Whether the server denies to read nodes.
    is_forbidden: Arc<AtomicBool>,
}

impl Nodes {
    pub(super) fn new(cluster: &Cluster) -> Self {
        Self { api: cluster.api_of_all(), known: Arc::default(), is_forbidden: Arc::default() }
    }

    /// Returns the place of a node. `None`: it can't be read.
    pub(super) async fn locate(&self, node: &str) -> Option<Location> {
        let known = |known: &Mutex<BTreeMap<String, Location>>| {
            known.lock().unwrap_or_else(PoisonError::into_inner).get(node).cloned()
        };
        if let Some(known) = known(&self.known) {
            return Some(known);
        }
        if self.is_forbidden.load(Ordering::Relaxed) {
            return None;
        }
        let found = match timeout(CALL_TIMEOUT, self.api.get_metadata(node)).await.ok()? {
            Ok(found) => found,
            Err(error) => {
                if is_code(&error, 403) && !self.is_forbidden.swap(true, Ordering::Relaxed) {
                    info!("nodes can't be read: the ring knows zones as far as workers know them");
                }
                return None;
            }
        };
        let labels = found.metadata.labels.unwrap_or_default();
        let label = |key: &str| labels.get(key).cloned().unwrap_or_default();
        let location = Location { zone: label(ZONE), rack: label(RACK), node: node.into() };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(node.into(), location.clone());
        Some(location)
    }
}

const RACK: &str = "topology.kubernetes.io/rack";
const ZONE: &str = "topology.kubernetes.io/zone";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kube::testing::FakeServer;

    #[tokio::test]
    async fn the_place_of_a_node_is_in_its_labels() {
        let (fake, cluster) = FakeServer::start();
        let nodes = Nodes::new(&cluster);
        assert_eq!(nodes.locate("n").await, None);
        let labels = json!({"topology.kubernetes.io/zone": "z", "kubernetes.io/os": "linux"});
        let node = json!({
            "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
            "metadata": {"name": "n", "labels": labels}
        });
        fake.state().cluster_paths.insert("/api/v1/nodes/n".into(), node);
        let expected = Location { zone: "z".into(), rack: String::new(), node: "n".into() };
        assert_eq!(nodes.locate("n").await, Some(expected.clone()));
        // It is read once.
        fake.state().cluster_paths.clear();
        assert_eq!(nodes.locate("n").await, Some(expected));
    }
}
