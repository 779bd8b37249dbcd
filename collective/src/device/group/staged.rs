//! Operations on device memory over the host group, block by block.
#![allow(
    unsafe_code,
    reason = "asynchronous copies; the buffers are borrowed until the streams are joined"
)]

use std::ops::Range;

use cudarc::driver::{DevicePtr, DevicePtrMut};

use super::{DeviceGroup, framed, unframed};
use crate::device::staging::Staging;
use crate::device::{DeviceError, Dtype, Element};
use crate::{CollectiveError, Communicator, HostGroup};

impl DeviceGroup {
    pub(super) fn sum_staged<T: Element>(
        &mut self,
        header: &[u8],
        src: &impl DevicePtr<T>,
        dst: &mut impl DevicePtrMut<T>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let stream = self.device.stream().clone();
        if self.host.world_size() == 1 {
            if src.is_empty() {
                return Ok(vec![header.to_vec()]);
            }
            stream.memcpy_dtod(src, dst).map_err(DeviceError::cuda("copy on the device"))?;
            return Ok(vec![header.to_vec()]);
        }
        let blocks = Blocks::of::<T>(src.len());
        let ((from, _read), (to, _written)) =
            (src.device_ptr(&stream), dst.device_ptr_mut(&stream));
        self.with_staging(|host, staging| {
            let mut scratch = Scratch::default();
            let mut headers = Vec::new();
            for turn in 0..blocks.count().min(2) {
                blocks.start_copy_to_host(host, staging, turn, from)?;
            }
            for turn in 0..blocks.count() {
                let bytes = blocks.bytes(turn).len();
                let input = staging.to_host.slot(turn, bytes, || host.check_alive())?;
                let output = staging.to_device.slot(turn, bytes, || host.check_alive())?;
                let own_header = if turn == 0 { framed(header, blocks.len) } else { Vec::new() };
                let gathered = sum_block::<T>(host, &own_header, input, output, &mut scratch)?;
                if turn == 0 {
                    headers = unframed(host, gathered, blocks.len)?;
                }
                if turn + 2 < blocks.count() {
                    blocks.start_copy_to_host(host, staging, turn + 2, from)?;
                }
                blocks.start_copy_to_device(staging, turn, to)?;
            }
            Ok(headers)
        })
    }

    pub(super) fn broadcast_staged<T: Element>(
        &mut self,
        root: usize,
        buf: &mut impl DevicePtrMut<T>,
    ) -> Result<(), CollectiveError> {
        if self.host.world_size() == 1 {
            return Ok(());
        }
        let stream = self.device.stream().clone();
        let blocks = Blocks::of::<T>(buf.len());
        let (buf, _written) = buf.device_ptr_mut(&stream);
        self.with_staging(|host, staging| {
            agree_on_len(host, blocks.len)?;
            let is_root = host.rank() == root;
            for turn in 0..if is_root { blocks.count().min(2) } else { 0 } {
                blocks.start_copy_to_host(host, staging, turn, buf)?;
            }
            for turn in 0..blocks.count() {
                // The host group broadcasts f32 words; the last word of 16-bit elements may be half
                // filled.
                let bytes = blocks.bytes(turn).len().next_multiple_of(size_of::<f32>());
                let queue = if is_root { &mut staging.to_host } else { &mut staging.to_device };
                let slot = queue.slot(turn, bytes, || host.check_alive())?;
                host.broadcast(root, bytemuck::cast_slice_mut(slot))?;
                if !is_root {
                    blocks.start_copy_to_device(staging, turn, buf)?;
                } else if turn + 2 < blocks.count() {
                    blocks.start_copy_to_host(host, staging, turn + 2, buf)?;
                }
            }
            Ok(())
        })
    }

    /// Runs `act` after the work on the device's stream, and orders later work on that stream after
    /// all copies, even if `act` fails.
    fn with_staging<T>(
        &mut self,
        act: impl FnOnce(&mut HostGroup, &mut Staging) -> Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        let Self { host, device, .. } = self;
        let mut staging = device.staging();
        let stream = device.stream();
        let begun = staging.to_host.follow(stream).and_then(|()| staging.to_device.follow(stream));
        let result = begun.map_err(CollectiveError::from).and_then(|()| act(host, &mut staging));
        let joined = staging.join(stream).map_err(CollectiveError::from);
        let result = result.and_then(|value| joined.map(|()| value));
        if result.is_err() {
            host.fail();
        }
        result
    }
}

/// Division of a buffer into blocks; identical on all ranks.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    len: usize,
    element_bytes: usize,
    block_bytes: usize,
}

