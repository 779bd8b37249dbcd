//! Buffers in GPU memory.
#![allow(unsafe_code, reason = "a program's memory is known by its address")]

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use super::{CudaSlice, Device};

/// Floats in GPU memory: of this crate, or of a program, which frees them itself.
#[derive(Debug)]
pub(super) struct Buffer {
    slice: ManuallyDrop<CudaSlice<f32>>,
    is_program: bool,
}

/// The memory of a program for the training of its model, on its GPU. It is filled with zeros.
///
/// **Invariant:** the memory at each address has the length that is said there, overlaps with no
/// other, and is not freed before all work of the trainer with it is done.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Device,
    addresses: Addresses,
}

/// Addresses of `f32`s in GPU memory.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// `[parameters]`.
    pub parameters: u64,
    /// Optimizer state: `[slots · parameters]`, at least one.
    pub slots: u64,
    /// Two buffers of `[parameters]`, for gradients and sums. If a program's optimizer is
    /// [divided](crate::external::Shape::division), the first alone is used.
    pub gradients: [u64; 2],
}

impl DeviceMemory {
    /// Lends memory to a trainer.
    ///
    /// # Safety
    /// The invariant of the type holds.
    #[must_use]
    pub unsafe fn new(device: Device, addresses: Addresses) -> Self {
        Self { device, addresses }
    }

    /// The GPU.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The buffers, for this number of parameters and of floats of optimizer state.
    pub(super) fn buffers(self, parameters: usize, slots: usize) -> (Buffer, Buffer, [Buffer; 2]) {
        let Addresses { parameters: values, slots: state, gradients } = self.addresses;
        let buffer = |address, len: usize| {
            // SAFETY: the invariant of the type; a buffer of a program does not free it.
            let slice = unsafe { self.device.stream().upgrade_device_ptr(address, len.max(1)) };
            Buffer { slice: ManuallyDrop::new(slice), is_program: true }
        };
        let gradients = gradients.map(|address| buffer(address, parameters));
        (buffer(values, parameters), buffer(state, slots), gradients)
    }
}

impl Buffer {
    pub(super) fn own(slice: CudaSlice<f32>) -> Self {
        Self { slice: ManuallyDrop::new(slice), is_program: false }
    }
}

impl Deref for Buffer {
    type Target = CudaSlice<f32>;

    fn deref(&self) -> &CudaSlice<f32> {
        &self.slice
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut CudaSlice<f32> {
        &mut self.slice
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: it is not used afterwards.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        if self.is_program {
            slice.leak();
        }
    }
}
