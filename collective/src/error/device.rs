//! The errors of GPUs, of NCCL and of their libraries, and which of them end the process.

#[cfg(feature = "gpu")]
use std::error::Error;
use std::time::Duration;

#[cfg(feature = "gpu")]
use cudarc::driver::DriverError;

/// Why a GPU or NCCL cannot be used, or has failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// NCCL did not release a communicator in time. Its kernel may still occupy the device's
    /// stream. The caller ends the process and starts another one.
    #[error(
        "NCCL did not abort its communicator within {waited:?}; \
         this process can't use its GPU any more"
    )]
    Abandoned {
        /// Duration of the wait for the abort.
        waited: Duration,
    },
    /// A call of the CUDA driver failed. Most of its errors are sticky: the caller ends the
    /// process.
    #[cfg(feature = "gpu")]
    #[error("CUDA failed to {action}")]
    Cuda {
        /// Operation that failed.
        action: &'static str,
        /// Error of the driver.
        #[source]
        source: DriverError,
    },
    /// The stream is a default stream of CUDA. Which work such a stream orders depends on the
    /// calling thread, and NCCL runs on a thread of its own.
    #[error(
        "the GPU's work is on a default stream of CUDA, whose order NCCL's thread can't follow; \
         open the GPU with a stream of its own: `Place::Cuda.open()`, or candle's \
         `Device::new_cuda_with_stream` in place of `Device::new_cuda`"
    )]
    DefaultStream,
    /// There is no device with this ordinal.
    #[error("there is no GPU {ordinal}: {count} are visible")]
    NoDevice {
        /// Requested ordinal.
        ordinal: usize,
        /// Number of visible devices.
        count: usize,
    },
    /// The library is missing or cannot be loaded. The caller continues without it.
    #[error("{library} can't be loaded: {reason}")]
    NoLibrary {
        /// File names that were tried.
        library: String,
        /// Message of the dynamic loader.
        reason: String,
    },
    /// The library lacks a required function: it is too old, or a different library. The caller
    /// continues without it.
    #[error("{library} has no {symbol}")]
    NoSymbol {
        /// Name of the library.
        library: String,
        /// Name of the function.
        symbol: &'static str,
    },
    /// A call of NCCL failed. Its communicator is unusable; the host path still works.
    #[error("NCCL failed to {action}: {reason} (result {code})")]
    Nccl {
        /// Operation that failed.
        action: &'static str,
        /// Result code of NCCL, in the numbering of its version.
        code: i32,
        /// Error message of NCCL.
        reason: String,
    },
    /// The library that was found is the CUDA toolkit's, for linking, and not the driver's.
    #[error(
        "libcuda.so is the CUDA toolkit's, for linking alone; remove the toolkit's folder `stubs` \
         from LD_LIBRARY_PATH"
    )]
    StubLibrary,
    /// The version of the NCCL library is not supported. The caller continues without it.
    #[error("NCCL {found} is too old; the oldest supported version is 2.19")]
    NcclVersion {
        /// Version of the library in NCCL's encoding: 21 903 is 2.19.3.
        found: i32,
    },
}

#[cfg(feature = "gpu")]
impl DeviceError {
    /// Returns the message of the dynamic loader.
    pub(crate) fn loader_message(error: &libloading::Error) -> String {
        error.source().map_or_else(|| error.to_string(), ToString::to_string)
    }

    /// Returns a function that wraps a driver error, for `map_err`.
    pub(crate) fn cuda(action: &'static str) -> impl FnOnce(DriverError) -> Self {
        move |source| Self::Cuda { action, source }
    }
}
