//! Jobs whose workers compute on GPUs. There are none: libraries that do on the host what a GPU's would stand in for them.
//!
//! The model's parameters count records, so the final parameters are the proof, wherever they were kept.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::time::Duration;

use elasticdl_collective::stand_in;
use elasticdl_tests::{Programs, Stage, send};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

const PROGRAMS: Programs = Programs {
    elasticdl: env!("CARGO_BIN_EXE_elasticdl-under-test"),
    counting: env!("CARGO_BIN_EXE_counting"),
};

#[test]
fn records_are_counted_exactly_once_on_gpus_under_kills_and_joins() {
    for seed in 0..3 {
        let stage = Stage { gpu: Some(stand_in::folder()), ..Stage::new(PROGRAMS, 3) };
        let mut job = stage.start(seed);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut kills = 0;
        while job.is_running() {
            if let Some((_, pid)) = job.any_worker(&mut rng) {
                send(pid, Signal::KILL);
                kills += 1;
            }
            std::thread::sleep(Duration::from_millis(rng.random_range(500..1500)));
        }
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}, {kills} kills"));
        assert!(kills > 1, "seed {seed}: too fast to be disturbed");
    }
}
