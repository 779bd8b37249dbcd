//! The directory of one job on this machine.
//!
//! ```text
//! <job>/lock                    held by the running master
//!       token                   the job's secret, mode 0600
//!       master.json             where the running master listens; gone when it has ended
//!       logs/master.log         what the master did
//!       logs/worker-<launch>.log   what one worker printed
//!       job.json, record.json, files.zst, processes   what another master needs to go on: see `kept`
//!       program                 the training program as it was when the job began
//!       checkpoints/            where the job keeps them, unless it was told another place
//!       summary.json            how the job ended
//! ```
//!
//! **Invariant:** whoever holds the lock is the only one that writes here. Files appear whole or
//! not at all.

mod contents;
mod persisted_job;
mod processes;

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::job::LaunchId;
use crate::local::ProcessIdentity;
use crate::token::Token;

pub use contents::{DeleteError, delete};
pub(crate) use persisted_job::note_process;
pub use persisted_job::{AbandonedJob, JobStart, PersistedJobFile, ResumeError, is_abandoned};
use processes::refuse_if_workers_live;
pub use processes::{StopError, StopTarget, is_running, stop};

/// The directory of a job that this process runs; holds its lock.
#[derive(Debug)]
pub struct JobDir {
    root: PathBuf,
    token: Token,
    /// The lock goes with the file, however this process ends.
    _lock: File,
}

impl JobDir {
    /// Makes `root` the directory of a new run: takes its lock, clears what an earlier run left,
    /// draws a token.
    ///
    /// # Errors
    /// [`JobDirError`]; nothing has been cleared then, nor written to a directory that is no job's.
    pub fn create(root: &Path) -> Result<Self, JobDirError> {
        contents::check_usable(root)?;
        let refused = |source| JobDirError::Create { path: root.into(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(root).map_err(refused)?;
        let root = root.canonicalize().map_err(refused)?;
        let lock = take_lock(&root)?;
        refuse_if_workers_live(&root)?;
        let logs = root.join(LOGS);
        let write = |path: &Path, source| JobDirError::Write { path: path.into(), source };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&logs)
            .map_err(|e| write(&logs, e))?;
        for stale in contents::stale_files(&root).map_err(|e| write(&root, e))? {
            fs::remove_file(&stale).map_err(|e| write(&stale, e))?;
        }
        let token_path = root.join(TOKEN);
        let token = Token::random().map_err(|e| write(&token_path, e))?;
        write_atomically(&token_path, token.to_hex().as_bytes())
            .map_err(|e| write(&token_path, e))?;
        Ok(Self { root, token, _lock: lock })
    }

    /// Checks that [`JobDir::create`] would take `root`, and writes nothing.
    ///
    /// # Errors
    /// [`JobDirError`].
    pub fn check(root: &Path) -> Result<(), JobDirError> {
        contents::check_usable(root)?;
        if is_running(root) {
            return Err(running(root));
        }
        refuse_if_workers_live(root)
    }

    /// The directory, absolute.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The job's secret.
    #[must_use]
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Where workers read the secret.
    #[must_use]
    pub fn token_path(&self) -> PathBuf {
        self.root.join(TOKEN)
    }

    /// Where logs are.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.root.join(LOGS)
    }

    /// Where masters say what they do.
    #[must_use]
    pub fn master_log(&self) -> PathBuf {
        self.logs().join(MASTER_LOG)
    }

    /// Where the job's copy of the training program is.
    #[must_use]
    pub fn program_path(&self) -> PathBuf {
        self.root.join(PROGRAM)
    }

    /// Where the summary is written when the job has ended.
    #[must_use]
    pub fn summary_path(&self) -> PathBuf {
        self.root.join(SUMMARY)
    }

    /// Tells commands where this job's master listens, until the directory is dropped.
    ///
    /// # Errors
    /// [`JobDirError::Write`].
    pub fn publish(&self, address: SocketAddr) -> Result<(), JobDirError> {
        let path = self.root.join(MASTER);
        let pid = std::process::id();
        let started = ProcessIdentity::look_up(pid).map(|started| started.start_ticks);
        let endpoint = Endpoint { address, pid, started };
        let json = serde_json::to_vec(&endpoint).expect("an address and a number are valid JSON");
        write_atomically(&path, &json).map_err(|source| JobDirError::Write { path, source })
    }
}

impl Drop for JobDir {
    fn drop(&mut self) {
        // Best effort: a command that finds a stale one gets no answer at its address and says so.
        let _ = fs::remove_file(self.root.join(MASTER));
    }
}

