//! The large buffers of a worker in GPU memory.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use elasticdl_collective::CollectiveError;
use elasticdl_collective::device::Path;

use super::{CudaSlice, Device, DeviceError, DeviceGradients, DeviceUpdate, Kernels, cuda};
use crate::ring::Ring;
use crate::tensor::{Tensor, window};

/// The buffers, like those of [`Tensors`](crate::tensors::Tensors).
#[derive(Debug)]
pub(crate) struct DeviceState {
    device: Device,
    kernels: Kernels,
    /// Number of floats of the optimizer state. At least one is allocated.
    slots_len: usize,
    parameters: CudaSlice<f32>,
    slots: CudaSlice<f32>,
    gradient: CudaSlice<f32>,
    retained: CudaSlice<f32>,
    reduced: CudaSlice<f32>,
}

impl DeviceState {
    /// Allocates the buffers, filled with zeros.
    ///
    /// # Errors
    /// A message that explains what is missing on this machine, and what the user should do.
    pub(crate) fn new(device: &Device, parameters: usize, slots: usize) -> Result<Self, String> {
        let kernels = Kernels::new(device)?;
        let zeros = |len: usize| {
            let floats = device.stream().alloc_zeros::<f32>(len.max(1));
            floats.map_err(|error| format!("not enough GPU memory for {len} more floats: {error}"))
        };
        Ok(Self {
            kernels,
            slots_len: parameters * slots,
            parameters: zeros(parameters)?,
            slots: zeros(parameters * slots)?,
            gradient: zeros(parameters)?,
            retained: zeros(parameters)?,
            reduced: zeros(parameters)?,
            device: device.clone(),
        })
    }

    /// See [`Tensors::sizes`](crate::tensors::Tensors::sizes).
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.parameters.len(), self.slots_len)
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn parameters(&self) -> &CudaSlice<f32> {
        &self.parameters
    }

    /// The parameters, and the gradient's accumulator for a batch of `records` records.
    pub(crate) fn gradient(&mut self, records: usize) -> (&CudaSlice<f32>, DeviceGradients<'_>) {
        let Self { parameters, gradient: sum, kernels, .. } = self;
        (parameters, DeviceGradients { sum, records, kernels })
    }

    pub(crate) fn update(&mut self, step: u64, records: u64) -> DeviceUpdate<'_> {
        let Self { kernels, parameters, slots, reduced: sum, .. } = self;
        DeviceUpdate { step, records, sum, parameters, slots, kernels }
    }

    pub(crate) fn clear_gradient(&mut self) -> Result<(), DeviceError> {
        self.device.stream().memset_zeros(&mut self.gradient).map_err(cuda("clear a gradient"))
    }

    /// Copies a tensor to the host.
    pub(crate) fn to_host(&self, tensor: Tensor) -> Result<Arc<Vec<f32>>, DeviceError> {
        let (slice, len) = match tensor {
            Tensor::Retained => (&self.retained, self.retained.len()),
            Tensor::Parameters => (&self.parameters, self.parameters.len()),
            Tensor::Reduced => (&self.reduced, self.reduced.len()),
            Tensor::Slots => (&self.slots, self.slots_len),
        };
        let mut floats = vec![0.0; len];
        if len > 0 {
            let stream = self.stream();
            stream
                .memcpy_dtoh(&slice.slice(..len), &mut floats)
                .map_err(cuda("copy to the host"))?;
            stream.synchronize().map_err(cuda("copy to the host"))?;
        }
        Ok(Arc::new(floats))
    }

    /// Overwrites a tensor with values of the host.
    pub(crate) fn load(&mut self, tensor: Tensor, floats: &[f32]) -> Result<(), DeviceError> {
        let stream = self.stream().clone();
        let slice = self.slice(tensor);
        if !floats.is_empty() {
            stream.memcpy_htod(floats, slice).map_err(cuda("copy from the host"))?;
            // The caller may drop `floats` after the return.
            stream.synchronize().map_err(cuda("copy from the host"))?;
        }
        Ok(())
    }

    /// Overwrites a part of a tensor, starting at element `at`, with values of the host.
    pub(crate) fn load_at(
        &mut self,
        tensor: Tensor,
        at: usize,
        floats: &[f32],
    ) -> Result<(), DeviceError> {
        let stream = self.stream().clone();
        let mut part = self.slice(tensor).slice_mut(at..at + floats.len());
        stream.memcpy_htod(floats, &mut part).map_err(cuda("copy from the host"))?;
        // The caller may drop `floats` after the return.
        stream.synchronize().map_err(cuda("copy from the host"))
    }

    /// See [`Tensors::sum`](crate::tensors::Tensors::sum).
    pub(crate) fn sum(
        &mut self,
        ring: &mut Ring,
        header: &[u8],
        path: Path,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        ring.device()?.all_reduce_device(header, &self.gradient, &mut self.reduced, path)
    }

    /// Uses the gradient as the sum, in a group of one.
    pub(crate) fn take_gradient_as_sum(&mut self) {
        std::mem::swap(&mut self.gradient, &mut self.reduced);
    }

    pub(crate) fn broadcast(
        &mut self,
        ring: &mut Ring,
        root: usize,
        tensor: Tensor,
    ) -> Result<(), CollectiveError> {
        if tensor == Tensor::Slots && self.slots_len == 0 {
            return Ok(());
        }
        ring.device()?.broadcast_device(root, self.slice(tensor), Path::Host)
    }

    pub(crate) fn sum_is_finite(&mut self) -> Result<bool, DeviceError> {
        self.kernels.is_finite(&self.reduced)
    }

    pub(crate) fn gradient_is_finite(&mut self) -> Result<bool, DeviceError> {
        self.kernels.is_finite(&self.gradient)
    }

    pub(crate) fn parameters_are_finite(&mut self) -> Result<bool, DeviceError> {
        self.kernels.is_finite(&self.parameters)
    }

    pub(crate) fn retain_reduced(&mut self) {
        std::mem::swap(&mut self.reduced, &mut self.retained);
    }

    /// Digests of the step's windows of the parameters and of the optimizer state.
    pub(crate) fn window_digests(&mut self, step: u64) -> Result<[u64; 2], DeviceError> {
        let windows = [window(step, self.parameters.len()), window(step, self.slots_len)];
        let starts = [windows[0].start, windows[1].start];
        let [parameters, slots] = windows;
        self.kernels.digests([self.parameters.slice(parameters), self.slots.slice(slots)], starts)
    }

    fn slice(&mut self, tensor: Tensor) -> &mut CudaSlice<f32> {
        match tensor {
            Tensor::Retained => &mut self.retained,
            Tensor::Parameters => &mut self.parameters,
            Tensor::Reduced => &mut self.reduced,
            Tensor::Slots => &mut self.slots,
        }
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.device.stream()
    }
}
