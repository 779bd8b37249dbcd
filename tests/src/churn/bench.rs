//! One job of real processes, observed through the event logs of its workers: queries to the master
//! would disturb the measurement.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use elasticdl_proto::{Summary, WorkerStatus};
use rand::RngExt as _;
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand::seq::IteratorRandom;
use rustix::process::Signal;

use super::event_log::{EventLogs, now};
use crate::{Command, Network, Running, counting_data, is_alive, send};

/// A job that is to be disturbed.
#[derive(Clone, Debug)]
pub struct DisturbedJob {
    /// Workers that it begins with.
    pub workers: u32,
    /// Workers beyond them that take the places of lost ones.
    pub spares: u32,
    /// Arguments of this program as the job's worker; `--event-logs FOLDER` is added.
    pub program: Vec<OsString>,
    /// Options of `elasticdl train`, with their values.
    pub options: Vec<(&'static str, String)>,
    /// Options of `elasticdl train` without a value.
    pub flags: Vec<&'static str>,
    /// Records of an epoch.
    pub records: u64,
    /// Steps before the first event.
    pub first_steps: u64,
    /// Steps between two events, in which the workers copy what the last one has cost them.
    pub rest_steps: u64,
}

/// A running job.
#[derive(Debug)]
pub struct Bench {
    job: Running,
    /// What its workers have done.
    pub logs: EventLogs,
    workers: usize,
    spares: usize,
    /// Steps between two events.
    rest_steps: u64,
    rng: ChaCha8Rng,
    /// Hosts of the workers, if each has its own.
    network: Option<Network>,
}

/// A job that has ended.
#[derive(Debug)]
pub struct DisturbedEnded {
    /// Its summary.
    pub summary: Summary,
    /// What its workers have done.
    pub logs: EventLogs,
    /// Workers that were alive when the job was stopped.
    last: Vec<u32>,
}

impl Bench {
    /// Starts the job in `folder` and waits until all its workers contribute to its steps.
    /// `launches`: each launch is on a host of its own, and there are so many.
    pub fn start(
        disturbed: &DisturbedJob,
        folder: &Path,
        launches: Option<u32>,
    ) -> Result<Self, Box<dyn Error>> {
        let hosts = launches.map(|launches| u8::try_from(launches + 1)).transpose();
        let hosts = hosts.map_err(|_| "there are at most 254 hosts: cause fewer events")?;
        let network = hosts.map(Network::new);
        let data = folder.join("data");
        counting_data(&data, disturbed.records, 1)?;
        let logs = EventLogs::create(folder.join("event-logs"))?;
        let this = std::env::current_exe()?;
        let of_logs = ["--event-logs".into(), logs.folder.clone().into_os_string()];
        let script = network.as_ref().map(Network::on_the_launchs_host);
        let script = script.iter().flat_map(|script| ["/bin/sh", "-c", script, "sh"]);
        let mut program: Vec<OsString> = script.map(Into::into).collect();
        program.extend([&[this.clone().into()], &disturbed.program[..], &of_logs].concat());
        let workers = disturbed.workers;
        let mut job = Command::new(&this, folder.join("job"), program)
            .option("training-data", data)
            .option("num-epochs", "1000000")
            .option("num-workers", workers.to_string())
            .option("max-workers", (workers + 1).to_string())
            .option("global-batch-size", (workers * RECORDS_PER_WORKER).to_string())
            .option("max-worker-restarts", "1000")
            .option("spares", disturbed.spares.to_string())
            .option("checkpoint-dir", "none");
        for (name, value) in &disturbed.options {
            job = job.option(name, value);
        }
        job = disturbed.flags.iter().fold(job, |job, name| job.flag(name));
        if let Some(network) = &network {
            job = job.started_by(network.on(0)).option("listen", network.address(0));
        }
        let (job, rng) = (job.start(), ChaCha8Rng::seed_from_u64(7));
        let (workers, spares) = (workers as usize, disturbed.spares as usize);
        let rest_steps = disturbed.rest_steps;
        let mut bench = Self { job, logs, workers, spares, rest_steps, rng, network };
        bench.wait_whole()?;
        bench.run_steps(disturbed.first_steps.saturating_sub(bench.step()))?;
        bench.settle()?;
        Ok(bench)
    }

