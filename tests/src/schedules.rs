//! Jobs of real processes under faults that a seed draws, and whether their results are exact.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use elasticdl_proto::{RowTouchesSummary, Status, WorkerId};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;

use crate::{Command, Ended, JobFixture, Programs, Running, each_once, send};

/// A job of real processes, and which faults may hit it, drawn from a seed. The seed draws the
/// faults too, but not the points of the job's run that they hit.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Seed of the faults and of the job.
    pub seed: u64,
    /// Workers at the start.
    pub num_workers: u32,
    /// Whether the job has `--deterministic`, and is compared with an undisturbed one.
    pub is_deterministic: bool,
    /// Whether the job writes checkpoints, on request too.
    pub has_checkpoints: bool,
    /// Whether the job is stopped, and another one goes on from its last checkpoint.
    pub is_resumed: bool,
    /// What the workers hold together.
    divided: Divided,
    /// Whether a fault waits until what the last worker that went has held is copied. Then nothing
    /// may be lost.
    one_loss_at_a_time: bool,
    /// Whether stopped workers are evicted; the master's kills do not reach them, and they go on.
    evicts: bool,
    /// Whether the model has 4 MiB.
    is_large: bool,
    /// Length of the buckets that gradients are summed in.
    bucket: Option<u64>,
}

/// What no worker of a job holds alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Divided {
    Nothing,
    Optimizer,
    Tables,
}

/// The result of a job that was exact.
#[derive(Debug)]
pub struct Disturbed {
    /// Its end.
    pub ended: Ended,
    /// The faults that hit it, each with its time in milliseconds.
    pub faults: String,
}

