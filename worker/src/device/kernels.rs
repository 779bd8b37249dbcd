//! Launches the kernels of `kernels.cu`.

#![allow(
    unsafe_code,
    reason = "kernels take raw addresses; this module ensures that these are valid"
)]

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr,
    DevicePtrMut, DeviceRepr, DriverError, LaunchConfig, PinnedHostSlice, PushKernelArg,
};
use elasticdl_collective::device::{Device, DeviceError};
use half::bf16;

use super::compiler::compile;
use super::error::cuda;
use crate::optimizer::{AdamWStep, Arithmetic, Optimizer, SgdStep};

/// The kernels, compiled for one device, and their scratch memory.
///
/// **Invariant:** the number of threads of a reduction depends only on lengths, so all GPUs compute
/// bit-identical results.
#[derive(Debug)]
pub(crate) struct Kernels {
    stream: Arc<CudaStream>,
    functions: Functions,
    /// Partial sums of squares: one per thread of the first pass.
    partials: CudaSlice<u64>,
    /// Partial sums of squares: one per thread of the second pass.
    second_pass: CudaSlice<u64>,
    scale: CudaSlice<f32>,
    digests: Results<2>,
    /// Not zero if the slice that was checked last has an element that is NaN or infinite.
    nonfinite: Results<1>,
}

/// When an update changes the parameters and the optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Always,
    /// If the check that was begun last finds all elements finite.
    CheckedIsFinite,
}

/// Numbers that kernels compute, and a copy for the host.
#[derive(Debug)]
struct Results<const N: usize> {
    on_device: CudaSlice<u64>,
    on_host: PinnedHostSlice<u64>,
    /// The end of the last copy. cudarc records none, since events are not tracked.
    copied: CudaEvent,
}

#[derive(Debug)]
struct Functions {
    adam_w: CudaFunction,
    add: CudaFunction,
    clip_scale: CudaFunction,
    digests: CudaFunction,
    double_sums: CudaFunction,
    from_bf16: CudaFunction,
    nonfinite: CudaFunction,
    sgd: CudaFunction,
    sgd_momentum: CudaFunction,
    sgd_nesterov: CudaFunction,
    square_sums: CudaFunction,
    to_bf16: CudaFunction,
}

/// Mirrors the struct in `kernels.cu`. Addresses are in device memory.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Step {
    sum: u64,
    parameters: u64,
    first: u64,
    second: u64,
    clipped: u64,
    nonfinite: u64,
    len: u64,
    scale: f32,
    rate: f32,
    decay_or_keep: f32,
    momentum_or_beta1: f32,
    beta2: f32,
    rest1: f32,
    rest2: f32,
    correction: f32,
    epsilon: f32,
}

/// Mirrors the struct in `kernels.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Add {
    values: u64,
    sum: u64,
    len: u64,
}

/// Mirrors the struct in `kernels.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Convert {
    values: u64,
    converted: u64,
    len: u64,
}

/// Mirrors the struct in `kernels.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Fold {
    values: u64,
    results: u64,
    len: u64,
    start: u64,
}

/// Mirrors the struct in `kernels.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Clip {
    square_sums: u64,
    scale: u64,
    len: u64,
    limit: f64,
    records: f64,
}

// SAFETY: contains only numbers, in C layout.
unsafe impl DeviceRepr for Step {}
// SAFETY: as above.
unsafe impl DeviceRepr for Add {}
// SAFETY: as above.
unsafe impl DeviceRepr for Convert {}
// SAFETY: as above.
unsafe impl DeviceRepr for Fold {}
// SAFETY: as above.
unsafe impl DeviceRepr for Clip {}

impl Kernels {
    /// Compiles the kernels for the device.
    ///
    /// # Errors
    /// A message that explains what is missing, and what the user should do.
    pub(crate) fn new(device: &Device) -> Result<Self, String> {
        let stream = device.stream().clone();
        let functions = Functions::load(stream.context())?;
        let no_memory = |error: DriverError| format!("not enough GPU memory: {error}");
        Ok(Self {
            digests: Results::new(&stream)?,
            nonfinite: Results::new(&stream)?,
            partials: stream.alloc_zeros(FOLD_THREADS_MAX).map_err(no_memory)?,
            second_pass: stream.alloc_zeros(SECOND_PASS_THREADS).map_err(no_memory)?,
            scale: stream.alloc_zeros(1).map_err(no_memory)?,
            functions,
            stream,
        })
    }

