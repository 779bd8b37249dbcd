//! Every record counts exactly once under random `kill -9` and mixed schedules of kills, leaves,
//! stops and scaling, 20 seeds, real processes; a failure prints its schedule and how to replay it.
//!
//! The model's parameters count records, so the final parameters are the proof; the ledger is
//! compared with them.

use std::time::{Duration, Instant};

use elasticdl_proto::{Cause, WorkerStatus};
use elasticdl_tests::{JobFixture, KILLS_MAX, Running, send};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::PROGRAMS;

#[test]
fn records_are_counted_exactly_once_under_random_kills() {
    for seed in 0..20 {
        JobFixture::new(PROGRAMS, 4).survives_kills(seed, 200..1200);
    }
}

/// A fault of a running job.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill,
    Leave,
    Scale(u32),
    /// Stops a worker for this number of milliseconds.
    Stop(u64),
}

impl Fault {
    fn draw(rng: &mut ChaCha8Rng) -> Self {
        match rng.random_range(0..10) {
            0..4 => Self::Kill,
            4..6 => Self::Leave,
            6..8 => Self::Scale(rng.random_range(1..=6)),
            _ => Self::Stop(rng.random_range(1..=400)),
        }
    }

    fn apply(self, job: &Running, rng: &mut ChaCha8Rng) {
        let victim = job.any_worker(rng).map(|(_, pid)| pid);
        match (self, victim) {
            (Self::Kill, Some(pid)) => send(pid, Signal::KILL),
            (Self::Leave, Some(pid)) => send(pid, Signal::TERM),
            // The job may have ended just before.
            (Self::Scale(workers), _) => {
                job.output_of(&["scale", "--num-workers", &workers.to_string()]);
            }
            (Self::Stop(ms), Some(pid)) => {
                send(pid, Signal::STOP);
                std::thread::sleep(Duration::from_millis(ms));
                send(pid, Signal::CONT);
            }
            (_, None) => {}
        }
    }
}

/// The seeds of the mixed schedules, or the one to be run again.
fn seeds() -> Vec<u64> {
    match std::env::var("ELASTICDL_CHAOS_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (100..110).collect(),
    }
}

#[test]
fn records_are_counted_exactly_once_under_mixed_schedules() {
    let mut lost = 0;
    for seed in seeds() {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let num_workers = rng.random_range(2..=5);
        let is_large = rng.random_ratio(1, 3);
        let fixture =
            JobFixture { micros_per_record: 300, ..JobFixture::new(PROGRAMS, num_workers) };
        let fixture = if is_large { fixture.large() } else { fixture };
        // Half of all jobs sum in about ten buckets while they compute.
        let bucket = (seed % 2 == 0).then_some(if is_large { 100_000 } else { 500 });
        let mut job = JobFixture { bucket, ..fixture }.start(seed);
        let started = Instant::now();
        let mut trace = format!(
            "{num_workers} workers, large: {is_large}, buckets: {bucket:?}; to run it again: \
             ELASTICDL_CHAOS_SEED={seed} cargo test -p elasticdl-tests --test jobs mixed\n"
        );
        let mut kills = 0;
        while job.is_running() {
            let fault = Fault::draw(&mut rng);
            kills += u32::from(matches!(fault, Fault::Kill));
            if kills > KILLS_MAX {
                break;
            }
            trace += &format!("{:6} ms {fault:?}\n", started.elapsed().as_millis());
            fault.apply(&job, &mut rng);
            // Some faults come in bursts, so that one hits the regroup that an earlier one has
            // caused.
            let pause = if rng.random_ratio(1, 4) { 0..30 } else { 100..600 };
            std::thread::sleep(Duration::from_millis(rng.random_range(pause)));
        }
        let ended = job.wait();
        ended.assert_exact(&trace);
        // A fault that no group has noticed proves nothing.
        assert!(ended.memberships().len() > 1, "no fault has struck: {trace}");
        lost += ended.lost().len();
    }
    assert!(lost > 0 || seeds().len() == 1, "no member was killed in any schedule");
}

#[test]
fn after_the_loss_of_all_workers_training_starts_again_and_is_exact() {
    for seed in 0..3 {
        let fixture = JobFixture { micros_per_record: 200, ..JobFixture::new(PROGRAMS, 3) };
        let mut job = fixture.start(seed);
        job.signal_workers(Signal::KILL);
        job.wait_for("new workers", |status| {
            let is_new = |worker: &WorkerStatus| worker.rank.is_some() && worker.worker.0 > 3;
            status.workers.len() == 3 && status.workers.iter().all(is_new)
        });
        job.wait().assert_exact(&format!("seed {seed}, all killed"));
    }
}

#[test]
fn a_worker_that_gets_sigterm_leaves_and_loses_nothing() {
    let mut job = JobFixture::new(PROGRAMS, 3).start(1);
    let (leaver, pid) = job.workers().into_iter().next().unwrap();
    send(pid, Signal::TERM);
    job.wait_for("the leave", |status| status.workers.iter().all(|w| w.worker != leaver));
    let ended = job.wait();
    ended.assert_exact("a leave");
    let memberships = ended.memberships();
    assert!(
        memberships.iter().any(|m| m.cause == Cause::Leave && m.left == [leaver]),
        "{memberships:?}"
    );
    assert_eq!(ended.lost(), [], "{memberships:?}");
}

#[test]
fn a_running_job_is_scaled_up_and_down() {
    let mut job = JobFixture::new(PROGRAMS, 2).start(1);
    for size in [4, 1, 2] {
        job.scale(size);
        job.wait_for_members(size as usize);
    }
    let ended = job.wait();
    ended.assert_exact("scaling");
    assert_eq!(ended.summary().workers.peak, 4);
}