impl Schedule {
    /// The schedule of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let divided = match rng.random_range(0..4) {
            0 => Divided::Optimizer,
            1 => Divided::Tables,
            _ => Divided::Nothing,
        };
        let is_deterministic = rng.random_ratio(1, 4);
        let has_checkpoints = rng.random_ratio(1, 2);
        let is_divided = divided != Divided::Nothing;
        let one_loss_at_a_time = is_divided && !has_checkpoints && rng.random();
        let is_large = !is_deterministic && !one_loss_at_a_time && rng.random_ratio(1, 4);
        let has_buckets = !is_deterministic && !is_divided && rng.random();
        Self {
            seed,
            num_workers: rng.random_range(2..=5),
            is_deterministic,
            has_checkpoints,
            is_resumed: has_checkpoints && rng.random_ratio(1, 3),
            divided,
            one_loss_at_a_time,
            evicts: !one_loss_at_a_time && rng.random_ratio(1, 4),
            is_large,
            bucket: has_buckets.then_some(if is_large { 100_000 } else { 500 }),
        }
    }

    /// The job, and its data. `determinism`: path of the model of jobs with `--deterministic`.
    pub fn fixture(&self, programs: Programs, determinism: &'static str) -> JobFixture {
        let counting = if self.is_deterministic { determinism } else { programs.counting };
        let fixture = JobFixture::new(Programs { counting, ..programs }, self.num_workers);
        let fixture = if self.is_large { fixture.large() } else { fixture };
        JobFixture {
            records: if self.is_deterministic { 1200 } else { fixture.records },
            micros_per_record: if self.is_deterministic { 10_000 } else { 1500 },
            bucket: self.bucket,
            program_options: match (self.divided, self.is_deterministic) {
                (Divided::Tables, _) => &["--tables"],
                // In the optimizer's state.
                (Divided::Optimizer, false) => &["--slots"],
                _ => &[],
            },
            // Several chunks.
            parameters: fixture.parameters.max(12_000),
            worker_timeout: Some(if self.evicts { "1s" } else { "10s" }),
            out_of_reach: self.evicts,
            restart_without_checkpoint: !self.has_checkpoints && !self.one_loss_at_a_time,
            ..fixture
        }
    }

    /// Runs the job in the fixture's folder. It exports its model to [`Schedule::export`].
    ///
    /// # Errors
    /// What is wrong with its result, and the faults that hit it.
    pub fn run(&self, fixture: &JobFixture) -> Result<Disturbed, String> {
        let mut faults = String::new();
        let ran = catch_unwind(AssertUnwindSafe(|| self.run_traced(fixture, &mut faults)));
        match ran {
            Ok(ended) => Ok(Disturbed { ended, faults }),
            Err(panic) => {
                let what = message(&*panic);
                Err(format!("seed {}: {self}; faults: {faults}; {what}", self.seed))
            }
        }
    }

    /// The model that the job has exported.
    pub fn export(fixture: &JobFixture) -> PathBuf {
        fixture.path("model.safetensors")
    }

    /// The summary of the job.
    pub fn summary(fixture: &JobFixture) -> PathBuf {
        fixture.path("summary.json")
    }

    /// The model of the undisturbed job, if the disturbed one has to be equal to it.
    pub fn undisturbed_export(&self, fixture: &JobFixture) -> Option<PathBuf> {
        self.is_deterministic.then(|| fixture.path("undisturbed/model.safetensors"))
    }

    fn run_traced(&self, fixture: &JobFixture, faults: &mut String) -> Ended {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let mut job = self.disturbed_command(fixture, "checkpoints").start();
        job.wait_for_first_steps();
        self.disturb(&mut job, &mut rng, faults);
        if self.is_resumed && wait_until(&mut job, has_saved) {
            *faults += " stop,";
            job.signal(Signal::TERM);
            let stopped = job.wait();
            if stopped.code == Some(0) {
                self.assert_exact(fixture, &stopped);
                return stopped;
            }
            stopped.assert_outcome(143, "stopped");
            let next = self.disturbed_command(fixture, "checkpoints-of-next");
            job = next.option("resume-from", fixture.path("checkpoints")).start();
            // Not the status of the one that was stopped.
            wait_until(&mut job, |status| status.state == "running");
            self.disturb(&mut job, &mut rng, faults);
        }
        fixture.hurry();
        let ended = job.wait_within(END_MAX);
        self.assert_exact(fixture, &ended);
        ended
    }

    /// The job whose checkpoints, if it has any, are in this folder.
    fn disturbed_command(&self, fixture: &JobFixture, checkpoints: &str) -> Command {
        let command = self.command(fixture).option("export", Self::export(fixture));
        let command = command.option("summary", Self::summary(fixture));
        match self.has_checkpoints {
            true => {
                let command = command.option("checkpoint-dir", fixture.path(checkpoints));
                command.option("checkpoint-every", EVERY)
            }
            false => command.option("checkpoint-dir", "none"),
        }
    }

    /// The job, with the options that do not depend on its checkpoints.
    fn command(&self, fixture: &JobFixture) -> Command {
        let command = fixture.command(self.seed);
        // Of a worker that the master's kills do not reach, it sees the exit code of a shell, which
        // counts as a failure of the program.
        let command = match self.evicts {
            true => command.option("max-worker-restarts", "1000"),
            false => command,
        };
        let flags = [
            ("deterministic", self.is_deterministic),
            ("shard-optimizer", self.divided == Divided::Optimizer),
        ];
        let set = flags.iter().filter(|(_, is_set)| *is_set);
        set.fold(command, |command, (name, _)| command.flag(name))
    }

    /// Applies faults until there were enough, or the job has ended.
    fn disturb(&self, job: &mut Running, rng: &mut ChaCha8Rng, faults: &mut String) {
        let began = Instant::now();
        job.wait_for_first_steps();
        for _ in 0..rng.random_range(FAULTS) {
            if !job.is_running() {
                return;
            }
            let fault = self.draw_fault(rng);
            *faults += &format!(" {} {fault:?},", began.elapsed().as_millis());
            self.apply(fault, job, rng);
            // Some come in bursts, so that one hits the regroup that an earlier one has caused.
            let pause = if rng.random_ratio(1, 4) { 0..30 } else { 100..600 };
            std::thread::sleep(Duration::from_millis(rng.random_range(pause)));
        }
    }

    fn draw_fault(&self, rng: &mut ChaCha8Rng) -> Fault {
        let fault = match rng.random_range(0..20) {
            0..6 => Fault::Kill,
            6..8 => Fault::KillTwo(rng.random_range(0..200)),
            8 => Fault::KillAll,
            9..12 => Fault::Leave,
            12..15 => Fault::Scale(rng.random_range(1..=6)),
            15..17 => Fault::Stop(rng.random_range(1..if self.evicts { 2500 } else { 400 })),
            17..19 => Fault::KillMaster(rng.random_range(0..300)),
            _ => Fault::Checkpoint,
        };
        match fault {
            Fault::KillTwo(_) | Fault::KillAll if self.one_loss_at_a_time => Fault::Kill,
            Fault::Scale(1) if self.one_loss_at_a_time => Fault::Scale(2),
            Fault::Checkpoint if !self.has_checkpoints => Fault::Kill,
            fault => fault,
        }
    }

    fn apply(&self, fault: Fault, job: &mut Running, rng: &mut ChaCha8Rng) {
        let pause = |ms| std::thread::sleep(Duration::from_millis(ms));
        let victim = job.any_worker(rng);
        match (fault, victim) {
            (Fault::Kill, Some((worker, pid))) => {
                send(pid, Signal::KILL);
                self.rest(job, Some(worker));
            }
            (Fault::KillTwo(ms), Some((_, pid))) => {
                send(pid, Signal::KILL);
                pause(ms);
                job.any_worker(rng).into_iter().for_each(|(_, pid)| send(pid, Signal::KILL));
            }
            (Fault::KillAll, Some(_)) => job.signal_workers(Signal::KILL),
            (Fault::Leave, Some((worker, pid))) => {
                send(pid, Signal::TERM);
                self.rest(job, Some(worker));
            }
            (Fault::Scale(workers), _) => {
                let is_join = job.try_status().is_some_and(|s| s.workers_desired < workers);
                job.output_of(&["scale", "--num-workers", &workers.to_string()]);
                // Joins and kills may meet.
                if !is_join {
                    self.rest(job, None);
                }
            }
            (Fault::Stop(ms), Some((_, pid))) => {
                send(pid, Signal::STOP);
                pause(ms);
                send(pid, Signal::CONT);
            }
            // The end of a job may be decided, and its summary written, before its master is
            // killed.
            (Fault::KillMaster(ms), Some(_)) if is_far_from_end(job) => {
                job.kill_master();
                pause(ms);
                job.resume();
            }
            (Fault::Checkpoint, _) => {
                job.output_of(&["checkpoint"]);
            }
            (Fault::KillMaster(_), _) | (_, None) => {}
        }
    }

    /// Waits until the workers that the job wants, and not `gone`, have made some steps, in which
    /// they have copied what was lost, if the faults are to wait for that.
    fn rest(&self, job: &mut Running, gone: Option<WorkerId>) {
        let mut until = None;
        let has_rested = |status: &Status| {
            let is_whole = status.members().count() == status.workers_desired as usize
                && status.workers.iter().all(|worker| Some(worker.worker) != gone)
                && status.tables.is_none_or(|tables| tables.shards_at_risk == 0);
            until = if is_whole { until.or(Some(status.step + REST_STEPS)) } else { None };
            until.is_some_and(|until| status.step >= until)
        };
        if self.one_loss_at_a_time {
            wait_until(job, has_rested);
        }
    }

    /// Asserts that the job's result is exact, and that of an undisturbed one if it has to be.
    fn assert_exact(&self, fixture: &JobFixture, ended: &Ended) {
        let (summary, output) = (ended.summary(), &ended.output);
        let expected = fixture.records * fixture.epochs;
        match self.undisturbed_export(fixture) {
            Some(export) => {
                ended.assert_outcome(0, "completed");
                assert_eq!(summary.records, each_once(expected), "{output}");
                fixture.hurry();
                let (job, kept) = (fixture.path("job"), fixture.path("disturbed"));
                std::fs::rename(job, kept).expect("the job has a directory");
                let command = self.command(fixture).option("checkpoint-dir", "none");
                let undisturbed = command.option("export", export).run();
                undisturbed.assert_outcome(0, "completed");
                assert_eq!(summary.digest, undisturbed.summary().digest, "{output}");
            }
            None => ended.assert_exactly_once("schedule", fixture.records, fixture.epochs),
        }
        // The model of jobs with `--deterministic` has two tables.
        let touches = if self.is_deterministic { 2 * expected } else { expected };
        let exact =
            RowTouchesSummary { expected: touches, counted: touches, missing: 0, repeated: 0 };
        let exact = (self.divided == Divided::Tables).then_some(exact);
        assert_eq!(summary.row_touches, exact, "{output}");
        if self.one_loss_at_a_time {
            assert_eq!((summary.rows_lost, summary.state_lost), (None, None), "{output}");
        }
    }
}

