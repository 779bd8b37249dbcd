//! The progress of a worker's group, as Python sees it.

use std::collections::BTreeMap;

use elasticdl::external::Watch;
use pyo3::prelude::*;

/// The progress of a worker's group.
#[pyclass(frozen, module = "elasticdl._elasticdl")]
#[derive(Debug)]
pub(crate) struct Progress {
    pub(crate) watch: Watch,
}

#[pymethods]
impl Progress {
    #[getter]
    fn generation(&self) -> u64 {
        self.watch.progress().generation
    }

    #[getter]
    fn rank(&self) -> usize {
        self.watch.progress().rank
    }

    #[getter]
    fn world_size(&self) -> usize {
        self.watch.progress().world_size
    }

    #[getter]
    fn step(&self) -> u64 {
        self.watch.progress().step
    }

    #[getter]
    fn epoch(&self) -> u32 {
        self.watch.progress().epoch
    }

    #[getter]
    fn records(&self) -> u64 {
        self.watch.progress().records
    }

    /// What the micro-batches of the step that is applied have added, on all workers.
    #[getter]
    fn tally(&self) -> BTreeMap<String, f64> {
        self.watch.progress().tally
    }
}
