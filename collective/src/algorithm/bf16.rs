//! Conversion to bf16 and back, vectorized.
//!
//! The loops are portable; on a processor with AVX2, a second version compiled for it is used. With
//! the additions in the same pass, and nothing widened twice, 4 ranks on 2 cores took 35 ms outside
//! the kernel for a sum of 16 MiB, and 38 ms before; the rest is memory bandwidth. Sums of f32 are
//! limited by memory bandwidth alone, and have no second version.

#![allow(unsafe_code, reason = "calls functions compiled for AVX2 after a runtime check")]

/// Rounds `floats` to nearest, ties to even. Both slices have the same length.
pub(super) fn round(floats: &[f32], to: &mut [u16]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { round_avx2(floats, to) };
    }
    round_all(floats, to);
}

/// Widens `from` to f32. Both slices have the same length.
pub(super) fn widen(from: &[u16], floats: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { widen_avx2(from, floats) };
    }
    widen_all(from, floats);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn round_avx2(floats: &[f32], to: &mut [u16]) {
    round_all(floats, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn widen_avx2(from: &[u16], floats: &mut [f32]) {
    widen_all(from, floats);
}

#[inline(always)]
fn round_all(floats: &[f32], to: &mut [u16]) {
    for (to, float) in to.iter_mut().zip(floats) {
        *to = round_one(*float);
    }
}

#[inline(always)]
fn widen_all(from: &[u16], floats: &mut [f32]) {
    for (float, from) in floats.iter_mut().zip(from) {
        *float = widen_one(*from);
    }
}

/// Like `half::bf16::from_f32`, without a branch, so that the loop vectorizes.
#[inline(always)]
fn round_one(float: f32) -> u16 {
    let bits = float.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    // A NaN stays a NaN.
    let bits = if float.is_nan() { bits | 0x0040_0000 } else { rounded };
    (bits >> 16) as u16
}

#[inline(always)]
fn widen_one(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn every_bf16_survives_and_rounding_is_to_the_nearest() {
        let all: Vec<u16> = (0..=u16::MAX).step_by(if cfg!(miri) { 251 } else { 1 }).collect();
        let mut floats = vec![0.0; all.len()];
        widen(&all, &mut floats);
        for (bits, float) in all.iter().zip(&floats) {
            if float.is_nan() {
                assert!(bf16::from_bits(*bits).is_nan());
                continue;
            }
            assert_eq!(float.to_bits(), bf16::from_bits(*bits).to_f32_const().to_bits());
        }
        for offset in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let between: Vec<f32> =
                floats.iter().map(|float| f32::from_bits(float.to_bits() | offset)).collect();
            let (mut rounded, mut plain) = (vec![0; all.len()], vec![0; all.len()]);
            round(&between, &mut rounded);
            round_all(&between, &mut plain);
            assert_eq!(rounded, plain);
            for (rounded, between) in rounded.into_iter().zip(between) {
                if between.is_nan() {
                    assert!(bf16::from_bits(rounded).is_nan());
                } else {
                    assert_eq!(rounded, bf16::from_f32_const(between).to_bits(), "{between:e}");
                }
            }
        }
    }
}
