//! Operations over NCCL on memory of a program.
#![allow(unsafe_code, reason = "the program's memory is known by its address")]

use std::mem;

use elasticdl_collective::device::{Buffers, CallKind, Device, DeviceGroup};

use super::{Group, ProgramRing, WorkerError, failed};
use crate::trainer::nccl_policy;

impl ProgramRing {
    /// Whether all ranks have NCCL for their GPUs. All ranks call this with the GPU of their memory
    /// before each operation over NCCL; the first call creates the communicator, if there is one.
    ///
    /// # Errors
    /// The links broke, or this group has used another GPU.
    pub fn has_nccl(&self, device: &Device) -> Result<bool, WorkerError> {
        let group = &mut self.state().group;
        group.host()?;
        let host = match mem::replace(group, Group::Ended) {
            Group::Host(host) => host,
            other => {
                *group = other;
                return match group {
                    Group::OnGpu(of_device, has_nccl)
                        if of_device.device().uuid() == device.uuid() =>
                    {
                        Ok(*has_nccl)
                    }
                    _ => Err(WorkerError::Failed(
                        "this rank's part of the group has another GPU: it uses one".to_owned(),
                    )),
                };
            }
        };
        let mut of_device = Box::new(DeviceGroup::new(*host, device.clone()));
        let begun = of_device.begin_nccl(&nccl_policy()).and_then(|()| of_device.wait_for_nccl());
        let has_nccl = *begun.as_ref().unwrap_or(&false);
        if !has_nccl {
            tracing::info!(state = ?of_device.nccl_state(), "tensors on GPUs pass the host");
        }
        *group = Group::OnGpu(of_device, has_nccl);
        begun.map_err(failed)
    }

    /// Performs an operation over NCCL on the stream of the device of [`has_nccl`](Self::has_nccl),
    /// which has returned true, and waits for its end. What `buffers` reads stays as it is.
    ///
    /// # Errors
    /// The links broke, or NCCL failed. The group has ended.
    ///
    /// # Safety
    /// The buffers are on that device, have the lengths that the operation says, and are not freed
    /// before this returns.
    pub unsafe fn perform(&self, kind: CallKind, buffers: Buffers) -> Result<(), WorkerError> {
        match &mut self.state().group {
            // SAFETY: guaranteed by the caller.
            Group::OnGpu(group, true) => unsafe { group.perform(kind, buffers) }.map_err(failed),
            _ => Err(WorkerError::Failed("this group has no NCCL".to_owned())),
        }
    }
}
