//! The public id of a job's run, which follows from the token that was drawn for the run.

use uuid::Uuid;

/// Public id of the run that `token` was drawn for, the same for all its masters. The token cannot
/// be found from it: it is a SHA-1 digest (UUID version 5).
#[must_use]
pub fn run_id(token: &[u8; TOKEN_BYTES]) -> Uuid {
    Uuid::new_v5(&RUNS, token)
}

/// The bytes that lower-case hexadecimal `digits` stand for; `None` for any other text.
#[must_use]
pub fn bytes_of_hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = (hex_digit(pair[0])? << 4) | hex_digit(pair[1])?;
    }
    Some(bytes)
}

fn hex_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

/// Bytes of a job's token.
pub const TOKEN_BYTES: usize = 32;
/// Namespace of the ids of runs.
const RUNS: Uuid = Uuid::from_u128(0x5d0c_86ab_31f9_4b7e_9c1d_e7a2_4f60_b853);
