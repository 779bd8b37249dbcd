//! The job's secret, and the keys that are derived from it.

use std::fmt;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

/// Secret of the job; authenticates both sides of every link. It is never sent, and `Debug` does
/// not show it.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Creates a secret from its bytes; an [`Endpoint`](crate::Endpoint) refuses an empty one.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// Returns a number that identifies this secret for this purpose, and reveals nothing about it.
    #[must_use]
    pub fn fingerprint(&self, purpose: &str) -> u32 {
        let [a, b, c, d, ..] = self.derive(purpose);
        u32::from_be_bytes([a, b, c, d])
    }

    /// Returns the key with which links are authenticated.
    pub(crate) fn link_key(&self) -> [u8; 32] {
        self.derive("elasticdl link: pre-shared key of the handshake")
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn derive(&self, purpose: &str) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key may have any length");
        mac.update(purpose.as_bytes());
        mac.finalize().into_bytes().into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_depends_on_secret_and_purpose_alone() {
        let of = |secret: &str, purpose| Secret::new(secret).fingerprint(purpose);
        assert_eq!(of("a", "x"), of("a", "x"));
        assert!(of("a", "x") != of("b", "x") && of("a", "x") != of("a", "y"));
    }
}