    /// See [`Optimizer::apply`]. `condition`: whether it changes anything.
    pub(crate) fn apply(
        &mut self,
        optimizer: &Optimizer,
        (step, records, condition): (u64, u64, Condition),
        sum: &CudaSlice<f32>,
        (parameters, slots): (&mut CudaSlice<f32>, &mut CudaSlice<f32>),
    ) -> Result<(), DeviceError> {
        let len = sum.len();
        assert!(records > 0, "a step has at least one record");
        assert_eq!(parameters.len(), len, "one gradient per parameter");
        assert!(slots.len() >= optimizer.slots() * len, "`slots` state values per parameter");
        if let Some(limit) = optimizer.norm_limit() {
            self.clip(limit, records, sum)?;
        }
        let Self { stream, functions, scale, nonfinite, .. } = self;
        let (first, second) = match optimizer.slots() {
            0 => (None, None),
            1 => (Some(slots.as_view_mut()), None),
            _ => {
                let (first, second) = slots.split_at_mut(len);
                (Some(first), Some(second))
            }
        };
        let (mut first, mut second) = (first, second);
        let first = first.as_mut().map(|slot| slot.device_ptr_mut(stream));
        let second = second.as_mut().map(|slot| slot.device_ptr_mut(stream));
        let (sum, _sum) = sum.device_ptr(stream);
        let (parameters, _parameters) = parameters.device_ptr_mut(stream);
        let (clipped, _clipped) = scale.device_ptr(stream);
        let (nonfinite, _nonfinite) = nonfinite.on_device.device_ptr(stream);
        let addresses = Step {
            sum,
            parameters,
            first: first.as_ref().map_or(0, |(address, _)| *address),
            second: second.as_ref().map_or(0, |(address, _)| *address),
            clipped: if optimizer.norm_limit().is_some() { clipped } else { 0 },
            nonfinite: if condition == Condition::CheckedIsFinite { nonfinite } else { 0 },
            len: len as u64,
            scale: (1.0 / records as f64) as f32,
            ..Step::default()
        };
        let (function, step) = match optimizer.arithmetic(step) {
            Arithmetic::AdamW(constants) => (&functions.adam_w, constants.fill(addresses)),
            Arithmetic::Momentum(constants) => (&functions.sgd_momentum, constants.fill(addresses)),
            Arithmetic::Nesterov(constants) => (&functions.sgd_nesterov, constants.fill(addresses)),
            Arithmetic::Plain(constants) => (&functions.sgd, constants.fill(addresses)),
        };
        // SAFETY: all slices have the length `len`, as asserted above, and stay borrowed until
        // their last use is enqueued on the stream.
        unsafe { launch(stream, function, threads(len), &step) }
    }

    /// Adds `values` to `sum`, which has the same length.
    pub(crate) fn add(
        &self,
        values: &CudaView<'_, f32>,
        sum: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        assert_eq!(values.len(), sum.len(), "`values` and `sum` have the same length");
        let len = values.len();
        let (values, _values) = values.device_ptr(&self.stream);
        let (sum, _sum) = sum.device_ptr_mut(&self.stream);
        let add = Add { values, sum, len: len as u64 };
        // SAFETY: both have the length `len`, and stay borrowed until their last use is enqueued on
        // the stream.
        unsafe { launch(&self.stream, &self.functions.add, threads(len), &add) }
    }

    /// Rounds `values` to bf16, in `rounded`, which has the same length.
    pub(crate) fn round_to_bf16(
        &self,
        values: &CudaView<'_, f32>,
        rounded: &mut CudaViewMut<'_, bf16>,
    ) -> Result<(), DeviceError> {
        self.convert(&self.functions.to_bf16, values, rounded)
    }

    /// Converts `values` to f32, in `wide`, which has the same length.
    pub(crate) fn widen_bf16(
        &self,
        values: &CudaView<'_, bf16>,
        wide: &mut CudaViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        self.convert(&self.functions.from_bf16, values, wide)
    }

    fn convert<T, U>(
        &self,
        function: &CudaFunction,
        values: &CudaView<'_, T>,
        converted: &mut CudaViewMut<'_, U>,
    ) -> Result<(), DeviceError> {
        assert_eq!(values.len(), converted.len(), "one result per value");
        let len = values.len();
        let (values, _values) = values.device_ptr(&self.stream);
        let (converted, _converted) = converted.device_ptr_mut(&self.stream);
        let convert = Convert { values, converted, len: len as u64 };
        // SAFETY: both have the length `len`, of the types of the function, and stay borrowed until
        // their last use is enqueued on the stream.
        unsafe { launch(&self.stream, function, threads(len), &convert) }
    }

