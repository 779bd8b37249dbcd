use std::str::FromStr;

use candle_core::Device;

use crate::model::UserError;

/// Where a model computes, as its users choose it: `cpu`, `cuda`, or `auto`, which is a GPU where
/// there is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Place {
    /// A GPU of NVIDIA where the program is built for one and there is one; else the CPU.
    Auto,
    /// The CPU.
    #[default]
    Cpu,
    /// A GPU of NVIDIA.
    Cuda,
}

impl Place {
    /// The device. Workers on one machine take its GPUs in turn.
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
            Self::Cuda => Err("this program is built without CUDA: build it with `--features cuda`, where the CUDA toolkit is".into()),
        }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            _ => Err(format!("`{text}` is no device; it is cpu, cuda or auto")),
        }
    }
}
