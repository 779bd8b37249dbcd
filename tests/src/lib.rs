//! What the cross-crate tests and benchmarks share: jobs as real processes, their data, networks that can be cut, figures.

mod data;
mod figures;
mod job;
mod network;

pub use data::{counting_data, counting_reader, numbers};
pub use figures::{print, quantile};
pub use job::{Command, Ended, Running, is_alive, send};
pub use network::Network;