    /// Waits until the group has made this many more steps.
    pub fn run_steps(&mut self, steps: u64) -> Result<(), Box<dyn Error>> {
        let until = self.step() + steps;
        while self.step() < until {
            let step = self.step();
            self.wait_for("more steps", |bench| bench.step() > step)?;
        }
        Ok(())
    }

    /// The master's process.
    pub fn master(&self) -> u32 {
        self.job.pid()
    }

    /// The processes of the living workers.
    pub fn pids(&self) -> Vec<u32> {
        self.logs.living().map(|log| log.pid).collect()
    }

    /// Waits until the wanted number of workers contributes and no others are left, and then until
    /// the group has made some more steps and some time has passed, so that the next event finds it
    /// at rest.
    pub fn settle(&mut self) -> Result<(), Box<dyn Error>> {
        self.wait_whole()?;
        self.wait_for("the spares", |bench| {
            let is_spare = |worker: &&WorkerStatus| worker.state == "spare";
            bench.spares == 0
                || bench.job.status().workers.iter().filter(is_spare).count() == bench.spares
        })?;
        let (since, from) = (now(), self.step());
        // At different parts of a step.
        let pause =
            REST + Duration::from_micros(self.rng.random_range(0..REST_VARIES.as_micros() as u64));
        self.wait_for("some more steps", |bench| {
            bench.step() >= from + bench.rest_steps && now() - since >= pause
        })?;
        self.wait_whole()
    }

    /// Waits until the wanted number of workers contributes, and no others but spares are left.
    pub fn wait_whole(&mut self) -> Result<(), Box<dyn Error>> {
        self.wait_for("all members", |bench| {
            let living = || bench.logs.living();
            living().count() == bench.workers + bench.spares
                && living().filter(|log| log.contribution().is_some()).count() == bench.workers
        })
    }

    /// Waits until `pid` has ended.
    pub fn wait_gone(&mut self, pid: u32) -> Result<(), Box<dyn Error>> {
        self.wait_for("a worker's end", |_| !is_alive(pid))
    }

    /// Waits for a worker whose first contribution comes after `at`.
    pub fn wait_joiner(&mut self, at: Duration) -> Result<(), Box<dyn Error>> {
        self.wait_for("a joiner", |bench| bench.logs.living().any(|log| log.is_new(at)))
    }

    /// Sends a signal to one of the members, but never to the last one that has the state. Returns
    /// its process.
    pub fn signal(&mut self, signal: Signal) -> Result<u32, Box<dyn Error>> {
        let victim = self.victim()?;
        send(victim, signal);
        Ok(victim)
    }

    /// As [`signal`](Self::signal): lets the thread that computes hang.
    pub fn hang(&mut self) -> Result<u32, Box<dyn Error>> {
        let victim = self.victim()?;
        std::fs::write(self.logs.folder.join(hang_file(victim)), "")?;
        Ok(victim)
    }

    /// As [`signal`](Self::signal): drops the packets that its host sends from now on, and those to
    /// it unless it is `half_open`.
    pub fn switch_off(&mut self, half_open: bool) -> Result<u32, Box<dyn Error>> {
        let victim = self.victim()?;
        let network = self.network.as_ref().ok_or("the workers have no hosts of their own")?;
        let host = network.host_of(victim).ok_or("a worker on no host")?;
        network.switch_off(host, half_open);
        Ok(victim)
    }

    fn victim(&mut self) -> Result<u32, Box<dyn Error>> {
        self.logs.refresh()?;
        let (members, others): (Vec<_>, Vec<_>) =
            self.logs.living().partition(|log| log.contribution().is_some());
        let victims = if members.len() > 1 { members } else { others };
        Ok(victims.iter().map(|d| d.pid).choose(&mut self.rng).ok_or("no member to disturb")?)
    }

    /// Scales the job to this many workers more than it began with.
    pub fn scale(&self, more: u32) {
        self.job.scale(self.workers as u32 + more);
    }

