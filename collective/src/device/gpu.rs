//! Looks for the driver before cudarc does, which panics where there is none.
#![allow(unsafe_code, reason = "a library is loaded to see whether it is there")]

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use cudarc::driver::{CudaContext, CudaStream, DriverError, sys};

use super::DeviceError;
use super::staging::Staging;

/// One GPU, and the stream on which its owner computes. Clones are the same.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    stream: Arc<CudaStream>,
    uuid: [u8; 16],
    /// Outlives the groups: page-locked memory is slow to get.
    staging: Mutex<Staging>,
}

impl Device {
    /// How many GPUs this process can see; 0 where the driver says that there is none.
    ///
    /// # Errors
    /// [`DeviceError::NoLibrary`] without a driver; [`DeviceError::NoSymbol`],
    /// [`DeviceError::Cuda`].
    pub fn count() -> Result<usize, DeviceError> {
        find_driver()?;
        match CudaContext::device_count() {
            Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
            Err(source) => Err(DeviceError::Cuda { action: "be initialised", source }),
        }
    }

    /// Opens a GPU, with a new stream.
    ///
    /// `ordinal`: from 0, as `CUDA_VISIBLE_DEVICES` leaves them.
    ///
    /// # Errors
    /// As for [`count`](Self::count), and [`DeviceError::NoDevice`].
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(DeviceError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(DeviceError::cuda("open the GPU"))?;
        let stream = context.new_stream().map_err(DeviceError::cuda("make a stream"))?;
        Self::of_stream(stream)
    }

    /// The GPU of a stream that somebody else has opened: a framework's, so that what is enqueued
    /// here comes in its order.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    pub fn of_stream(stream: Arc<CudaStream>) -> Result<Self, DeviceError> {
        let context = stream.context();
        let uuid = context.uuid().map_err(DeviceError::cuda("tell the GPU's UUID"))?;
        let uuid = uuid.bytes.map(|byte| byte as u8);
        let staging = Mutex::new(Staging::new(context)?);
        Ok(Self { inner: Arc::new(Inner { stream, uuid, staging }) })
    }

    /// The stream on which all that concerns this device's buffers is enqueued.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.inner.stream
    }

    /// What no other GPU has: two ranks with the same one share it.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.inner.uuid
    }

    pub(crate) fn staging(&self) -> MutexGuard<'_, Staging> {
        // Who panicked while it held it has left slots whose copies are awaited before they are
        // used again.
        self.inner.staging.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Loads the driver for good, or says why that can't be. cudarc finds the one that is loaded.
fn find_driver() -> Result<(), DeviceError> {
    static FOUND: OnceLock<Result<(), DeviceError>> = OnceLock::new();
    FOUND.get_or_init(load_driver).clone()
}

fn load_driver() -> Result<(), DeviceError> {
    let mut reason = String::new();
    for name in NAMES {
        // SAFETY: what a system has under this name is its driver, made to be loaded by whoever
        // wants.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => {
                // Not unloaded again: cudarc keeps pointers into it.
                let library = std::mem::ManuallyDrop::new(library);
                return check_symbols(name, &library);
            }
            Err(error) => reason = DeviceError::loader_said(&error),
        }
    }
    Err(DeviceError::NoLibrary { library: NAMES.join(", "), reason })
}

fn check_symbols(name: &str, library: &libloading::Library) -> Result<(), DeviceError> {
    let lacks = |symbol: &&str| {
        // SAFETY: the symbol is only looked for, not used.
        unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_err()
    };
    match SYMBOLS.iter().find(|symbol| lacks(symbol)) {
        None => Ok(()),
        Some(symbol) => Err(DeviceError::NoSymbol { library: name.to_owned(), symbol }),
    }
}

/// The first that is there, in the order in which cudarc looks.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// What is called here through cudarc, which panics where one is missing.
const SYMBOLS: [&str; 30] = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
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
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];
