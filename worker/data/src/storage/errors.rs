//! Errors of accesses to files, transient or permanent.

use std::error::Error;
use std::io;

use rustix::io::Errno;

use super::cloud;
use super::retry::Transient;

/// Why an access failed.
#[derive(Debug)]
pub(super) enum Failed {
    /// There is no such file.
    NotFound,
    Other(Box<dyn Error + Send + Sync>),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind::{IsADirectory, NotADirectory, NotFound};
        match error.kind() {
            // Nothing exists below a file.
            NotFound | NotADirectory | IsADirectory => Self::NotFound,
            _ => Self::Other(Box::new(error)),
        }
    }
}

/// Whether the same access may succeed later.
pub(super) fn is_transient(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    match error.downcast_ref::<io::Error>() {
        Some(error) => error.is_transient(),
        None => cloud::is_transient(error),
    }
}

/// Whether the store refuses these credentials, or the system this user.
pub(super) fn is_refusal(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    match error.downcast_ref::<io::Error>() {
        Some(error) => error.is_refusal(),
        None => cloud::is_refusal(error),
    }
}

/// A short text for an error.
pub(super) fn reason(error: &(dyn Error + Send + Sync + 'static)) -> String {
    match error.downcast_ref::<io::Error>() {
        Some(error) => error.to_string(),
        None => cloud::reason(error),
    }
}

impl Transient for io::Error {
    /// Errors of a network file system whose server is unreachable, and temporary read errors of a
    /// disk.
    fn is_transient(&self) -> bool {
        let transient = [
            Errno::CONNABORTED,
            Errno::CONNREFUSED,
            Errno::CONNRESET,
            Errno::HOSTDOWN,
            Errno::HOSTUNREACH,
            Errno::IO,
            Errno::NETDOWN,
            Errno::NETRESET,
            Errno::NETUNREACH,
            Errno::NOLINK,
            Errno::NOTCONN,
            Errno::REMOTEIO,
            Errno::SHUTDOWN,
            Errno::STALE,
            Errno::TIMEDOUT,
        ];
        Errno::from_io_error(self).is_some_and(|errno| transient.contains(&errno))
    }

    /// A permission that was changed, or a ticket for a network file system that has expired.
    fn is_refusal(&self) -> bool {
        let refused = [Errno::ACCESS, Errno::KEYEXPIRED, Errno::NOKEY, Errno::PERM];
        Errno::from_io_error(self).is_some_and(|errno| refused.contains(&errno))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reader::DataError;

    #[test]
    fn a_permission_that_is_taken_away_is_an_outage_and_a_missing_file_is_none() {
        let of = |errno: Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        for (errno, is_transient, is_refusal) in [
            (Errno::ACCESS, false, true),
            (Errno::KEYEXPIRED, false, true),
            (Errno::STALE, true, false),
            (Errno::NOENT, false, false),
            (Errno::NOSPC, false, false),
        ] {
            let error = of(errno);
            let found = (error.is_transient(), error.is_refusal());
            assert_eq!(found, (is_transient, is_refusal), "{errno}");
            let error = DataError::Io { path: "a".into(), source: of(errno) };
            assert_eq!(error.is_outage(), is_transient || is_refusal, "{errno}");
        }
    }
}
