//! Support for the cross-crate tests and benchmarks: jobs as real processes, their data, networks
//! that can be cut, their disturbance, figures; and the simulation of whole jobs in one thread.

mod browser;
mod child_output;
pub mod churn;
pub mod cluster;
mod data;
mod determinism;
mod exported_tables;
mod figures;
mod half_parameters;
mod job;
mod job_fixture;
mod kube_api;
mod network;
mod page;
mod process;
mod proxy;
mod s3;
mod schedules;
pub mod simulation;

pub use browser::Browser;
pub use child_output::ChildOutput;
pub use data::{
    counting_data, counting_reader, counts_summary, exported_counts, numbers, unless_refused,
};
pub use determinism::DeterminismCase;
pub use exported_tables::{ExportedRow, exported_rows, touches_without_row};
pub use figures::{
    auc, built, exit_code, jain, measure_parts, parse_seeds, print, quantile, read_results,
    run_benchmark, spread, write_results,
};
pub use half_parameters::HalfParameters;
pub use job::{Command, Ended, Running, assert_exactly_once, each_once, once_of, read_summary};
pub use job_fixture::{JobFixture, KILLS_MAX, Programs};
pub use kube_api::KubeApi;
pub use network::{Capture, Network, Observed};
pub use page::Page;
pub use process::{assert_end, is_alive, send};
pub use proxy::Proxy;
pub use s3::{FaultRates, S3};
pub use schedules::{Disturbed, Schedule};
