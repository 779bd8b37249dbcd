//! The element types of buffers in GPU memory, and their names in NCCL and on the host path.

use cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use half::{bf16, f16};

/// Element type of a device buffer: `f32`, `bf16` or `f16`.
///
/// On the host path, 16-bit elements are summed as f32 and rounded once. NCCL sums them in the
/// precision that its version uses.
pub trait Element:
    DeviceRepr + ValidAsZeroBits + bytemuck::Pod + Send + Sync + sealed::Sealed
{
    /// Data type as a value.
    const DTYPE: Dtype;

    /// Converts to f32 without loss.
    fn widen(self) -> f32;

    /// Rounds to the nearest representable number, ties to even.
    fn round(wide: f32) -> Self;
}

/// Data type of the elements of a device buffer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// Bytes of any type, which can't be summed.
    Byte,
    /// IEEE 754 binary16.
    F16,
    /// IEEE 754 binary32.
    F32,
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;

    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn round(wide: f32) -> Self {
        Self::from_f32(wide)
    }
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;

    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn round(wide: f32) -> Self {
        Self::from_f32(wide)
    }
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;

    fn widen(self) -> f32 {
        self
    }

    fn round(wide: f32) -> Self {
        wide
    }
}

mod sealed {
    /// Prevents implementations of [`Element`](super::Element) outside this crate.
    #[expect(unnameable_types, reason = "no other type can implement it")]
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}
