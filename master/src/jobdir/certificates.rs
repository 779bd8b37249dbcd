//! The certificates of a job whose master listens on the network.
//!
//! **Invariant:** the private key is readable by the job's owner alone, and stays the same for all
//! masters of a run, so that workers and commands trust a master that takes the job over.

use std::io;
use std::path::{Path, PathBuf};

use super::JobDir;
use super::error::JobDirError;
use super::files::{CA, CERTIFICATE, KEY, write_atomically};
use crate::certificates::Certificates;
use crate::listener::{Identity, IdentityError};

/// DNS name in the certificate of a local job's master, whatever its address.
pub const MASTER_DNS_NAME: &str = "elasticdl-master";

impl JobDir {
    /// Generates the certificates of `job`, with which its masters serve TLS from now on.
    ///
    /// # Errors
    /// [`JobDirError::Write`].
    pub(crate) fn create_certificates(&self, job: &str) -> Result<(), JobDirError> {
        let failed = |path: &Path, source| JobDirError::Write { path: path.into(), source };
        let ca = self.root.join(CA);
        let Certificates { ca: ca_pem, certificate, key } =
            Certificates::generate(job, &[MASTER_DNS_NAME.to_owned()])
                .map_err(|error| failed(&ca, io::Error::other(error)))?;
        // The CA comes last: where it is, the others are.
        for (name, pem) in [(KEY, key), (CERTIFICATE, certificate), (CA, ca_pem)] {
            let path = self.root.join(name);
            write_atomically(&path, pem.as_bytes()).map_err(|source| failed(&path, source))?;
        }
        Ok(())
    }

    /// The TLS identity of the job's masters; `None` if they serve without TLS.
    ///
    /// # Errors
    /// The files can't be read, or were changed.
    pub(crate) fn identity(&self) -> Result<Option<Identity>, IdentityError> {
        let [certificate, key] = [CERTIFICATE, KEY].map(|name| self.root.join(name));
        ca_path(&self.root).map(|_| Identity::read(&certificate, &key)).transpose()
    }

    /// Path of the certificate of the job's CA, which its workers read; `None` without TLS.
    #[must_use]
    pub fn ca_path(&self) -> Option<PathBuf> {
        ca_path(&self.root)
    }
}

/// Path of the CA's certificate of the job in `root`; `None` if its masters serve without TLS.
pub fn ca_path(root: &Path) -> Option<PathBuf> {
    Some(root.join(CA)).filter(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_certificates_of_a_run_are_private_and_end_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("job");
        let dir = JobDir::create(&root).unwrap();
        assert!(dir.identity().unwrap().is_none() && dir.ca_path().is_none());
        dir.create_certificates("mnist").unwrap();
        assert!(dir.identity().unwrap().is_some());
        assert_eq!(ca_path(&root), dir.ca_path());
        for name in [CA, CERTIFICATE, KEY] {
            let mode = root.join(name).metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        drop(dir);
        // The next run may listen on the loopback interface.
        let dir = JobDir::create(&root).unwrap();
        assert!(dir.identity().unwrap().is_none());
        dir.create_certificates("mnist").unwrap();
        drop(dir);
        assert_eq!(crate::jobdir::delete(&root).unwrap(), Vec::<PathBuf>::new());
    }
}
