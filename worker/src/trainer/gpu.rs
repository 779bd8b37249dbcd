//! What the trainer does with a GPU: builds NCCL beside the steps, and says what became of it.

use elasticdl_collective::CollectiveError;
use elasticdl_collective::device::{DeviceError, Path};
use elasticdl_collective::nccl::NcclState;

use super::{Stopped, Trainer, ring};
use crate::core::swap::{self, Build};
use crate::device::DeviceModel;
use crate::failure::Failure;
use crate::model::{Model, UserError};
use crate::ring::Ring;

impl<M: Model> Trainer<'_, M> {
    /// Begins to build NCCL, where all ranks find that they should. An operation of the group.
    pub(super) fn begin_nccl(&mut self) -> Result<(), Stopped> {
        if self.session.nccl_obstacle().is_none() {
            let ring = ring(&mut self.ring)?.device().map_err(Stopped::Broken)?;
            ring.begin_nccl(&self.nccl).map_err(Stopped::Broken)?;
        }
        Ok(())
    }

    /// Has the session know how far NCCL is, and learns what carries the next step.
    pub(super) fn path(&mut self) -> Path {
        if let Some(Ring::Device(ring)) = &self.ring {
            self.session.nccl_is_at(match ring.nccl_state() {
                NcclState::Absent(_) => Build::Absent,
                NcclState::Building => Build::Building,
                NcclState::Failed(_) => Build::Failed,
                NcclState::Ready => Build::Ready,
            });
        }
        match self.session.path() {
            swap::Path::Host => Path::Host,
            swap::Path::Nccl => Path::Nccl,
        }
    }

    /// Tells what has failed with the links, or on the GPU: what NCCL does, the host ring can do, but without a GPU this worker can't
    /// go on.
    pub(super) fn judge(&mut self, error: CollectiveError) -> Result<CollectiveError, Failure> {
        match error {
            CollectiveError::Device {
                source: DeviceError::Nccl { .. } | DeviceError::NcclTimeout { .. },
            } => {
                self.session.nccl_broke();
                Ok(error)
            }
            CollectiveError::Device { source } => Err(source.into()),
            error => Ok(error),
        }
    }
}

/// The model on the GPU that it said it computes on.
pub(super) fn device_of<M: Model>(
    model: &mut M,
) -> Result<&mut dyn DeviceModel<Batch = M::Batch>, UserError> {
    model.device().ok_or_else(|| "device() has given a GPU once, and now gives none".into())
}