    /// Sleeps until `at`; an error if the job ends before.
    pub fn rest_until(&mut self, at: Duration) -> Result<(), Box<dyn Error>> {
        self.wait_for("a moment", |_| now() >= at)
    }

    /// Stops the job.
    pub fn stop(mut self) -> Result<DisturbedEnded, Box<dyn Error>> {
        self.logs.refresh()?;
        let last = self.logs.living().map(|log| log.pid).collect();
        self.job.signal(Signal::INT);
        let ended = self.job.wait();
        self.logs.refresh()?;
        Ok(DisturbedEnded { summary: ended.summary().clone(), logs: self.logs, last })
    }

    /// Number of steps that any worker has committed.
    pub fn step(&self) -> u64 {
        let last = self.logs.all.values().filter_map(|log| log.commits.last());
        last.map(|(_, commit)| commit.step + 1).max().unwrap_or(0)
    }

    fn wait_for(&mut self, what: &str, done: impl Fn(&Self) -> bool) -> Result<(), Box<dyn Error>> {
        let deadline = Instant::now() + TIMEOUT + TIMEOUT_PER_WORKER * self.workers as u32;
        loop {
            self.logs.refresh()?;
            if done(self) {
                return Ok(());
            }
            if !self.job.is_running() || Instant::now() >= deadline {
                return Err(format!("no sign of {what}: {:?}", self.job.try_status()).into());
            }
            // So that the work of looking does not grow with the workers.
            std::thread::sleep(POLL_INTERVAL * (self.workers / WORKERS_AT_ONCE + 1) as u32);
        }
    }
}

impl DisturbedEnded {
    /// Records that were not counted, and records that were counted more than once: the worse of
    /// what the job's summary reports and what the model counted, if it has counted.
    pub fn records_lost_and_repeated(&self) -> Result<(u64, u64), Box<dyn Error>> {
        let records = self.summary.records;
        let Some(words) = &self.summary.model_summary else {
            return Ok((records.missing, records.repeated));
        };
        let counts: Vec<f64> = words.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [least, _, total] = counts[..] else {
            return Err("the model summary is malformed".into());
        };
        let epochs = u64::from(self.summary.epochs);
        let over = |a: u64, b: u64| a.saturating_sub(b);
        let mut out_of_turn = BTreeMap::new();
        for (_, commit) in self.logs.all.values().flat_map(|log| &log.commits) {
            let most = out_of_turn.entry(commit.step).or_insert(0);
            *most = commit.repeated.max(*most);
        }
        let (counted, total) = (records.counted, total as u64);
        let lost = records.missing.max(over(counted, total)).max(over(epochs, least as u64));
        let repeated = records.repeated.max(over(total, counted)).max(out_of_turn.values().sum());
        Ok((lost, repeated))
    }

    /// Distinct steps that a worker other than the `disturbed` had to compute again, or that were
    /// undone; and steps that workers which left in order had begun in vain.
    pub fn steps_lost(&self, disturbed: &[u32]) -> usize {
        let others = || self.logs.all.values().filter(|log| !disturbed.contains(&log.pid));
        let again: BTreeSet<u64> = others().flat_map(|log| log.steps_lost()).collect();
        let left_open = others().filter(|log| log.open > 0 && !self.last.contains(&log.pid));
        again.len() + left_open.count()
    }
}

/// Name of the file, in the folder of the event logs, that makes the worker with this process id
/// hang.
pub fn hang_file(pid: u32) -> String {
    format!("{pid}.hang")
}

/// Records of a step, for each worker that the job begins with.
pub const RECORDS_PER_WORKER: u32 = 8;
/// Minimum time between the end of one event and the next one.
const REST: Duration = Duration::from_millis(400);
const REST_VARIES: Duration = Duration::from_millis(100);
/// Interval at which the event logs of so many workers are read.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const WORKERS_AT_ONCE: usize = 64;
/// Limit of all waits.
const TIMEOUT: Duration = Duration::from_secs(180);
/// What is added for each worker: a thousand processes start and join on few cores.
const TIMEOUT_PER_WORKER: Duration = Duration::from_millis(500);
