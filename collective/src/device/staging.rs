//! Staging of device buffers on the host path: page-locked memory on both sides of the host group.
//!
//! Two slots per direction: while the host group works on block k, block k+1 is copied to the host
//! and block k−1 to the device, by the device's copy engines on separate streams.
#![allow(unsafe_code, reason = "asynchronous copies; this module tracks which slots are in use")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, PinnedHostSlice, result};
use std::thread;

use super::DeviceError;

/// Page-locked slots, and the streams that fill and drain them.
#[derive(Debug)]
pub(crate) struct Staging {
    pub(crate) to_host: CopyQueue,
    pub(crate) to_device: CopyQueue,
}

/// Copies in one direction: a stream, and two slots that are used alternately.
#[derive(Debug)]
pub(crate) struct CopyQueue {
    stream: Arc<CudaStream>,
    slots: [Slot; 2],
}

/// Page-locked memory, and the completion event of its last copy.
#[derive(Debug)]
struct Slot {
    memory: Option<PinnedHostSlice<u8>>,
    copied: CudaEvent,
    is_used: bool,
}

impl Staging {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        Ok(Self { to_host: CopyQueue::new(context)?, to_device: CopyQueue::new(context)? })
    }

    /// Orders work that is enqueued on `stream` from now on after the copies in progress. Called on
    /// every exit path of an operation: buffers are freed in stream order.
    pub(crate) fn join(&self, stream: &Arc<CudaStream>) -> Result<(), DeviceError> {
        let joined =
            stream.join(&self.to_host.stream).and_then(|()| stream.join(&self.to_device.stream));
        joined.map_err(DeviceError::cuda("order two streams"))
    }
}

impl CopyQueue {
    fn new(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        let stream = context.new_stream().map_err(DeviceError::cuda("create a stream"))?;
        let slot = || {
            let copied = context.new_event(None).map_err(DeviceError::cuda("create an event"))?;
            Ok(Slot { memory: None, copied, is_used: false })
        };
        Ok(Self { stream, slots: [slot()?, slot()?] })
    }

    /// Orders copies that start from now on after the work already enqueued on `stream`.
    pub(crate) fn follow(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.stream.join(stream).map_err(DeviceError::cuda("order two streams"))
    }

    /// Starts a copy of `bytes` bytes from device memory at `src` to slot `turn`, which must be
    /// free.
    ///
    /// # Safety
    /// That many bytes are valid at the address, and are not freed before this queue's stream is
    /// joined.
    pub(crate) unsafe fn start_copy_to_host(
        &mut self,
        turn: usize,
        src: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let Self { stream, slots } = self;
        let slot = &mut slots[turn % 2];
        let memory = slot.reserve(bytes)?;
        // SAFETY: guaranteed by the caller; the slot is not accessed before the event recorded
        // after the copy.
        unsafe { result::memcpy_dtoh_async(memory, src, stream.cu_stream()) }
            .map_err(DeviceError::cuda("copy to the host"))?;
        slot.mark(stream)
    }

    /// Starts a copy of the first `bytes` bytes of slot `turn` to device memory at `dst`.
    ///
    /// # Safety
    /// As for [`start_copy_to_host`](Self::start_copy_to_host).
    pub(crate) unsafe fn start_copy_to_device(
        &mut self,
        turn: usize,
        dst: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let Self { stream, slots } = self;
        let slot = &mut slots[turn % 2];
        let memory = slot.reserve(bytes)?;
        // SAFETY: as above.
        unsafe { result::memcpy_htod_async(dst, memory, stream.cu_stream()) }
            .map_err(DeviceError::cuda("copy to the device"))?;
        slot.mark(stream)
    }

    /// Returns the first `bytes` bytes of slot `turn` once its last copy is complete. `is_over` is
    /// called from time to time during the wait and ends it with an error.
    pub(crate) fn slot<E: From<DeviceError>>(
        &mut self,
        turn: usize,
        bytes: usize,
        is_over: impl Fn() -> Result<(), E>,
    ) -> Result<&mut [u8], E> {
        let slot = &mut self.slots[turn % 2];
        slot.wait(is_over)?;
        Ok(slot.reserve(bytes)?)
    }
}

impl Slot {
    /// Waits until the last copy is complete.
    fn wait<E: From<DeviceError>>(&mut self, is_over: impl Fn() -> Result<(), E>) -> Result<(), E> {
        let begun = Instant::now();
        while self.is_used {
            if self
                .copied
                .try_is_complete()
                .map_err(DeviceError::cuda("copy between host and device"))?
            {
                self.is_used = false;
            } else if begun.elapsed() < SPIN_TIME_MAX {
                thread::yield_now();
            } else {
                is_over()?;
                thread::sleep(POLL_INTERVAL);
            }
        }
        Ok(())
    }

    /// Returns the first `bytes` bytes of the slot, which no copy uses; grows the slot if
    /// necessary.
    fn reserve(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError> {
        let is_too_small = self.memory.as_ref().is_none_or(|memory| memory.len() < bytes);
        if is_too_small {
            self.memory = None;
            // SAFETY: the memory is initialized below. Not write-combined: the host reads it.
            let memory = unsafe {
                self.copied.context().alloc_pinned_with_flags(bytes.max(SLOT_BYTES_MIN), 0)
            };
            let memory =
                self.memory.insert(memory.map_err(DeviceError::cuda("lock memory of the host"))?);
            memory.as_mut_slice().map_err(DeviceError::cuda("lock memory of the host"))?.fill(0);
        }
        let memory = self.memory.as_mut().expect("the memory was just allocated");
        let all =
            memory.as_mut_slice().map_err(DeviceError::cuda("copy between host and device"))?;
        Ok(&mut all[..bytes])
    }

    fn mark(&mut self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.copied.record(stream).map_err(DeviceError::cuda("record an event"))?;
        self.is_used = true;
        Ok(())
    }
}

/// Smallest slot, so that slots do not grow repeatedly.
const SLOT_BYTES_MIN: usize = 1 << 20;

/// Spin time before a wait sleeps: about the duration of one block.
const SPIN_TIME_MAX: Duration = Duration::from_millis(1);
const POLL_INTERVAL: Duration = Duration::from_micros(50);
