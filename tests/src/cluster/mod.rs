//! A namespace of a real cluster, jobs in it, and what a test may do to its node and its API
//! server.

mod api_server;
mod audit;
mod following;
mod job;
mod kubectl;
mod namespace;
mod node;
mod sightings;

pub use api_server::{ApiServer, Stopped};
pub use audit::{Call, calls};
pub use following::Following;
pub use job::{FIRST_GRADIENT, FIRST_UPDATE, Job, RECORDS, assert_exactly_once, name, uid};
pub use kubectl::{kubectl, must, text};
pub use namespace::Namespace;
pub use node::{Cordoned, Node, PriorityClass};
pub use sightings::{Sightings, since_midnight, time_of_line};
