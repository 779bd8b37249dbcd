//! The kind of device that a model computes on, as users select it.

use std::str::FromStr;

use candle_core::Device;

use crate::metrics::UserError;

/// Kind of device that a model computes on, as users select it: `cpu`, `cuda` or `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Place {
    /// An NVIDIA GPU, if the program is built for one and there is one; else the CPU.
    Auto,
    /// The CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl Place {
    /// Opens the device. Workers on one machine are assigned its GPUs round-robin.
    ///
    /// # Errors
    /// There is no GPU, or the program is not built for one.
    pub fn open(self) -> Result<Device, UserError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            #[cfg(feature = "cuda")]
            Self::Auto => match crate::device::Device::count() {
                Ok(1..) => Self::Cuda.open(),
                Ok(0) | Err(_) => Ok(Device::Cpu),
            },
            #[cfg(feature = "cuda")]
            Self::Cuda => Ok(Device::new_cuda_with_stream(crate::device::ordinal()?)?),
            #[cfg(not(feature = "cuda"))]
            Self::Auto => Ok(Device::Cpu),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => Err("this program is built without CUDA: build it with \
                               `--features cuda` and the CUDA toolkit"
                .into()),
        }
    }
}

impl FromStr for Place {
    type Err = ParsePlaceError;

    fn from_str(text: &str) -> Result<Self, ParsePlaceError> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            _ => Err(ParsePlaceError(text.to_owned())),
        }
    }
}

/// A text that names no [`Place`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a device; use cpu, cuda or auto")]
pub struct ParsePlaceError(String);
