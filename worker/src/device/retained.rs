//! The sum of the last committed step, for ranks that are one step behind.
//!
//! It moves to the host while the next step is computed, so that it takes no memory of the GPU. A
//! rank that is one step behind, or a joining worker, is rare.
#![allow(unsafe_code, reason = "a copy is in progress between two calls")]

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, result};
use elasticdl_collective::device::DeviceError;

use super::error::cuda;
use super::host_copies::{HostCopies, HostCopy};

/// The sum, and its copy to the host.
///
/// **Invariant:** from [`retain`](Self::retain) on, the buffer of the sum is not written before
/// [`release`](Self::release), and neither is freed before the other's stream has passed the copy.
#[derive(Debug)]
pub(super) struct RetainedSum {
    /// Stream of the copies. The device's own stream goes on meanwhile.
    pub(super) stream: Arc<CudaStream>,
    copied: CudaEvent,
    /// `None`: the sum is where it was computed.
    copy: Option<HostCopy>,
    /// Whether the device's stream may write to the buffer before the copy is complete.
    is_reading: bool,
}

impl RetainedSum {
    pub(super) fn new(stream: &CudaStream) -> Result<Self, DeviceError> {
        let context = stream.context();
        Ok(Self {
            stream: context.new_stream().map_err(cuda("create a stream"))?,
            copied: context.new_event(None).map_err(cuda("create an event"))?,
            copy: None,
            is_reading: false,
        })
    }

    /// Retains the sum that the work on `main` computes, in place of the last one. `moves`: a later
    /// step overwrites the buffer before it is known that no rank needs the sum.
    pub(super) fn retain(
        &mut self,
        sum: &CudaSlice<f32>,
        main: &CudaStream,
        moves: bool,
        copies: &mut HostCopies,
    ) -> Result<(), DeviceError> {
        self.release(main)?;
        if let Some(old) = self.copy.take() {
            // Memory that is given back may be freed. The copy was enqueued a step ago.
            self.copied.synchronize().map_err(cuda("copy to the host"))?;
            copies.give_back(old);
        }
        if !moves {
            return Ok(());
        }
        let mut copy = copies.take(sum.len());
        self.stream.join(main).map_err(cuda("order two streams"))?;
        let floats = copy.floats_mut();
        let (from, _read) = sum.device_ptr(&self.stream);
        // SAFETY: both have this length, and live as the invariant says; the copy is read after
        // the event.
        unsafe { result::memcpy_dtoh_async(floats, from, self.stream.cu_stream()) }
            .map_err(cuda("copy to the host"))?;
        self.copied.record(&self.stream).map_err(cuda("record an event"))?;
        self.copy = Some(copy);
        self.is_reading = true;
        Ok(())
    }

    /// End of the copy, if work that is enqueued from now on may come before it.
    pub(super) fn in_progress(&self) -> Option<&CudaEvent> {
        self.is_reading.then_some(&self.copied)
    }

    /// Orders work that is enqueued on `main` from now on after the copy.
    pub(super) fn release(&mut self, main: &CudaStream) -> Result<(), DeviceError> {
        if self.is_reading {
            main.wait(&self.copied).map_err(cuda("order two streams"))?;
            self.is_reading = false;
        }
        Ok(())
    }

    /// The copy, once it is complete; `None` if the sum is where it was computed.
    pub(super) fn copy(&self) -> Result<Option<Arc<Vec<f32>>>, DeviceError> {
        let Some(copy) = &self.copy else { return Ok(None) };
        self.copied.synchronize().map_err(cuda("copy to the host"))?;
        Ok(Some(copy.shared()))
    }
}

impl Drop for RetainedSum {
    fn drop(&mut self) {
        // The copy's memory is freed next.
        let _ = self.copied.synchronize();
    }
}