impl Blocks {
    /// Divides a buffer into eighths, within limits, so that most copies overlap with the host
    /// group's transfers and per-block overhead stays small.
    fn of<T: Element>(len: usize) -> Self {
        let element_bytes = size_of::<T>();
        let block_bytes = (len * element_bytes / 8).clamp(BLOCK_BYTES_MIN, BLOCK_BYTES_MAX);
        Self { len, element_bytes, block_bytes: block_bytes.next_multiple_of(element_bytes) }
    }

    /// Returns the number of blocks: at least one, since the first block carries the headers.
    fn count(self) -> usize {
        (self.len * self.element_bytes).div_ceil(self.block_bytes).max(1)
    }

    fn bytes(self, block: usize) -> Range<usize> {
        let end = self.len * self.element_bytes;
        block * self.block_bytes..end.min((block + 1) * self.block_bytes)
    }

    fn start_copy_to_host(
        self,
        host: &HostGroup,
        staging: &mut Staging,
        turn: usize,
        src: u64,
    ) -> Result<(), CollectiveError> {
        let bytes = self.bytes(turn);
        staging.to_host.slot(turn, bytes.len(), || host.check_alive())?;
        if !bytes.is_empty() {
            // SAFETY: the range is inside the source, which is borrowed until the streams are
            // joined; the slot is free.
            unsafe {
                staging.to_host.start_copy_to_host(turn, src + bytes.start as u64, bytes.len())
            }?;
        }
        Ok(())
    }

    fn start_copy_to_device(
        self,
        staging: &mut Staging,
        turn: usize,
        dst: u64,
    ) -> Result<(), CollectiveError> {
        let bytes = self.bytes(turn);
        if !bytes.is_empty() {
            // SAFETY: the range is inside the destination, which is borrowed until the streams are
            // joined; the slot is free.
            unsafe {
                staging.to_device.start_copy_to_device(turn, dst + bytes.start as u64, bytes.len())
            }?;
        }
        Ok(())
    }
}

/// 16-bit elements widened to f32, in which they are summed.
#[derive(Debug, Default)]
struct Scratch {
    input: Vec<f32>,
    output: Vec<f32>,
}

fn sum_block<T: Element>(
    host: &mut HostGroup,
    header: &[u8],
    input: &[u8],
    output: &mut [u8],
    scratch: &mut Scratch,
) -> Result<Vec<Vec<u8>>, CollectiveError> {
    if T::DTYPE == Dtype::F32 {
        return host.all_reduce(
            header,
            bytemuck::cast_slice(input),
            bytemuck::cast_slice_mut(output),
        );
    }
    let (halves, sums) =
        (bytemuck::cast_slice::<u8, T>(input), bytemuck::cast_slice_mut::<u8, T>(output));
    scratch.input.clear();
    scratch.input.extend(halves.iter().map(|half| half.widen()));
    scratch.output.resize(halves.len(), 0.0);
    let gathered = host.all_reduce(header, &scratch.input, &mut scratch.output)?;
    sums.iter_mut().zip(&scratch.output).for_each(|(sum, wide)| *sum = T::round(*wide));
    Ok(gathered)
}

/// Checks that the buffers of all ranks have the same length.
fn agree_on_len(host: &mut HostGroup, len: usize) -> Result<(), CollectiveError> {
    let gathered = host.gather_alongside(&framed(&[], len))?;
    unframed(host, gathered, len).map(drop)
}

/// Smallest block; below it the latency of the host group dominates.
const BLOCK_BYTES_MIN: usize = 1 << 20;

/// Largest block. Four blocks are page-locked, and none exceeds the limit of an all-gather.
const BLOCK_BYTES_MAX: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_the_buffer_in_order_and_hold_whole_elements() {
        for len in [0, 1, 262_143, 262_144, 262_145, 5_000_001, 100_000_000] {
            for blocks in [Blocks::of::<f32>(len), Blocks::of::<half::bf16>(len)] {
                let mut end = 0;
                for block in 0..blocks.count() {
                    let bytes = blocks.bytes(block);
                    assert_eq!(bytes.start, end, "{blocks:?}, block {block}");
                    assert!(
                        bytes.len() % blocks.element_bytes == 0 && bytes.len() <= BLOCK_BYTES_MAX
                    );
                    assert!(!bytes.is_empty() || len == 0, "{blocks:?}, block {block}");
                    end = bytes.end;
                }
                assert_eq!(end, len * blocks.element_bytes);
            }
        }
    }
}
