//! candle's variables on a GPU, next to the flat slices there. Copies of parameters and sums of
//! gradients stay on the GPU.

use candle_core::cuda_backend::cudarc::driver::CudaView;
use candle_core::{CudaStorage, InplaceOp1, Layout, Storage};

use super::{Candle, CandleModel, CpuStorage, Device as CandleDevice, Summed, built};
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
        let network = built(&self.network)?;
        self.parameters.copy(parameters)?;
        let loss = Summed::of(self.model.loss(network, batch)?, gradients.records())?;
        let found = loss.sum.backward()?;
        for (declared, variable) in self.parameters.declared.iter().zip(&self.parameters.variables)
        {
            // A parameter that does not affect the loss has no gradient.
            let Some(gradient) = found.get(variable) else { continue };
            let gradient = gradient.contiguous()?;
            let (storage, layout) = gradient.storage_and_layout();
            match (&*storage, layout.contiguous_offsets()) {
                (Storage::Cuda(storage), Some((start, end))) => {
                    let values = storage.as_cuda_slice::<f32>()?.slice(start..end);
                    gradients.add_sum(declared.range.clone(), &values)?;
                }
                _ => {
                    return Err(
                        "a parameter's gradient must be a contiguous tensor of f32 on its device"
                            .into(),
                    );
                }
            }
        }
        Ok(Loss::Sum(loss.value()?))
    }

    fn evaluate(
        &mut self,
        parameters: &CudaSlice<f32>,
        batch: M::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let network = built(&self.network)?;
        self.parameters.copy(parameters)?;
        self.model.evaluate(network, batch, metrics)
    }
}

impl super::Parameters {
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

/// Overwrites a variable's values with values of the host.
pub(super) fn overwrite(
    storage: &mut CudaStorage,
    layout: &Layout,
    values: &[f32],
) -> candle_core::Result<()> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("a parameter must be a contiguous tensor of f32")
    };
    let device = storage.device.clone();
    device.memcpy_htod(values, &mut storage.as_cuda_slice_mut::<f32>()?.slice_mut(start..end))
}

/// Converts candle's device to this crate's: the same GPU and the same CUDA stream. `None`: the
/// CPU.
pub(super) fn gpu_of(device: &CandleDevice) -> Result<Option<Device>, UserError> {
    match device {
        CandleDevice::Cuda(device) => Ok(Some(Device::from_stream(device.cuda_stream())?)),
        _ => Ok(None),
    }
}
