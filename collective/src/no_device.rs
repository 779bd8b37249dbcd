//! GPUs in a program without the feature `gpu`: there are none. Code for GPUs compiles, as no type
//! here that has a GPU has a value.

use crate::{CollectiveError, HostGroup};

pub use crate::error::DeviceError;

/// A GPU.
#[derive(Clone, Debug)]
pub enum Device {}

/// A group whose ranks have one GPU each.
#[derive(Debug)]
pub enum DeviceGroup {}

/// Data path of an operation on device memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Path {
    /// The host group.
    Host,
    /// NCCL.
    Nccl,
}

/// Whether a rank is willing to use NCCL.
#[derive(Clone, Debug)]
pub enum NcclPolicy {
    /// With this library.
    On(nccl::Library, ()),
}

impl DeviceGroup {
    /// Wraps the host group of a generation.
    #[must_use]
    pub fn new(_host: HostGroup, device: Device) -> Self {
        match device {}
    }

    /// The group on the host.
    pub fn host(&self) -> &HostGroup {
        match *self {}
    }

    /// The group on the host, for its operations.
    pub fn host_mut(&mut self) -> &mut HostGroup {
        match *self {}
    }

    /// Begins to build NCCL.
    ///
    /// # Errors
    /// None.
    pub fn begin_nccl(&self, _policy: &NcclPolicy) -> Result<(), CollectiveError> {
        match *self {}
    }

    /// The state of NCCL.
    pub fn nccl_state(&self) -> nccl::NcclState {
        match *self {}
    }
}

/// NCCL, without a library.
pub mod nccl {
    /// The library.
    #[derive(Clone, Debug)]
    pub enum Library {}

    /// State of a group's communicator.
    #[derive(Clone, Debug, Eq, PartialEq)]
    pub enum NcclState {
        /// There is none, for this reason.
        Absent(String),
        /// It is being created.
        Building,
        /// It could not be created, for this reason.
        Failed(String),
        /// It may be used.
        Ready,
    }

    impl Library {
        /// Version, in NCCL's encoding.
        pub fn version(&self) -> i32 {
            match *self {}
        }
    }
}
