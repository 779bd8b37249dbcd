//! Options of a job, as Python sees them.

use elasticdl::external::JobOptions;
use pyo3::prelude::*;

/// Options of the job, as [`JobOptions`].
#[pyclass(frozen, get_all, module = "elasticdl._elasticdl")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    epochs: u32,
    global_batch: Option<u64>,
    per_worker: Option<u64>,
    seed: u64,
    shuffles: bool,
    is_deterministic: bool,
    shards_optimizer: bool,
    audits: bool,
}

impl From<JobOptions> for Options {
    fn from(options: JobOptions) -> Self {
        let JobOptions { epochs, global_batch, per_worker, seed, shuffles, .. } = options;
        let JobOptions { is_deterministic, shards_optimizer, audits, .. } = options;
        Self {
            epochs,
            global_batch,
            per_worker,
            seed,
            shuffles,
            is_deterministic,
            shards_optimizer,
            audits,
        }
    }
}
