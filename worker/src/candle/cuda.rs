//! candle's variables on a GPU, next to the flat slices there. Copies of parameters and sums of
//! gradients stay on the GPU.

use std::ops::Range;

use candle_core::cuda_backend::cudarc::driver::CudaView;
use candle_core::{
    CpuStorage, CudaStorage, Device as CandleDevice, InplaceOp1, Layout, Storage, Tensor,
};
use elasticdl_tables::BatchRows;

use super::cuts::Accumulate;
use super::parameters::Parameters;
use super::{Candle, CandleModel, built};
use crate::device::{CudaSlice, Device, DeviceGradients, DeviceModel};
use crate::metrics::{Loss, Metrics, UserError};

impl<M: CandleModel> DeviceModel for Candle<M> {
    type Batch = M::Batch;

    fn device(&self) -> &Device {
        self.gpu.as_ref().expect("called only if there is a GPU")
    }

    fn gradients(
        &mut self,
        parameters: &CudaSlice<f32>,
        batch: M::Batch,
        gradients: &mut DeviceGradients<'_>,
    ) -> Result<Loss, UserError> {
        let version = gradients.parameters_version();
        if self.copied != Some(version) {
            self.parameters.copy(parameters)?;
            self.copied = Some(version);
        }
        self.accumulate(batch, (gradients.records(), gradients.is_overlapped()), gradients)
    }

    fn evaluate(
        &mut self,
        parameters: &CudaSlice<f32>,
        mut batch: M::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        self.take_rows(&mut batch, metrics.rows.as_deref())?;
        let network = built(&self.network)?;
        self.copied = None;
        self.parameters.copy(parameters)?;
        self.model.evaluate(network, batch, metrics)
    }
}

impl Accumulate for DeviceGradients<'_> {
    fn open_len(&mut self) -> usize {
        self.sum().len()
    }

    fn add(&mut self, range: Range<usize>, gradient: &Tensor) -> Result<(), UserError> {
        let gradient = gradient.contiguous()?;
        let (storage, layout) = gradient.storage_and_layout();
        let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
        else {
            return Err(
                "a parameter's gradient must be a contiguous tensor of f32 on its device".into()
            );
        };
        Ok(self.add_sum(range, &storage.as_cuda_slice::<f32>()?.slice(start..end))?)
    }

    fn complete_from(&mut self, start: usize) {
        DeviceGradients::complete_from(self, start);
    }

    fn rows(&mut self) -> Option<&mut BatchRows> {
        DeviceGradients::rows(self)
    }
}

impl Parameters {
    /// Like `set`, from the GPU.
    fn copy(&self, values: &CudaSlice<f32>) -> candle_core::Result<()> {
        for (declared, variable) in self.declared.iter().zip(&self.variables) {
            variable.inplace_op1(&Copy(values.slice(declared.range.clone())))?;
        }
        Ok(())
    }
}

/// Overwrites a variable's values in place.
struct Copy<'a>(CudaView<'a, f32>);

impl InplaceOp1 for Copy<'_> {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn cpu_fwd(&self, _storage: &mut CpuStorage, _layout: &Layout) -> candle_core::Result<()> {
        candle_core::bail!("a parameter must be on the model's device")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("a parameter must be a contiguous tensor of f32")
        };
        let device = storage.device.clone();
        device.memcpy_dtod(&self.0, &mut storage.as_cuda_slice_mut::<f32>()?.slice_mut(start..end))
    }
}

/// Converts candle's device to this crate's: the same GPU and the same CUDA stream. `None`: the
/// CPU.
pub(super) fn gpu_of(device: &CandleDevice) -> Result<Option<Device>, UserError> {
    match device {
        CandleDevice::Cuda(device) => Ok(Some(Device::from_stream(device.cuda_stream())?)),
        _ => Ok(None),
    }
}
