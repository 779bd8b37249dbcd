//! The directory of one job on this machine.
//!
//! ```text
//! <job>/lock                    held by the running master
//!       token                   the job's secret, mode 0600
//!       master.json             address of the running master; removed at its end
//!       logs/master.log         log of the masters
//!       logs/worker-<launch>.log   output of one worker
//!       job.json, record.json, files.zst, processes   the persisted job: see `persisted_job`
//!       program                 copy of the training program, made at the job's start
//!       checkpoints/            the job's checkpoints, unless another location was chosen
//!       summary.json            result of the job
//! ```
//!
//! **Invariant:** only the process that holds the lock writes here. Files are written atomically.

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
    /// The lock is released with the file, however this process ends.
    _lock: File,
}

impl JobDir {
    /// Makes `root` the directory of a new run: takes its lock, removes the files of an earlier
    /// run, and generates a token.
    ///
    /// # Errors
    /// [`JobDirError`]; then no file was removed, and none was written to a directory that is not a
    /// job's.
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

    /// Checks that [`JobDir::create`] would accept `root`. Writes nothing.
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

    /// Absolute path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The job's secret.
    #[must_use]
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Path of the secret's file, which workers read.
    #[must_use]
    pub fn token_path(&self) -> PathBuf {
        self.root.join(TOKEN)
    }

    /// Path of the folder of logs.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.root.join(LOGS)
    }

    /// Path of the masters' log.
    #[must_use]
    pub fn master_log(&self) -> PathBuf {
        self.logs().join(MASTER_LOG)
    }

    /// Path of the job's copy of the training program.
    #[must_use]
    pub fn program_path(&self) -> PathBuf {
        self.root.join(PROGRAM)
    }

    /// Path of the summary, which is written at the job's end.
    #[must_use]
    pub fn summary_path(&self) -> PathBuf {
        self.root.join(SUMMARY)
    }

    /// Publishes the master's address to commands, until the directory is dropped.
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
        // Best effort: a command that finds a stale file gets no answer at its address and reports
        // that.
        let _ = fs::remove_file(self.root.join(MASTER));
    }
}

/// Why a directory can't be used for a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobDirError {
    /// Its master has died, but workers of it still train. Resume the job, or stop its workers.
    #[error(
        "the master of the job in {} has died, but {workers} {} of it still {}; \
         resume the job by\n    \
         elasticdl train --resume {3}\nor stop it by\n    elasticdl stop {3}",
        path.display(),
        if *workers == 1 { "worker" } else { "workers" },
        if *workers == 1 { "trains" } else { "train" },
        quoted(path)
    )]
    Abandoned {
        /// The directory.
        path: PathBuf,
        /// Number of running workers.
        workers: usize,
    },
    /// It can't be created. Choose another, or make its parent writable.
    #[error(
        "can't create the job directory {}: {source}; choose another with --job-dir",
        path.display()
    )]
    Create {
        /// The directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// It contains files that are not a job's. Choose another.
    #[error(
        "{} is not a job's directory, and not empty: it contains {}; give --job-dir \
         an empty folder, a job's, or one that does not exist yet, for example {}",
        path.display(), found.display(), path.join("job").display()
    )]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// One of these files.
        found: PathBuf,
    },
    /// A master runs in it. Wait for it, stop it, or choose another name or directory.
    #[error(
        "a job is already running in {}{}; \
         stop it first, or choose another --job-name or --job-dir",
        path.display(), pid.map(|pid| format!(" (master process {pid})")).unwrap_or_default()
    )]
    Running {
        /// The directory.
        path: PathBuf,
        /// Process id of the master, if it has published it.
        pid: Option<u32>,
    },
    /// A file in it can't be written.
    #[error("can't write {}: {source}; choose another directory with --job-dir", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Address of a running master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    /// Address of its gRPC server.
    pub address: SocketAddr,
    /// Its process id.
    pub pid: u32,
    /// Start time of the process, in clock ticks since boot. `None` if an older version has written
    /// the file.
    #[serde(default)]
    pub started: Option<u64>,
}

/// Finds the master of the job whose directory is `root`, and the secret with which it is accessed.
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

/// Default folder of jobs' directories: `elasticdl` in the user's state directory, or `.elasticdl`
/// in the working directory if the environment names neither a state directory nor a home.
#[must_use]
pub fn default_root() -> PathBuf {
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map_or_else(|| PathBuf::from(".elasticdl"), |state| state.join("elasticdl"))
}

/// Directory of the job that the user names: a path as it is, or a name below the default root.
#[must_use]
pub fn directory_of(job: &Path) -> PathBuf {
    if job.as_os_str().as_encoded_bytes().contains(&b'/') || job == Path::new(".") {
        job.into()
    } else {
        default_root().join(job)
    }
}

/// Atomically replaces `path` with `bytes`, readable by its owner only. A reader, also after a
/// crash, sees either the old file or the new one.
///
/// # Errors
/// An error of the operating system; the old file is unchanged.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_and_rename(path, bytes, File::sync_all)
}

/// Like [`write_atomically`], but a crash of the machine may lose the new file or its content.
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
        // The file may not have been created at all.
        let _ = fs::remove_file(&temporary);
    })
}

/// Checks that [`write_atomically`] would succeed for `path` now. Leaves no file behind.
///
/// # Errors
/// Why it would fail.
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

/// Returns a random name in the same directory, so that a rename is atomic. Process ids are not
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
            // Another command may be checking whether a master runs.
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
        }
    }
}

fn running(root: &Path) -> JobDirError {
    let pid = look_up(root).ok().map(|(endpoint, _)| endpoint.pid);
    JobDirError::Running { path: root.into(), pid }
}

/// Quotes a path for a shell, if necessary.
pub(crate) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@%,".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

/// Returns the path of a worker's log.
#[must_use]
pub fn worker_log(logs: &Path, launch: LaunchId) -> PathBuf {
    logs.join(format!("worker-{}.log", launch.0))
}

/// Folder of the checkpoints of a job without another location for them.
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
        let Err(JobDirError::Running { pid: found, .. }) = JobDir::create(&root) else { panic!() };
        assert_eq!(found, Some(pid));
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
    fn a_new_run_starts_with_an_empty_directory_and_a_new_token() {
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
    fn a_path_is_quoted_where_a_shell_would_split_it() {
        assert_eq!(quoted(Path::new("/tmp/job-1.a")), "/tmp/job-1.a");
        assert_eq!(quoted(Path::new("/tmp/it's a $job")), r"'/tmp/it'\''s a $job'");
    }

    #[test]
    fn a_file_is_replaced_atomically_and_a_failure_leaves_no_temporary_file() {
        let scratch = scratch();
        let path = scratch.path().join("summary.json");
        write_atomically(&path, b"one").unwrap();
        // A reader that has opened the old file keeps all of it: the new one has another inode.
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
    fn a_directory_that_cannot_be_created_is_named_in_the_error() {
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

    #[test]
    fn a_job_with_a_slash_is_a_directory() {
        assert_eq!(directory_of(Path::new("./mnist")), Path::new("./mnist"));
        assert!(
            directory_of(Path::new("mnist")).ends_with("elasticdl/mnist")
                || directory_of(Path::new("mnist")).ends_with(".elasticdl/mnist")
        );
    }
}
