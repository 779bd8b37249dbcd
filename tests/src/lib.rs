//! What the cross-crate tests share: jobs as real processes, and their data.

mod data;
mod job;

pub use data::counting_data;
pub use job::{Command, Ended, Running, is_alive, send};
