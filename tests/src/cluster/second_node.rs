//! A second node on the same machine, which can be lost.

use std::path::Path;
use std::process::Command;

use super::kubectl::must;
use super::node::Node;

/// The second node, with a kubelet, a containerd and a pod network of its own. Dropping it removes
/// it; its pods are deleted then.
#[derive(Debug)]
pub struct SecondNode {
    node: Node,
}

impl SecondNode {
    /// Adds the node by `.ci/second-node`, with the images of the first one, and waits until it
    /// takes pods.
    pub fn add() -> Self {
        run("start");
        Self { node: Node::named("node-1") }
    }

    /// The node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Cuts the node off: its kubelet stands still, and no packet of its pods is delivered. Their
    /// processes run on.
    pub fn lose(&self) {
        run("lose");
    }
}

impl Drop for SecondNode {
    fn drop(&mut self) {
        run("stop");
    }
}

fn run(command: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace's folder");
    must(Command::new(root.join(".ci/second-node")).arg(command));
}
