//! Collective operations on memory of Python.

use std::net::{SocketAddr, TcpListener};
use std::slice;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use elasticdl::device::{Buffers, CallKind, Dtype};
use elasticdl::external::{ProgramRing, RingMembers, WorkerError};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::borrowed::Borrowed;
use crate::gpu::Gpu;
use crate::operations::{Act, Operation, Operations};

/// One rank of a group of programs of a fixed size, which `connect()` forms.
///
/// Its operations take anything with the buffer protocol or DLPack, in the memory of the CPU:
/// NumPy's arrays and PyTorch's tensors. They release Python's lock while they wait. A group that
/// has lost a rank ends: its operations raise RuntimeError on all ranks.
#[pyclass(frozen, module = "elasticdl")]
#[derive(Debug)]
pub(crate) struct Ring {
    address: SocketAddr,
    listener: Mutex<Option<TcpListener>>,
    ring: OnceLock<(Arc<ProgramRing>, Operations)>,
}

#[pymethods]
impl Ring {
    /// Listens on a free port of `ip`.
    #[new]
    fn new(ip: &str) -> PyResult<Self> {
        let ip: std::net::IpAddr = ip.parse().map_err(|error| {
            PyValueError::new_err(format!("{ip:?} is no IP address of this host: {error}"))
        })?;
        let listener = TcpListener::bind((ip, 0))?;
        let address = listener.local_addr()?;
        Ok(Self { address, listener: Mutex::new(Some(listener)), ring: Default::default() })
    }

    /// Address at which this rank listens.
    #[getter]
    fn address(&self) -> String {
        self.address.to_string()
    }

    /// Connects the group, once, within `timeout` seconds. `name` and `secret`: the same on all
    /// ranks, and the secret known to no other program. `addresses`: of all ranks, in their order.
    #[pyo3(signature = (*, name, secret, rank, addresses, timeout))]
    fn connect(
        &self,
        py: Python<'_>,
        name: String,
        secret: Vec<u8>,
        rank: usize,
        addresses: Vec<String>,
        timeout: f64,
    ) -> PyResult<()> {
        let addresses = addresses.iter().map(|address| address.parse()).collect::<Result<_, _>>();
        let addresses: Vec<SocketAddr> = addresses
            .map_err(|error| PyValueError::new_err(format!("a member's address: {error}")))?;
        let timeout = Duration::try_from_secs_f64(timeout)
            .map_err(|error| PyValueError::new_err(format!("timeout: {error}")))?;
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        let listener = listener.take();
        let listener = listener.ok_or_else(|| PyRuntimeError::new_err("connect() was called"))?;
        let members = RingMembers { name, secret, rank, addresses };
        let ring = py.detach(|| ProgramRing::connect(listener, members, timeout));
        let ring = Arc::new(ring.map_err(error_of)?);
        let operations = Operations::start(Arc::clone(&ring))?;
        let _ = self.ring.set((ring, operations));
        Ok(())
    }

    /// Ends the group and its thread, before the process ends.
    fn close(&self, py: Python<'_>) {
        self.abort();
        self.shut_down(py);
    }

    /// Replaces an array of f32 by its sum over all ranks.
    fn all_reduce(&self, py: Python<'_>, values: &Bound<'_, PyAny>) -> PyResult<()> {
        let (ring, mut memory) = (self.connected()?, Borrowed::new(values)?);
        let values = memory.floats()?;
        py.detach(|| ring.all_reduce(values)).map_err(error_of)
    }

    /// Returns the bytes of every rank, which are as many on each.
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        values: &Bound<'py, PyAny>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let (ring, mut memory) = (self.connected()?, Borrowed::new(values)?);
        let bytes = memory.bytes();
        let gathered = py.detach(|| ring.all_gather(bytes)).map_err(error_of)?;
        Ok(gathered.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Gives each rank its array of `given`, and replaces the arrays of `taken` by those that the
    /// ranks give to this one, which have as many bytes.
    fn exchange(
        &self,
        py: Python<'_>,
        given: Vec<Bound<'_, PyAny>>,
        taken: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let ring = self.connected()?;
        let (mut given, mut taken) = (borrow(&given)?, borrow(&taken)?);
        given.iter_mut().for_each(|part| part.keep_from(&taken));
        let send: Vec<&[u8]> = given.iter_mut().map(|memory| &*memory.bytes()).collect();
        let mut receive: Vec<&mut [u8]> = taken.iter_mut().map(Borrowed::bytes).collect();
        py.detach(|| ring.exchange(&send, &mut receive)).map_err(error_of)
    }

    /// Replaces each array of `parts` by that of its rank, which has as many bytes on all ranks.
    fn gather(
        &self,
        py: Python<'_>,
        values: &Bound<'_, PyAny>,
        parts: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let (ring, mut memory) = (self.connected()?, Borrowed::new(values)?);
        let mut parts = borrow(&parts)?;
        memory.keep_from(&parts);
        let bytes = memory.bytes();
        let mut into: Vec<&mut [u8]> = parts.iter_mut().map(Borrowed::bytes).collect();
        py.detach(|| ring.gather(bytes, &mut into)).map_err(error_of)
    }

    /// Gives each rank its array of f32 of `given`, and replaces `sum` by the sum of those that the
    /// ranks give to this one, which have as many elements.
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        given: Vec<Bound<'_, PyAny>>,
        sum: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let (ring, mut memory) = (self.connected()?, Borrowed::new(sum)?);
        let mut given = borrow(&given)?;
        given.iter_mut().for_each(|part| part.keep_from(slice::from_ref(&memory)));
        let floats = given.iter_mut().map(|part| part.floats().map(|floats| &*floats));
        let (floats, sum) = (floats.collect::<PyResult<Vec<&[f32]>>>()?, memory.floats()?);
        py.detach(|| ring.reduce_scatter(&floats, sum)).map_err(error_of)
    }

