//! The job's secret token, which authenticates clients of the master.

use std::fmt;

use elasticdl_proto::{TOKEN_BYTES, bytes_of_hex, run_id};
use ring::hmac;
use subtle::ConstantTimeEq;
use uuid::Uuid;

/// 32 random bytes, drawn for each run of a job.
///
/// **Invariant:** a token is never logged, is compared in constant time, and is stored only in
/// files that their owner alone can read.
#[derive(Clone)]
pub struct Token([u8; TOKEN_BYTES]);

impl Token {
    /// Draws a token from the system's random number generator.
    ///
    /// # Errors
    /// The generator failed.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
        Ok(Self(bytes))
    }

    /// Parses the output of [`Token::to_hex`], ignoring surrounding white space. `None` for any
    /// other text.
    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        bytes_of_hex(text.trim().as_bytes()).map(Self)
    }

    /// The token as 64 lower-case hexadecimal digits.
    pub(crate) fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Public id of the run that the token was drawn for, the same for all its masters.
    #[must_use]
    pub fn run_id(&self) -> Uuid {
        run_id(&self.0)
    }

    /// A key for one purpose, from which neither the token nor another key can be found
    /// (HMAC-SHA-256).
    pub(crate) fn derive(&self, purpose: &str) -> [u8; TOKEN_BYTES] {
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

const SCHEME: &str = "Bearer ";

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
