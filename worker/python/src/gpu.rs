//! The GPU of a worker, as Python sees it.

use std::thread;

use elasticdl::device::{self, Addresses, Device, DeviceMemory};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// A GPU, and the CUDA stream on which the trainer works.
#[pyclass(frozen, module = "elasticdl._elasticdl")]
#[derive(Debug)]
pub(crate) struct Gpu {
    device: Device,
}

/// Memory of the program on a GPU, by address, as attributes of an object of Python.
#[derive(Debug, FromPyObject)]
pub(crate) struct GpuMemory {
    gpu: Py<Gpu>,
    parameters: u64,
    /// The optimizer state.
    state: u64,
    /// With a divided optimizer, the first alone is used.
    gradients: [u64; 2],
    /// Keeps the memory.
    owner: Py<PyAny>,
}

#[pymethods]
impl Gpu {
    /// Opens a GPU by its index among the visible ones.
    #[new]
    fn new(py: Python<'_>, ordinal: usize) -> PyResult<Self> {
        // On another thread: the GPU becomes the current one of the thread, and PyTorch's choice of
        // one for the caller's shall stay.
        let open = || thread::spawn(move || Device::open(ordinal)).join();
        let device = py.detach(open).expect("opening a GPU does not panic");
        device
            .map(|device| Self { device })
            .map_err(|error| PyRuntimeError::new_err(format!("GPU {ordinal}: {error}")))
    }

    /// Handle of the stream. The program enqueues its work there.
    #[getter]
    fn stream(&self) -> usize {
        self.device.stream().cu_stream().expose_provenance()
    }
}

impl Gpu {
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

impl GpuMemory {
    /// The memory for a trainer on this GPU. `owner` is never freed: a process trains one model.
    #[expect(unsafe_code, reason = "memory of PyTorch is known by its address")]
    pub(crate) fn into_trainer(self) -> DeviceMemory {
        let Self { gpu, parameters, state: slots, gradients, owner } = self;
        std::mem::forget(owner);
        let addresses = Addresses { parameters, slots, gradients };
        // SAFETY: the package allocates tensors of these lengths, which `owner` keeps for good.
        unsafe { DeviceMemory::new(gpu.get().device.clone(), addresses) }
    }
}

/// Waits until NCCL has released the communicators of this process, which is about to end.
#[pyfunction]
pub(crate) fn end_nccl(py: Python<'_>) {
    py.detach(elasticdl::external::end_nccl);
}

/// Index, among the visible ones, of the GPU that this worker is assigned.
#[pyfunction]
pub(crate) fn gpu_ordinal() -> PyResult<usize> {
    device::ordinal().map_err(|error| PyRuntimeError::new_err(error.to_string()))
}
