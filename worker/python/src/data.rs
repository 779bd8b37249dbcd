//! The order of records and the seeds that belong to them, as Python sees them.

use std::num::NonZeroU64;

use elasticdl::external::{self, Keyed, StepShare, seed_of};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A rank's share of a step.
#[pyclass(frozen, get_all, module = "elasticdl._elasticdl")]
#[derive(Debug)]
pub(crate) struct Step {
    epoch: u32,
    /// Records of this rank.
    records: Vec<u64>,
    /// Number of records before the next step.
    next: u64,
}

/// The order of a data set, and how the ranks of a group without a master divide its steps.
#[pyclass(frozen, module = "elasticdl._elasticdl")]
#[derive(Debug)]
pub(crate) struct Share {
    inner: external::Share,
    rank: usize,
    world_size: usize,
}

#[pymethods]
impl Share {
    #[new]
    #[pyo3(signature = (*, records, epochs, global_batch, seed, rank, world_size))]
    fn new(
        records: u64,
        epochs: u32,
        global_batch: u64,
        seed: Option<u64>,
        rank: usize,
        world_size: usize,
    ) -> PyResult<Self> {
        let positive = |value: u64, name: &str| {
            let error = || PyValueError::new_err(format!("{name} is 0; it must be positive"));
            NonZeroU64::new(value).ok_or_else(error)
        };
        let (records, batch) =
            (positive(records, "length")?, positive(global_batch, "global_batch")?);
        if rank >= world_size {
            let error = format!("rank is {rank}; it must be below world_size, {world_size}");
            return Err(PyValueError::new_err(error));
        }
        let inner = external::Share::new(records, epochs, batch, seed);
        Ok(Self { inner, rank, world_size })
    }

    /// The step after the first `absorbed` records. None at the end.
    fn step(&self, absorbed: u64) -> Option<Step> {
        let step = self.inner.step(absorbed, self.rank, self.world_size)?;
        let StepShare { epoch, records, next } = step;
        Some(Step { epoch, records, next })
    }
}

/// The seeds of records in an epoch.
#[pyfunction]
pub(crate) fn seeds_of_records(seed: u64, epoch: u32, records: Vec<u64>, stream: u64) -> Vec<u64> {
    let of = |number| seed_of(seed, Keyed::Record { epoch, number }, stream);
    records.into_iter().map(of).collect()
}

/// The seed of a step.
#[pyfunction]
pub(crate) fn seed_of_step(seed: u64, step: u64, stream: u64) -> u64 {
    seed_of(seed, Keyed::Step(step), stream)
}
