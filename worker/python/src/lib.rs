//! The extension module of the Python package `elasticdl`.
//!
//! **Invariant:** it translates between Python and [`elasticdl::external`], and decides nothing.

mod batches;
mod borrowed;
mod core;
mod data;
mod floats;
mod gpu;
mod operations;
mod options;
mod progress;
mod ring;
mod rows;

use std::ffi::OsString;
use std::fs::File;
use std::path::PathBuf;

use elasticdl::external::{ProgramStacks, Worker};
use pyo3::exceptions::PyOSError;
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
    module.add_function(wrap_pyfunction!(gpu::end_nccl, module)?)?;
    module.add_function(wrap_pyfunction!(gpu::gpu_ordinal, module)?)?;
    module.add_function(wrap_pyfunction!(die_with_parent, module)?)?;
    module.add_function(wrap_pyfunction!(id_of, module)?)?;
    module.add_function(wrap_pyfunction!(is_supervisor, module)?)?;
    module.add_function(wrap_pyfunction!(supervise, module)?)?;
    module.add_function(wrap_pyfunction!(warn, module)?)?;
    module.add_function(wrap_pyfunction!(watch_stacks, module)?)?;
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
        .map_err(|error| PyOSError::new_err(error.to_string()))
}

/// Writes a line to the log of this worker.
#[pyfunction]
fn warn(text: &str) {
    tracing::warn!("{text}");
}

/// Makes Python's stacks a part of what this worker reports of itself. A byte to `ask`, a pipe,
/// requests that they are written to the file `dump`; a byte of `told` says that they are. The
/// handler of `signal` writes them there as well.
#[pyfunction]
fn watch_stacks(ask: PathBuf, told: PathBuf, dump: PathBuf, signal: i32) -> PyResult<()> {
    let open = || {
        let ask = File::options().write(true).open(ask)?;
        let dump = File::options().read(true).write(true).open(dump)?;
        Ok(ProgramStacks { ask, told: File::open(told)?, dump, signal })
    };
    let stacks = open().map_err(|error: std::io::Error| PyOSError::new_err(error.to_string()))?;
    elasticdl::external::watch_stacks(stacks);
    Ok(())
}
