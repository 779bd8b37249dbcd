//! Copies between a buffer of a GPU and memory of the host that is not page-locked, by way of the
//! page-locked memory of the [staging](super::staging).
#![allow(unsafe_code, reason = "asynchronous copies; the buffers are borrowed until they are over")]

use cudarc::driver::{DevicePtr, DevicePtrMut};

use super::staging::CopyQueue;
use super::{Device, DeviceError, Element};

impl Device {
    /// Copies a buffer to memory of the host, after the work on the [stream](Self::stream), and
    /// waits until it is there.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; `dst` then holds unspecified values.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn copy_to_host<T: Element>(
        &self,
        src: &impl DevicePtr<T>,
        dst: &mut [T],
    ) -> Result<(), DeviceError> {
        assert_eq!(src.len(), dst.len(), "a copy of as many elements");
        let (src, _read) = src.device_ptr(self.stream());
        let (mut staging, dst) = (self.staging(), bytemuck::cast_slice_mut::<T, u8>(dst));
        let (queue, len) = (&mut staging.to_host, dst.len());
        queue.follow(self.stream())?;
        let start = |queue: &mut CopyQueue, turn: usize| {
            let begin = turn * BLOCK_BYTES;
            let bytes = BLOCK_BYTES.min(len.saturating_sub(begin));
            if bytes == 0 {
                return Ok(());
            }
            queue.slot(turn, bytes, never_over)?;
            // SAFETY: the range is within the source, which is borrowed until the streams are
            // joined; the slot is free.
            unsafe { queue.start_copy_to_host(turn, src + begin as u64, bytes) }
        };
        let copied = (|| {
            start(queue, 0)?;
            start(queue, 1)?;
            for (turn, block) in dst.chunks_mut(BLOCK_BYTES).enumerate() {
                block.copy_from_slice(queue.slot(turn, block.len(), never_over)?);
                start(queue, turn + 2)?;
            }
            Ok(())
        })();
        let joined = staging.join(self.stream());
        copied.and(joined)
    }

    /// Copies memory of the host to a buffer, after the work on the [stream](Self::stream) and
    /// before what is enqueued there next. The memory may be written and freed at once.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`]; `dst` then holds unspecified values.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn copy_to_device<T: Element>(
        &self,
        src: &[T],
        dst: &mut impl DevicePtrMut<T>,
    ) -> Result<(), DeviceError> {
        assert_eq!(src.len(), dst.len(), "a copy of as many elements");
        let (dst, _written) = dst.device_ptr_mut(self.stream());
        let (mut staging, src) = (self.staging(), bytemuck::cast_slice::<T, u8>(src));
        let queue = &mut staging.to_device;
        queue.follow(self.stream())?;
        let copied = src.chunks(BLOCK_BYTES).enumerate().try_for_each(|(turn, block)| {
            queue.slot(turn, block.len(), never_over)?.copy_from_slice(block);
            // SAFETY: the range is within the destination, which is borrowed until the streams are
            // joined; the slot is free.
            unsafe {
                queue.start_copy_to_device(turn, dst + (turn * BLOCK_BYTES) as u64, block.len())
            }
        });
        let joined = staging.join(self.stream());
        copied.and(joined)
    }
}

/// No group ends the wait.
fn never_over() -> Result<(), DeviceError> {
    Ok(())
}

/// Number of bytes of a block. Two are page-locked in each direction.
const BLOCK_BYTES: usize = 4 << 20;
