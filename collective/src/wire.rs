//! What the elements of a sum are on their way. Pure.
//!
//! bf16 and f16 halve the bytes. Sums stay f32 where they are added; each time a partial sum leaves a rank, and once more when
//! the total does, it is rounded to the nearest. The rank that owns a chunk keeps what it has sent, not what it had, so
//! that all ranks hold the same bits.
//!
//! With `n` ranks an element is off by at most `n` roundings of the largest partial sum `s` on its way: `n·s/256` for
//! bf16 (8 bits of precision, the range of f32), `n·s/2048` for f16 (11 bits). Above 65504 an f16 is infinite, and so is then the sum, on
//! every rank; what is below 6e-8 is zero.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// What the elements of a sum are on their way: f32, or rounded to 16 bits each time they leave a rank.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum WireDtype {
    /// 8 bits of precision, the range of f32: an element of a sum over `n` ranks is off by at most `n/256` of the largest partial
    /// sum.
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
            Self::Bf16 => {
                for (to, float) in to.iter_mut().zip(floats) {
                    *to = round_bf16(*float);
                }
            }
            Self::F16 => bytemuck::cast_slice_mut::<u16, f16>(to).convert_from_f32_slice(floats),
        }
    }

    /// Puts what was rounded into `floats`. Both are as long.
    pub(crate) fn widen(self, from: &[u16], floats: &mut [f32]) {
        match self {
            Self::Bf16 => {
                for (float, from) in floats.iter_mut().zip(from) {
                    *float = widen_bf16(*from);
                }
            }
            Self::F16 => bytemuck::cast_slice::<u16, f16>(from).convert_to_f32_slice(floats),
        }
    }
}

/// As `bf16::from_f32`, without a branch, so that it is done for many at once.
fn round_bf16(float: f32) -> u16 {
    let bits = float.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    // A NaN stays one.
    let bits = if float.is_nan() { bits | 0x0040_0000 } else { rounded };
    (bits >> 16) as u16
}

fn widen_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn every_bf16_survives_and_rounding_is_to_the_nearest() {
        for bits in 0..=u16::MAX {
            let float = widen_bf16(bits);
            if float.is_nan() {
                assert!(bf16::from_bits(bits).is_nan() && widen_bf16(round_bf16(float)).is_nan());
                continue;
            }
            assert_eq!(float.to_bits(), bf16::from_bits(bits).to_f32_const().to_bits());
            assert_eq!(round_bf16(float), bits);
            for offset in [1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let between = f32::from_bits(float.to_bits() | offset);
                if between.is_nan() {
                    assert!(widen_bf16(round_bf16(between)).is_nan());
                    continue;
                }
                let expected = bf16::from_f32_const(between);
                assert_eq!(round_bf16(between), expected.to_bits(), "{between:e}");
            }
        }
    }

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
