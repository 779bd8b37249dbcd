//! Operations on device memory over the host's ring, block by block.
#![allow(
    unsafe_code,
    reason = "copies that go on while the ring works; the buffers are borrowed until the streams are joined again"
)]

use std::ops::Range;

use cudarc::driver::{DevicePtr, DevicePtrMut};

use super::{DeviceRing, framed, unframed};
use crate::device::staging::Staging;
use crate::device::{DeviceError, Dtype, Element};
use crate::{CollectiveError, Communicator, TcpRing};

impl DeviceRing {
    pub(super) fn sum_staged<T: Element>(
        &mut self,
        header: &[u8],
        src: &impl DevicePtr<T>,
        dst: &mut impl DevicePtrMut<T>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let stream = self.device.stream().clone();
        if self.ring.world_size() == 1 {
            if src.is_empty() {
                return Ok(vec![header.to_vec()]);
            }
            stream.memcpy_dtod(src, dst).map_err(DeviceError::cuda("copy on the device"))?;
            return Ok(vec![header.to_vec()]);
        }
        let cut = Cut::of::<T>(src.len());
        let ((from, _read), (to, _written)) =
            (src.device_ptr(&stream), dst.device_ptr_mut(&stream));
        self.with_staging(|ring, staging| {
            let mut scratch = Scratch::default();
            let mut headers = Vec::new();
            for turn in 0..cut.blocks().min(2) {
                cut.begin_out(ring, staging, turn, from)?;
            }
            for turn in 0..cut.blocks() {
                let bytes = cut.bytes(turn).len();
                let input = staging.outward.slot(turn, bytes, || ring.check_alive())?;
                let output = staging.inward.slot(turn, bytes, || ring.check_alive())?;
                let mine = if turn == 0 { framed(header, cut.len) } else { Vec::new() };
                let told = sum_block::<T>(ring, &mine, input, output, &mut scratch)?;
                if turn == 0 {
                    headers = unframed(ring, told, cut.len)?;
                }
                if turn + 2 < cut.blocks() {
                    cut.begin_out(ring, staging, turn + 2, from)?;
                }
                cut.begin_in(staging, turn, to)?;
            }
            Ok(headers)
        })
    }

    pub(super) fn broadcast_staged<T: Element>(
        &mut self,
        root: usize,
        buf: &mut impl DevicePtrMut<T>,
    ) -> Result<(), CollectiveError> {
        if self.ring.world_size() == 1 {
            return Ok(());
        }
        let stream = self.device.stream().clone();
        let cut = Cut::of::<T>(buf.len());
        let (buf, _written) = buf.device_ptr_mut(&stream);
        self.with_staging(|ring, staging| {
            agree_on_len(ring, cut.len)?;
            let is_root = ring.rank() == root;
            for turn in 0..if is_root { cut.blocks().min(2) } else { 0 } {
                cut.begin_out(ring, staging, turn, buf)?;
            }
            for turn in 0..cut.blocks() {
                // The ring passes words around; the last one of halves may be half filled.
                let bytes = cut.bytes(turn).len().next_multiple_of(size_of::<f32>());
                let lane = if is_root { &mut staging.outward } else { &mut staging.inward };
                let slot = lane.slot(turn, bytes, || ring.check_alive())?;
                ring.broadcast(root, bytemuck::cast_slice_mut(slot))?;
                if !is_root {
                    cut.begin_in(staging, turn, buf)?;
                } else if turn + 2 < cut.blocks() {
                    cut.begin_out(ring, staging, turn + 2, buf)?;
                }
            }
            Ok(())
        })
    }

    pub(super) fn gather_staged<T: Element>(
        &mut self,
        src: &impl DevicePtr<T>,
        dst: &mut impl DevicePtrMut<T>,
    ) -> Result<(), CollectiveError> {
        let stream = self.device.stream().clone();
        let cut = Cut::of::<T>(src.len());
        let whole = cut.len * cut.element_bytes;
        let ((from, _read), (to, _written)) =
            (src.device_ptr(&stream), dst.device_ptr_mut(&stream));
        self.with_staging(|ring, staging| {
            agree_on_len(ring, cut.len)?;
            let mut landings = 0;
            for turn in 0..cut.blocks() {
                cut.begin_out(ring, staging, turn, from)?;
                let range = cut.bytes(turn);
                let input = staging.outward.slot(turn, range.len(), || ring.check_alive())?;
                let all = ring.gather_beside(input)?;
                for (rank, block) in all.iter().enumerate() {
                    if block.len() != range.len() {
                        let reason = format!(
                            "expected a block of {} bytes, got {}",
                            range.len(),
                            block.len()
                        );
                        return Err(ring.broken_by(rank, reason));
                    }
                    if range.is_empty() {
                        continue;
                    }
                    staging
                        .inward
                        .slot(landings, block.len(), || ring.check_alive())?
                        .copy_from_slice(block);
                    let to = to + (rank * whole + range.start) as u64;
                    // SAFETY: inside `dst`, which has room for all; it is borrowed until the
                    // streams are joined.
                    unsafe { staging.inward.begin_in(landings, to, block.len()) }?;
                    landings += 1;
                }
            }
            Ok(())
        })
    }

