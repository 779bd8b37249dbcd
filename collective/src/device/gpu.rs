//! A GPU of this process. The CUDA driver is looked up here before cudarc loads it, since cudarc
//! panics if there is none.
#![allow(unsafe_code, reason = "a library is loaded to check whether it exists")]

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use super::DeviceError;
use super::staging::Staging;

/// One GPU, and the CUDA stream on which its owner computes. Clones share the same device.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    stream: Arc<CudaStream>,
    /// Stream of operations that run beside the work on `stream`.
    side_stream: Arc<CudaStream>,
    uuid: [u8; 16],
    /// Position on the host's PCI buses: domain, bus and device.
    pci: [i32; 3],
    /// Staging memory, kept across groups: page-locked memory is slow to allocate.
    staging: Mutex<Staging>,
}

impl Device {
    /// Returns the number of GPUs visible to this process; 0 if the driver reports none.
    ///
    /// # Errors
    /// [`DeviceError::NoLibrary`] without a driver; [`DeviceError::NoSymbol`],
    /// [`DeviceError::Cuda`].
    pub fn count() -> Result<usize, DeviceError> {
        find_driver()?;
        match CudaContext::device_count() {
            Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
            Err(DriverError(sys::CUresult::CUDA_ERROR_STUB_LIBRARY)) => {
                Err(DeviceError::StubLibrary)
            }
            Err(source) => Err(DeviceError::Cuda { action: "initialize", source }),
        }
    }

    /// Opens a GPU and creates a stream on it.
    ///
    /// `ordinal`: index from 0, after `CUDA_VISIBLE_DEVICES` is applied.
    ///
    /// # Errors
    /// As for [`count`](Self::count), and [`DeviceError::NoDevice`].
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(DeviceError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(DeviceError::cuda("open the GPU"))?;
        let stream = context.new_stream().map_err(DeviceError::cuda("create a stream"))?;
        Self::from_stream(stream)
    }

    /// Wraps the GPU of an existing stream, for example a framework's. Operations of this crate are
    /// enqueued on that stream, in order with the framework's work.
    ///
    /// From then on, cudarc does not track with events which stream uses a buffer of this context:
    /// all work on buffers is enqueued on this stream. The device's memory pool keeps memory that
    /// is freed, so that the next step need not map it again.
    ///
    /// # Errors
    /// [`DeviceError::DefaultStream`], [`DeviceError::Cuda`].
    pub fn from_stream(stream: Arc<CudaStream>) -> Result<Self, DeviceError> {
        if stream.cu_stream().addr() <= PER_THREAD_STREAM {
            return Err(DeviceError::DefaultStream);
        }
        let context = stream.context();
        // SAFETY: buffers are used on one stream; the copies of `Staging`, on streams of their own,
        // are ordered with it by events.
        unsafe { context.disable_event_tracking() };
        keep_freed_memory(context);
        let uuid = context.uuid().map_err(DeviceError::cuda("read the GPU's UUID"))?;
        let uuid = uuid.bytes.map(|byte| byte as u8);
        let pci = PCI_POSITION.map(|attribute| context.attribute(attribute));
        let read = DeviceError::cuda("read the GPU's PCI position");
        let [domain, bus, place] = pci;
        let pci = domain.and_then(|domain| Ok([domain, bus?, place?])).map_err(read)?;
        let staging = Mutex::new(Staging::new(context)?);
        let side_stream = context.new_stream().map_err(DeviceError::cuda("create a stream"))?;
        Ok(Self { inner: Arc::new(Inner { stream, side_stream, uuid, pci, staging }) })
    }

    /// Stream on which all work on this device's buffers is enqueued.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.inner.stream
    }

    pub(crate) fn side_stream(&self) -> &Arc<CudaStream> {
        &self.inner.side_stream
    }

    /// UUID of the GPU. Two ranks with the same UUID share a GPU.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.inner.uuid
    }

    /// Position of the GPU on its host's PCI buses. Instances of one GPU (MIG) share it.
    pub(crate) fn pci(&self) -> [i32; 3] {
        self.inner.pci
    }

    pub(crate) fn staging(&self) -> MutexGuard<'_, Staging> {
        // A panic under this lock leaves valid slots: their copies are awaited before the slots are
        // reused.
        self.inner.staging.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Lets this thread query events and page-lock memory while another thread captures a CUDA graph.
/// By default, such a call fails and ends the capture of `torch.cuda.graph()`. For threads that
/// capture none themselves.
pub fn relax_capture_mode() {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the driver is loaded, and writes the thread's former mode there.
    let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode).result() };
    if let Err(error) = exchanged {
        tracing::debug!(%error, "the thread keeps its capture mode");
    }
}

/// Lets the device's default pool keep all memory that is freed. By default, it returns the memory
/// of a step to the driver at each synchronization, and the next step maps it again.
fn keep_freed_memory(context: &CudaContext) {
    let mut threshold = u64::MAX;
    // SAFETY: the device exists, and the attribute is a 64-bit number.
    let kept = unsafe {
        result::device::get_default_mem_pool(context.cu_device()).and_then(|pool| {
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast())
        })
    };
    if let Err(error) = kept {
        // Virtual GPUs have no pools; cudarc then allocates without.
        tracing::debug!(%error, "the GPU's memory pool keeps no freed memory");
    }
}

/// Loads the driver permanently, or returns why that failed. cudarc then finds the loaded library.
fn find_driver() -> Result<(), DeviceError> {
    static FOUND: OnceLock<Result<(), DeviceError>> = OnceLock::new();
    FOUND.get_or_init(load_driver).clone()
}

fn load_driver() -> Result<(), DeviceError> {
    let mut reason = String::new();
    for name in NAMES {
        // SAFETY: the system's library of this name is its CUDA driver, which is made to be loaded.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => {
                // The library is never unloaded: cudarc keeps pointers into it.
                let library = std::mem::ManuallyDrop::new(library);
                return check_symbols(name, &library);
            }
            Err(error) => reason = DeviceError::loader_message(&error),
        }
    }
    Err(DeviceError::NoLibrary { library: NAMES.join(", "), reason })
}

fn check_symbols(name: &str, library: &libloading::Library) -> Result<(), DeviceError> {
    let lacks = |symbol: &&str| {
        // SAFETY: the symbol is only looked up, not used.
        unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_err()
    };
    match SYMBOLS.iter().find(|symbol| lacks(symbol)) {
        None => Ok(()),
        Some(symbol) => Err(DeviceError::NoSymbol { library: name.to_owned(), symbol }),
    }
}

const PCI_POSITION: [sys::CUdevice_attribute; 3] = [
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
];

/// Handle of the calling thread's default stream; 0 and 1 are the legacy default stream.
const PER_THREAD_STREAM: usize = 2;

/// File names of the driver, in the order in which cudarc tries them.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// Driver functions that this crate calls through cudarc, which panics if one is missing.
const SYMBOLS: [&str; 35] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemPoolSetAttribute",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];
