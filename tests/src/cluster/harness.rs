//! Runs the tests of an executable in a cluster. Where there is none, each is listed as ignored,
//! with the reason, which libtest can't do for a condition of the machine.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// Runs the tests, which are named by their paths in the executable, if `KUBECONFIG` is set.
pub fn run_tests(tests: &[(&'static str, fn())]) -> ExitCode {
    let has_cluster = std::env::var_os("KUBECONFIG").is_some();
    let trial = |&(name, test): &(&'static str, fn())| {
        let inside = name.split_once("::").map_or(name, |(_, inside)| inside);
        let trial = Trial::test(inside, move || {
            test();
            Ok(())
        });
        if has_cluster { trial } else { trial.with_ignored_flag(true).with_kind(WITHOUT) }
    };
    let trials = tests.iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// What a test shows that is ignored.
const WITHOUT: &str = "needs a cluster: `.ci/cluster`, or KUBECONFIG";
