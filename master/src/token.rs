//! The job's secret token, which authenticates clients of the master.

use std::fmt;

use ring::hmac;
use subtle::ConstantTimeEq;
use uuid::Uuid;

/// 32 random bytes, drawn for each run of a job.
///
/// **Invariant:** a token is never logged, is compared in constant time, and is stored only in
/// files that their owner alone can read.
#[derive(Clone)]
pub struct Token([u8; BYTES]);

impl Token {
    /// Draws a token from the system's random number generator.
    ///
    /// # Errors
    /// The generator failed.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0; BYTES];
        getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
        Ok(Self(bytes))
    }

    /// Parses the output of [`Token::to_hex`], ignoring surrounding white space. `None` for any
    /// other text.
    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        let digits = text.trim().as_bytes();
        if digits.len() != 2 * BYTES {
            return None;
        }
        let mut bytes = [0; BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (hex_digit(pair[0])? << 4) | hex_digit(pair[1])?;
        }
        Some(Self(bytes))
    }

    /// The token as 64 lower-case hexadecimal digits.
    pub(crate) fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Public id of the run that the token was drawn for, the same for all its masters. The token
    /// cannot be found from it: it is a SHA-1 digest (UUID version 5).
    pub(crate) fn run_id(&self) -> Uuid {
        Uuid::new_v5(&RUNS, &self.0)
    }

    /// A key for one purpose, from which neither the token nor another key can be found
    /// (HMAC-SHA-256).
    pub(crate) fn derive(&self, purpose: &str) -> [u8; BYTES] {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.0);
        let tag = hmac::sign(&key, purpose.as_bytes());
        tag.as_ref().try_into().expect("a tag of SHA-256 has 32 bytes")
    }

    /// Value of the `authorization` metadata of a request.
    #[must_use]
    pub fn to_bearer(&self) -> String {
        format!("{SCHEME}{}", self.to_hex())
    }

    /// Whether `authorization` (`Bearer <hex>`) contains this token. The comparison takes constant
    /// time.
    pub(crate) fn authorizes(&self, authorization: &[u8]) -> bool {
        let Some(digits) = authorization.strip_prefix(SCHEME.as_bytes()) else {
            return false;
        };
        let Some(shown) = str::from_utf8(digits).ok().and_then(Self::from_hex) else {
            return false;
        };
        shown.0.ct_eq(&self.0).into()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

pub(crate) fn hex_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

const BYTES: usize = 32;
const SCHEME: &str = "Bearer ";

/// Namespace of the ids of runs.
const RUNS: Uuid = Uuid::from_u128(0x5d0c_86ab_31f9_4b7e_9c1d_e7a2_4f60_b853);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_tokens_own_digits_authorize() {
        let token = Token::random().unwrap();
        let other = Token::random().unwrap();
        assert!(token.authorizes(token.to_bearer().as_bytes()));
        let bare = token.to_hex();
        let mut last_changed = token.to_bearer();
        let last = if last_changed.pop() == Some('0') { '1' } else { '0' };
        last_changed.push(last);
        let wrong = [
            other.to_bearer(),
            bare,
            last_changed,
            String::new(),
            "Bearer ".into(),
            "Bearer 00".into(),
        ];
        for shown in wrong {
            assert!(!token.authorizes(shown.as_bytes()), "{shown:?}");
        }
        assert!(!token.authorizes(b"Bearer \xff\xff"));
    }

    #[test]
    fn a_token_round_trips_through_its_file_and_is_not_printed() {
        let token = Token::random().unwrap();
        let back = Token::from_hex(&format!("{}\n", token.to_hex())).unwrap();
        assert_eq!(back.0, token.0);
        assert_eq!(format!("{token:?}"), "Token(..)");
        assert_eq!(back.run_id(), token.run_id());
        assert_ne!(Token::random().unwrap().run_id(), token.run_id());
    }
}
