//! Measures how fast a GPU copies to, from and within its memory, for the figures of the
//! benchmarks.

#![allow(
    unsafe_code,
    reason = "page-locked memory is allocated uninitialized, and copies run concurrently"
)]

use std::time::Instant;

use cudarc::driver::{CudaStream, DriverError};

use super::{Device, DeviceError};

/// Copy bandwidth of a device, in bytes per second.
#[derive(Clone, Copy, Debug)]
pub struct CopyBandwidth {
    /// From page-locked host memory to the device.
    pub to_device: f64,
    /// From the device to page-locked host memory.
    pub to_host: f64,
    /// Both directions concurrently, per direction.
    pub both: f64,
    /// Within device memory; each byte counts once.
    pub within: f64,
}

impl CopyBandwidth {
    /// Measures the bandwidth with buffers of `bytes` bytes, at least 1.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    pub fn measure(device: &Device, bytes: usize) -> Result<Self, DeviceError> {
        Self::run(device, bytes).map_err(DeviceError::cuda("copy"))
    }

    fn run(device: &Device, bytes: usize) -> Result<Self, DriverError> {
        let (out, back) = (device.stream(), device.stream().fork()?);
        let mut on_device = out.alloc_zeros::<u8>(bytes)?;
        let other = out.alloc_zeros::<u8>(bytes)?;
        // SAFETY: copies from the device initialize the memory before it is read.
        let mut host = unsafe { out.context().alloc_pinned_with_flags::<u8>(bytes, 0) }?;
        // SAFETY: as above.
        let mut host_dst = unsafe { out.context().alloc_pinned_with_flags::<u8>(bytes, 0) }?;
        out.memcpy_dtoh(&other, &mut host)?;
        out.synchronize()?;
        let to_device = rate(bytes, &[out], || out.memcpy_htod(&host, &mut on_device))?;
        let to_host = rate(bytes, &[out], || out.memcpy_dtoh(&on_device, &mut host))?;
        let both = rate(bytes, &[out, &back], || {
            out.memcpy_htod(&host, &mut on_device)?;
            back.memcpy_dtoh(&other, &mut host_dst)
        })?;
        let within = rate(bytes, &[out], || out.memcpy_dtod(&other, &mut on_device))?;
        Ok(Self { to_device, to_host, both, within })
    }
}

/// Returns the best rate of five copies.
fn rate(
    bytes: usize,
    streams: &[&CudaStream],
    mut copy: impl FnMut() -> Result<(), DriverError>,
) -> Result<f64, DriverError> {
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let begun = Instant::now();
        copy()?;
        streams.iter().try_for_each(|stream| stream.synchronize())?;
        best = best.min(begun.elapsed().as_secs_f64());
    }
    Ok(bytes as f64 / best)
}
