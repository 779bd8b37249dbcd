//! Copies of tensors on the host.

#![allow(unsafe_code, reason = "page-locks memory, which a copy keeps until it is dropped")]

use std::sync::Arc;

use cudarc::driver::{CudaStream, CudaView, sys};
use elasticdl_collective::device::DeviceError;

use super::error::cuda;

/// Copies that are in use, and a few that are not: the next copy of the same length takes their
/// memory, which is page-locked. Fresh memory is allocated page by page while the group waits, and
/// the driver copies to it by way of its own.
#[derive(Debug)]
pub(super) struct HostCopies {
    stream: Arc<CudaStream>,
    copies: Vec<HostCopy>,
}

/// Memory of one copy.
#[derive(Debug)]
pub(super) struct HostCopy {
    floats: Arc<Vec<f32>>,
    stream: Arc<CudaStream>,
    is_locked: bool,
}

impl HostCopies {
    pub(super) fn new(stream: &Arc<CudaStream>) -> Self {
        Self { stream: Arc::clone(stream), copies: Vec::new() }
    }

    /// Copies a part of a tensor to the host.
    pub(super) fn copy(&mut self, part: &CudaView<'_, f32>) -> Result<Arc<Vec<f32>>, DeviceError> {
        if part.is_empty() {
            return Ok(Arc::default());
        }
        let mut copy = self.take(part.len());
        self.stream.memcpy_dtoh(part, copy.floats_mut()).map_err(cuda("copy to the host"))?;
        self.stream.synchronize().map_err(cuda("copy to the host"))?;
        let floats = copy.shared();
        self.give_back(copy);
        Ok(floats)
    }

    /// Memory for a copy of this length, which nothing else uses.
    pub(super) fn take(&mut self, len: usize) -> HostCopy {
        let found =
            self.copies.iter_mut().position(|copy| copy.floats.len() == len && copy.is_free());
        match found {
            Some(at) => self.copies.swap_remove(at),
            None => HostCopy::new(&self.stream, len),
        }
    }

    /// Takes memory back. What has been [shared](HostCopy::shared) stays as it is until its users
    /// have dropped it.
    pub(super) fn give_back(&mut self, copy: HostCopy) {
        self.copies.push(copy);
        let mut free = 0;
        self.copies.retain_mut(|copy| {
            let is_free = copy.is_free();
            free += usize::from(is_free);
            !is_free || free <= FREE_MAX
        });
    }
}

impl HostCopy {
    fn new(stream: &Arc<CudaStream>, len: usize) -> Self {
        let mut floats = elasticdl_collective::zeros(len);
        let bytes = size_of_val(&floats[..]);
        let bound = stream.context().bind_to_thread();
        // SAFETY: the memory is valid, and is not freed before it is unlocked: the vector behind an
        // `Arc` that others share is never resized.
        let locked = bound.and_then(|()| unsafe {
            sys::cuMemHostRegister_v2(floats.as_mut_ptr().cast(), bytes, 0).result()
        });
        // Without, for example within a limit of locked memory, the copy is slower.
        Self { floats: Arc::new(floats), stream: Arc::clone(stream), is_locked: locked.is_ok() }
    }

    /// The memory of a copy that is not shared.
    pub(super) fn floats_mut(&mut self) -> &mut [f32] {
        Arc::get_mut(&mut self.floats).expect("memory that was taken is in no other use")
    }

    /// The values.
    pub(super) fn shared(&self) -> Arc<Vec<f32>> {
        Arc::clone(&self.floats)
    }

    fn is_free(&mut self) -> bool {
        Arc::get_mut(&mut self.floats).is_some()
    }
}

impl Drop for HostCopy {
    fn drop(&mut self) {
        if self.is_locked && self.stream.context().bind_to_thread().is_ok() {
            // SAFETY: the memory was locked, and no copy to it is in progress.
            let _ = unsafe {
                sys::cuMemHostUnregister(self.floats.as_ptr().cast_mut().cast()).result()
            };
        }
    }
}

/// Number of unused copies that are kept: the parameters and the optimizer state.
const FREE_MAX: usize = 2;
