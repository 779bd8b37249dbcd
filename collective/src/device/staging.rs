//! The way of device buffers over the host: page-locked memory on both sides of the host's ring.
//!
//! Two slots each way: while the ring works on block k, block k+1 is copied to the host and block
//! k−1 to the device, by the device's copy engines on streams of their own.
#![allow(
    unsafe_code,
    reason = "copies that go on while the host works; whose memory it is when is decided here"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, PinnedHostSlice, result};
use std::thread;

use super::DeviceError;

/// Page-locked slots and the streams that fill and empty them.
#[derive(Debug)]
pub(crate) struct Staging {
    pub(crate) outward: Lane,
    pub(crate) inward: Lane,
}

/// One direction: a stream, and two slots that are used in turn.
#[derive(Debug)]
pub(crate) struct Lane {
    stream: Arc<CudaStream>,
    slots: [Slot; 2],
}

/// Page-locked memory, and the copy that last used it.
#[derive(Debug)]
struct Slot {
    memory: Option<PinnedHostSlice<u8>>,
    copied: CudaEvent,
    is_used: bool,
}

impl Staging {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        Ok(Self { outward: Lane::new(context)?, inward: Lane::new(context)? })
    }

    /// What is enqueued on `stream` from now on comes after what is being copied. On every way out
    /// of an operation: buffers are freed in the order of their stream.
    pub(crate) fn join(&self, stream: &Arc<CudaStream>) -> Result<(), DeviceError> {
        let joined =
            stream.join(&self.outward.stream).and_then(|()| stream.join(&self.inward.stream));
        joined.map_err(DeviceError::cuda("order two streams"))
    }
}

impl Lane {
    fn new(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        let stream = context.new_stream().map_err(DeviceError::cuda("make a stream"))?;
        let slot = || {
            let copied = context.new_event(None).map_err(DeviceError::cuda("make an event"))?;
            Ok(Slot { memory: None, copied, is_used: false })
        };
        Ok(Self { stream, slots: [slot()?, slot()?] })
    }

    /// What is copied from now on comes after what has been enqueued on `stream`.
    pub(crate) fn follow(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        self.stream.join(stream).map_err(DeviceError::cuda("order two streams"))
    }

    /// Begins to copy `bytes` bytes from the device's memory at `src` into slot `turn`, which must
    /// be free.
    ///
    /// # Safety
    /// That many bytes are there, and stay there until whoever frees them has waited for this lane.
    pub(crate) unsafe fn begin_out(
        &mut self,
        turn: usize,
        src: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let Self { stream, slots } = self;
        let slot = &mut slots[turn % 2];
        let memory = slot.room(bytes)?;
        // SAFETY: by the caller's promise; the slot is not touched before the event that is
        // recorded behind the copy.
        unsafe { result::memcpy_dtoh_async(memory, src, stream.cu_stream()) }
            .map_err(DeviceError::cuda("copy to the host"))?;
        slot.mark(stream)
    }

    /// Begins to copy the first `bytes` bytes of slot `turn` into the device's memory at `dst`.
    ///
    /// # Safety
    /// As for [`begin_out`](Self::begin_out).
    pub(crate) unsafe fn begin_in(
        &mut self,
        turn: usize,
        dst: u64,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let Self { stream, slots } = self;
        let slot = &mut slots[turn % 2];
        let memory = slot.room(bytes)?;
        // SAFETY: as above.
        unsafe { result::memcpy_htod_async(dst, memory, stream.cu_stream()) }
            .map_err(DeviceError::cuda("copy to the device"))?;
        slot.mark(stream)
    }

    /// The first `bytes` bytes of slot `turn`, once its last copy is done. `is_over`: asked now and
    /// then whether to give up.
    pub(crate) fn slot<E: From<DeviceError>>(
        &mut self,
        turn: usize,
        bytes: usize,
        is_over: impl Fn() -> Result<(), E>,
    ) -> Result<&mut [u8], E> {
        let slot = &mut self.slots[turn % 2];
        slot.wait(is_over)?;
        Ok(slot.room(bytes)?)
    }
}

impl Slot {
    /// Waits until the last copy is done.
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
                thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// That many bytes of it, which no copy uses.
    fn room(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError> {
        let is_small = self.memory.as_ref().is_none_or(|memory| memory.len() < bytes);
        if is_small {
            self.memory = None;
            // SAFETY: it is filled below. Not write-combined: the host reads it.
            let memory = unsafe {
                self.copied.context().alloc_pinned_with_flags(bytes.max(SLOT_BYTES_MIN), 0)
            };
            let memory =
                self.memory.insert(memory.map_err(DeviceError::cuda("lock memory of the host"))?);
            memory.as_mut_slice().map_err(DeviceError::cuda("lock memory of the host"))?.fill(0);
        }
        let memory = self.memory.as_mut().expect("it was just made");
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

/// Grown once, not again and again.
const SLOT_BYTES_MIN: usize = 1 << 20;

/// As long as a block takes.
const SPIN_TIME_MAX: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(50);
