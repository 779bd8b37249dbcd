//! Models on a GPU: the parameters, the optimizer state and the gradients stay in its memory.
//!
//! ```text
//!   as_device_model ──▶ DeviceModel   gradients ──▶ all-reduce ──▶ update by `kernels.cu`
//!                                                   host ring, or NCCL
//! ```
//!
//! CUDA is loaded at run time, so a program that is built with this also runs on machines without a
//! GPU.

use std::fmt;
use std::ops::Range;

use cudarc::driver::{CudaView, CudaViewMut};
use elasticdl_collective::device::Overlap;
use elasticdl_tables::BatchRows;
use half::bf16;

pub use cudarc;
pub use cudarc::driver::CudaSlice;
pub use elasticdl_collective::device::{Buffers, CallKind, Device, DeviceError, Dtype};

use crate::metrics::{Loss, Metrics, UserError};
use crate::optimizer::Optimizer;
use crate::update::UpdateRule;

mod buffer;
mod compiler;
mod error;
mod host_copies;
mod kernels;
mod merged_buckets;
mod retained;
mod state;

pub use buffer::{Addresses, DeviceMemory};
pub use compiler::compile;
pub(crate) use kernels::{Condition, Kernels};
use merged_buckets::MergedBuckets;
pub(crate) use state::DeviceState;
/// The layer's time per step, for the GPU drill.
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub use state::layer_times;

/// Opens the GPU of this worker. Workers on one machine that see the same GPUs are assigned them
/// round-robin.
///
/// # Errors
/// [`DeviceError`], if there is none, or no driver.
pub fn open() -> Result<Device, DeviceError> {
    Device::open(ordinal()?)
}

/// Ordinal of this worker's GPU among the visible ones.
///
/// # Errors
/// See [`open`].
pub fn ordinal() -> Result<usize, DeviceError> {
    let index = std::env::var("ELASTICDL_INDEX").ok().and_then(|index| index.parse::<usize>().ok());
    Ok(index.unwrap_or(0) % Device::count()?.max(1))
}

/// The GPU side of a [`Model`](crate::Model). Either all workers of a job use a GPU, or none.
///
/// Slices are flat, as those of `Model`, and in the memory of [`device`](Self::device). Work that a
/// method enqueues on the device's stream runs in stream order: after what is already enqueued, and
/// before what this crate enqueues next.
pub trait DeviceModel {
    /// See [`Model::Batch`](crate::Model::Batch).
    type Batch;

    /// The GPU; always the same one.
    fn device(&self) -> &Device;

    /// See [`Model::gradients`](crate::Model::gradients).
    ///
    /// # Errors
    /// See the method of `Model`.
    fn gradients(
        &mut self,
        parameters: &CudaSlice<f32>,
        batch: Self::Batch,
        gradients: &mut DeviceGradients<'_>,
    ) -> Result<Loss, UserError>;

    /// See [`Model::evaluate`](crate::Model::evaluate).
    ///
    /// # Errors
    /// See the method of `Model`.
    fn evaluate(
        &mut self,
        parameters: &CudaSlice<f32>,
        batch: Self::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError>;

    /// The model's own rule, if it is no [`Optimizer`]. Default: none; the optimizer is applied.
    fn update_rule(&mut self) -> Option<&mut dyn DeviceUpdateRule> {
        None
    }
}

/// Like [`UpdateRule`], on the GPU. An optimizer needs none: its update is enqueued before the host
/// knows whether the sum is finite, and changes nothing if it is not.
pub trait DeviceUpdateRule {
    /// Applies one step's gradient, which is finite. `rule`: the model's.
    ///
    /// # Errors
    /// An error ends this worker.
    fn apply(
        &mut self,
        update: DeviceUpdate<'_>,
        rule: &mut dyn UpdateRule,
    ) -> Result<(), UserError>;
}

/// Like [`Gradients`](crate::Gradients), on the GPU: the **sum** over the step's records.
#[derive(Debug)]
pub struct DeviceGradients<'a> {
    sum: Accumulator<'a>,
    records: usize,
    kernels: &'a Kernels,
    version: u64,
    rows: Option<&'a mut BatchRows>,
}

#[derive(Debug)]
enum Accumulator<'a> {
    Overlapped(&'a mut (dyn Overlapped + 'a)),
    Whole(&'a mut CudaSlice<f32>),
}

