//! The GPU side of a program's model.

use std::mem;

use cudarc::driver::{DevicePtr as _, DevicePtrMut as _};

use super::calls::Change;
use super::lent::{Lent, LentMut};
use super::model::{Batch, ExternalModel};
use crate::device::{
    CudaSlice, Device, DeviceGradients, DeviceModel, DeviceUpdate, DeviceUpdateRule,
};
use crate::metrics::{Loss, Metrics, UserError};
use crate::update::UpdateRule;

impl DeviceModel for ExternalModel {
    type Batch = Batch;

    fn device(&self) -> &Device {
        self.memory.device.as_ref().expect("called only if there is a GPU")
    }

    fn gradients(
        &mut self,
        _parameters: &CudaSlice<f32>,
        batch: Batch,
        gradients: &mut DeviceGradients<'_>,
    ) -> Result<Loss, UserError> {
        let is_overlapped = gradients.is_overlapped();
        let gradient = {
            let stream = self.device().stream();
            let mut sum = gradients.sum();
            let len = sum.len();
            let (address, _written) = sum.device_ptr_mut(stream);
            LentMut::on_device(address, len)
        };
        // The program has rows only if it has tables.
        let mut rows = gradients.rows().map(mem::take).unwrap_or_default();
        let complete = |start| gradients.complete_from(start);
        let loss = self.compute(batch.records, (gradient, &mut rows), is_overlapped, complete)?;
        if let Some(lender) = gradients.rows() {
            *lender = rows;
        }
        Ok(loss)
    }

    fn evaluate(
        &mut self,
        _parameters: &CudaSlice<f32>,
        batch: Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        self.measure(&batch.records, metrics)
    }

    fn update_rule(&mut self) -> Option<&mut dyn DeviceUpdateRule> {
        Some(self)
    }
}

impl DeviceUpdateRule for ExternalModel {
    fn apply(
        &mut self,
        update: DeviceUpdate<'_>,
        _rule: &mut dyn UpdateRule,
    ) -> Result<(), UserError> {
        let DeviceUpdate { step, records, sum, parameters, slots, .. } = update;
        let stream = self.device().stream().clone();
        let lent = |slice: &mut CudaSlice<f32>| {
            let len = slice.len();
            LentMut::on_device(slice.device_ptr_mut(&stream).0, len)
        };
        let sum = Lent::on_device(sum.device_ptr(&stream).0, sum.len());
        self.channel().change(Change::new((step, records), sum, lent(parameters), lent(slots)))
    }
}
