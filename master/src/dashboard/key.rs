//! The key that opens a job's dashboard.

use std::fmt;
use std::net::SocketAddr;

use elasticdl_proto::bytes_of_hex;
use subtle::ConstantTimeEq as _;

use crate::token::Token;

/// Opens the dashboard of one run of a job, and nothing else: workers need the token itself.
#[derive(Clone)]
pub(crate) struct DashboardKey([u8; BYTES]);

impl DashboardKey {
    /// The key of the job with this token.
    pub(crate) fn of(token: &Token) -> Self {
        let mut key = [0; BYTES];
        key.copy_from_slice(&token.derive("elasticdl dashboard")[..BYTES]);
        Self(key)
    }

    /// The address of the page. The key is in its fragment, which browsers neither send nor log.
    pub(crate) fn link(&self, address: SocketAddr) -> String {
        format!("http://{address}/#{}", self.to_hex())
    }

    fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether `authorization` (`Bearer <hex>`) contains this key. The comparison takes constant
    /// time.
    pub(super) fn authorizes(&self, authorization: &[u8]) -> bool {
        let Some(digits) = authorization.strip_prefix(b"Bearer ") else { return false };
        let Some(shown) = bytes_of_hex::<BYTES>(digits) else { return false };
        shown.ct_eq(&self.0).into()
    }
}

impl fmt::Debug for DashboardKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DashboardKey(..)")
    }
}

const BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_key_of_the_run_opens_its_dashboard() {
        let token = Token::random().unwrap();
        let key = DashboardKey::of(&token);
        let bearer = format!("Bearer {}", key.to_hex());
        assert!(key.authorizes(bearer.as_bytes()));
        assert!(DashboardKey::of(&token).authorizes(bearer.as_bytes()));
        assert!(!DashboardKey::of(&Token::random().unwrap()).authorizes(bearer.as_bytes()));
        let half = &token.to_bearer()["Bearer ".len()..][..2 * BYTES];
        let wrong =
            ["", "Bearer ", key.to_hex().as_str(), &bearer[..bearer.len() - 1], &token.to_bearer()]
                .map(str::to_owned);
        let wrong = wrong.into_iter().chain([format!("Bearer {half}"), bearer.replace('B', "b")]);
        for shown in wrong {
            assert!(!key.authorizes(shown.as_bytes()), "{shown:?}");
        }
        assert!(!token.authorizes(bearer.as_bytes()));
        assert_eq!(format!("{key:?}"), "DashboardKey(..)");
    }

    #[test]
    fn a_link_fits_into_a_line_of_a_terminal() {
        let key = DashboardKey::of(&Token::random().unwrap());
        let link = key.link("127.0.0.1:65535".parse().unwrap());
        assert!(link.len() <= 56, "{link}");
    }
}
