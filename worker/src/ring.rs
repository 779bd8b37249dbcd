//! Communicator of a worker's group: on the host, or with a GPU at each rank.

use elasticdl_collective::device::DeviceGroup;
use elasticdl_collective::{CollectiveError, Communicator, HostGroup};

/// Communicator of one generation.
#[derive(Debug)]
pub(crate) enum Ring {
    Device(DeviceGroup),
    Host(HostGroup),
}

impl Ring {
    /// Returns the group's communicator for GPUs.
    ///
    /// # Errors
    /// The ranks compute on CPUs: a defect of the caller.
    pub(crate) fn device(&mut self) -> Result<&mut DeviceGroup, CollectiveError> {
        match self {
            Self::Device(ring) => Ok(ring),
            Self::Host(_) => Err(CollectiveError::Invalid("this group has no GPUs".to_owned())),
        }
    }

    /// The underlying communicator on the host.
    pub(crate) fn host(&self) -> &HostGroup {
        match self {
            Self::Device(ring) => ring.host(),
            Self::Host(ring) => ring,
        }
    }

    /// The communicator for operations on host memory.
    pub(crate) fn host_mut(&mut self) -> &mut dyn Communicator {
        match self {
            Self::Device(ring) => ring,
            Self::Host(ring) => ring,
        }
    }
}
