//! A job's own certificates, generated at its submission.
//!
//! **Invariant:** the CA signs one certificate; its private key is never stored, and is dropped
//! when [`Certificates::generate`] returns.

use std::fmt;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
};

/// The certificates by which a job's workers authenticate their master, in PEM.
#[derive(Clone, Default)]
pub struct Certificates {
    /// Certificate of the job's own CA.
    pub ca: String,
    /// Certificate of the master, signed by that CA.
    pub certificate: String,
    /// Private key of the master's certificate.
    pub key: String,
}

/// The certificates could not be generated.
#[derive(Debug, thiserror::Error)]
#[error("can't make the job's certificates: {0}")]
pub struct CertificatesError(#[from] rcgen::Error);

impl Certificates {
    /// Generates the certificates of `job`, whose master has these DNS names. They are valid from a
    /// day ago, because clocks differ, for [`YEARS`].
    ///
    /// # Errors
    /// There are no random bytes, or a name is invalid.
    pub fn generate(job: &str, names: &[String]) -> Result<Self, CertificatesError> {
        let mut params = params(&format!("CA of the elasticdl job {job}"), &[])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let mut params = self::params(&format!("master of the elasticdl job {job}"), names)?;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &ca)?.pem();
        Ok(Self { ca: ca.pem(), certificate, key: key.serialize_pem() })
    }
}

impl fmt::Debug for Certificates {
    /// Omits the private key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificates(..)")
    }
}

fn params(common_name: &str, names: &[String]) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    let now = SystemTime::now();
    params.not_before = (now - DAY).into();
    params.not_after = (now + VALIDITY).into();
    params.distinguished_name = DistinguishedName::new();
    // The standard limits the length (X.520).
    let common_name: String = common_name.chars().take(COMMON_NAME_LEN_MAX).collect();
    params.distinguished_name.push(DnType::CommonName, common_name);
    Ok(params)
}

/// Validity of the certificates, in years.
pub const YEARS: u64 = 10;
const COMMON_NAME_LEN_MAX: usize = 64;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const VALIDITY: Duration = Duration::from_secs(YEARS * 365 * 24 * 60 * 60);
