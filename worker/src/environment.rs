//! Environment variables that a launcher passes to a worker process.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elasticdl_proto::Location;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};

/// A worker's identity in a job, as set by its launcher.
#[derive(Clone)]
pub(crate) struct Environment {
    /// Address of the master, `host:port`.
    pub(crate) master: String,
    /// File with another address of the master, `IP:PORT`, which its launcher keeps up to date.
    pub(crate) master_file: Option<PathBuf>,
    pub(crate) job: String,
    pub(crate) launch: u64,
    /// The job's secret, in hexadecimal.
    pub(crate) token: String,
    /// Authentication of the master; `None` for a connection without TLS, as between processes
    /// of one host.
    pub(crate) tls: Option<Tls>,
    /// Time without a master after which this process ends.
    pub(crate) master_timeout: Duration,
    /// Where this process runs.
    pub(crate) location: Location,
    /// The job's directory on this machine, in a local job.
    pub(crate) job_dir: Option<String>,
}

/// Requirements on the certificate that a master presents over TLS.
#[derive(Clone, Debug)]
pub(crate) struct Tls {
    /// CA certificate that must have signed the master's, in PEM.
    pub(crate) ca: String,
    /// DNS name that the master's certificate must contain, whatever address is dialed.
    pub(crate) name: String,
}

impl Tls {
    /// Reads `ELASTICDL_CA_FILE` and `ELASTICDL_MASTER_NAME`.
    fn read(ca_file: Option<String>, name: Option<String>) -> Result<Option<Self>, String> {
        let (ca_file, name) = match (ca_file, name) {
            (Some(ca_file), Some(name)) => (ca_file, name),
            (None, None) => return Ok(None),
            (Some(_), None) => {
                return Err(one_without_the_other("ELASTICDL_CA_FILE", "ELASTICDL_MASTER_NAME"));
            }
            (None, Some(_)) => {
                return Err(one_without_the_other("ELASTICDL_MASTER_NAME", "ELASTICDL_CA_FILE"));
            }
        };
        let ca = read(&ca_file)?;
        check_ca(&ca).map_err(|why| {
            format!(
                "ELASTICDL_CA_FILE: {ca_file} must hold the certificate of the job's CA, in PEM: \
                 {why}"
            )
        })?;
        ServerName::try_from(name.as_str()).map_err(|_| {
            format!(
                "ELASTICDL_MASTER_NAME: `{name}` is not a DNS name; it must be one in the master's \
                 certificate"
            )
        })?;
        Ok(Some(Self { ca, name }))
    }
}

impl std::fmt::Debug for Environment {
    /// Omits the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { master, job, launch, master_timeout, .. } = self;
        write!(
            f,
            "Environment {{ {job} launch {launch}, master {master}, timeout {master_timeout:?} }}"
        )
    }
}

impl Environment {
    /// Reads the variables through `variable` (usually the process's environment).
    ///
    /// # Errors
    /// A description of the missing or invalid variable, for display to the user.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let need = |name: &str| variable(name).ok_or_else(|| format!("{name} is not set"));
        let number = |name: &str| -> Result<u64, String> {
            need(name)?.parse().map_err(|_| format!("{name} is not a number"))
        };
        let token = read(&need("ELASTICDL_TOKEN_FILE")?)?;
        Ok(Self {
            master: need("ELASTICDL_MASTER")?,
            master_file: variable("ELASTICDL_MASTER_FILE").map(PathBuf::from),
            job: need("ELASTICDL_JOB")?,
            launch: number("ELASTICDL_LAUNCH")?,
            token: token.trim().to_string(),
            tls: Tls::read(variable("ELASTICDL_CA_FILE"), variable("ELASTICDL_MASTER_NAME"))?,
            master_timeout: Duration::from_millis(number("ELASTICDL_MASTER_TIMEOUT_MS")?),
            location: Location {
                zone: variable("ELASTICDL_ZONE").unwrap_or_default(),
                rack: variable("ELASTICDL_RACK").unwrap_or_default(),
                node: variable("ELASTICDL_NODE_NAME").unwrap_or_default(),
            },
            job_dir: variable("ELASTICDL_JOB_DIR"),
        })
    }

    /// Address to dial in an attempt (from 0) to reach the master: the address given at the start
    /// or, in every second attempt, that of the file, if it has one.
    pub(crate) fn master_in_attempt(&self, attempt: u64) -> String {
        let other = self.master_file.as_deref().filter(|_| !attempt.is_multiple_of(2));
        let other = other.and_then(|file| std::fs::read_to_string(file).ok());
        let other = other.and_then(|text| text.trim().parse::<SocketAddr>().ok());
        other.map_or_else(|| self.master.clone(), |address| address.to_string())
    }

    /// Time after SIGTERM for which a worker waits until the group releases it, unless its master
    /// sets another.
    pub(crate) fn leave_timeout(&self) -> Duration {
        self.master_timeout.min(Duration::from_secs(5))
    }
}

fn read(path: &str) -> Result<String, String> {
    std::fs::read_to_string(Path::new(path)).map_err(|error| format!("{path}: {error}"))
}

fn one_without_the_other(set: &str, unset: &str) -> String {
    format!("{set} is set and {unset} is not: TLS needs both, and without TLS there is neither")
}

/// Finds errors that a connection would report later and less clearly.
fn check_ca(pem: &str) -> Result<(), String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|error| error.to_string())?;
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    if roots.is_empty() { Err("there is no `BEGIN CERTIFICATE` in it".into()) } else { Ok(()) }
}