/// Why a directory can't be a job's.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobDirError {
    /// Its master is gone, but workers of it still train. Go on with the job, or tell them to end.
    #[error(
        "the master of the job in {} is gone, but {workers} {} of it still {}; go on with the job by\n    \
         elasticdl train --resume {3}\nor end it by\n    elasticdl stop {3}",
        path.display(),
        if *workers == 1 { "worker" } else { "workers" },
        if *workers == 1 { "trains" } else { "train" },
        quoted(path)
    )]
    Abandoned {
        /// The directory.
        path: PathBuf,
        /// How many workers live.
        workers: usize,
    },
    /// It can't be made. Choose another, or make its parent writable.
    #[error("can't create the job directory {}: {source}; choose another with --job-dir", path.display())]
    Create {
        /// The directory.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
    /// It holds what is not a job's. Choose another.
    #[error(
        "{} is not a job's directory, and not empty: {} is in it; give --job-dir an empty folder, a job's, or one that is \
         not there yet, for example {}",
        path.display(), found.display(), path.join("job").display()
    )]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// Something in it.
        found: PathBuf,
    },
    /// A master runs in it. Wait for it, stop it, or choose another name or directory.
    #[error(
        "a job is already running in {}{}; stop it first, or choose another --job-name or --job-dir",
        path.display(), pid.map(|pid| format!(" (master process {pid})")).unwrap_or_default()
    )]
    Running {
        /// The directory.
        path: PathBuf,
        /// The master's process, if it has said so already.
        pid: Option<u32>,
    },
    /// A file in it can't be written.
    #[error("can't write {}: {source}; choose another directory with --job-dir", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
}

/// Where a running master listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Its gRPC server.
    pub address: SocketAddr,
    /// Its process.
    pub pid: u32,
    /// When that was started, in the system's ticks since it came up; unknown where an older
    /// program has written it.
    #[serde(default)]
    pub started: Option<u64>,
}

/// Finds the master of the job whose directory is `root`, and the secret to speak to it with.
///
/// # Errors
/// [`LookupError`].
pub fn look_up(root: &Path) -> Result<(Endpoint, Token), LookupError> {
    if !contents::is_job_dir(root) {
        return Err(LookupError::NoSuchJob { path: root.into() });
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

/// Why a job's master was not found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LookupError {
    /// No job ever ran there. Check the name.
    #[error("no such job: {} is not a job's directory", path.display())]
    NoSuchJob {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// It ran, and has ended.
    #[error(
        "the job in {} is not running{}", path.display(),
        summary.as_ref().map(|p| format!("; how it ended is in {}", p.display())).unwrap_or_default()
    )]
    NotRunning {
        /// Its directory.
        path: PathBuf,
        /// Its summary, if it came to write one.
        summary: Option<PathBuf>,
    },
    /// A file of it can't be read. Jobs can be asked by the user who started them.
    #[error("can't read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
}

/// Where jobs' directories are by default: `elasticdl` in the user's state directory, or
/// `.elasticdl` here if the environment names neither a state directory nor a home.
#[must_use]
pub fn default_root() -> PathBuf {
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map_or_else(|| PathBuf::from(".elasticdl"), |state| state.join("elasticdl"))
}

/// Replaces `path` with `bytes`, readable by its owner alone: a reader, or a crash at any time,
/// sees the old file or the new one.
///
/// # Errors
/// The system's; the old file is still there.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_and_rename(path, bytes, File::sync_all)
}

/// As [`write_atomically`], but a crash of the whole machine may lose the new file, or what is in
/// it.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_and_rename(path, bytes, |_| Ok(()))
}

fn write_and_rename(
    path: &Path,
    bytes: &[u8],
    sync: impl Fn(&File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = temporary_beside(path)?;
    let written = create_new(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        sync(&file)
    });
    written.and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        // It may not have been created at all.
        let _ = fs::remove_file(&temporary);
    })
}

/// Whether [`write_atomically`] would work for `path` now; leaves nothing behind.
///
/// # Errors
/// Why it would not.
pub fn check_writable(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
    }
    let temporary = temporary_beside(path)?;
    create_new(&temporary)?;
    fs::remove_file(&temporary)
}

fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// A name in the same directory (so that a rename is atomic), drawn at random: process ids are not
/// unique where several containers share a folder.
fn temporary_beside(path: &Path) -> io::Result<PathBuf> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    let mut hidden = OsString::from(".");
    hidden.push(name);
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    hidden.push(format!(".{:016x}.tmp", u64::from_ne_bytes(random)));
    Ok(path.with_file_name(hidden))
}

fn take_lock(root: &Path) -> Result<File, JobDirError> {
    let path = root.join(LOCK);
    let options = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).clone();
    let file =
        options.open(&path).map_err(|source| JobDirError::Create { path: root.into(), source })?;
    let mut attempts = LOCK_ATTEMPTS;
    loop {
        attempts -= 1;
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(source)) => return Err(JobDirError::Write { path, source }),
            Err(TryLockError::WouldBlock) if attempts == 0 => return Err(running(root)),
            // Another command may be looking whether a master runs.
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
        }
    }
}

fn running(root: &Path) -> JobDirError {
    let pid = look_up(root).ok().map(|(endpoint, _)| endpoint.pid);
    JobDirError::Running { path: root.into(), pid }
}

/// A path as a shell takes it.
pub(crate) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@%,".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

