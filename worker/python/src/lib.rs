//! The extension module of the Python package `elasticdl`.
//!
//! **Invariant:** it translates between Python and [`elasticdl::external`], and decides nothing.

mod borrowed;
mod core;
mod data;
mod floats;
mod gpu;
mod operations;
mod progress;
mod ring;
mod rows;

use std::ffi::OsString;

use elasticdl::external::Worker;
use pyo3::prelude::*;

/// The extension module of `elasticdl`.
#[pymodule]
fn _elasticdl(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<core::Core>()?;
    module.add_class::<data::Share>()?;
    module.add_class::<floats::Floats>()?;
    module.add_class::<gpu::Gpu>()?;
    module.add_class::<ring::Ring>()?;
    module.add_function(wrap_pyfunction!(data::seeds_of_records, module)?)?;
    module.add_function(wrap_pyfunction!(data::seed_of_step, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpu_ordinal, module)?)?;
    module.add_function(wrap_pyfunction!(die_with_parent, module)?)?;
    module.add_function(wrap_pyfunction!(id_of, module)?)?;
    module.add_function(wrap_pyfunction!(is_supervisor, module)?)?;
    module.add_function(wrap_pyfunction!(supervise, module)?)?;
    Ok(())
}

/// An id for a text: the bits of `elasticdl::id_of`, as tensors of i64 have them.
#[pyfunction]
fn id_of(text: &str) -> i64 {
    elasticdl::id_of(text).cast_signed()
}

/// Whether this process is to start the workers of its pod.
#[pyfunction]
fn is_supervisor() -> PyResult<bool> {
    Worker::is_supervisor().map_err(core::error_of)
}

/// Starts the workers of this pod, and returns the pod's exit code when all have ended.
#[pyfunction]
fn supervise(py: Python<'_>, program: Vec<OsString>) -> PyResult<u8> {
    py.detach(|| Worker::supervise(&program)).map_err(core::error_of)
}

/// Makes the kernel kill this process when the thread that forked it ends: a process that a worker
/// forked holds copies of its connections, and would keep them open.
#[pyfunction]
fn die_with_parent() -> PyResult<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| pyo3::exceptions::PyOSError::new_err(error.to_string()))
}