impl DeviceGradients<'_> {
    /// Number of records in the batch, by which the gradient of a mean loss must be multiplied.
    pub fn records(&self) -> usize {
        self.records
    }

    /// A number that changes whenever the parameters may have changed. A model that copies them
    /// need not do so for each micro-batch.
    pub fn parameters_version(&self) -> u64 {
        self.version
    }

    /// The sum over records, to which the model adds: `[parameters]`, without the elements
    /// that are [complete](Self::complete_from) and being summed. It already contains the gradients
    /// of the step's earlier micro-batches.
    pub fn sum(&mut self) -> CudaViewMut<'_, f32> {
        match &mut self.sum {
            Accumulator::Overlapped(gradient) => gradient.rest(),
            Accumulator::Whole(sum) => sum.as_view_mut(),
        }
    }

    /// Adds `values`, a part of the gradient of the batch's summed loss, to the elements of
    /// `range`, which must have the same length.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    ///
    /// # Panics
    /// If the lengths differ, or `range` is not within [`sum`](Self::sum).
    pub fn add_sum(
        &mut self,
        range: Range<usize>,
        values: &CudaView<'_, f32>,
    ) -> Result<(), DeviceError> {
        let kernels = self.kernels;
        kernels.add(values, &mut self.sum().slice_mut(range))
    }

    /// The rows of the batch's [ids](crate::TableModel::ids) with the sums of their gradients, in
    /// the memory of the host, if the model has [tables](crate::TableModel): the model copies what
    /// it needs, and waits for the gradients that it adds.
    pub fn rows(&mut self) -> Option<&mut BatchRows> {
        self.rows.as_deref_mut()
    }

    /// Whether completed parts are summed over NCCL while the rest is computed: in the last
    /// micro-batch of a step, with [buckets](crate::Model::bucket_len) and other workers.
    pub fn is_overlapped(&self) -> bool {
        matches!(self.sum, Accumulator::Overlapped(_))
    }

    /// Declares the elements from `start` on complete: they are computed by work that is enqueued
    /// already, and the model adds nothing more to them in this batch. Without
    /// [overlap](Self::is_overlapped), this has no effect.
    pub fn complete_from(&mut self, start: usize) {
        if let Accumulator::Overlapped(gradient) = &mut self.sum {
            gradient.complete_from(start);
        }
    }
}

/// An [`Overlap`] without its lifetime, which a mutable reference can't shorten.
trait Overlapped: fmt::Debug {
    fn rest(&mut self) -> CudaViewMut<'_, f32>;
    fn complete_from(&mut self, start: usize);
}

/// A gradient that is computed from its end to its start, while its completed buckets are summed.
#[derive(Debug)]
struct Buckets<'a, 'b> {
    overlap: &'a mut Overlap<'b, f32>,
    buckets: MergedBuckets,
}

impl Overlapped for Buckets<'_, '_> {
    fn rest(&mut self) -> CudaViewMut<'_, f32> {
        self.overlap.rest()
    }

    fn complete_from(&mut self, start: usize) {
        let mut rest = self.overlap.rest_len();
        while let Some(at) = self.buckets.next_start(rest).filter(|at| *at >= start) {
            self.overlap.sum_from(at);
            rest = at;
        }
    }
}

/// Like [`Buckets`], rounded to bf16 on the wire.
#[derive(Debug)]
struct RoundedBuckets<'a, 'b> {
    gradient: &'a mut CudaSlice<f32>,
    kernels: &'a Kernels,
    /// That of the rounded gradient.
    overlap: &'a mut Overlap<'b, bf16>,
    buckets: MergedBuckets,
    /// An error ends the sums.
    failed: &'a mut Result<(), DeviceError>,
}

impl Overlapped for RoundedBuckets<'_, '_> {
    fn rest(&mut self) -> CudaViewMut<'_, f32> {
        self.gradient.slice_mut(..self.overlap.rest_len())
    }

    fn complete_from(&mut self, start: usize) {
        let mut rest = self.overlap.rest_len();
        while let Some(at) = self.buckets.next_start(rest).filter(|at| *at >= start) {
            let (values, mut open) = (self.gradient.slice(at..rest), self.overlap.rest());
            let rounded = self.kernels.round_to_bf16(&values, &mut open.slice_mut(at..rest));
            if let Err(error) = rounded {
                *self.failed = Err(error);
                return;
            }
            self.overlap.sum_from(at);
            rest = at;
        }
    }
}

/// Like [`Update`](crate::Update), on the GPU.
#[derive(Debug)]
#[non_exhaustive]
pub struct DeviceUpdate<'a> {
    /// Number of the step, from 0.
    pub step: u64,
    /// Number of records in `sum`, over all ranks; at least 1.
    pub records: u64,
    /// Gradient, summed over these records: `[parameters]`.
    pub sum: &'a CudaSlice<f32>,
    /// Parameters: `[parameters]`.
    pub parameters: &'a mut CudaSlice<f32>,
    /// Optimizer state: `[slots · parameters]`, initially zero. It has one element if there are no
    /// slots, as GPU memory cannot be empty.
    pub slots: &'a mut CudaSlice<f32>,
    kernels: &'a mut Kernels,
}

impl DeviceUpdate<'_> {
    /// Applies the mean gradient as [`Optimizer::apply`] does, with bit-identical results unless
    /// the gradient is clipped.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    pub fn apply(self, optimizer: &Optimizer) -> Result<(), DeviceError> {
        let Self { step, records, sum, parameters, slots, kernels } = self;
        let when = (step, records, Condition::Always);
        kernels.apply(optimizer, when, sum, (parameters, slots))
    }
}
