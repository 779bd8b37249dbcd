//! Nodes of a cluster.

use serde_json::Value;

use super::kubectl::{kubectl, must};

/// A node.
#[derive(Debug)]
pub struct Node {
    name: String,
}

impl Node {
    /// The cluster's only node.
    pub fn only() -> Self {
        let nodes = items(&["get", "nodes"]);
        assert_eq!(nodes.len(), 1, "these tests need a cluster with one node");
        Self { name: super::name(&nodes[0]).to_owned() }
    }

    pub(super) fn named(name: &str) -> Self {
        Self { name: name.into() }
    }

    /// Cordons the node: no new pods are scheduled on it for as long as the guard lives.
    pub fn cordon(&self) -> Cordoned<'_> {
        must(kubectl().args(["cordon", &self.name]));
        Cordoned { node: self }
    }

    /// Runs `kubectl drain` on the pods with these labels: cordons the node and evicts them.
    pub fn drain(&self, selector: &str) -> Cordoned<'_> {
        let cordoned = self.cordon();
        must(kubectl().args(["drain", &self.name, "--pod-selector", selector]).args([
            "--ignore-daemonsets",
            "--delete-emptydir-data",
            "--timeout=60s",
        ]));
        cordoned
    }

    /// The CPU that no pod on the node requests, in thousandths.
    pub fn free_cpu_millis(&self) -> u64 {
        let node = items(&["get", "nodes"]);
        let allocatable = millis(&node[0]["status"]["allocatable"]["cpu"]);
        let live = "status.phase!=Succeeded,status.phase!=Failed";
        let pods = items(&["get", "pods", "--all-namespaces", "--field-selector", live]);
        let asked = |pod: &Value| {
            let containers = pod["spec"]["containers"].as_array().cloned().unwrap_or_default();
            containers.iter().map(|c| millis(&c["resources"]["requests"]["cpu"])).sum::<u64>()
        };
        allocatable.saturating_sub(pods.iter().map(asked).sum())
    }
}

/// A node that is cordoned for as long as this value lives.
#[derive(Debug)]
pub struct Cordoned<'a> {
    node: &'a Node,
}

impl Drop for Cordoned<'_> {
    fn drop(&mut self) {
        let _ = kubectl().args(["uncordon", &self.node.name]).output();
    }
}

/// A PriorityClass, which is deleted with this value. The scheduler preempts pods of lower ones for
/// those of higher ones.
#[derive(Debug)]
pub struct PriorityClass {
    name: String,
}

impl PriorityClass {
    /// Creates a PriorityClass.
    pub fn new(name: String, value: i32) -> Self {
        let value = format!("--value={value}");
        must(kubectl().args(["create", "priorityclass", &name, &value]));
        Self { name }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for PriorityClass {
    fn drop(&mut self) {
        let _ = kubectl().args(["delete", "priorityclass", &self.name, "--wait=false"]).output();
    }
}

fn items(args: &[&str]) -> Vec<Value> {
    let output = must(kubectl().args(args).args(["-o", "json"]));
    let list: Value = serde_json::from_slice(&output.stdout).expect("kubectl prints JSON");
    list["items"].as_array().cloned().unwrap_or_default()
}

/// Parses a quantity such as `2` or `250m`; null is 0.
fn millis(amount: &Value) -> u64 {
    let text = amount.as_str().unwrap_or("0");
    match text.strip_suffix('m') {
        Some(millis) => millis.parse().expect("an amount of CPU"),
        None => text.parse::<u64>().expect("an amount of CPU") * 1000,
    }
}
