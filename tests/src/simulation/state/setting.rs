//! The parameters of a run.

use std::num::NonZeroU64;
use std::time::Duration;

use elasticdl::simulated::{ChunkLayout, Settings};
use elasticdl_master::job::{
    Batch, CheckpointEvery, CheckpointSpec, JobSpec, LaunchId, OnRowsLost, ValidationSpec,
    WorkerOptions,
};

use super::nccl::Gpus;
use crate::simulation::clock::{Micros, SimRng};

/// The parameters of a run, which are drawn from its seed before it begins.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) spec: JobSpec,
    /// Number of records of each file.
    pub(crate) files: Vec<u64>,
    /// Number of parameters of a segment on the ring.
    pub(crate) segment_len: usize,
    /// Maximum time to describe a data set or to build a model.
    pub(crate) build_us: Micros,
    /// Mean time to compute the gradient of a record.
    pub(crate) record_us: Micros,
    /// Maximum time from the master's order to the end of the process.
    pub(crate) kill_us: Micros,
    /// Whether the snapshot that the next master finds may be older than the last actions of this
    /// one.
    pub(crate) may_restore_stale: bool,
    /// A host of the cluster's [`HOSTS`] on which each start fails.
    pub(crate) bad_host: Option<usize>,
    /// A launch that runs another build of the program.
    pub(crate) other_build: Option<LaunchId>,
    /// Whether a storm of kills hits the job, which allows few failures.
    pub(crate) has_storm: bool,
    /// `None`: workers compute on CPUs.
    pub(crate) gpus: Option<Gpus>,
    /// Number of zones that processes run in, in turn; 1: they do not know any.
    pub(crate) zones: usize,
    /// How the model's tables are divided; `None`: it has none.
    pub(crate) tables: Option<Settings>,
    /// How many parameters a chunk of the optimizer's state has, and how many bytes of chunks are
    /// copied at a time; `None`: each worker holds all of it.
    pub(crate) chunks: Option<(usize, u64)>,
    /// Whether a search wants to know equal states.
    pub(crate) is_explored: bool,
}

/// A small job, of which all runs are searched. Each worker has one record of each step.
#[derive(Clone, Copy, Debug)]
pub struct Explored {
    /// Number of workers at the beginning; one more may join.
    pub workers: u32,
    /// Number of steps.
    pub steps: u64,
    /// Number of workers beyond them that take the places of lost ones.
    pub spares: u32,
    /// Number of shards of the model's tables, each on two workers; 0: it has no tables.
    pub shards: u32,
    /// Number of chunks of the optimizer's state, each on two workers; 0: each worker has all.
    pub chunks: u32,
}

impl Setting {
    /// A job in a cluster, without checkpoints.
    pub(crate) fn explored(job: Explored) -> Self {
        let Explored { workers, steps, spares, shards, chunks } = job;
        let of_step = NonZeroU64::new(workers.into()).expect("a job has workers");
        let spec = JobSpec {
            min_workers: 1,
            max_workers: workers + 1,
            spares,
            max_worker_restarts: 1000,
            restart_without_checkpoint: true,
            options: WorkerOptions {
                worker_timeout: Some(Duration::from_millis(200)),
                shard_optimizer: chunks > 0,
                ..WorkerOptions::new("numbers", Batch::Global(of_step))
            },
            ..JobSpec::new("explored", "numbers", workers, Batch::Global(of_step))
        };
        let records = u64::from(workers) * steps;
        let chunk_len = |chunks: u32| (records as usize).div_ceil(chunks as usize);
        let tables = Settings { seed: 0, shards, copies: 2, copy_bytes: 100, copy_rate: 0, lag: 0 };
        Self {
            spec,
            files: vec![records],
            segment_len: usize::MAX >> 1,
            build_us: 5_000,
            record_us: 200,
            kill_us: 5_000,
            may_restore_stale: true,
            bad_host: None,
            other_build: None,
            has_storm: false,
            gpus: None,
            zones: 1,
            tables: (shards > 0).then_some(tables),
            chunks: (chunks > 0).then(|| (chunk_len(chunks), 100)),
            is_explored: true,
        }
    }

