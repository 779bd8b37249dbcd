//! GPUs in a program without the feature `gpu`: there are none, and no type here has a value.

use std::sync::Arc;

use elasticdl_collective::CollectiveError;
use elasticdl_collective::device::{Device, DeviceError, DeviceGroup, Path};
use elasticdl_tables::BatchRows;

use crate::buckets::SummedBuckets;
use crate::optimizer::Optimizer;
use crate::tensor::{ModelSize, Tensor};

/// The buffers of a worker in GPU memory.
#[derive(Debug)]
pub(crate) enum DeviceState {}

/// A buffer in GPU memory, or what is made of some.
#[derive(Debug)]
pub(crate) enum NoMemory {}

impl DeviceState {
    pub(crate) fn size(&self) -> ModelSize {
        match *self {}
    }

    pub(crate) fn device(&self) -> &Device {
        match *self {}
    }

    pub(crate) fn parameters(&self) -> &NoMemory {
        match *self {}
    }

    pub(crate) fn gradient(
        &self,
        _records: usize,
        _rows: Option<&mut BatchRows>,
    ) -> (&NoMemory, NoMemory) {
        match *self {}
    }

    pub(crate) fn overlap<T>(
        &self,
        _group: &mut DeviceGroup,
        _records: usize,
        _bucket_len: usize,
        _compute: impl FnOnce(&NoMemory, &mut NoMemory) -> T,
    ) -> (T, Result<usize, CollectiveError>) {
        match *self {}
    }

    pub(crate) fn update(&self, _step: u64, _records: u64) -> NoMemory {
        match *self {}
    }

    pub(crate) fn clear_gradient(&self) -> Result<(), DeviceError> {
        match *self {}
    }

    pub(crate) fn to_host(&self, _tensor: Tensor) -> Result<Arc<Vec<f32>>, DeviceError> {
        match *self {}
    }

    pub(crate) fn load(&self, _tensor: Tensor, _floats: &[f32]) -> Result<(), DeviceError> {
        match *self {}
    }

    pub(crate) fn gradient_to_host(&self, _to: &mut [f32]) -> Result<(), DeviceError> {
        match *self {}
    }

    pub(crate) fn load_at(
        &self,
        _tensor: Tensor,
        _at: usize,
        _floats: &[f32],
    ) -> Result<(), DeviceError> {
        match *self {}
    }

    pub(crate) fn sum(
        &self,
        _group: &mut DeviceGroup,
        _header: &[u8],
        _path: Path,
        _buckets: Option<SummedBuckets>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        match *self {}
    }

    pub(crate) fn take_gradient_as_sum(&self) -> Result<(), DeviceError> {
        match *self {}
    }

    pub(crate) fn broadcast(
        &self,
        _group: &mut DeviceGroup,
        _root: usize,
        _tensor: Tensor,
    ) -> Result<(), CollectiveError> {
        match *self {}
    }

    pub(crate) fn begin_sum_check(&self) -> Result<(), DeviceError> {
        match *self {}
    }

    pub(crate) fn end_sum_check(&self) -> Result<bool, DeviceError> {
        match *self {}
    }

    pub(crate) fn update_if_finite(&self, _: (u64, u64), _: &Optimizer) -> Result<(), DeviceError> {
        match *self {}
    }

    pub(crate) fn gradient_is_finite(&self) -> Result<bool, DeviceError> {
        match *self {}
    }

    pub(crate) fn parameters_are_finite(&self) -> Result<bool, DeviceError> {
        match *self {}
    }

    pub(crate) fn retain_reduced(&self, _is_alone: bool) -> Result<(), DeviceError> {
        match *self {}
    }

    pub(crate) fn begin_window_digests(&self, _step: u64) -> Result<(), DeviceError> {
        match *self {}
    }

    pub(crate) fn window_digests(&self, _step: u64) -> Result<[u64; 2], DeviceError> {
        match *self {}
    }
}
