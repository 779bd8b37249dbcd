//! Configuration of the master's server: listener, token and TLS identity.

use std::error::Error;
use std::fmt;
use std::path::Path;

use tokio::net::TcpListener;
use tonic::transport;
use tonic::transport::ServerTlsConfig;

use crate::limits::AUTHENTICATION_TIMEOUT;
use crate::token::Token;

/// Configuration of a master's server.
#[derive(Debug)]
pub struct ServerConfig {
    /// Listener of the server.
    pub listener: TcpListener,
    /// Token that each client must present.
    pub token: Token,
    /// TLS identity; `None` for plain TCP, as between processes of one machine.
    pub identity: Option<Identity>,
}

/// The TLS identity of a server: a certificate and its private key.
#[derive(Clone)]
pub struct Identity(transport::Server);

/// Why a certificate and a key form no [`Identity`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct IdentityError(String);

impl Identity {
    /// Builds an identity from PEM texts: the certificate, followed by any intermediate
    /// certificates, and its key.
    ///
    /// # Errors
    /// A text is malformed, or the key belongs to another certificate.
    pub fn from_pem(certificate: &str, key: &str) -> Result<Self, IdentityError> {
        let identity = transport::Identity::from_pem(certificate, key);
        let config = ServerTlsConfig::new().identity(identity).timeout(AUTHENTICATION_TIMEOUT);
        let server = transport::Server::builder().tls_config(config);
        server.map(Self).map_err(|error| {
            // The display text of the error itself is generic; its source holds the reason.
            IdentityError(error.source().map_or_else(|| error.to_string(), ToString::to_string))
        })
    }

    /// Reads an identity from two PEM files.
    ///
    /// # Errors
    /// A file can't be read, or as [`Identity::from_pem`]; the text names the files.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, IdentityError> {
        let read = |what: &str, path: &Path| {
            std::fs::read_to_string(path).map_err(|e| {
                IdentityError(format!("can't read the {what} {}: {e}", path.display()))
            })
        };
        let pem = (read("TLS certificate", certificate)?, read("TLS key", key)?);
        Self::from_pem(&pem.0, &pem.1).map_err(|IdentityError(why)| {
            let (certificate, key) = (certificate.display(), key.display());
            IdentityError(format!(
                "{certificate} and {key} are no TLS certificate (PEM) with its key (PEM, PKCS #8): \
                 {why}"
            ))
        })
    }

    /// A server builder with this identity.
    pub(crate) fn into_server(self) -> transport::Server {
        self.0
    }
}

impl fmt::Debug for Identity {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificates::Certificates;

    #[test]
    fn an_invalid_identity_is_refused_with_the_reason() {
        let [ours, other] = [(); 2].map(|()| Certificates::generate("j", &["m".into()]).unwrap());
        let broken = ours.key.replace("PRIVATE KEY", "SECRET");
        let table = [
            (ours.certificate.as_str(), broken.as_str()),
            (&ours.certificate, &other.key),
            ("", &ours.key),
            (&ours.key, &ours.certificate),
        ];
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = (folder.path().join("a.crt"), folder.path().join("a.key"));
        for (certificate_pem, key_pem) in table {
            std::fs::write(&certificate, certificate_pem).unwrap();
            std::fs::write(&key, key_pem).unwrap();
            let error = Identity::read(&certificate, &key).unwrap_err().to_string();
            assert!(error.contains("a.crt and ") && error.contains("PKCS #8"), "{error}");
            assert!(!error.contains(ours.key.lines().nth(1).unwrap()), "{error}");
        }
        std::fs::write(&key, &ours.key).unwrap();
        std::fs::write(&certificate, &ours.certificate).unwrap();
        assert_eq!(format!("{:?}", Identity::read(&certificate, &key).unwrap()), "Identity(..)");
        std::fs::remove_file(&key).unwrap();
        let error = Identity::read(&certificate, &key).unwrap_err().to_string();
        assert!(error.contains("can't read the TLS key") && error.contains("a.key"), "{error}");
    }
}
