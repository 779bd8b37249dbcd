//! One job of real processes, observed through the event logs of its workers: queries to the master
//! would disturb the measurement.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use elasticdl_proto::Summary;
use elasticdl_tests::{Running, counting_data, is_alive, send};
use rand::RngExt as _;
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand::seq::IteratorRandom;
use rustix::process::Signal;

use crate::Arguments;
use crate::event_log::{EventLogs, now};
use crate::model::ROWS_PER_RECORD;

/// A running job.
#[derive(Debug)]
pub(crate) struct Bench {
    job: Running,
    pub(crate) logs: EventLogs,
    workers: usize,
    /// Steps between two events, after which all rows have their copies.
    rest_steps: u64,
    rng: ChaCha8Rng,
}

/// A job that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) summary: Summary,
    pub(crate) logs: EventLogs,
    /// Workers that were alive when the job was stopped.
    last: Vec<u32>,
}

impl Bench {
    /// Starts a job in `folder` and waits until all its workers contribute to its steps.
    pub(crate) fn start(arguments: &Arguments, folder: &Path) -> Result<Self, Box<dyn Error>> {
        let records = match arguments.rows {
            0 => RECORDS,
            rows => rows.div_ceil(ROWS_PER_RECORD) as usize,
        };
        let records = records.min(arguments.params);
        let data = folder.join("data");
        counting_data(&data, records as u64, 1)?;
        let logs = EventLogs::create(folder.join("event-logs"))?;
        let this = std::env::current_exe()?;
        let mut program = vec![this.clone().into_os_string()];
        program.extend(["--params".into(), arguments.params.to_string().into()]);
        program.extend(["--slots".into(), arguments.slots.to_string().into()]);
        program.extend(["--records".into(), records.to_string().into()]);
        program.extend(["--rows".into(), arguments.rows.to_string().into()]);
        program.extend(["--event-logs".into(), logs.folder.clone().into_os_string()]);
        let job = elasticdl_tests::Command::new(&this, folder.join("job"), program)
            .option("training-data", data)
            .option("num-epochs", "1000000")
            .option("num-workers", arguments.workers.to_string())
            .option("max-workers", (arguments.workers + 1).to_string())
            .option("global-batch-size", (arguments.workers * RECORDS_PER_WORKER).to_string())
            .option("max-worker-restarts", "1000")
            .option("table-replicas", arguments.table_replicas.to_string())
            .option("checkpoint-dir", "none");
        let job = match &arguments.worker_timeout {
            Some(timeout) => job.option("worker-timeout", timeout),
            None => job,
        };
        let (job, rng) = (job.start(), ChaCha8Rng::seed_from_u64(7));
        let workers = arguments.workers as usize;
        let moved = arguments.rows * ROW_BYTES * 2 / u64::from(arguments.workers);
        let rest_steps = REST_STEPS + moved / COPIED_PER_STEP;
        let mut bench = Self { job, logs, workers, rest_steps, rng };
        bench.wait_whole()?;
        // An epoch touches all rows.
        let steps = records as u64 / u64::from(arguments.workers * RECORDS_PER_WORKER) + 1;
        while arguments.rows > 0 && bench.step() < steps {
            let step = bench.step();
            bench.wait_for("more rows", |bench| bench.step() > step)?;
        }
        bench.settle()?;
        Ok(bench)
    }

    /// Waits until the wanted number of workers contributes and no others are left, and then until
    /// the group has made some more steps and some time has passed, so that the next event finds it
    /// at rest.
    pub(crate) fn settle(&mut self) -> Result<(), Box<dyn Error>> {
        self.wait_whole()?;
        let (since, from) = (now(), self.step());
        // At different parts of a step.
        let pause =
            REST + Duration::from_micros(self.rng.random_range(0..REST_VARIES.as_micros() as u64));
        self.wait_for("some more steps", |bench| {
            bench.step() >= from + bench.rest_steps && now() - since >= pause
        })?;
        self.wait_whole()
    }