    /// Runs `act` behind what is on the device's stream, and what comes there behind all copies,
    /// however `act` ends.
    fn with_staging<T>(
        &mut self,
        act: impl FnOnce(&mut TcpRing, &mut Staging) -> Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        let Self { ring, device, .. } = self;
        let mut staging = device.staging();
        let stream = device.stream();
        let begun = staging.outward.follow(stream).and_then(|()| staging.inward.follow(stream));
        let result = begun.map_err(CollectiveError::from).and_then(|()| act(ring, &mut staging));
        let joined = staging.join(stream).map_err(CollectiveError::from);
        let result = result.and_then(|value| joined.map(|()| value));
        if result.is_err() {
            ring.give_up();
        }
        result
    }
}

/// A buffer in blocks, the same on all ranks.
#[derive(Clone, Copy, Debug)]
struct Cut {
    len: usize,
    element_bytes: usize,
    block_bytes: usize,
}

impl Cut {
    /// Eighths, so that most of the copies goes on beside the ring, of a size at which neither
    /// minds.
    fn of<T: Element>(len: usize) -> Self {
        let element_bytes = size_of::<T>();
        let block_bytes = (len * element_bytes / 8).clamp(BLOCK_BYTES_MIN, BLOCK_BYTES_MAX);
        Self { len, element_bytes, block_bytes: block_bytes.next_multiple_of(element_bytes) }
    }

    /// At least one, as an empty buffer has headers, too.
    fn blocks(self) -> usize {
        (self.len * self.element_bytes).div_ceil(self.block_bytes).max(1)
    }

    fn bytes(self, block: usize) -> Range<usize> {
        let end = self.len * self.element_bytes;
        block * self.block_bytes..end.min((block + 1) * self.block_bytes)
    }

    fn begin_out(
        self,
        ring: &TcpRing,
        staging: &mut Staging,
        turn: usize,
        src: u64,
    ) -> Result<(), CollectiveError> {
        let bytes = self.bytes(turn);
        staging.outward.slot(turn, bytes.len(), || ring.check_alive())?;
        if !bytes.is_empty() {
            // SAFETY: inside the source, which is borrowed until the streams are joined; the slot
            // is free.
            unsafe { staging.outward.begin_out(turn, src + bytes.start as u64, bytes.len()) }?;
        }
        Ok(())
    }

    fn begin_in(self, staging: &mut Staging, turn: usize, dst: u64) -> Result<(), CollectiveError> {
        let bytes = self.bytes(turn);
        if !bytes.is_empty() {
            // SAFETY: inside the target, which is borrowed until the streams are joined; the slot
            // is free.
            unsafe { staging.inward.begin_in(turn, dst + bytes.start as u64, bytes.len()) }?;
        }
        Ok(())
    }
}

/// Halves as what they are summed.
#[derive(Debug, Default)]
struct Scratch {
    input: Vec<f32>,
    output: Vec<f32>,
}

fn sum_block<T: Element>(
    ring: &mut TcpRing,
    header: &[u8],
    input: &[u8],
    output: &mut [u8],
    scratch: &mut Scratch,
) -> Result<Vec<Vec<u8>>, CollectiveError> {
    if T::DTYPE == Dtype::F32 {
        return ring.all_reduce(
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
    let told = ring.all_reduce(header, &scratch.input, &mut scratch.output)?;
    sums.iter_mut().zip(&scratch.output).for_each(|(sum, wide)| *sum = T::round(*wide));
    Ok(told)
}

/// Checks that all ranks' buffers are of one length.
fn agree_on_len(ring: &mut TcpRing, len: usize) -> Result<(), CollectiveError> {
    let told = ring.gather_beside(&framed(&[], len))?;
    unframed(ring, told, len).map(drop)
}

/// Below this the ring's latency shows.
const BLOCK_BYTES_MIN: usize = 1 << 20;

/// Four of these are locked in memory, and none is longer than a block of a gather may be.
const BLOCK_BYTES_MAX: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_the_buffer_in_order_and_hold_whole_elements() {
        for len in [0, 1, 262_143, 262_144, 262_145, 5_000_001, 100_000_000] {
            for cut in [Cut::of::<f32>(len), Cut::of::<half::bf16>(len)] {
                let mut end = 0;
                for block in 0..cut.blocks() {
                    let bytes = cut.bytes(block);
                    assert_eq!(bytes.start, end, "{cut:?}, block {block}");
                    assert!(bytes.len() % cut.element_bytes == 0 && bytes.len() <= BLOCK_BYTES_MAX);
                    assert!(!bytes.is_empty() || len == 0, "{cut:?}, block {block}");
                    end = bytes.end;
                }
                assert_eq!(end, len * cut.element_bytes);
            }
        }
    }
}
