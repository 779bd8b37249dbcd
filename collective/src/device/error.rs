use std::error::Error;
use std::time::Duration;

use cudarc::driver::DriverError;

/// Why a GPU, or NCCL, can't be used, or has failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// NCCL did not give a communicator back in time. Its kernel may still hold the device's
    /// stream: end the process, another one takes its place.
    #[error(
        "NCCL has not aborted its communicator within {waited:?}; this process can't go on with its GPU"
    )]
    Abandoned {
        /// How long its return was waited for.
        waited: Duration,
    },
    /// A call of the CUDA driver failed. Most of its errors stay: end the process.
    #[error("CUDA could not {action}")]
    Cuda {
        /// What was tried.
        action: &'static str,
        /// What the driver said.
        #[source]
        source: DriverError,
    },
    /// There is no device of this number.
    #[error("there is no GPU {ordinal}: {count} can be seen")]
    NoDevice {
        /// The number that was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The library is not there, or can't be loaded. Go on without it.
    #[error("{library} can't be loaded: {reason}")]
    NoLibrary {
        /// The names that were tried.
        library: String,
        /// What the system's loader said.
        reason: String,
    },
    /// The library lacks a function that is needed: it is too old, or something else. Go on without
    /// it.
    #[error("{library} has no {symbol}")]
    NoSymbol {
        /// The library's name.
        library: String,
        /// The function's name.
        symbol: &'static str,
    },
    /// A call of NCCL failed. Its communicator is of no use any more; the host's ring is.
    #[error("NCCL could not {action}: {reason} (result {code})")]
    Nccl {
        /// What was tried.
        action: &'static str,
        /// NCCL's result code, whatever version it is of.
        code: i32,
        /// What NCCL said of it.
        reason: String,
    },
    /// The NCCL library is of a version that this can't work with. Go on without it.
    #[error("NCCL {found} is too old; 2.18 is the oldest that works")]
    NcclVersion {
        /// The version found, as NCCL counts: 21 803 is 2.18.3.
        found: i32,
    },
}

impl DeviceError {
    /// What the system's loader said.
    pub(crate) fn loader_said(error: &libloading::Error) -> String {
        error.source().map_or_else(|| error.to_string(), ToString::to_string)
    }

    /// For `map_err` of a driver call.
    pub(crate) fn cuda(action: &'static str) -> impl FnOnce(DriverError) -> Self {
        move |source| Self::Cuda { action, source }
    }
}