    /// Waits until the wanted number of workers contributes, and no others are left.
    pub(crate) fn wait_whole(&mut self) -> Result<(), Box<dyn Error>> {
        self.wait_for("all members", |bench| {
            bench.logs.living().count() == bench.workers
                && bench.logs.living().all(|log| log.contribution().is_some())
        })
    }

    /// Waits until `pid` has ended.
    pub(crate) fn wait_gone(&mut self, pid: u32) -> Result<(), Box<dyn Error>> {
        self.wait_for("a worker's end", |_| !is_alive(pid))
    }

    /// Waits for a worker whose first contribution comes after `at`.
    pub(crate) fn wait_joiner(&mut self, at: Duration) -> Result<(), Box<dyn Error>> {
        self.wait_for("a joiner", |bench| bench.logs.living().any(|log| log.is_new(at)))
    }

    /// Sends a signal to one of the members, but never to the last one that has the state.
    pub(crate) fn disturb(&mut self, signal: Signal) -> Result<u32, Box<dyn Error>> {
        self.logs.refresh()?;
        let (members, others): (Vec<_>, Vec<_>) =
            self.logs.living().partition(|log| log.contribution().is_some());
        let victims = if members.len() > 1 { members } else { others };
        let victim =
            victims.iter().map(|d| d.pid).choose(&mut self.rng).ok_or("no member to disturb")?;
        send(victim, signal);
        Ok(victim)
    }

    /// Scales the job to this many workers more than it began with.
    pub(crate) fn scale(&self, more: u32) {
        self.job.scale(self.workers as u32 + more);
    }

    /// Sleeps until `at`; an error if the job ends before.
    pub(crate) fn rest_until(&mut self, at: Duration) -> Result<(), Box<dyn Error>> {
        self.wait_for("a moment", |_| now() >= at)
    }

    /// Stops the job.
    pub(crate) fn stop(mut self) -> Result<Ended, Box<dyn Error>> {
        self.logs.refresh()?;
        let last = self.logs.living().map(|log| log.pid).collect();
        self.job.signal(Signal::INT);
        let ended = self.job.wait();
        self.logs.refresh()?;
        Ok(Ended { summary: ended.summary().clone(), logs: self.logs, last })
    }

    fn step(&self) -> u64 {
        let last = self.logs.all.values().filter_map(|log| log.commits.last());
        last.map(|(_, commit)| commit.step + 1).max().unwrap_or(0)
    }

    fn wait_for(&mut self, what: &str, done: impl Fn(&Self) -> bool) -> Result<(), Box<dyn Error>> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            self.logs.refresh()?;
            if done(self) {
                return Ok(());
            }
            if !self.job.is_running() || Instant::now() >= deadline {
                return Err(format!("no sign of {what}: {:?}", self.job.try_status()).into());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Ended {
    /// Records that were not counted, and records that were counted more than once: the worse of
    /// what the job's summary reports and what the model counted.
    pub(crate) fn records_lost_and_repeated(&self) -> Result<(u64, u64), Box<dyn Error>> {
        let records = self.summary.records;
        let words = self.summary.model_summary.as_ref().ok_or("there is no model summary")?;
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
    pub(crate) fn steps_lost(&self, disturbed: &[u32]) -> usize {
        let others = || self.logs.all.values().filter(|log| !disturbed.contains(&log.pid));
        let again: BTreeSet<u64> = others().flat_map(|log| log.steps_lost()).collect();
        let left_open = others().filter(|log| log.open > 0 && !self.last.contains(&log.pid));
        again.len() + left_open.count()
    }
}

/// Maximum number of records of an epoch.
const RECORDS: usize = 1 << 15;
const RECORDS_PER_WORKER: u32 = 8;
/// Minimum time between the end of one event and the next one.
const REST: Duration = Duration::from_millis(400);
const REST_VARIES: Duration = Duration::from_millis(100);
const REST_STEPS: u64 = 8;
/// Bytes of a row, and of those that a worker receives between two steps.
const ROW_BYTES: u64 = 84;
const COPIED_PER_STEP: u64 = 4 << 20;
/// Interval at which the event logs are read.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Limit of all waits.
const TIMEOUT: Duration = Duration::from_secs(180);
