//! The large buffers of a worker in GPU memory.
#![allow(unsafe_code, reason = "sums are in progress between two calls")]

use std::iter;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaStream;
use elasticdl_collective::CollectiveError;
use elasticdl_collective::device::{DeviceGroup, Overlap, Path, relax_capture_mode};
use elasticdl_proto::WireDtype;
use elasticdl_tables::BatchRows;
use half::bf16;

use super::buffer::{Buffer, DeviceMemory};
use super::error::cuda;
use super::host_copies::HostCopies;
use super::retained::RetainedSum;
use super::{
    Accumulator, Buckets, Condition, CudaSlice, Device, DeviceError, DeviceGradients, DeviceUpdate,
    Kernels, MergedBuckets, RoundedBuckets,
};
use crate::buckets::SummedBuckets;
use crate::optimizer::Optimizer;
use crate::tensor::{ModelSize, Tensor, window};

/// The buffers, like those of [`Tensors`](crate::tensors::Tensors).
#[derive(Debug)]
pub(crate) struct DeviceState {
    device: Device,
    kernels: Kernels,
    /// Number of floats of the optimizer state. At least one is allocated.
    slots_len: usize,
    parameters: Buffer,
    slots: Buffer,
    gradient: Buffer,
    /// Destination of the next sum; until then, the last one.
    reduced: Buffer,
    /// Dropped after the buffers, which are freed in the order of the device's stream.
    retained: RetainedSum,
    /// Gradient and sum as they are on NCCL's wire; `None` if they are f32 there.
    wire: Option<[CudaSlice<bf16>; 2]>,
    /// Number of changes of the parameters and of the optimizer state.
    version: u64,
    /// Step and version whose window digests were begun last.
    digests_of: Option<(u64, u64)>,
    copies: Mutex<HostCopies>,
}

impl DeviceState {
    /// Allocates the buffers, filled with zeros, if the model does not lend `memory`. This thread
    /// works with them from now on, also while the program captures a CUDA graph in another.
    ///
    /// # Errors
    /// A message that explains what is missing on this machine, and what the user should do.
    pub(crate) fn new(
        device: &Device,
        size: ModelSize,
        wire: WireDtype,
        memory: Option<DeviceMemory>,
    ) -> Result<Self, String> {
        relax_capture_mode();
        let kernels = Kernels::new(device)?;
        let ModelSize { parameters, slots: slots_len } = size;
        let (values, slots, [gradient, reduced]) = match memory {
            Some(memory) => memory.buffers(parameters, slots_len),
            None => {
                let zeros = |len| zeros(device, len);
                let gradients = [zeros(parameters)?, zeros(parameters)?];
                (zeros(parameters)?, zeros(slots_len)?, gradients)
            }
        };
        let halves = || {
            let halves = device.stream().alloc_zeros::<bf16>(parameters);
            halves.map_err(|error| format!("not enough GPU memory for {parameters} bf16: {error}"))
        };
        let wire = match wire {
            WireDtype::Bf16 => Some([halves()?, halves()?]),
            // Sums over records exceed the range of f16.
            WireDtype::F16 | WireDtype::F32 => None,
        };
        Ok(Self {
            kernels,
            wire,
            slots_len,
            parameters: values,
            slots,
            gradient,
            reduced,
            retained: RetainedSum::new(device.stream()).map_err(|error| error.to_string())?,
            version: 0,
            digests_of: None,
            copies: Mutex::new(HostCopies::new(device.stream())),
            device: device.clone(),
        })
    }

