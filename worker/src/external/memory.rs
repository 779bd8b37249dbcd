//! Where the state of a program's model is.

#[cfg(feature = "gpu")]
use crate::device::{Device, DeviceMemory};
use crate::state_buffer::StateMemory;

/// Where a program wants its parameters and optimizer state to be.
#[derive(Debug)]
pub enum Memory {
    /// In memory of the program on its GPU, with its gradients. If the optimizer's state is
    /// [divided](super::Shape::division), only what the program computes with: the state is in its
    /// memory on the host.
    #[cfg(feature = "gpu")]
    Device(DeviceMemory, Option<StateMemory>),
    /// In memory of the program on the host.
    Host(StateMemory),
    /// Wherever the trainer keeps them on the host.
    Trainer,
}

/// The memory, which the trainer takes when it starts, and the GPU, which stays.
#[derive(Debug, Default)]
pub(super) struct Taken {
    pub(super) host: Option<StateMemory>,
    #[cfg(feature = "gpu")]
    pub(super) on_device: Option<DeviceMemory>,
    #[cfg(feature = "gpu")]
    pub(super) device: Option<Device>,
}

impl From<Memory> for Taken {
    fn from(memory: Memory) -> Self {
        match memory {
            #[cfg(feature = "gpu")]
            Memory::Device(memory, host) => {
                let device = Some(memory.device().clone());
                Self { host, on_device: Some(memory), device }
            }
            Memory::Host(memory) => {
                let mut taken = Self::default();
                taken.host.replace(memory);
                taken
            }
            Memory::Trainer => Self::default(),
        }
    }
}
