//! Jobs in a real cluster: `.ci/cluster` starts one and runs these tests.
//!
//! One executable, so that little is linked, and so that the tests, most of which wait, run beside
//! each other. Those of `node` disturb everything else in the cluster: they run in a second call,
//! one at a time.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]
#![allow(clippy::print_stdout, reason = "figures of the cluster")]

mod admission;
mod declared;
mod images;
mod limits;
mod masters;
mod node;
mod pods;
mod security;
mod storage;

use std::process::ExitCode;

use elasticdl_tests::cluster::{Namespace, run_tests};

/// The program under test.
const ELASTICDL: &str = env!("CARGO_BIN_EXE_elasticdl-under-test");

/// A new namespace with the rights that jobs need.
fn namespace(test: &str) -> Namespace {
    let namespace = Namespace::new(test, ELASTICDL);
    namespace.apply_rbac();
    namespace
}

/// The tests of a module, with their names.
macro_rules! cluster_tests {
    ($($test:ident),+ $(,)?) => {
        pub(crate) const TESTS: &[(&str, fn())] =
            &[$((concat!(module_path!(), "::", stringify!($test)), $test)),+];
    };
}
use cluster_tests;

/// Runs the longest tests first, so that none is left alone at the end.
fn main() -> ExitCode {
    let modules = [
        masters::TESTS,
        storage::TESTS,
        pods::TESTS,
        declared::TESTS,
        limits::TESTS,
        security::TESTS,
        images::TESTS,
        admission::TESTS,
        node::TESTS,
    ];
    run_tests(&modules.concat())
}
