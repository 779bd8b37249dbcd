//! Jobs of real processes under random faults: is each touch of a row counted once?

use std::error::Error;
use std::time::Duration;

use elasticdl_tests::{JobFixture, KILLS_MAX, Programs, Running, print, send};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{Arguments, built};

pub(crate) fn measure(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    let path = |name| -> Result<&'static str, Box<dyn Error>> {
        let path = built("elasticdl-tests", name)?;
        let path = path.to_str().ok_or("the path of a program is not UTF-8")?;
        Ok(Box::leak(path.into()))
    };
    let (elasticdl, counting) = (path("elasticdl-under-test")?, path("counting")?);
    let mut exact = 0;
    for seed in arguments.first_seed..arguments.first_seed + arguments.schedules {
        let programs = Programs { elasticdl, counting };
        match run(programs, seed) {
            Ok(()) => exact += 1,
            Err(error) => print(&format!("seed {seed}: {error}")),
        }
    }
    Ok(json!({ "schedules": { "run": arguments.schedules, "exact": exact } }))
}

/// Runs a job of four workers under the faults that `seed` draws. The error says what is wrong with
/// its result.
fn run(programs: Programs, seed: u64) -> Result<(), String> {
    let program_options = &["--tables"];
    let fixture =
        JobFixture { program_options, micros_per_record: 300, ..JobFixture::new(programs, 4) };
    let (records, epochs) = (fixture.records, fixture.epochs);
    let command = fixture.command(seed).option("checkpoint-dir", "none");
    let mut job = command.start().keeping(fixture.folder);
    job.wait_for_first_steps();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut kills = 0;
    let mut trace = String::new();
    while job.is_running() && kills + 2 <= KILLS_MAX {
        let fault = rng.random_range(0..12);
        trace += &format!(" {fault}");
        kills += disturb(&mut job, fault, &mut rng);
        std::thread::sleep(Duration::from_millis(rng.random_range(100..600)));
    }
    let ended = job.wait();
    let fail = |what: String| Err(format!("{what}; faults:{trace}"));
    if ended.code != Some(0) {
        return fail(format!("code {:?}: {}", ended.code, ended.output));
    }
    let summary = ended.summary();
    let Some(touches) = summary.row_touches else { return fail("no touches".into()) };
    let (counted, missing) = (summary.records.counted, summary.records.missing);
    let of_records = (counted, missing, summary.records.repeated);
    let of_rows = (touches.counted, touches.missing, touches.repeated);
    let expected = (records * epochs, 0, 0);
    if of_records != expected || of_rows != expected || touches.expected != expected.0 {
        return fail(format!("records {of_records:?}, touches {touches:?}, not {expected:?}"));
    }
    Ok(())
}

/// Applies a fault, and returns the number of workers that it kills.
fn disturb(job: &mut Running, fault: u32, rng: &mut ChaCha8Rng) -> u32 {
    let victim = job.any_worker(rng).map(|(_, pid)| pid);
    match (fault, victim) {
        (0..4, Some(pid)) => {
            send(pid, Signal::KILL);
            1
        }
        (4..6, Some(pid)) => {
            send(pid, Signal::KILL);
            std::thread::sleep(Duration::from_millis(rng.random_range(0..200)));
            let Some((_, pid)) = job.any_worker(rng) else { return 1 };
            send(pid, Signal::KILL);
            2
        }
        (6..8, Some(pid)) => {
            send(pid, Signal::TERM);
            0
        }
        // The job may have ended just before.
        (8, _) => {
            let _ = job.try_scale(rng.random_range(1..=6));
            0
        }
        (9, Some(pid)) => {
            send(pid, Signal::STOP);
            std::thread::sleep(Duration::from_millis(rng.random_range(1..400)));
            send(pid, Signal::CONT);
            0
        }
        (10, _) if job.is_running() => {
            job.kill_master();
            job.resume();
            0
        }
        _ => 0,
    }
}