    pub(crate) fn draw(rng: &mut SimRng, seed: u64) -> Self {
        let max_workers = [1, 2, 2, 3, 3, 3, 4, 4, 5][rng.below(9) as usize];
        let num_workers = rng.between(1.max(max_workers / 2), max_workers);
        let min_workers = if rng.chance(2, 3) { 1 } else { rng.between(1, num_workers) };
        let files: Vec<u64> = (0..rng.between(1, 2)).map(|_| rng.between(3, 36)).collect();
        let some = |n: u64| NonZeroU64::new(n).expect("drawn from 1 on");
        let batch = if rng.chance(3, 4) {
            Batch::Global(some(rng.between(1, files.iter().sum::<u64>().min(8))))
        } else {
            Batch::PerWorker(some(rng.between(1, 3)))
        };
        let timeout_ms = rng.chance(7, 8).then(|| rng.between(2, 8) * 100);
        // From a generator of their own, so that the other draws of a seed stay as they are.
        let per_pod = workers_per_pod(&mut SimRng::new(seed.rotate_left(16)));
        let pods_max = if per_pod > 1 { 3 } else { u64::MAX };
        let number = |pods: u64| (pods.min(pods_max) * per_pod) as u32;
        let spec = JobSpec {
            min_workers: number(min_workers),
            max_workers: number(max_workers),
            workers_per_pod: per_pod as u32,
            // A worker that ends by itself, because it is cut off from the master, counts as a
            // failure.
            max_worker_restarts: 1000,
            step_timeout: step_timeout(&mut SimRng::new(seed.rotate_left(24))),
            restart_without_checkpoint: true,
            options: WorkerOptions {
                epochs: rng.between(1, 3) as u32,
                max_steps: rng.chance(1, 8).then(|| rng.between(1, 12)),
                seed,
                worker_timeout: timeout_ms.map(Duration::from_millis),
                // From generators of their own, so that other draws of a seed stay as they are.
                checkpoints: checkpoints(&mut SimRng::new(!seed)),
                micro_batch: NonZeroU64::new(SimRng::new(seed.rotate_left(32)).below(4)),
                validation: validation(&mut SimRng::new(seed.rotate_left(48))),
                ..WorkerOptions::new("numbers", batch)
            },
            ..JobSpec::new("simulated", "numbers", number(num_workers), batch)
        };
        let mut setting = Self {
            spec,
            files,
            segment_len: if rng.chance(1, 6) {
                rng.between(2, 6) as usize
            } else {
                usize::MAX >> 1
            },
            build_us: if rng.chance(1, 4) { 50_000 } else { 5_000 },
            record_us: rng.between(10, 800),
            kill_us: if rng.chance(1, 3) { 1_000_000 } else { 5_000 },
            may_restore_stale: rng.chance(1, 2),
            bad_host: None,
            other_build: None,
            has_storm: false,
            gpus: Gpus::draw(&mut SimRng::new(seed.rotate_left(32))),
            zones: 1 + SimRng::new(seed.rotate_left(8)).below(3) as usize,
            tables: tables(&mut SimRng::new(seed.rotate_left(12)), seed),
            chunks: None,
            is_explored: false,
        };
        if setting.tables.is_none() {
            setting.draw_chunks(&mut SimRng::new(seed.rotate_left(28)));
        }
        if setting.may_restore_stale
            && let Some(host) = bad_host(&mut SimRng::new(seed.rotate_left(40)))
        {
            (setting.bad_host, setting.spec.max_worker_restarts) = (Some(host), 3);
        }
        // An evaluation may take an hour before a member counts as hung.
        if setting.gpus.is_some() || setting.spec.step_timeout.is_some() {
            setting.spec.options.validation = None;
        }
        if setting.tables.is_some()
            && setting.chunks.is_none()
            && SimRng::new(seed.rotate_left(28)).chance(1, 2)
        {
            setting.spec.options.on_rows_lost = OnRowsLost::Stale;
            setting.tables.iter_mut().for_each(|tables| tables.lag = 0);
        }
        let audit = SimRng::new(seed.rotate_left(56)).below(16);
        if setting.tables.is_none() && setting.gpus.is_none() && audit < 2 {
            setting.spec.options.audit = [1_000_000, 300_000][audit as usize];
        }
        setting.draw_rare_worlds(&mut SimRng::new(seed.rotate_left(20)));
        setting.draw_table_servers(&mut SimRng::new(seed.rotate_left(36)));
        let spares = SimRng::new(seed.rotate_left(44)).below(12);
        if (1..3).contains(&spares) {
            setting.spec.spares = spares as u32 * setting.spec.workers_per_pod;
        }
        setting
    }

