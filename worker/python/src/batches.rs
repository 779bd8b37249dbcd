//! Micro-batches, as Python sees them.

use pyo3::prelude::*;

/// A micro-batch that is drawn.
#[pyclass(frozen, get_all, module = "elasticdl._elasticdl")]
#[derive(Debug)]
pub(crate) struct MicroBatch {
    pub(crate) epoch: u32,
    /// Indices of records.
    pub(crate) records: Vec<u64>,
    /// Whether there is none before the next `wait`.
    pub(crate) must_wait: bool,
}

/// How the micro-batch that was drawn first counts.
#[pyclass(frozen, get_all, module = "elasticdl._elasticdl")]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CountedBatch {
    /// Address of the step's gradient; `None` if the micro-batch will be discarded.
    pub(crate) address: Option<usize>,
    pub(crate) records: usize,
    /// Number of records in that gradient.
    pub(crate) before: u64,
    /// Whether it is the last one of the step.
    pub(crate) is_last: bool,
    /// Whether its parts are summed as soon as they are complete.
    pub(crate) is_overlapped: bool,
    /// Whether its gradient is compared with that of another worker; whether it is only compared,
    /// and counts no second time.
    pub(crate) is_compared: bool,
    pub(crate) is_again: bool,
}