    /// Enqueues the computation of the digests of two slices; each changes with any element.
    /// `starts`: positions of the slices' first elements in their tensors.
    pub(crate) fn begin_digests(
        &mut self,
        slices: [CudaView<'_, f32>; 2],
        starts: [usize; 2],
    ) -> Result<(), DeviceError> {
        let Self { stream, functions, digests, .. } = self;
        digests.clear(stream)?;
        for (turn, (slice, start)) in slices.iter().zip(starts).enumerate() {
            let mut sum = digests.on_device.slice_mut(turn..turn + 1);
            let (values, len) = (slice.device_ptr(stream), slice.len());
            fold(stream, &functions.digests, (values, len, start), &mut sum, fold_threads(len))?;
        }
        digests.begin_copy(stream)
    }

    /// The digests that were begun last. Waits for them, and not for work enqueued after them.
    pub(crate) fn end_digests(&self) -> Result<[u64; 2], DeviceError> {
        self.digests.end_copy()
    }

    /// Enqueues a check whether an element is NaN or infinite.
    pub(crate) fn begin_check(&mut self, slice: &CudaSlice<f32>) -> Result<(), DeviceError> {
        let Self { stream, functions, nonfinite, .. } = self;
        nonfinite.clear(stream)?;
        let (values, len) = (slice.device_ptr(stream), slice.len());
        let found = &mut nonfinite.on_device;
        fold(stream, &functions.nonfinite, (values, len, 0), found, fold_threads(len))?;
        nonfinite.begin_copy(stream)
    }

    /// Whether the check that was begun last has found all elements finite. Waits for it, and not
    /// for work enqueued after it.
    pub(crate) fn end_check(&self) -> Result<bool, DeviceError> {
        Ok(self.nonfinite.end_copy()? == [0])
    }

    /// Writes the factor for the gradient sum, which divides by the records and clips, to `scale`.
    fn clip(&mut self, limit: f64, records: u64, sum: &CudaSlice<f32>) -> Result<(), DeviceError> {
        let Self { stream, functions, partials, second_pass, scale, .. } = self;
        let all = fold_threads(sum.len());
        fold(
            stream,
            &functions.square_sums,
            (sum.device_ptr(stream), sum.len(), 0),
            partials,
            all,
        )?;
        fold(
            stream,
            &functions.double_sums,
            (partials.device_ptr(stream), all, 0),
            second_pass,
            SECOND_PASS_THREADS,
        )?;
        let (square_sums, _second_pass) = second_pass.device_ptr(stream);
        let (scale, _scale) = scale.device_ptr_mut(stream);
        let clip = Clip {
            square_sums,
            scale,
            len: SECOND_PASS_THREADS as u64,
            limit,
            records: records as f64,
        };
        // SAFETY: there are `SECOND_PASS_THREADS` sums and one scale; both stay borrowed until
        // their last use is enqueued on the stream.
        unsafe { launch(stream, &functions.clip_scale, 1, &clip) }
    }
}

impl<const N: usize> Results<N> {
    fn new(stream: &Arc<CudaStream>) -> Result<Self, String> {
        let no_memory = |error: DriverError| format!("not enough memory: {error}");
        // SAFETY: the memory is initialized next. Not write-combined: the host reads it.
        let on_host = unsafe { stream.context().alloc_pinned_with_flags(N, 0) };
        let mut on_host: PinnedHostSlice<u64> = on_host.map_err(no_memory)?;
        on_host.as_mut_slice().map_err(no_memory)?.fill(0);
        let copied = stream.context().new_event(None);
        Ok(Self {
            on_device: stream.alloc_zeros(N).map_err(no_memory)?,
            on_host,
            copied: copied.map_err(|error| format!("cannot create a CUDA event: {error}"))?,
        })
    }

    fn clear(&mut self, stream: &Arc<CudaStream>) -> Result<(), DeviceError> {
        stream.memset_zeros(&mut self.on_device).map_err(cuda("clear a result"))
    }

    fn begin_copy(&mut self, stream: &Arc<CudaStream>) -> Result<(), DeviceError> {
        let Self { on_device, on_host, copied } = self;
        let enqueued = stream.memcpy_dtoh(on_device, on_host).and_then(|()| copied.record(stream));
        enqueued.map_err(cuda("copy a result to the host"))
    }

