//! Rows of tables, each on two workers, are touched exactly once by each record under random
//! `kill -9`.

use std::time::Duration;

use elasticdl_proto::RowTouchesSummary;
use elasticdl_tests::{Ended, JobFixture, Running, send};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::PROGRAMS;

/// Starts a job whose model has a table, with so many copies of each row.
fn start(seed: u64, (workers, replicas): (u32, u32)) -> Running {
    let program_options = &["--tables"];
    let fixture = JobFixture { program_options, ..JobFixture::new(PROGRAMS, workers) };
    let command = fixture.command(seed).option("checkpoint-dir", "none");
    let command = command.option("table-replicas", replicas.to_string());
    let mut job = command.start().keeping(fixture.folder);
    job.wait_for_first_steps();
    job
}

#[test]
fn rows_are_touched_exactly_once_under_random_kills() {
    for seed in 0..3 {
        let mut job = start(seed, (4, 2));
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..6 {
            // Both copies of a row are lost if two workers are killed before the others have made
            // copies again, which takes a step or two.
            let step = job.status().step;
            job.wait_for("copies", |status| status.step > step + 10);
            std::thread::sleep(Duration::from_millis(rng.random_range(0..100)));
            let (_, pid) = job.any_worker(&mut rng).unwrap();
            send(pid, Signal::KILL);
        }
        let ended = job.wait();
        assert_exact(&ended, seed);
        assert!(ended.lost().len() > 2, "seed {seed}: too fast to be disturbed");
    }
}

#[test]
fn with_three_copies_two_workers_may_be_killed_at_once() {
    let seed = 4;
    let mut job = start(seed, (5, 3));
    for _ in 0..3 {
        let step = job.status().step;
        job.wait_for("copies", |status| status.step > step + 10);
        job.workers().into_values().take(2).for_each(|pid| send(pid, Signal::KILL));
    }
    let ended = job.wait();
    assert_exact(&ended, seed);
    assert!(ended.lost().len() > 3, "too fast to be disturbed");
}

/// Each record and each touch of a row was counted once.
fn assert_exact(ended: &Ended, seed: u64) {
    ended.assert_exact(&format!("seed {seed}"));
    let expected = 12_000;
    let exact = RowTouchesSummary { expected, counted: expected, missing: 0, repeated: 0 };
    assert_eq!(ended.summary().row_touches, Some(exact), "seed {seed}");
}