/// The job is done, or this worker left in an orderly way.
pub(crate) const EXIT_DONE: u8 = 0;
/// The user's code failed, or the job cannot continue. The master has received the reason.
pub(crate) const EXIT_FAILED: u8 = 1;
/// The program was not started by a launcher, or its environment is invalid.
pub(crate) const EXIT_USAGE: u8 = 2;
/// No master was found, or the master refused this worker.
pub(crate) const EXIT_MASTER_LOST: i32 = 70;
/// The worker was terminated, and the group did not release it in time.
pub(crate) const EXIT_TERMINATED: i32 = 143;

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads these variables, in addition to all required ones.
    fn read_with(set: &[(&str, &str)]) -> Result<Environment, String> {
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        std::fs::write(&token, "abc\n").unwrap();
        Environment::read(|name| {
            let value =
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
            value.or_else(|| match name {
                "ELASTICDL_TOKEN_FILE" => Some(token.to_str().unwrap().into()),
                "ELASTICDL_MASTER" => Some("127.0.0.1:9".into()),
                "ELASTICDL_JOB" => Some("mnist".into()),
                "ELASTICDL_LAUNCH" | "ELASTICDL_MASTER_TIMEOUT_MS" => Some("1".into()),
                _ => None,
            })
        })
    }

    fn ca() -> String {
        let key = rcgen::KeyPair::generate().unwrap();
        rcgen::CertificateParams::default().self_signed(&key).unwrap().pem()
    }

    #[test]
    fn a_missing_variable_is_named() {
        let missing = Environment::read(|_| None).unwrap_err();
        assert_eq!(missing, "ELASTICDL_TOKEN_FILE is not set");
    }

    #[test]
    fn every_second_attempt_dials_the_address_of_the_file_as_it_is_then() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        let environment = read_with(&[("ELASTICDL_MASTER_FILE", path)]).unwrap();
        let dialed = || [0, 1, 2, 3].map(|attempt| environment.master_in_attempt(attempt));
        let given = "127.0.0.1:9";
        assert_eq!(dialed(), [given; 4], "the file is empty");
        std::fs::write(&file, "10.0.0.7:7070\n").unwrap();
        assert_eq!(dialed(), [given, "10.0.0.7:7070", given, "10.0.0.7:7070"]);
        std::fs::write(&file, "[fd00::7]:7070").unwrap();
        assert_eq!(environment.master_in_attempt(1), "[fd00::7]:7070");
        std::fs::write(&file, "no address").unwrap();
        assert_eq!(dialed(), [given; 4]);
        let without = read_with(&[]).unwrap();
        assert_eq!(without.master_in_attempt(1), given);
    }

    #[test]
    fn a_worker_knows_where_it_runs_as_far_as_its_launcher_says() {
        assert_eq!(read_with(&[]).unwrap().location, Location::default());
        let set = [("ELASTICDL_ZONE", "z"), ("ELASTICDL_RACK", ""), ("ELASTICDL_NODE_NAME", "n")];
        let expected = Location { zone: "z".into(), rack: String::new(), node: "n".into() };
        assert_eq!(read_with(&set).unwrap().location, expected);
    }

    #[test]
    fn tls_needs_both_a_ca_and_a_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let ca = ca();
        std::fs::write(&file, &ca).unwrap();
        let path = file.path().to_str().unwrap();
        assert!(read_with(&[]).unwrap().tls.is_none());
        let set = [("ELASTICDL_CA_FILE", path), ("ELASTICDL_MASTER_NAME", "mnist-master")];
        let environment = read_with(&set).unwrap();
        assert_eq!(environment.token, "abc");
        let tls = environment.tls.unwrap();
        assert_eq!((tls.ca, tls.name), (ca, "mnist-master".into()));
        for (alone, other) in [(set[0], "ELASTICDL_MASTER_NAME"), (set[1], "ELASTICDL_CA_FILE")] {
            let error = read_with(&[alone]).unwrap_err();
            assert!(error.contains(&format!("{} is set and {other} is not", alone.0)), "{error}");
        }
    }

    #[test]
    fn an_invalid_ca_is_refused_with_its_file_and_the_expected_format() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        let read_as =
            |name| read_with(&[("ELASTICDL_CA_FILE", path), ("ELASTICDL_MASTER_NAME", name)]);
        let ca = ca();
        let head = "-----BEGIN CERTIFICATE-----\n";
        let key = rcgen::KeyPair::generate().unwrap().serialize_pem();
        let no_certificate = format!("{head}AAAA\n-----END CERTIFICATE-----\n");
        let table = [
            ("", "no `BEGIN CERTIFICATE`"),
            ("hello", "no `BEGIN CERTIFICATE`"),
            (&key, "no `BEGIN CERTIFICATE`"),
            (&ca[..ca.len() / 2], "in PEM: "),
            (&no_certificate, "in PEM: "),
        ];
        for (content, expected) in table {
            std::fs::write(&file, content).unwrap();
            let error = read_as("mnist-master").unwrap_err();
            assert!(
                error.contains(path) && error.contains("in PEM") && error.contains(expected),
                "{error}"
            );
        }
        std::fs::write(&file, &ca).unwrap();
        let error = read_as("a master").unwrap_err();
        assert!(error.contains("`a master` is not a DNS name"), "{error}");
        drop(std::fs::remove_file(&file));
        let error = read_as("mnist-master").unwrap_err();
        assert!(error.contains(path) && error.contains("No such file"), "{error}");
    }
}
