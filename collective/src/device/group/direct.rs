//! Operations over NCCL on memory that is known by its address.
#![allow(unsafe_code, reason = "the caller answers for the addresses")]

use std::time::Duration;

use super::{DeviceGroup, Nccl, wait_for_result};
use crate::CollectiveError;
use crate::device::nccl::{Buffers, Call, CallKind, NcclState};
use crate::group::host_group::WaitOutcome;

impl DeviceGroup {
    /// Waits until the communicator that [`begin_nccl`](Self::begin_nccl) has begun is ready on all
    /// ranks, or will not be on one of them. Returns whether it is: [`perform`](Self::perform) may
    /// then be used. This is a collective operation.
    ///
    /// # Errors
    /// [`CollectiveError`] of the host group; the group has ended.
    pub fn wait_for_nccl(&mut self) -> Result<bool, CollectiveError> {
        while let Nccl::Begun(communicator) = &self.nccl
            && communicator.state() == NcclState::Building
        {
            let waited = self.host.wait_alongside(communicator.finished(), BUILD_POLL_INTERVAL)?;
            if let WaitOutcome::NeighbourGone(error) = waited {
                return Err(self.stop_nccl(error));
            }
        }
        let is_ready = [u8::from(self.nccl_state() == NcclState::Ready)];
        let gathered = self.host.gather_alongside(&is_ready)?;
        Ok(gathered.iter().all(|is_ready| is_ready[..] == [1]))
    }

    /// Performs an operation over NCCL on memory that is known by its address, and waits for its
    /// end.
    ///
    /// # Errors
    /// As for [`all_reduce_device`](Self::all_reduce_device).
    ///
    /// # Safety
    /// The buffers are on this group's device, have the lengths that `kind` says, and are not freed
    /// before this returns.
    pub unsafe fn perform(
        &mut self,
        kind: CallKind,
        buffers: Buffers,
    ) -> Result<(), CollectiveError> {
        self.host.check_alive()?;
        if let CallKind::Broadcast { root } = kind {
            self.check_root(root)?;
        }
        let name = format!("{kind:?} of {:?}", buffers.dtype);
        self.ready_communicator()?.call(Call { kind, buffers, beside: None });
        // NCCL would wait for ever for a rank that does something else.
        let names = self.finish_nccl(name.as_bytes(), buffers.len, 0)?;
        if let Some(rank) = names.iter().position(|other| other != name.as_bytes()) {
            let reason = format!("expected {name}, got {}", String::from_utf8_lossy(&names[rank]));
            return Err(self.stop_nccl(self.host.protocol_error(rank, reason)));
        }
        self.ready_communicator()
            .and_then(|communicator| wait_for_result(&self.host, communicator))
            .map_err(|error| self.stop_nccl(error))
    }
}

/// How often the state of a communicator that is being created is read.
const BUILD_POLL_INTERVAL: Duration = Duration::from_millis(2);
