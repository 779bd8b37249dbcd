//! NCCL called directly, to measure what the layers above it cost.

#![allow(unsafe_code, reason = "calls into a C library, on one thread")]

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use super::call::CallKind;
use super::library::{Buffers, CallStatus, Handle, Library, UniqueId};
use crate::device::{DeviceError, Element};

/// NCCL without the watchdog, as a baseline for benchmarks. A call that hangs is not
/// aborted.
#[derive(Debug)]
pub struct RawCommunicator {
    library: Arc<Library>,
    handle: Handle,
    stream: Arc<CudaStream>,
}

impl RawCommunicator {
    /// Creates a communicator; waits until all ranks have called this.
    ///
    /// # Errors
    /// [`DeviceError::Nccl`].
    pub fn new(
        library: &Arc<Library>,
        id: &UniqueId,
        (rank, world): (usize, usize),
        stream: &Arc<CudaStream>,
    ) -> Result<Self, DeviceError> {
        stream.context().bind_to_thread().map_err(DeviceError::cuda("use the GPU"))?;
        let (handle, call_status) = library.begin(id, rank, world)?;
        let bare = Self { library: library.clone(), handle, stream: stream.clone() };
        bare.wait_until_done(call_status)?;
        Ok(bare)
    }

    /// Runs an all-reduce and waits for it.
    ///
    /// # Errors
    /// [`DeviceError::Nccl`], [`DeviceError::Cuda`].
    pub fn all_reduce<T: Element>(
        &self,
        src: &CudaSlice<T>,
        dst: &mut CudaSlice<T>,
    ) -> Result<(), DeviceError> {
        let (len, stream) = (src.len(), &self.stream);
        let ((src, _read), (dst, _written)) = (src.device_ptr(stream), dst.device_ptr_mut(stream));
        let buffers = Buffers { src, dst, len, dtype: T::DTYPE };
        // SAFETY: only this thread uses the handle; the buffers are borrowed until the stream is
        // synchronized.
        let call_status = unsafe {
            self.library.enqueue(
                CallKind::AllReduce,
                self.handle,
                buffers,
                stream.cu_stream().cast(),
            )
        }?;
        self.wait_until_done(call_status)?;
        stream.synchronize().map_err(DeviceError::cuda("complete an NCCL all-reduce"))
    }

    fn wait_until_done(&self, mut call_status: CallStatus) -> Result<(), DeviceError> {
        while call_status == CallStatus::InProgress {
            std::thread::yield_now();
            // SAFETY: only this thread uses the handle.
            call_status = unsafe { self.library.poll("make progress", self.handle) }?;
        }
        Ok(())
    }
}

impl Drop for RawCommunicator {
    fn drop(&mut self) {
        // SAFETY: only this thread uses the handle, and it is not used again.
        if let Err(error) = unsafe { self.library.abort(self.handle) } {
            tracing::debug!(%error, "an abort of NCCL failed");
        }
    }
}
