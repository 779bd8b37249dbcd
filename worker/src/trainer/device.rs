//! The side of a model on a GPU that the trainer uses: whether there is one, and whose rule updates
//! the parameters there, that of the model or its optimizer. The environment decides here whether
//! the worker offers NCCL to its group.
//!
//! Without the feature `gpu`, `no_device.rs` is in the place of this file.

use elasticdl_collective::device::NcclPolicy;

use crate::device::{DeviceModel, DeviceUpdate};
use crate::metrics::UserError;
use crate::model::Model;
use crate::optimizer::Optimizer;
use crate::update::UpdateRule;

/// NCCL where it is found, unless `ELASTICDL_NCCL` is `off` or names a library file. With
/// `ELASTICDL_NCCL_SHARED=1`, workers that share a GPU use it too, for experiments: see
/// [`NcclOptions::on_shared_gpus`](elasticdl_collective::device::NcclOptions::on_shared_gpus).
pub(crate) fn nccl_policy() -> NcclPolicy {
    let mut policy = match std::env::var_os("ELASTICDL_NCCL") {
        None => NcclPolicy::auto(),
        Some(value) if value == "off" => NcclPolicy::Off("ELASTICDL_NCCL is off".into()),
        Some(file) => NcclPolicy::from_file(std::path::Path::new(&file)),
    };
    if let NcclPolicy::On(_, options) = &mut policy {
        options.on_shared_gpus =
            std::env::var_os("ELASTICDL_NCCL_SHARED").is_some_and(|value| value == "1");
    }
    policy
}

/// Whether the model computes on a GPU.
pub(crate) fn is_on_gpu<M: Model>(model: &mut M) -> bool {
    model.as_device_model().is_some()
}

/// The model on the GPU that its `as_device_model()` returned at the start.
pub(super) fn device_of<M: Model>(
    model: &mut M,
) -> Result<&mut dyn DeviceModel<Batch = M::Batch>, UserError> {
    let changed = "as_device_model() returned a model before and returns none now";
    model.as_device_model().ok_or_else(|| changed.into())
}

/// Applies a step's gradient on the GPU, by the model's own rule or by its optimizer.
pub(super) fn update<M: Model>(
    model: &mut M,
    update: DeviceUpdate<'_>,
    rule: &mut dyn UpdateRule,
) -> Result<(), UserError> {
    if let Some(own) = device_of(model)?.update_rule() {
        return own.apply(update, rule);
    }
    let optimizer = rule.as_optimizer().ok_or(
        "the model's update rule is no Optimizer, so it has no GPU side: implement \
         DeviceModel::update_rule",
    )?;
    Ok(update.apply(&optimizer)?)
}

/// The optimizer of a model without a rule of its own on the GPU.
pub(super) fn optimizer_of<M: Model>(model: &mut M, rule: &dyn UpdateRule) -> Option<Optimizer> {
    let has_own = device_of(model).ok()?.update_rule().is_some();
    rule.as_optimizer().filter(|_| !has_own)
}