    /// Buffers for the parameters and the gradient alone: the gradient is summed, and the
    /// parameters are updated, on the host.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub(crate) fn of_computation(
        device: &Device,
        parameters: usize,
        memory: Option<DeviceMemory>,
    ) -> Result<Self, String> {
        let nothing = ModelSize { parameters: 0, slots: 0 };
        let state = Self::new(device, nothing, WireDtype::F32, None)?;
        let (parameters, gradient) = match memory {
            Some(memory) => {
                let (values, _, [gradient, _]) = memory.buffers(parameters, 0);
                (values, gradient)
            }
            None => (zeros(device, parameters)?, zeros(device, parameters)?),
        };
        Ok(Self { parameters, gradient, ..state })
    }

    pub(crate) fn size(&self) -> ModelSize {
        ModelSize { parameters: self.parameters.len(), slots: self.slots_len }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn parameters(&self) -> &CudaSlice<f32> {
        &self.parameters
    }

    /// The parameters, and the gradient's accumulator for a batch of `records` records, with the
    /// rows of its ids if the model has tables.
    pub(crate) fn gradient<'a>(
        &'a mut self,
        records: usize,
        rows: Option<&'a mut BatchRows>,
    ) -> (&'a CudaSlice<f32>, DeviceGradients<'a>) {
        let Self { parameters, gradient, kernels, version, .. } = self;
        let sum = Accumulator::Whole(gradient);
        (parameters, DeviceGradients { sum, records, kernels, version: *version, rows })
    }

    /// Calls `compute` with the parameters and the gradient's accumulator for the last `records`
    /// records of a step. Buckets of at least `bucket_len` elements that it declares complete are
    /// summed over all ranks meanwhile. Returns its result and the number of these buckets.
    pub(crate) fn overlap<T>(
        &mut self,
        ring: &mut DeviceGroup,
        records: usize,
        bucket_len: usize,
        compute: impl FnOnce(&CudaSlice<f32>, &mut DeviceGradients<'_>) -> T,
    ) -> (T, Result<usize, CollectiveError>) {
        let Self { parameters, gradient, reduced, retained, wire, kernels, version, .. } = self;
        let (kernels, version) = (&*kernels, *version);
        let buckets = nccl_buckets(gradient.len(), bucket_len, wire.is_some());
        let mut enqueued = Ok(());
        let failed = &mut enqueued;
        // SAFETY of both: the step sums the rest next, or the group is dropped first. The trainer
        // drops its group before these buffers.
        let (computed, summed) = match wire {
            None => {
                let compute = |overlap: &mut Overlap<'_, f32>| {
                    if let Some(copied) = retained.in_progress() {
                        overlap.wait_for(copied);
                    }
                    let mut buckets = Buckets { overlap, buckets };
                    let sum = Accumulator::Overlapped(&mut buckets);
                    let rows = None;
                    let gradients = DeviceGradients { sum, records, kernels, version, rows };
                    compute(parameters, &mut { gradients })
                };
                unsafe { ring.overlap(&mut **gradient, &mut **reduced, compute) }
            }
            Some([rounded, sum]) => {
                let compute = |overlap: &mut Overlap<'_, bf16>| {
                    let mut buckets =
                        RoundedBuckets { gradient, kernels, overlap, buckets, failed };
                    let sum = Accumulator::Overlapped(&mut buckets);
                    let rows = None;
                    let gradients = DeviceGradients { sum, records, kernels, version, rows };
                    compute(parameters, &mut { gradients })
                };
                unsafe { ring.overlap(rounded, sum, compute) }
            }
        };
        (computed, enqueued.map_err(|source| CollectiveError::Device { source }).and(summed))
    }

    pub(crate) fn update(&mut self, step: u64, records: u64) -> DeviceUpdate<'_> {
        self.version += 1;
        let Self { kernels, parameters, slots, reduced: sum, .. } = self;
        DeviceUpdate { step, records, sum, parameters, slots, kernels }
    }

    /// Like [`DeviceUpdate::apply`], but changes nothing if the sum, whose check was begun last, is
    /// not finite.
    pub(crate) fn update_if_finite(
        &mut self,
        (step, records): (u64, u64),
        optimizer: &Optimizer,
    ) -> Result<(), DeviceError> {
        let DeviceUpdate { sum, parameters, slots, kernels, .. } = self.update(step, records);
        let when = (step, records, Condition::CheckedIsFinite);
        kernels.apply(optimizer, when, sum, (parameters, slots))
    }

    pub(crate) fn clear_gradient(&mut self) -> Result<(), DeviceError> {
        self.device.stream().memset_zeros(&mut *self.gradient).map_err(cuda("clear a gradient"))
    }

    /// Copies a tensor to the host.
    pub(crate) fn to_host(&self, tensor: Tensor) -> Result<Arc<Vec<f32>>, DeviceError> {
        let (slice, len) = match tensor {
            Tensor::Retained => match self.retained.copy()? {
                Some(copy) => return Ok(copy),
                None => (&self.reduced, self.reduced.len()),
            },
            Tensor::Parameters => (&self.parameters, self.parameters.len()),
            Tensor::Reduced => (&self.reduced, self.reduced.len()),
            Tensor::Slots => (&self.slots, self.slots_len),
        };
        self.copies.lock().unwrap_or_else(PoisonError::into_inner).copy(&slice.slice(..len))
    }

    /// Overwrites a tensor with values of the host.
    pub(crate) fn load(&mut self, tensor: Tensor, floats: &[f32]) -> Result<(), DeviceError> {
        let device = self.device.clone();
        let slice = self.slice(tensor)?;
        if floats.is_empty() {
            return Ok(());
        }
        device.copy_to_device(floats, slice)
    }

    /// Copies the gradient to the host, and waits for it.
    pub(crate) fn gradient_to_host(&self, to: &mut [f32]) -> Result<(), DeviceError> {
        self.device.copy_to_host(&*self.gradient, to)
    }

    /// Overwrites a part of a tensor, starting at element `at`, with values of the host.
    pub(crate) fn load_at(
        &mut self,
        tensor: Tensor,
        at: usize,
        floats: &[f32],
    ) -> Result<(), DeviceError> {
        let stream = self.stream().clone();
        let mut part = self.slice(tensor)?.slice_mut(at..at + floats.len());
        stream.memcpy_htod(floats, &mut part).map_err(cuda("copy from the host"))?;
        // The caller may drop `floats` after the return.
        stream.synchronize().map_err(cuda("copy from the host"))
    }

    /// See [`Tensors::sum`](crate::tensors::Tensors::sum). Over NCCL, the gradient is summed in
    /// buckets if there are any.
    pub(crate) fn sum(
        &mut self,
        ring: &mut DeviceGroup,
        header: &[u8],
        path: Path,
        buckets: Option<SummedBuckets>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.release_reduced().map_err(|source| CollectiveError::Device { source })?;
        let Self { gradient, reduced, wire, kernels, .. } = self;
        let (gradient, reduced) = (&**gradient, &mut **reduced);
        let rest = |SummedBuckets { len, summed }| -> Vec<Range<usize>> {
            nccl_buckets(gradient.len(), len, wire.is_some()).ranges().skip(summed).collect()
        };
        match (path, buckets.map(rest), wire) {
            (Path::Nccl, rest, Some([rounded, sum])) => {
                let source = |source| CollectiveError::Device { source };
                let rest = rest.unwrap_or_else(|| iter::once(0..gradient.len()).collect());
                let end = rest.first().map_or(0, |first| first.end);
                kernels
                    .round_to_bf16(&gradient.slice(..end), &mut rounded.slice_mut(..end))
                    .map_err(source)?;
                let headers = ring.sum_rest(header, rounded, sum, &rest)?;
                kernels.widen_bf16(&sum.as_view(), &mut reduced.as_view_mut()).map_err(source)?;
                Ok(headers)
            }
            (Path::Nccl, Some(rest), None) => ring.sum_rest(header, gradient, reduced, &rest),
            (Path::Host | Path::Nccl, ..) => {
                ring.all_reduce_device(header, gradient, reduced, path)
            }
        }
    }

    /// Uses the gradient as the sum, in a group of one.
    pub(crate) fn take_gradient_as_sum(&mut self) -> Result<(), DeviceError> {
        self.release_reduced()?;
        std::mem::swap(&mut self.gradient, &mut self.reduced);
        Ok(())
    }

    pub(crate) fn broadcast(
        &mut self,
        ring: &mut DeviceGroup,
        root: usize,
        tensor: Tensor,
    ) -> Result<(), CollectiveError> {
        if tensor == Tensor::Slots && self.slots_len == 0 {
            return Ok(());
        }
        let failed = |source| CollectiveError::Device { source };
        if tensor == Tensor::Retained {
            // The rank whose sum is retained is the root.
            if let Some(copy) = self.retained.copy().map_err(failed)? {
                self.load(Tensor::Reduced, &copy).map_err(failed)?;
            }
            return ring.broadcast_device(root, &mut *self.reduced, Path::Host);
        }
        let slice = self.slice(tensor).map_err(failed)?;
        ring.broadcast_device(root, slice, Path::Host)
    }

    /// Enqueues the check whether the sum is finite.
    pub(crate) fn begin_sum_check(&mut self) -> Result<(), DeviceError> {
        self.kernels.begin_check(&self.reduced)
    }

    /// Result of the [check](Self::begin_sum_check). Does not wait for work enqueued since.
    pub(crate) fn end_sum_check(&self) -> Result<bool, DeviceError> {
        self.kernels.end_check()
    }

    pub(crate) fn gradient_is_finite(&mut self) -> Result<bool, DeviceError> {
        self.kernels.begin_check(&self.gradient)?;
        self.kernels.end_check()
    }

    pub(crate) fn parameters_are_finite(&mut self) -> Result<bool, DeviceError> {
        self.kernels.begin_check(&self.parameters)?;
        self.kernels.end_check()
    }

    /// See [`Tensors::retain_reduced`](crate::tensors::Tensors::retain_reduced). A group of one
    /// needs no copy: nothing overwrites the sum before the next step is certain.
    pub(crate) fn retain_reduced(&mut self, is_alone: bool) -> Result<(), DeviceError> {
        let copies = self.copies.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.retained.retain(&self.reduced, self.device.stream(), !is_alone, copies)
    }

    /// Orders work that is enqueued from now on after a copy of the retained sum to the host.
    fn release_reduced(&mut self) -> Result<(), DeviceError> {
        self.retained.release(self.device.stream())
    }

    /// Enqueues the computation of the digests of the step's windows of the parameters and of the
    /// optimizer state.
    pub(crate) fn begin_window_digests(&mut self, step: u64) -> Result<(), DeviceError> {
        let windows = [window(step, self.parameters.len()), window(step, self.slots_len)];
        let starts = [windows[0].start, windows[1].start];
        let [parameters, slots] = windows;
        let slices = [self.parameters.slice(parameters), self.slots.slice(slots)];
        self.kernels.begin_digests(slices, starts)?;
        self.digests_of = Some((step, self.version));
        Ok(())
    }

    /// Digests of the step's windows. Once they were begun, this does not wait for work enqueued
    /// since.
    pub(crate) fn window_digests(&mut self, step: u64) -> Result<[u64; 2], DeviceError> {
        if self.digests_of != Some((step, self.version)) {
            self.begin_window_digests(step)?;
        }
        self.kernels.end_digests()
    }

    /// A tensor that is written. The retained sum is not.
    fn slice(&mut self, tensor: Tensor) -> Result<&mut CudaSlice<f32>, DeviceError> {
        match tensor {
            Tensor::Parameters | Tensor::Slots => self.version += 1,
            Tensor::Reduced | Tensor::Retained => self.release_reduced()?,
        }
        Ok(match tensor {
            Tensor::Parameters => &mut self.parameters,
            Tensor::Reduced | Tensor::Retained => &mut self.reduced,
            Tensor::Slots => &mut self.slots,
        })
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.device.stream()
    }
}

#[cfg(feature = "simulation")]
pub mod layer_times;
/// Zeros in the memory of a GPU; at least one.
fn zeros(device: &Device, len: usize) -> Result<Buffer, String> {
    let floats = device.stream().alloc_zeros::<f32>(len.max(1)).map(Buffer::own);
    floats.map_err(|error| format!("not enough GPU memory for {len} more floats: {error}"))
}

/// The buckets that NCCL sums of a gradient of `len` elements.
fn nccl_buckets(len: usize, bucket_len: usize, is_rounded: bool) -> MergedBuckets {
    let element_bytes = if is_rounded { size_of::<bf16>() } else { size_of::<f32>() };
    MergedBuckets::new(len, bucket_len, element_bytes)
}

#[cfg(test)]
mod tests;
