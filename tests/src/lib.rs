//! What the cross-crate tests and benchmarks share: jobs as real processes, their data, figures.

mod data;
mod figures;
mod job;

pub use data::{counting_data, counting_reader, numbers};
pub use figures::{print, quantile};
pub use job::{Command, Ended, Running, is_alive, send};
