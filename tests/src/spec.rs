//! Jobs for masters that run in the tests' own process.

use std::time::Duration;

use elasticdl_master::job::{Batch, JobSpec, OnNonfinite, WireDtype, Work};

/// A job of at most `num_workers` workers that trains for two epochs, and in which workers are
/// never evicted or replaced.
#[must_use]
pub fn job_spec(name: &str, training_data: &str, workers: u32, batch: Batch) -> JobSpec {
    JobSpec {
        name: name.into(),
        training_data: training_data.into(),
        num_workers: workers,
        min_workers: 1,
        max_workers: workers,
        workers_per_pod: 1,
        epochs: 2,
        max_steps: None,
        batch,
        records_per_shard: None,
        shuffle: Default::default(),
        micro_batch: None,
        deterministic: false,
        seed: 0,
        max_worker_restarts: 0,
        worker_timeout: None,
        step_timeout: None,
        start_timeout: Duration::from_secs(60),
        master_timeout: Duration::from_secs(30),
        checkpoints: None,
        resume_from: None,
        validation: None,
        work: Work::default(),
        wire_dtype: WireDtype::F32,
        channels: 1,
        link_encryption: Default::default(),
        on_nonfinite: OnNonfinite::Fail,
        allow_mixed_builds: false,
        bad_records_max: 0,
        table_replicas: 2,
        restart_without_checkpoint: true,
        grace_period: Duration::from_secs(30),
        policies: Default::default(),
    }
}
