//! What the elements of a sum are on their way. Pure.
//!
//! bf16 and f16 halve the bytes. Sums stay f32 where they are added; each time a partial sum leaves
//! a rank, and once more when the total does, it is rounded to the nearest. The rank that owns a
//! chunk keeps what it has sent, not what it had, so that all ranks hold the same bits.
//!
//! With `n` ranks an element is off by at most `n` roundings of the largest partial sum `s` on its
//! way: `n·s/256` for bf16 (8 bits of precision, the range of f32), `n·s/2048` for f16 (11 bits).
//! Above 65504 an f16 is infinite, and so is then the sum, on every rank; what is below 6e-8 is
//! zero.

use half::f16;

mod bf16;
use half::slice::HalfFloatSliceExt;

/// What the elements of a sum are on their way: f32, or rounded to 16 bits each time they leave a
/// rank.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum WireDtype {
    /// 8 bits of precision, the range of f32: an element of a sum over `n` ranks is off by at most
    /// `n/256` of the largest partial sum.
    Bf16,
    /// 11 bits of precision, up to 65504; what is larger is infinite.
    F16,
    /// As it is.
    #[default]
    F32,
}

/// A dtype of 16 bits.
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

    /// Rounds `floats` to the nearest, ties to even. Both are as long.
    pub(crate) fn round(self, floats: &[f32], to: &mut [u16]) {
        match self {
            Self::Bf16 => bf16::round(floats, to),
            Self::F16 => bytemuck::cast_slice_mut::<u16, f16>(to).convert_from_f32_slice(floats),
        }
    }

    /// Puts `own` plus what was rounded into `sum`. All are as long.
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

    /// Puts what was rounded into `floats`. Both are as long.
    pub(crate) fn widen(self, from: &[u16], floats: &mut [f32]) {
        match self {
            Self::Bf16 => bf16::widen(from, floats),
            Self::F16 => bytemuck::cast_slice::<u16, f16>(from).convert_to_f32_slice(floats),
        }
    }
}

/// Elements that stay in the innermost cache.
const TILE_LEN: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_widened_rounds_to_itself_and_f16_has_its_range() {
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
