//! The GPU of the model, and whether the worker uses NCCL.

use elasticdl_collective::device::NcclPolicy;

use crate::device::DeviceModel;
use crate::metrics::UserError;
use crate::model::Model;

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
pub(super) fn is_on_gpu<M: Model>(model: &mut M) -> bool {
    model.as_device_model().is_some()
}

/// The model on the GPU that its `as_device_model()` returned at the start.
pub(super) fn device_of<M: Model>(
    model: &mut M,
) -> Result<&mut dyn DeviceModel<Batch = M::Batch>, UserError> {
    let changed = "as_device_model() returned a model before and returns none now";
    model.as_device_model().ok_or_else(|| changed.into())
}
