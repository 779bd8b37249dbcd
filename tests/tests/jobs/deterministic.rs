//! `--deterministic` gives the same parameters, bit for bit, at 1 to 8 workers, under faults, after
//! a resume, over TCP, channels and hosts.

use std::sync::OnceLock;

use elasticdl_tests::{DeterminismCase, Programs};

const PROGRAMS: Programs = Programs {
    elasticdl: env!("CARGO_BIN_EXE_determinism"),
    counting: env!("CARGO_BIN_EXE_determinism"),
};

fn digest(case: &DeterminismCase, is_deterministic: bool) -> String {
    let ended = case.run(PROGRAMS, is_deterministic);
    ended.summary().digest.clone().expect("a completed job has a digest")
}

/// The digest of one worker to which nothing happens.
fn expected() -> &'static String {
    static DIGEST: OnceLock<String> = OnceLock::new();
    DIGEST.get_or_init(|| digest(&DeterminismCase::UNDISTURBED[0], true))
}

fn assert_same(cases: &[DeterminismCase]) {
    for case in cases {
        assert_eq!(digest(case, true), *expected(), "{}", case.name);
    }
}

fn digest_with_tables(case: &DeterminismCase, lag: u8) -> String {
    case.run_with_tables(PROGRAMS, lag).summary().digest.clone().expect("a digest")
}

#[test]
fn any_number_of_workers_trains_the_same_bits() {
    assert_same(&DeterminismCase::UNDISTURBED[1..]);
}

#[test]
fn workers_and_masters_that_come_and_go_train_the_same_bits() {
    assert_same(&DeterminismCase::DISTURBED[..4]);
}

#[test]
fn another_master_a_checkpoint_other_shares_and_late_data_train_the_same_bits() {
    assert_same(&DeterminismCase::DISTURBED[4..]);
}

#[test]
#[ignore = "needs root and iproute2"]
fn any_transport_trains_the_same_bits() {
    assert_same(DeterminismCase::TRANSPORTS);
}

#[test]
fn rows_of_tables_are_trained_to_the_same_bits() {
    let digest = |case| digest_with_tables(case, 0);
    let [one, others @ ..] = DeterminismCase::UNDISTURBED else { panic!("there are cases") };
    let expected = digest(one);
    let disturbed = [0, 1, 2, 5].map(|case| DeterminismCase::DISTURBED[case]);
    for case in others[..3].iter().chain(&disturbed) {
        assert_eq!(digest(case), expected, "{}", case.name);
    }
}

#[test]
fn rows_of_older_commits_are_trained_to_the_same_bits() {
    let [one, _, three, ..] = DeterminismCase::UNDISTURBED else { panic!("there are three") };
    let expected = digest_with_tables(one, 2);
    assert_ne!(digest_with_tables(one, 0), expected, "the rows that steps read are others");
    for case in [three, &DeterminismCase::DISTURBED[0]] {
        assert_eq!(digest_with_tables(case, 2), expected, "{}", case.name);
    }
}

/// Between hosts, rows are looked up while the step before is computed.
#[test]
#[ignore = "needs root and iproute2"]
fn rows_that_are_looked_up_early_are_trained_to_the_same_bits() {
    for lag in [0, 1] {
        let expected = digest_with_tables(&DeterminismCase::UNDISTURBED[0], lag);
        let [tcp, _, two_hosts] = DeterminismCase::TRANSPORTS else { panic!("there are three") };
        for case in [tcp, two_hosts] {
            assert_eq!(digest_with_tables(case, lag), expected, "{}, lag {lag}", case.name);
        }
    }
}

/// Otherwise the tests above would prove nothing.
#[test]
fn without_the_option_the_bits_depend_on_the_number_of_workers() {
    let [one, _, three, ..] = DeterminismCase::UNDISTURBED else { panic!("there are three") };
    assert_ne!(digest(one, false), digest(three, false));
}