    /// Draws worlds that exclude most faults.
    fn draw_rare_worlds(&mut self, rng: &mut SimRng) {
        let JobSpec { num_workers, workers_per_pod, .. } = self.spec;
        if self.bad_host.is_some() {
            return;
        }
        if rng.chance(1, 40) && num_workers > 2 && workers_per_pod == 1 {
            // The first ranks may only be those of the first launches.
            (self.other_build, self.zones) = (Some(LaunchId(rng.between(3, 5))), 1);
        } else if rng.chance(1, 40) {
            (self.has_storm, self.spec.max_worker_restarts) = (true, 3);
        }
    }

    /// Draws how many table servers there are, if the model has tables.
    fn draw_table_servers(&mut self, rng: &mut SimRng) {
        if self.tables.is_some() && rng.chance(1, 2) {
            let per_pod = self.spec.workers_per_pod;
            let pods_max = if per_pod > 1 { 2 } else { 3 };
            self.spec.options.table_servers = rng.between(1, pods_max) as u32 * per_pod;
        }
    }

    /// Draws how the optimizer's state is divided, if it is.
    fn draw_chunks(&mut self, rng: &mut SimRng) {
        if rng.chance(1, 7) {
            let chunks = rng.between(1, 8) as usize;
            self.chunks = Some((self.parameters().div_ceil(chunks), rng.between(1, 300)));
            (self.spec.options.shard_optimizer, self.gpus) = (true, None);
        }
    }

    /// How the optimizer's state is divided, if it is.
    pub(crate) fn layout(&self) -> Option<ChunkLayout> {
        let (parameters, slots) = (self.parameters(), 1);
        self.chunks.map(|(chunk_len, _)| ChunkLayout { parameters, first: 0, slots, chunk_len })
    }

    /// Number of shards of tables, or of the optimizer's state.
    pub(crate) fn shards(&self) -> u32 {
        let chunks = self.layout().map(|layout| layout.chunks());
        self.tables.map(|tables| tables.shards).or(chunks).unwrap_or(0)
    }

    /// Number of copies of each of them.
    pub(crate) fn copies(&self) -> usize {
        let of_chunks = if self.chunks.is_some() { 2 } else { 1 };
        self.tables.map_or(of_chunks, |tables| tables.copies as usize)
    }

    /// Number of records of one epoch.
    pub(crate) fn records(&self) -> u64 {
        self.files.iter().sum()
    }

    /// Number of parameters of the model: one for each record of each epoch.
    pub(crate) fn parameters(&self) -> usize {
        (self.records() * u64::from(self.spec.options.epochs)) as usize
    }
}

/// Draws how the tables of the model are divided, if it has any.
fn tables(rng: &mut SimRng, seed: u64) -> Option<Settings> {
    rng.chance(1, 8).then(|| Settings {
        seed,
        shards: rng.between(1, 8) as u32,
        copies: if rng.chance(1, 4) { 3 } else { 2 },
        copy_bytes: rng.between(1, 300),
        copy_rate: rng.between(0, 1),
        lag: if rng.chance(1, 3) { rng.between(1, 3) as u32 } else { 0 },
    })
}

fn checkpoints(rng: &mut SimRng) -> Option<CheckpointSpec> {
    let steps = NonZeroU64::new(rng.between(1, 8)).expect("drawn from 1 on");
    let every = if rng.chance(3, 4) {
        CheckpointEvery::Steps(steps)
    } else {
        CheckpointEvery::Time(Duration::from_millis(steps.get()))
    };
    rng.chance(1, 2).then(|| CheckpointSpec {
        dir: "vault".into(),
        every,
        keep: 1,
        exclusive: false,
    })
}

/// Draws when the model is evaluated, if it is.
fn validation(rng: &mut SimRng) -> Option<ValidationSpec> {
    rng.chance(1, 16).then(|| ValidationSpec {
        data: "validation".into(),
        every: rng.chance(3, 4).then(|| rng.between(1, 5)),
        metric: "loss".into(),
        highest: false,
        patience: None,
        split: None,
        export_best: None,
    })
}

/// Draws the time after which a hung worker is evicted.
fn step_timeout(rng: &mut SimRng) -> Option<Duration> {
    rng.chance(1, 4).then(|| Duration::from_secs(rng.between(2, 4)))
}

fn bad_host(rng: &mut SimRng) -> Option<usize> {
    rng.chance(1, 30).then(|| rng.below(HOSTS as u64) as usize)
}

/// Draws the number of workers per pod.
fn workers_per_pod(rng: &mut SimRng) -> u64 {
    if rng.chance(1, 5) { rng.between(2, 3) } else { 1 }
}

/// Number of hosts that pods are placed on in turn.
pub(crate) const HOSTS: usize = 3;
