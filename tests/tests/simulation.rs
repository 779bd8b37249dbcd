//! Whole jobs in simulated worlds: 10,000 storms, and every record counted once after each.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::num::NonZero;

use elasticdl_tests::simulation::{Many, Tally, run_many, tell};

#[test]
fn every_record_is_counted_once_whatever_fails_and_whenever() {
    let Many { tally, failures } = run_many(0..10_000, NonZero::new(2).unwrap(), 1, None);
    if let Some(failure) = failures.first() {
        panic!("{failure}");
    }
    // The storms come into every corner; where they no longer do, their dice have to be thrown
    // otherwise.
    let Tally { runs, faults, generations, redone, zombie_commits, .. } = tally;
    assert!(runs == 10_000 && faults > runs && generations > runs, "{tally:#?}");
    assert!(redone > 20 && zombie_commits > 20, "{tally:#?}");
    assert!(tally.repaired_by_result > 100 && tally.repaired_by_state > 1000, "{tally:#?}");
    assert!(tally.fetched > 500 && tally.followed > 500, "{tally:#?}");
    assert!(tally.begun_again > 100 && tally.evicted > 100, "{tally:#?}");
    assert!(tally.returned > 1000 && tally.control_storms > 1000, "{tally:#?}");
    assert!(tally.kept > 1000 && tally.restored > 50, "{tally:#?}");
    assert!(
        tally.nccl_steps > 20_000 && tally.nccl_failures > 200 && tally.nccl_given_up > 50,
        "{tally:#?}"
    );
    assert!(tally.pods_failed > 500, "{tally:#?}");
    assert!(tally.fenced > 1000 && tally.stopped > 20 && tally.masters_crashed > 500, "{tally:#?}");
}

#[test]
fn a_run_depends_on_its_seed_alone() {
    for seed in 0..20 {
        let (outcome, story) = tell(seed);
        assert!(story.len() > 20, "seed {seed}: {story:#?}");
        assert_eq!((outcome, story), tell(seed), "seed {seed}");
    }
}
