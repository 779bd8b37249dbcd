//! Support for the cross-crate tests and benchmarks: jobs as real processes, their data, networks
//! that can be cut, figures; and the simulation of whole jobs in one thread.

pub mod cluster;
mod data;
mod figures;
mod job;
mod job_fixture;
mod network;
mod proxy;
mod s3;
pub mod simulation;
mod spec;

pub use data::{counting_data, counting_reader, counts_summary, numbers};
pub use figures::{print, quantile};
pub use job::{Command, Ended, Running, is_alive, send};
pub use job_fixture::{JobFixture, Programs};
pub use network::Network;
pub use proxy::Proxy;
pub use s3::{FaultRates, S3};
pub use spec::job_spec;
