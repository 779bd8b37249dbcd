//! Data type of an all-reduce's elements on the wire. Pure.
//!
//! bf16 and f16 halve the traffic. Sums are added in f32. A partial sum is rounded to nearest each
//! time it is sent, and the total once more. The rank that owns a chunk keeps the rounded values
//! that it has sent, so that all ranks hold the same bits.
//!
//! With `n` ranks the error of an element is at most `n` roundings of the largest partial sum `s`
//! on its path: `n·s/256` for bf16 (8 bits of precision, the range of f32), `n·s/2048` for f16 (11
//! bits). A value above 65504 becomes infinite in f16, and so does the sum, on every rank; a value
//! below 6e-8 becomes zero.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::bf16;

/// Data type of an all-reduce's elements on the wire: f32, or rounded to 16 bits each time they are
/// sent.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum WireDtype {
    /// 8 bits of precision, the range of f32: the error of an element of a sum over `n` ranks is at
    /// most `n/256` of the largest partial sum.
    Bf16,
    /// 11 bits of precision, up to 65504; larger values become infinite.
    F16,
    /// No conversion.
    #[default]
    F32,
}

/// A 16-bit data type.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Half {
    Bf16,
    F16,
}

impl Half {
    pub(crate) fn of(dtype: WireDtype) -> Option<Self> {
        match dtype {
            WireDtype::Bf16 => Some(Self::Bf16),
            WireDtype::F16 => Some(Self::F16),
            WireDtype::F32 => None,
        }
    }

    /// Rounds `floats` to nearest, ties to even. Both slices have the same length.
    pub(crate) fn round(self, floats: &[f32], to: &mut [u16]) {
        match self {
            Self::Bf16 => bf16::round(floats, to),
            Self::F16 => bytemuck::cast_slice_mut::<u16, f16>(to).convert_from_f32_slice(floats),
        }
    }

    /// Writes `own` plus the widened `from` to `sum`. All slices have the same length.
    pub(crate) fn add(self, from: &[u16], own: &[f32], sum: &mut [f32]) {
        let mut tile = [0.0; TILE_LEN];
        let pieces = from.chunks(TILE_LEN).zip(own.chunks(TILE_LEN)).zip(sum.chunks_mut(TILE_LEN));
        for ((from, own), sum) in pieces {
            let tile = &mut tile[..from.len()];
            self.widen(from, tile);
            for ((sum, own), part) in sum.iter_mut().zip(own).zip(tile) {
                *sum = *part + own;
            }
        }
    }

    /// Widens `from` to f32. Both slices have the same length.
    pub(crate) fn widen(self, from: &[u16], floats: &mut [f32]) {
        match self {
            Self::Bf16 => bf16::widen(from, floats),
            Self::F16 => bytemuck::cast_slice::<u16, f16>(from).convert_to_f32_slice(floats),
        }
    }
}

/// Number of elements that stay in the L1 cache.
const TILE_LEN: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_inverts_widening_and_f16_overflows_to_infinity() {
        for half in [Half::Bf16, Half::F16] {
            let all: Vec<u16> = (0..=u16::MAX).collect();
            let (mut floats, mut again) = (vec![0.0; all.len()], vec![0; all.len()]);
            half.widen(&all, &mut floats);
            half.round(&floats, &mut again);
            for (index, float) in floats.iter().enumerate() {
                assert!(again[index] == all[index] || float.is_nan(), "{half:?} {index:#x}");
            }
        }
        let (mut halves, mut floats) = ([0; 3], [0.0; 3]);
        Half::F16.round(&[65504.0, 65520.0, 1e-9], &mut halves);
        Half::F16.widen(&halves, &mut floats);
        assert_eq!(floats, [65504.0, f32::INFINITY, 0.0]);
    }
}
