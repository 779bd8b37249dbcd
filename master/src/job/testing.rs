//! What the tests of this module start from.

use std::num::NonZeroU64;
use std::time::Duration;

use super::spec::{Batch, Dataset, File, JobSpec, OnNonfinite, WireDtype, Work};

/// Three workers, two epochs, four records a step, shuffled with seed 7.
pub(crate) fn spec() -> JobSpec {
    JobSpec {
        name: "job".into(),
        training_data: "data".into(),
        num_workers: 3,
        min_workers: 1,
        max_workers: 3,
        workers_per_pod: 1,
        epochs: 2,
        max_steps: None,
        batch: Batch::Global(NonZeroU64::new(4).unwrap()),
        records_per_shard: None,
        shuffle: true,
        seed: 7,
        max_worker_restarts: 3,
        worker_timeout: None,
        master_timeout: Duration::from_secs(30),
        checkpoints: None,
        resume_from: None,
        validation: None,
        work: Work::default(),
        wire_dtype: WireDtype::F32,
        streams: 1,
        on_nonfinite: OnNonfinite::default(),
        restart_without_checkpoint: true,
        // A leaver is let go after 10 s.
        grace_period: Duration::from_secs(14),
    }
}

/// Files of this many records.
pub(super) fn dataset(files: &[u64]) -> Dataset {
    let file = |(i, &records)| File { path: format!("file-{i}"), records, version: None };
    Dataset { files: files.iter().enumerate().map(file).collect() }
}
