//! Where the master of a job listens.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::contents;
use super::files::{MASTER, SUMMARY, TOKEN};
use crate::token::Token;

/// Address of a running master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Address of its gRPC server.
    pub address: SocketAddr,
    /// Its process id.
    pub pid: u32,
    /// Start time of the process, in clock ticks since boot.
    pub started: u64,
    /// Address of its dashboard, if it serves one.
    pub dashboard: Option<SocketAddr>,
}

/// Finds the master of the job whose directory is `root`, and the secret with which it is accessed.
///
/// # Errors
/// [`LookupError`].
pub fn look_up(root: &Path) -> Result<(Endpoint, Token), LookupError> {
    if !contents::is_job_dir(root) {
        return Err(match fs::read_dir(root) {
            // The directory of another user.
            Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
                LookupError::Unreadable { path: root.into(), source }
            }
            _ => LookupError::NoSuchJob { path: root.into() },
        });
    }
    let read = |name| {
        let path = root.join(name);
        fs::read_to_string(&path).map_err(|source| LookupError::Unreadable { path, source })
    };
    let endpoint = match read(MASTER) {
        Ok(text) => text,
        Err(LookupError::Unreadable { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            let summary = Some(root.join(SUMMARY)).filter(|path| path.is_file());
            return Err(LookupError::NotRunning { path: root.into(), summary });
        }
        Err(error) => return Err(error),
    };
    let malformed = |name, reason: &str| {
        let source = io::Error::new(io::ErrorKind::InvalidData, reason);
        LookupError::Unreadable { path: root.join(name), source }
    };
    let endpoint =
        serde_json::from_str(&endpoint).map_err(|e| malformed(MASTER, &e.to_string()))?;
    let token = Token::from_hex(&read(TOKEN)?).ok_or_else(|| malformed(TOKEN, "not a token"))?;
    Ok((endpoint, token))
}

/// Time at which the job in `root` was started: its token is written once.
#[must_use]
pub fn started_at(root: &Path) -> Option<SystemTime> {
    fs::metadata(root.join(TOKEN)).ok()?.modified().ok()
}

/// Why a job's master was not found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LookupError {
    /// No job ever ran there. Check the name.
    #[error("no such job: {} is not a job's directory", path.display())]
    NoSuchJob {
        /// Directory that was searched.
        path: PathBuf,
    },
    /// The job has ended.
    #[error(
        "the job in {} is not running{}", path.display(),
        summary.as_ref()
            .map(|p| format!("; its summary is in {}", p.display())).unwrap_or_default()
    )]
    NotRunning {
        /// Directory of the job.
        path: PathBuf,
        /// Path of its summary, if there is one.
        summary: Option<PathBuf>,
    },
    /// A file of the job can't be read. Only the user who started the job has access.
    #[error("can't read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Error of the operating system, or of the parser.
        source: io::Error,
    },
}
