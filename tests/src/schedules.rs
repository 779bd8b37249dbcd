//! Jobs of real processes under random faults, and whether their results are exact.

use std::error::Error;
use std::ops::Range;
use std::time::{Duration, Instant};

use elasticdl_proto::{Summary, WorkerId};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{JobFixture, KILLS_MAX, Programs, Running, built, print, send};

/// Jobs without checkpoints that random faults hit: kills, leaves, joins, stopped workers, killed
/// masters.
#[derive(Clone, Copy, Debug)]
pub struct Schedules {
    /// The job, of at least two workers.
    pub job: fn(Programs) -> JobFixture,
    /// Its options without a value.
    pub flags: &'static [&'static str],
    /// Whether a fault waits until what the last worker that went has held is copied. Otherwise two
    /// workers are killed at the same time, too.
    pub one_loss_at_a_time: bool,
    /// What is wrong with the result, apart from the number of records, which it is given.
    pub check: fn(&Summary, u64) -> Result<(), String>,
}

impl Schedules {
    /// Runs a job for each of these seeds, and returns how many there were and were exact, and how
    /// many workers were killed in those. Builds the programs, and prints what is wrong with a
    /// result.
    pub fn run(&self, seeds: Range<u64>) -> Result<Value, Box<dyn Error>> {
        let path = |name| -> Result<&'static str, Box<dyn Error>> {
            let path = built("elasticdl-tests", name)?;
            let path = path.to_str().ok_or("the path of a program is not UTF-8")?;
            Ok(Box::leak(path.into()))
        };
        let programs =
            Programs { elasticdl: path("elasticdl-under-test")?, counting: path("counting")? };
        let (mut exact, mut kills) = (0, 0);
        for seed in seeds.clone() {
            match self.run_one(programs, seed) {
                Ok(of_job) => (exact, kills) = (exact + 1, kills + of_job),
                Err(error) => print(&format!("seed {seed}: {error}")),
            }
        }
        Ok(json!({ "run": seeds.end - seeds.start, "exact": exact, "kills": kills }))
    }

    /// Runs a job under the faults that `seed` draws, and returns how many workers were killed. The
    /// error says what is wrong with its result.
    fn run_one(&self, programs: Programs, seed: u64) -> Result<u32, String> {
        let fixture = (self.job)(programs);
        let expected = fixture.records * fixture.epochs;
        let command = fixture.command(seed).option("checkpoint-dir", "none");
        let command = self.flags.iter().fold(command, |command, name| command.flag(name));
        let mut job = command.start().keeping(fixture.folder);
        job.wait_for_first_steps();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut kills = 0;
        let mut trace = String::new();
        while job.is_running() && kills + 2 <= KILLS_MAX {
            let fault = rng.random_range(0..12);
            trace += &format!(" {fault}");
            kills += self.disturb(&mut job, fault, &mut rng);
            std::thread::sleep(Duration::from_millis(rng.random_range(100..600)));
        }
        let ended = job.wait();
        let fail = |what: String| Err(format!("{what}; faults:{trace}"));
        if ended.code != Some(0) {
            return fail(ended.cause());
        }
        let (summary, records) = (ended.summary(), ended.summary().records);
        if (records.counted, records.missing, records.repeated) != (expected, 0, 0) {
            return fail(format!("records {records:?}, not {expected}"));
        }
        (self.check)(summary, expected).map(|()| kills).or_else(fail)
    }

    /// Applies a fault, and returns the number of workers that it kills.
    fn disturb(&self, job: &mut Running, fault: u32, rng: &mut ChaCha8Rng) -> u32 {
        let victim = job.any_worker(rng);
        match (fault, victim) {
            (4..6, Some((_, pid))) if !self.one_loss_at_a_time => {
                send(pid, Signal::KILL);
                std::thread::sleep(Duration::from_millis(rng.random_range(0..200)));
                let Some((_, pid)) = job.any_worker(rng) else { return 1 };
                send(pid, Signal::KILL);
                2
            }
            (0..6, Some((worker, pid))) => {
                send(pid, Signal::KILL);
                self.rest(job, Some(worker));
                1
            }
            (6..8, Some((worker, pid))) => {
                send(pid, Signal::TERM);
                self.rest(job, Some(worker));
                0
            }
            // The job may have ended just before.
            (8, _) => {
                let least = if self.one_loss_at_a_time { 2 } else { 1 };
                let workers = rng.random_range(least..=6);
                let is_join = job.try_status().is_some_and(|s| s.workers_desired < workers);
                job.output_of(&["scale", "--num-workers", &workers.to_string()]);
                // Joins and kills may meet.
                if !is_join {
                    self.rest(job, None);
                }
                0
            }
            (9, Some((_, pid))) => {
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

    /// Waits until the workers that the job wants, and not `gone`, have made some steps, in which
    /// they have copied what was lost, if the faults are to wait for that; or the job has ended.
    fn rest(&self, job: &mut Running, gone: Option<WorkerId>) {
        let deadline = Instant::now() + REST_MAX;
        let mut until = None;
        while self.one_loss_at_a_time && job.is_running() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
            let Some(status) = job.try_status() else { continue };
            let is_whole = status.members().count() == status.workers_desired as usize
                && status.workers.iter().all(|worker| Some(worker.worker) != gone);
            match until {
                _ if !is_whole => until = None,
                Some(step) if status.step >= step => return,
                Some(_) => {}
                None => until = Some(status.step + REST_STEPS),
            }
        }
    }
}

/// Steps in which the workers of a small model complete their copies.
const REST_STEPS: u64 = 4;

/// The longest wait for these steps.
const REST_MAX: Duration = Duration::from_secs(60);
