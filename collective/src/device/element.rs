use cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use half::{bf16, f16};

/// What a device buffer is made of: `f32`, `bf16` or `f16`.
///
/// Halves are summed as f32 and rounded once on the host's path; NCCL sums them as its version sees
/// fit.
pub trait Element:
    DeviceRepr + ValidAsZeroBits + bytemuck::Pod + Send + Sync + sealed::Sealed
{
    /// The element's type, as a value.
    const DTYPE: Dtype;

    /// The same number as f32.
    fn widen(self) -> f32;

    /// The nearest number, ties to even.
    fn round(wide: f32) -> Self;
}

/// The type of a device buffer's elements.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
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
    /// Nothing else can be an element.
    #[expect(unnameable_types, reason = "so that nothing else can implement it")]
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}
