//! What the cross-crate tests and benchmarks share: jobs as real processes, their data, networks
//! that can be cut, figures; and whole jobs in one thread.

pub mod cluster;
mod data;
mod figures;
mod job;
mod network;
mod proxy;
mod s3;
pub mod simulation;
mod spec;
mod stage;

pub use data::{counting_data, counting_reader, counts_summary, numbers};
pub use figures::{print, quantile};
pub use job::{Command, Ended, Running, is_alive, send};
pub use network::Network;
pub use proxy::Proxy;
pub use s3::{S3, Weather};
pub use spec::job_spec;
pub use stage::{Programs, Stage};
