//! Models that compute on a GPU: parameters, optimizer state and gradients stay there.
//!
//! ```text
//!   Model::device ──▶ DeviceModel   gradients ──▶ sum over the group ──▶ update by `kernels.cu`, all on one stream
//!                                                   host ring, or NCCL
//! ```
//!
//! CUDA is looked for at run time: what is built of this runs on machines without a GPU, too.

use std::ops::Range;

use cudarc::driver::{CudaView, DriverError};

pub use cudarc::driver::CudaSlice;
pub use elasticdl_collective::device::{Device, DeviceError};

use crate::model::{Metrics, UserError};
use crate::optimizer::Optimizer;

mod kernels;
mod state;

pub(crate) use kernels::Kernels;
pub(crate) use state::DeviceState;

/// Opens the GPU for this worker. Workers on one machine that see the same GPUs take them in turn.
///
/// # Errors
/// [`DeviceError`], if there is none, or no driver.
pub fn open() -> Result<Device, DeviceError> {
    Device::open(ordinal()?)
}

/// The number of the GPU for this worker, among those that it sees.
///
/// # Errors
/// As for [`open`].
pub fn ordinal() -> Result<usize, DeviceError> {
    let index = std::env::var("ELASTICDL_INDEX").ok().and_then(|index| index.parse::<usize>().ok());
    Ok(index.unwrap_or(0) % Device::count()?.max(1))
}

/// What a [`Model`](crate::Model) that computes on a GPU fills in beside it. All workers of a job
/// have one, or none.
///
/// Slices are flat, as those of `Model`, and in the memory of [`device`](Self::device). What is
/// enqueued on its stream comes after what is there, and before what this crate enqueues next.
pub trait DeviceModel {
    /// As [`Model::Batch`](crate::Model::Batch).
    type Batch;

    /// The GPU. Always the same.
    fn device(&self) -> &Device;

    /// As [`Model::gradients`](crate::Model::gradients).
    ///
    /// # Errors
    /// As there.
    fn gradients(
        &mut self,
        parameters: &CudaSlice<f32>,
        batch: Self::Batch,
        gradients: &mut DeviceGradients<'_>,
    ) -> Result<f64, UserError>;

    /// As [`Model::evaluate`](crate::Model::evaluate).
    ///
    /// # Errors
    /// As there.
    fn evaluate(
        &mut self,
        parameters: &CudaSlice<f32>,
        batch: Self::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError>;

    /// As [`Model::update`](crate::Model::update); `optimizer` is the model's. Default: the
    /// optimizer, on the mean over the step's records.
    ///
    /// # Errors
    /// As there.
    fn update(&mut self, update: DeviceUpdate<'_>, optimizer: &Optimizer) -> Result<(), UserError> {
        Ok(update.apply(optimizer)?)
    }
}

/// Where a step's gradient is added up: `[parameters]`, on the GPU.
#[derive(Debug)]
pub struct DeviceGradients<'a> {
    /// What micro-batches of this step have added so far.
    pub sum: &'a mut CudaSlice<f32>,
    kernels: &'a Kernels,
}

impl DeviceGradients<'_> {
    /// Adds `values` to the elements of `range`, which are as many.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    ///
    /// # Panics
    /// If they are not as many, or not all there.
    pub fn add(
        &mut self,
        range: Range<usize>,
        values: &CudaView<'_, f32>,
    ) -> Result<(), DeviceError> {
        self.kernels.add(values, &mut self.sum.slice_mut(range))
    }
}

/// As [`Update`](crate::Update), on the GPU.
#[derive(Debug)]
pub struct DeviceUpdate<'a> {
    /// The step, from 0.
    pub step: u64,
    /// Records behind `sum`, over all ranks; at least 1.
    pub records: u64,
    /// Gradient summed over these records, `[parameters]`.
    pub sum: &'a CudaSlice<f32>,
    /// The parameters, `[parameters]`.
    pub parameters: &'a mut CudaSlice<f32>,
    /// The optimizer's state, `[slots · parameters]`, zero at the start. One element where there
    /// are no slots: a GPU has no empty memory.
    pub slots: &'a mut CudaSlice<f32>,
    kernels: &'a mut Kernels,
}

impl DeviceUpdate<'_> {
    /// Applies the mean gradient as [`Optimizer::apply`] does, and with the same bits where nothing
    /// is clipped.
    ///
    /// # Errors
    /// [`DeviceError::Cuda`].
    pub fn apply(self, optimizer: &Optimizer) -> Result<(), DeviceError> {
        let Self { step, records, sum, parameters, slots, kernels } = self;
        kernels.apply(optimizer, (step, records), sum, (parameters, slots))
    }
}

/// For `map_err` of a driver call.
fn cuda(action: &'static str) -> impl FnOnce(DriverError) -> DeviceError {
    move |source| DeviceError::Cuda { action, source }
}
