//! Numbers of the fake NCCL's data types.

/// The numbers in these bytes.
pub fn numbers(dtype: u8, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|half| u16::from_le_bytes([half[0], half[1]]));
    match dtype {
        BFLOAT16 => halves().map(|half| f32::from_bits(u32::from(half) << 16)).collect(),
        FLOAT16 => halves().map(widen).collect(),
        _ => {
            bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
        }
    }
}

/// The bytes of a number.
pub fn encode(dtype: u8, number: f32) -> Vec<u8> {
    match dtype {
        BFLOAT16 => {
            let bits = number.to_bits();
            let rounded = if number.is_nan() { bits } else { bits + 0x7fff + (bits >> 16 & 1) };
            ((rounded >> 16) as u16).to_le_bytes().to_vec()
        }
        FLOAT16 => round(number).to_le_bytes().to_vec(),
        _ => number.to_le_bytes().to_vec(),
    }
}

fn widen(half: u16) -> f32 {
    let (sign, exponent, fraction) =
        (half >> 15, i32::from(half >> 10 & 31), f32::from(half & 1023));
    let size = match exponent {
        0 => fraction * 2_f32.powi(-24),
        31 => {
            if fraction == 0.0 {
                f32::INFINITY
            } else {
                f32::NAN
            }
        }
        _ => (1.0 + fraction / 1024.0) * 2_f32.powi(exponent - 15),
    };
    if sign == 1 { -size } else { size }
}

fn round(number: f32) -> u16 {
    let sign = u16::from(number.is_sign_negative()) << 15;
    let size = number.abs();
    if !(size < 65_520.0) {
        return sign | if size.is_nan() { 0x7e00 } else { 0x7c00 };
    }
    let exponent = (size.log2().floor() as i32).max(-14);
    let steps = (size / 2_f32.powi(exponent - 10)).round_ties_even() as u16;
    sign | (((exponent + 14) as u16) << 10) + steps
}

pub const FLOAT16: u8 = 6;
pub const FLOAT32: u8 = 7;
pub const BFLOAT16: u8 = 9;
