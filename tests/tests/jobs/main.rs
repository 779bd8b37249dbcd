//! Jobs as real processes, under faults of every kind: `cargo test -p elasticdl-tests --test jobs
//! chaos::` runs the tests of one module.
//!
//! One executable, so that little is linked, and so that the tests, most of which wait, run beside
//! each other.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod audit;
mod autoscale;
mod chaos;
mod checkpoints;
mod dashboard;
mod debug;
mod declared;
mod deterministic;
mod disk;
mod encryption;
mod endings;
mod evaluation;
mod export;
mod gpu;
mod gpu_drill;
mod hosts;
mod inference;
mod lifecycle;
mod lineage;
mod logs;
mod master;
mod metrics;
mod network_policy;
mod own_trouble;
mod partition;
mod pods;
mod refusals;
mod regroup;
mod replicas;
mod sharded;
mod spares;
mod status;
mod stops;
mod storage;
mod table_exports;
mod tables;
mod tls;
mod traces;
mod trouble;

use elasticdl_tests::Programs;

/// The programs under test.
const PROGRAMS: Programs = Programs {
    elasticdl: env!("CARGO_BIN_EXE_elasticdl-under-test"),
    counting: env!("CARGO_BIN_EXE_counting"),
};