    /// The numbers that were copied last. Waits for them, and not for work enqueued after them.
    fn end_copy(&self) -> Result<[u64; N], DeviceError> {
        let found = self.copied.synchronize().and_then(|()| self.on_host.as_slice());
        let found = found.map_err(cuda("copy a result to the host"))?;
        Ok(found.try_into().expect("there are N numbers"))
    }
}

impl<const N: usize> Drop for Results<N> {
    /// The memory on the host is freed next.
    fn drop(&mut self) {
        if let Err(error) = self.copied.synchronize() {
            tracing::debug!(%error, "a copy of results did not end");
        }
    }
}

impl Functions {
    fn load(context: &Arc<CudaContext>) -> Result<Self, String> {
        let compiled = compile(context, SOURCE, "kernels.cu")?;
        let module = context.load_module(compiled).map_err(|error| {
            format!(
                "the GPU's driver rejects the code that NVRTC compiled ({error}); NVRTC must not \
                 be of a newer major version than the driver's CUDA"
            )
        })?;
        let load = |name: &str| {
            module
                .load_function(name)
                .map_err(|error| format!("the kernel {name} cannot be loaded: {error}"))
        };
        Ok(Self {
            adam_w: load("adam_w")?,
            add: load("add")?,
            clip_scale: load("clip_scale")?,
            digests: load("digests")?,
            double_sums: load("double_sums")?,
            from_bf16: load("from_bf16")?,
            nonfinite: load("nonfinite")?,
            sgd: load("sgd")?,
            sgd_momentum: load("sgd_momentum")?,
            sgd_nesterov: load("sgd_nesterov")?,
            square_sums: load("square_sums")?,
            to_bf16: load("to_bf16")?,
        })
    }
}

impl SgdStep {
    fn fill(self, step: Step) -> Step {
        let Self { rate, decay, momentum } = self;
        Step { rate, decay_or_keep: decay, momentum_or_beta1: momentum, ..step }
    }
}

impl AdamWStep {
    fn fill(self, step: Step) -> Step {
        let Self { keep, beta1, beta2, rest1, rest2, rate, correction, epsilon } = self;
        let (decay_or_keep, momentum_or_beta1) = (keep, beta1);
        Step {
            rate,
            decay_or_keep,
            momentum_or_beta1,
            beta2,
            rest1,
            rest2,
            correction,
            epsilon,
            ..step
        }
    }
}

/// Launches a reduction, which changes the one element of `results` or writes one per thread.
fn fold<Guard>(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    ((values, _values), len, start): ((u64, Guard), usize, usize),
    results: &mut impl DevicePtrMut<u64>,
    threads: usize,
) -> Result<(), DeviceError> {
    let (results, _results) = results.device_ptr_mut(stream);
    let fold = Fold { values, results, len: len as u64, start: start as u64 };
    // SAFETY: the caller's guard keeps `len` values borrowed; `results` has the elements that the
    // function writes.
    unsafe { launch(stream, function, threads, &fold) }
}

/// # Safety
/// `arguments` must match `function`; the memory that they point to must stay valid until the
/// stream has finished with it.
unsafe fn launch(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    threads: usize,
    arguments: &impl DeviceRepr,
) -> Result<(), DeviceError> {
    let block = threads.min(BLOCK);
    let config = LaunchConfig {
        grid_dim: (threads.div_ceil(block) as u32, 1, 1),
        block_dim: (block as u32, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: guaranteed by the caller.
    let launched = unsafe { stream.launch_builder(function).arg(arguments).launch(config) };
    launched.map(drop).map_err(cuda("launch a kernel"))
}

/// Number of threads for `len` elements: a multiple of the block size.
fn threads(len: usize) -> usize {
    len.div_ceil(ELEMENTS_MIN).next_multiple_of(BLOCK).clamp(BLOCK, THREADS_MAX)
}

/// Number of threads of a reduction of `len` elements. Each loads several elements at a time.
fn fold_threads(len: usize) -> usize {
    len.div_ceil(FOLD_ELEMENTS_MIN).next_multiple_of(BLOCK).clamp(BLOCK, FOLD_THREADS_MAX)
}

const SOURCE: &str = include_str!("kernels.cu");

/// Threads per block.
const BLOCK: usize = 256;
/// Minimum number of elements per thread, up to `THREADS_MAX` threads.
const ELEMENTS_MIN: usize = 4;
/// Maximum number of threads: about as many as the largest GPUs run concurrently.
const THREADS_MAX: usize = 1 << 18;
/// Like `ELEMENTS_MIN`, of a reduction: the loads that a thread has in flight.
const FOLD_ELEMENTS_MIN: usize = 8;
/// Like `THREADS_MAX`, of a reduction: its loads in flight saturate the memory.
const FOLD_THREADS_MAX: usize = 1 << 17;
/// Number of threads of the second pass of a sum of squares.
const SECOND_PASS_THREADS: usize = 2 * BLOCK;

#[cfg(test)]
mod tests;
