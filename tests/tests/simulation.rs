//! Whole jobs over a simulated network and clock count every record once, and every touch of a row
//! of a table, under 2,500 fault plans, and in each run of small jobs with one fault, wherever it
//! hits.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::num::NonZero;

use elasticdl_tests::simulation::{
    Bounds, Choice, Coverage, Decision, Explored, Many, explore, replay, run_many, run_traced,
};

/// Seeds of fault plans; the program `simulate` runs as many as it is asked for.
const RUNS: u64 = 2_500;

#[test]
fn every_record_is_counted_once_under_every_fault_plan() {
    let Many { coverage, failures } =
        run_many(0..RUNS, NonZero::new(2).unwrap(), 1, None, |_, _| ());
    if let Some(failure) = failures.first() {
        panic!("{failure}");
    }
    // The faults reach every code path; if some counts become too low, the distributions of the
    // fault plans have to be changed.
    let Coverage { runs, faults, generations, redone, zombie_commits, .. } = coverage;
    assert!(runs == RUNS && faults > runs && generations > runs, "{coverage:#?}");
    assert!(redone > 5 && zombie_commits > 5, "{coverage:#?}");
    assert!(coverage.repaired_by_result > 25 && coverage.repaired_by_state > 250, "{coverage:#?}");
    assert!(coverage.fetched > 125 && coverage.followed > 125, "{coverage:#?}");
    assert!(coverage.fetches_interrupted > 25 && coverage.fetches_resumed > 10, "{coverage:#?}");
    assert!(coverage.unread > 250, "{coverage:#?}");
    assert!(coverage.row_commits > 5000 && coverage.foreseen > 2500, "{coverage:#?}");
    assert!(coverage.rows_lost > 1 && coverage.rows_replaced > 12, "{coverage:#?}");
    assert!(coverage.evaluations > 500, "{coverage:#?}");
    assert!(coverage.begun_again > 25 && coverage.evicted > 25, "{coverage:#?}");
    assert!(coverage.returned > 250 && coverage.control_only_runs > 250, "{coverage:#?}");
    assert!(coverage.checkpoints > 250 && coverage.restored > 12, "{coverage:#?}");
    assert!(
        coverage.nccl_steps > 5000 && coverage.nccl_failures > 50 && coverage.nccl_given_up > 12,
        "{coverage:#?}"
    );
    assert!(
        coverage.masters_replaced > 50
            && coverage.published_by_replaced > 5
            && coverage.resumed_outdated > 0,
        "{coverage:#?}"
    );
    assert!(coverage.hung > 50 && coverage.bad_starts > 10, "{coverage:#?}");
    assert!(
        coverage.diverged > 15
            && coverage.void < coverage.flipped / 10
            && coverage.other_builds > 2
            && coverage.storms > 12,
        "{coverage:#?}"
    );
    assert!(coverage.miscounted > 12 && coverage.audited > 8, "{coverage:#?}");
    assert!(coverage.sums_changed > 5, "{coverage:#?}");
    assert!(coverage.pods_failed > 125 && coverage.suspensions > 125, "{coverage:#?}");
    assert!(
        coverage.fenced > 250 && coverage.stopped > 5 && coverage.masters_crashed > 125,
        "{coverage:#?}"
    );
}

#[test]
fn a_run_depends_on_its_seed_alone() {
    for seed in 0..20 {
        let (outcome, trace) = run_traced(seed);
        assert!(trace.len() > 20, "seed {seed}: {trace:#?}");
        assert_eq!((outcome, trace), run_traced(seed), "seed {seed}");
    }
}

#[test]
fn every_fault_at_every_point_of_a_small_job_costs_no_record() {
    for (shards, chunks, spares) in [(0, 0, 0), (2, 0, 0), (0, 2, 0), (0, 0, 1)] {
        let job = Explored { workers: 2, steps: 2, spares, shards, chunks };
        let bounds =
            Bounds { job, decisions: 1, delays: 1, runs: u64::MAX, violations: 1, threads: 2 };
        let found = explore(&bounds);
        assert!(found.violations.is_empty() && found.is_complete, "{found:#?}");
        assert!(found.states > 500 && found.runs > 300, "{found:#?}");
    }
}

#[test]
fn a_run_depends_on_its_decisions_alone() {
    let job = Explored { workers: 3, steps: 2, spares: 0, shards: 0, chunks: 0 };
    let kill = Decision { at: 100, choice: Choice::Kill(2) };
    assert_eq!(kill.to_string().parse(), Ok(kill));
    let (outcome, trace) = replay(job, &[kill]);
    assert!(outcome.is_ok() && trace.iter().any(|line| line.contains("CHOICE: kill 2")));
    assert_eq!((outcome, trace), replay(job, &[kill]));
}