    /// Replaces an array by that of rank `root`.
    fn broadcast(&self, py: Python<'_>, root: usize, values: &Bound<'_, PyAny>) -> PyResult<()> {
        let (ring, mut memory) = (self.connected()?, Borrowed::new(values)?);
        let bytes = memory.bytes();
        py.detach(|| ring.broadcast(root, bytes)).map_err(error_of)
    }

    /// Whether all ranks have NCCL for their GPUs. Each calls this with its GPU before an operation
    /// over NCCL.
    fn has_nccl(&self, py: Python<'_>, gpu: &Gpu) -> PyResult<bool> {
        let ring = self.connected()?;
        py.detach(|| ring.has_nccl(gpu.device())).map_err(error_of)
    }

    /// Performs an operation over NCCL, after the work on the stream of that GPU, and waits for its
    /// end: `kind` is "all_gather", "all_reduce", "broadcast" (of rank `root`) or "reduce_scatter".
    /// `given` and `taken`: addresses of what is read and written, whose smaller one has `length`
    /// elements of the type "bf16", "byte", "f16" or "f32".
    #[pyo3(signature = (kind, given, taken, length, dtype, root=0))]
    #[expect(unsafe_code, reason = "memory of PyTorch is known by its address")]
    #[expect(clippy::too_many_arguments, reason = "they have names in Python")]
    fn over_nccl(
        &self,
        py: Python<'_>,
        kind: &str,
        given: u64,
        taken: u64,
        length: usize,
        dtype: &str,
        root: usize,
    ) -> PyResult<()> {
        let ring = self.connected()?;
        let kind = match kind {
            "all_gather" => CallKind::AllGather,
            "all_reduce" => CallKind::AllReduce,
            "broadcast" => CallKind::Broadcast { root },
            "reduce_scatter" => CallKind::ReduceScatter,
            _ => return Err(PyValueError::new_err(format!("no operation {kind}"))),
        };
        let dtype = match dtype {
            "bf16" => Dtype::Bf16,
            "byte" => Dtype::Byte,
            "f16" => Dtype::F16,
            "f32" => Dtype::F32,
            _ => return Err(PyValueError::new_err(format!("no type {dtype}"))),
        };
        let buffers = Buffers { src: given, dst: taken, len: length, dtype };
        // SAFETY: the package gives memory of tensors of this length, which it keeps meanwhile.
        py.detach(|| unsafe { ring.perform(kind, buffers) }).map_err(error_of)
    }

    /// Begins to replace an array of f32 by its sum over all ranks. `done` is called in another
    /// thread, with an error or None. The ring is ended if that takes longer than `limit` seconds.
    fn begin_all_reduce(
        &self,
        values: &Bound<'_, PyAny>,
        limit: f64,
        done: Py<PyAny>,
    ) -> PyResult<()> {
        let mut memory = Borrowed::new(values)?;
        memory.floats()?;
        self.begin(Act::AllReduce(memory), limit, done)
    }

    /// Begins to wait for all ranks; as for `begin_all_reduce`.
    fn begin_barrier(&self, limit: f64, done: Py<PyAny>) -> PyResult<()> {
        self.begin(Act::Barrier, limit, done)
    }

    /// Begins to replace an array by that of rank `root`; as for `begin_all_reduce`.
    fn begin_broadcast(
        &self,
        root: usize,
        values: &Bound<'_, PyAny>,
        limit: f64,
        done: Py<PyAny>,
    ) -> PyResult<()> {
        self.begin(Act::Broadcast(root, Borrowed::new(values)?), limit, done)
    }

    /// Begins to call a function that uses this ring; as for `begin_all_reduce`.
    fn begin_call(&self, function: Py<PyAny>, limit: f64, done: Py<PyAny>) -> PyResult<()> {
        self.begin(Act::Call(function), limit, done)
    }

    /// Ends the thread of the operations that were begun, after them, and waits for it. To be
    /// called before the process ends.
    fn shut_down(&self, py: Python<'_>) {
        if let Some((ring, operations)) = self.ring.get() {
            operations.shut_down(py);
            py.detach(|| ring.end());
        }
    }

    /// Ends the group: operations fail on every rank.
    fn abort(&self) {
        if let Some((ring, _)) = self.ring.get() {
            ring.abort();
        }
    }
}

impl Ring {
    fn connected(&self) -> PyResult<&ProgramRing> {
        self.parts().map(|(ring, _)| &**ring)
    }

    fn begin(&self, act: Act, limit: f64, done: Py<PyAny>) -> PyResult<()> {
        let limit = Duration::try_from_secs_f64(limit)
            .map_err(|error| PyValueError::new_err(format!("limit: {error}")))?;
        self.parts()?.1.begin(Operation { act, limit, done })
    }

    fn parts(&self) -> PyResult<&(Arc<ProgramRing>, Operations)> {
        self.ring.get().ok_or_else(|| PyRuntimeError::new_err("the ring is not connected"))
    }
}

fn borrow(all: &[Bound<'_, PyAny>]) -> PyResult<Vec<Borrowed>> {
    all.iter().map(Borrowed::new).collect()
}

fn error_of(error: WorkerError) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}
