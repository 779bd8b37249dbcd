//! A namespace of a real cluster, jobs in it, and faults of its nodes and its API server.

mod api_server;
mod audit;
mod harness;
mod job;
mod kubectl;
mod namespace;
mod network_policy;
mod node;
mod pod_watch;
mod second_node;

pub use api_server::{ApiServer, Stopped};
pub use audit::{Call, calls};
pub use harness::run_tests;
pub use job::{FIRST_GRADIENT, FIRST_UPDATE, Job, RECORDS, name, uid};
pub use kubectl::{kubectl, must, text};
pub use namespace::{Namespace, pod_template};
pub use network_policy::{Peer, allows};
pub use node::{Cordoned, Node, PriorityClass};
pub use pod_watch::{PodWatch, since_midnight, time_of_line};
pub use second_node::SecondNode;
