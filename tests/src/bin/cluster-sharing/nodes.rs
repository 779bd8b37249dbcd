//! Nodes without machines: Node objects, their Leases, and pods that take a part of their CPUs.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

use crate::Fault;

/// Nodes of a cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Nodes {
    /// The first of the 133 nodes of EDL's experiments.
    Edl(u32),
    /// Three nodes: 24 CPUs for workers, as in ElasticDL's experiment, and one on each for masters.
    Small,
}

impl Nodes {
    /// Number of nodes.
    pub(crate) fn count(self) -> u32 {
        match self {
            Self::Edl(count) => count,
            Self::Small => 3,
        }
    }

    /// CPUs of all nodes.
    pub(crate) fn cpus(self) -> u32 {
        (0..self.count()).map(|node| self.cpus_of(node)).sum()
    }

    /// CPUs of all nodes that placeholders take.
    pub(crate) fn cpus_taken(self) -> f64 {
        let all: u32 = (0..self.count()).map(|node| self.placeholders_of(node)).sum();
        f64::from(all) / 2.0
    }

    /// How many pods of so many CPUs each fit at most beside the placeholders.
    pub(crate) fn capacity(self, cpus: u32) -> u32 {
        let free = |node| self.cpus_of(node) - self.placeholders_of(node).min(1);
        (0..self.count()).map(|node| free(node) / cpus).sum()
    }

    /// Whole CPUs of a node.
    fn cpus_of(self, node: u32) -> u32 {
        match self {
            Self::Edl(_) => share(CPUS, node + 1) - share(CPUS, node),
            Self::Small => 9,
        }
    }

    /// Placeholders of half a CPU on a node: one or none.
    fn placeholders_of(self, node: u32) -> u32 {
        match self {
            Self::Edl(_) => share(PLACEHOLDERS, node + 1) - share(PLACEHOLDERS, node),
            Self::Small => 0,
        }
    }

    /// Creates the nodes. Nodes of an earlier run are replaced.
    pub(crate) async fn create(self, client: &Client) -> Result<(), Fault> {
        Self::delete(client).await?;
        let nodes: Api<Node> = Api::all(client.clone());
        let others = nodes.list(&ListParams::default()).await?.items;
        if let Some(name) = others.first().and_then(|node| node.metadata.name.as_ref()) {
            let why = "pods would be scheduled to it; start the cluster with --control-plane-only";
            return Err(format!("the cluster has a node {name} of its own: {why}").into());
        }
        for node in 0..self.count() {
            let node: Node = serde_json::from_value(node_object(node, self.cpus_of(node)))?;
            nodes.create(&PostParams::default(), &node).await?;
        }
        Ok(())
    }

    /// Creates the placeholders in a namespace, bound to their nodes.
    pub(crate) async fn fill(self, client: &Client, namespace: &str) -> Result<(), Fault> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        for node in (0..self.count()).filter(|&node| self.placeholders_of(node) > 0) {
            let pod = json!({
                "metadata": {"name": format!("placeholder-{node}")},
                "spec": {
                    "nodeName": name(node),
                    "terminationGracePeriodSeconds": 0,
                    "containers": [{
                        "name": "placeholder",
                        "image": "none",
                        "resources": {"requests": {"cpu": "500m"}},
                    }],
                },
            });
            pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
        }
        Ok(())
    }

    /// Renews the Leases of all nodes, one after the other, each once per `interval`. Without them
    /// the node controller would declare the nodes lost.
    pub(crate) async fn keep_alive(self, client: Client, interval: Duration) {
        let leases: Api<Lease> = Api::namespaced(client, "kube-node-lease");
        let mut ticks = tokio::time::interval(interval / self.count());
        for node in (0..self.count()).cycle() {
            ticks.tick().await;
            let (leases, name) = (leases.clone(), name(node));
            tokio::spawn(async move {
                if renew(&leases, &name).await.is_err() {
                    // The next renewal follows within the node controller's grace period.
                    let _ = renew(&leases, &name).await;
                }
            });
        }
    }

    /// Deletes the nodes and their Leases.
    pub(crate) async fn delete(client: &Client) -> Result<(), Fault> {
        let ours = ListParams::default().labels(LABEL);
        let (nodes, leases): (Api<Node>, Api<Lease>) =
            (Api::all(client.clone()), Api::namespaced(client.clone(), "kube-node-lease"));
        nodes.delete_collection(&DeleteParams::default(), &ours).await?;
        leases.delete_collection(&DeleteParams::default(), &ours).await?;
        Ok(())
    }
}

async fn renew(leases: &Api<Lease>, name: &str) -> Result<(), kube::Error> {
    let lease = Lease {
        metadata: ObjectMeta {
            name: Some(name.into()),
            labels: Some([(LABEL.into(), String::new())].into()),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(name.into()),
            lease_duration_seconds: Some(40),
            renew_time: Some(MicroTime(Timestamp::now())),
            ..LeaseSpec::default()
        }),
    };
    match leases.patch(name, &PatchParams::default(), &Patch::Merge(&lease)).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            leases.create(&PostParams::default(), &lease).await.map(drop)
        }
        renewed => renewed.map(drop),
    }
}

fn node_object(node: u32, cpus: u32) -> serde_json::Value {
    let (name, now) = (name(node), Timestamp::now().to_string());
    let condition = |kind: &str, status: &str| {
        json!({
            "type": kind, "status": status, "reason": "Simulated", "message": "",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        })
    };
    let amounts = json!({"cpu": cpus.to_string(), "memory": "256Gi", "pods": "110",
               "ephemeral-storage": "1Ti"});
    json!({
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", LABEL: ""},
        },
        "status": {
            "allocatable": amounts,
            "capacity": amounts,
            "addresses": [{"type": "Hostname", "address": name}],
            "conditions": [
                condition("MemoryPressure", "False"), condition("DiskPressure", "False"),
                condition("PIDPressure", "False"), condition("Ready", "True"),
            ],
        },
    })
}

fn name(node: u32) -> String {
    format!("sharing-{node:03}")
}

/// The part of `all` that the first `nodes` nodes have.
fn share(all: u32, nodes: u32) -> u32 {
    all * nodes / NODES
}

/// Nodes, CPUs and CPUs in use of the cluster of EDL's experiments.
pub(crate) const NODES: u32 = 133;
const CPUS: u32 = 2348;
const PLACEHOLDERS: u32 = 101;
const LABEL: &str = "elasticdl-tests/sharing";