/// The name of one worker's log file.
#[must_use]
pub fn worker_log(logs: &Path, launch: LaunchId) -> PathBuf {
    logs.join(format!("worker-{}.log", launch.0))
}

/// Where a job keeps checkpoints that has no other place for them.
pub(crate) const CHECKPOINTS: &str = "checkpoints";
const FILES: &str = "files.zst";
const JOB: &str = "job.json";
const LOCK: &str = "lock";
const LOCK_ATTEMPTS: u32 = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(10);
const LOGS: &str = "logs";
const MASTER: &str = "master.json";
const MASTER_LOG: &str = "master.log";
const PROCESSES: &str = "processes";
const PROGRAM: &str = "program";
const RECORD: &str = "record.json";
const SUMMARY: &str = "summary.json";
const TOKEN: &str = "token";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn scratch() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn names(path: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(path)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_directory_has_one_master_at_a_time() {
        let scratch = scratch();
        let root = scratch.path().join("job");
        let first = JobDir::create(&root).unwrap();
        first.publish("127.0.0.1:1".parse().unwrap()).unwrap();
        let pid = std::process::id();
        assert!(
            matches!(JobDir::create(&root), Err(JobDirError::Running { pid: Some(p), .. }) if p == pid)
        );
        drop(first);
        assert!(JobDir::create(&root).is_ok());
    }

    #[test]
    fn a_published_master_is_found_until_it_ends() {
        let scratch = scratch();
        let root = scratch.path().join("job");
        assert!(matches!(look_up(&root), Err(LookupError::NoSuchJob { .. })));
        let dir = JobDir::create(&root).unwrap();
        assert!(matches!(look_up(&root), Err(LookupError::NotRunning { summary: None, .. })));
        let address = "127.0.0.1:4711".parse().unwrap();
        dir.publish(address).unwrap();
        let (endpoint, token) = look_up(&root).unwrap();
        let started =
            ProcessIdentity::look_up(std::process::id()).map(|started| started.start_ticks);
        assert!(started.is_some());
        assert_eq!(endpoint, Endpoint { address, pid: std::process::id(), started });
        assert_eq!(token.to_hex(), dir.token().to_hex());
        write_atomically(&dir.summary_path(), b"{}").unwrap();
        drop(dir);
        assert!(matches!(look_up(&root), Err(LookupError::NotRunning { summary: Some(_), .. })));
    }

    #[test]
    fn a_new_run_starts_clean_with_a_token_of_its_own() {
        let scratch = scratch();
        let dir = JobDir::create(scratch.path()).unwrap();
        let before = dir.token().to_hex();
        fs::write(worker_log(&dir.logs(), LaunchId(3)), "old").unwrap();
        write_atomically(&dir.summary_path(), b"old").unwrap();
        drop(dir);
        let dir = JobDir::create(scratch.path()).unwrap();
        assert_ne!(dir.token().to_hex(), before);
        assert_eq!(names(dir.path()), ["lock", "logs", "token"]);
        assert!(names(&dir.logs()).is_empty());
    }

    #[test]
    fn the_token_is_readable_by_its_owner_alone() {
        let scratch = scratch();
        let dir = JobDir::create(&scratch.path().join("job")).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&dir.token_path()), mode(dir.path())), (0o600, 0o700));
    }

    #[test]
    fn a_path_is_quoted_where_a_shell_would_take_it_apart() {
        assert_eq!(quoted(Path::new("/tmp/job-1.a")), "/tmp/job-1.a");
        assert_eq!(quoted(Path::new("/tmp/it's a $job")), r"'/tmp/it'\''s a $job'");
    }

    #[test]
    fn a_file_is_replaced_whole_and_leaves_no_trace_of_a_failure() {
        let scratch = scratch();
        let path = scratch.path().join("summary.json");
        write_atomically(&path, b"one").unwrap();
        // A reader that opened the old file keeps it whole: the new one has another inode.
        let mut old = File::open(&path).unwrap();
        write_atomically(&path, b"two").unwrap();
        let mut text = String::new();
        io::Read::read_to_string(&mut old, &mut text).unwrap();
        assert_eq!((text.as_str(), fs::read_to_string(&path).unwrap().as_str()), ("one", "two"));
        let folder = scratch.path().join("folder");
        fs::create_dir(&folder).unwrap();
        assert!(write_atomically(&folder, b"three").is_err());
        assert!(write_atomically(&scratch.path().join("absent/file"), b"three").is_err());
        assert_eq!(names(scratch.path()), ["folder", "summary.json"]);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_refused_with_its_name() {
        let scratch = scratch();
        let file = scratch.path().join("file");
        fs::write(&file, "").unwrap();
        let error = JobDir::create(&file.join("job")).unwrap_err().to_string();
        assert!(error.contains("file/job") && error.contains("--job-dir"), "{error}");
        assert!(check_writable(&file.join("summary.json")).is_err());
        assert!(check_writable(scratch.path()).is_err());
        assert!(check_writable(&scratch.path().join("summary.json")).is_ok());
        assert_eq!(names(scratch.path()), ["file"]);
    }
}