/// Words that name what the job has, separated by commas.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [
            (self.divided == Divided::Nothing, "dense"),
            (self.divided == Divided::Optimizer, "sharded optimizer"),
            (self.divided == Divided::Tables, "tables"),
            (self.is_deterministic, "deterministic"),
            (self.has_checkpoints, "checkpoints"),
            (self.is_resumed, "resumed"),
            (self.one_loss_at_a_time, "one loss at a time"),
            (self.evicts, "evictions"),
            (self.is_large, "4 MiB"),
            (self.bucket.is_some(), "buckets"),
        ];
        write!(f, "{} workers", self.num_workers)?;
        words.iter().filter(|(is_so, _)| *is_so).try_for_each(|(_, word)| write!(f, ", {word}"))
    }
}

/// A fault of a running job. Numbers other than those of workers are milliseconds.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// A checkpoint is requested.
    Checkpoint,
    Kill,
    KillAll,
    /// The next master is started after this time.
    KillMaster(u64),
    /// The second worker is killed after this time.
    KillTwo(u64),
    Leave,
    Scale(u32),
    Stop(u64),
}

/// Whether the job, as it runs, comes to such a status. Waits for a minute at most.
fn wait_until(job: &mut Running, mut is_so: impl FnMut(&Status) -> bool) -> bool {
    let deadline = Instant::now() + WAIT_MAX;
    while job.is_running() && Instant::now() < deadline {
        if job.try_status().is_some_and(|status| is_so(&status)) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

fn has_saved(status: &Status) -> bool {
    status.checkpoints.as_ref().is_some_and(|known| known.saved > 0)
}

fn is_far_from_end(job: &Running) -> bool {
    job.try_status().is_some_and(|status| status.progress < 0.8)
}

/// What a panic says.
fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}

/// Faults of a job: fewer than the kills without progress that end one.
const FAULTS: Range<u32> = 3..11;
/// Steps between two checkpoints.
const EVERY: &str = "15";
/// Steps in which the workers of a small model complete their copies.
const REST_STEPS: u64 = 4;
/// The longest wait for the end, on a machine that has many other jobs.
const END_MAX: Duration = Duration::from_secs(900);
/// The longest wait for a status.
const WAIT_MAX: Duration = Duration::from_secs(60);
