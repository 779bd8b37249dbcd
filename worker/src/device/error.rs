//! Errors of the driver.

use cudarc::driver::DriverError;
use elasticdl_collective::device::DeviceError;

/// Converts the error of a driver call; for `map_err`.
pub(super) fn cuda(action: &'static str) -> impl FnOnce(DriverError) -> DeviceError {
    move |source| DeviceError::Cuda { action, source }
}
