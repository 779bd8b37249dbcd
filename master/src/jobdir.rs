//! The directory of one job on this machine.
//!
//! ```text
//! <job>/lock                    held by the running master
//!       token                   the job's secret, mode 0600
//!       master.json             address of the running master; removed at its end
//!       ca.crt, master.crt, master.key   for TLS, if the master listens on the network
//!       logs/master.log         log of the masters
//!       logs/worker-<number>.log   output of one worker; .log.1: what it had when it was long
//!       job.json, record.json, record.spare, files.zst, processes   the persisted job: see
//!                               `persisted_job`
//!       program                 copy of the training program, made at the job's start
//!       checkpoints/            the job's checkpoints, unless another location was chosen
//!       history.json            curves and lifetimes of workers, for the dashboard and the report
//!       summary.json            result of the job
//!       best.safetensors, model.safetensors   models that could not be exported to their places
//!       earlier/                the files of the job that this one replaces, until it has started
//!       refused/                the files of the newest job that could not start
//! ```
//!
//! **Invariant:** only the process that holds the lock writes here. Files are written atomically.

mod aside;
mod certificates;
mod contents;
mod deletion;
mod earlier;
mod error;
mod files;
mod guard;
mod lock;
mod lookup;
mod names;
pub mod neighbours;
mod notes;
mod owner;
mod persisted_job;
mod process_identity;
mod processes;
mod program_copy;
mod record_file;
mod start_time;

use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use tracing::warn;

pub use self::certificates::MASTER_DNS_NAME;
pub use self::certificates::ca_path;
pub use self::contents::{complete_checkpoints, is_own_file};
pub use self::deletion::{DeleteError, delete};
pub use self::earlier::{EarlierJob, earlier_job, has_begun};
pub use self::error::{JobDirError, ResumeError};
pub use self::files::{CHECKPOINTS, quoted, write_output, write_summary};
use self::files::{EXPORTS, HISTORY, LOGS, MASTER, MASTER_LOG, PROGRAM, SUMMARY, TOKEN};
pub use self::files::{check_writable, is_another_file, write_atomically};
use self::lock::{running, take_lock};
pub use self::lookup::{Endpoint, LookupError, look_up, started_at};
pub(crate) use self::notes::note_process;
pub use self::owner::Owner;
pub(crate) use self::persisted_job::read_start;
pub use self::persisted_job::{
    AbandonedJob, JobStart, PersistedJobFile, is_abandoned, read_record, working_folder,
};
pub use self::process_identity::ProcessIdentity;
use self::processes::refuse_if_workers_live;
pub use self::processes::{StopError, StopTarget, count_workers, is_running, stop};
pub use self::program_copy::ProgramCopy;
pub(crate) use self::program_copy::ProgramSource;
pub use self::start_time::StartTime;
use crate::job::LaunchId;
pub use crate::persisted_format::OtherFormat;
use crate::token::Token;

/// The directory of a job that this process runs; holds its lock.
#[derive(Debug)]
pub struct JobDir {
    root: PathBuf,
    token: Token,
    owner: Owner,
    /// The lock is released with the file, however this process ends.
    _lock: File,
}

impl JobDir {
    /// Makes `root` the directory of a new run: takes its lock, and generates a token. The files of
    /// an earlier run are removed, or set aside if it has trained anything.
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
        // A job that was killed at its start has left it so.
        aside::restore(&root).map_err(|e| write(&root, e))?;
        if earlier_job(&root).is_some() {
            aside::set_aside(&root).map_err(|e| write(&root, e))?;
        } else {
            for stale in contents::stale_files(&root).map_err(|e| write(&root, e))? {
                fs::remove_file(&stale).map_err(|e| write(&stale, e))?;
            }
        }
        let token_path = root.join(TOKEN);
        let token = Token::random().map_err(|e| write(&token_path, e))?;
        write_atomically(&token_path, token.to_hex().as_bytes())
            .map_err(|e| write(&token_path, e))?;
        Ok(Self { owner: Owner::of(&root), root, token, _lock: lock })
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

    /// The models that their own places have not taken, at least so far.
    #[must_use]
    pub fn unexported_models(&self) -> Vec<PathBuf> {
        let models = EXPORTS.iter().map(|name| self.root.join(name));
        models.filter(|model| model.is_file()).collect()
    }

    /// The job of this directory.
    #[must_use]
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Path of the job's history, which is written now and then, and at the job's end.
    #[must_use]
    pub fn history_path(&self) -> PathBuf {
        history_path(&self.root)
    }

    /// Removes the files of the job that this one replaces, at the end of one that has started.
    pub fn forget_earlier(&self) {
        if let Err(error) = aside::forget(&self.root) {
            warn!(%error, "the files of the earlier job are not removed");
        }
    }

    /// Ends a job that could not start: the directory is that of the earlier job again. Returns the
    /// folder with the files of this one; `None` if it replaces no job, or has started.
    pub fn restore_earlier(&self) -> Option<PathBuf> {
        aside::restore(&self.root).unwrap_or_else(|error| {
            warn!(%error, "the files of the earlier job are not moved back");
            None
        })
    }

    /// Publishes the address of the master, and that of its dashboard, to commands, until the
    /// directory is dropped.
    ///
    /// # Errors
    /// [`JobDirError::Write`].
    pub fn publish(
        &self,
        address: SocketAddr,
        dashboard: Option<SocketAddr>,
    ) -> Result<(), JobDirError> {
        let path = self.root.join(MASTER);
        let pid = std::process::id();
        let failed = |source| JobDirError::Write { path: path.clone(), source };
        let own = ProcessIdentity::look_up(pid)
            .ok_or_else(|| failed(io::Error::other("/proc does not have this process")))?;
        let endpoint = Endpoint { address, pid, started: own.start_ticks, dashboard };
        let json = serde_json::to_vec(&endpoint).expect("an address and a number are valid JSON");
        write_atomically(&path, &json).map_err(failed)
    }
}

impl Drop for JobDir {
    fn drop(&mut self) {
        if self.owner.is_replaced() {
            return;
        }
        // Best effort: a command that finds a stale file gets no answer at its address and reports
        // that.
        let _ = fs::remove_file(self.root.join(MASTER));
    }
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
        names::resolve(&default_root(), job)
    }
}

/// Makes `name` the name of the job in `root`, which may be anywhere, for commands.
///
/// # Errors
/// For the user, why commands don't find the job by this name.
pub(crate) fn register(name: &str, root: &Path) -> Result<(), String> {
    names::register(&default_root(), name, root)
}

/// Removes the name at `link`, a path in the default root, if its job is gone.
pub fn forget_deleted(link: &Path) {
    names::forget_deleted(link);
}

/// Returns the path of the history of the job in `root`.
#[must_use]
pub fn history_path(root: &Path) -> PathBuf {
    root.join(HISTORY)
}

/// Returns the path of a worker's log.
#[must_use]
pub fn worker_log(logs: &Path, launch: LaunchId) -> PathBuf {
    logs.join(format!("worker-{}.log", launch.0))
}

#[cfg(test)]
mod tests {
    use std::io;
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
        first.publish("127.0.0.1:1".parse().unwrap(), None).unwrap();
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
        dir.publish(address, Some(address)).unwrap();
        let (endpoint, token) = look_up(&root).unwrap();
        let started = ProcessIdentity::look_up(std::process::id()).unwrap().start_ticks;
        assert_eq!(
            endpoint,
            Endpoint { address, pid: std::process::id(), started, dashboard: Some(address) }
        );
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
    fn an_output_to_a_device_or_a_pipe_is_written_to_it_and_does_not_replace_it() {
        let scratch = scratch();
        let pipe = scratch.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o600.into()).unwrap();
        check_writable(&pipe).unwrap();
        assert!(write_output(&pipe, b"x").is_err(), "it has no reader");
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read_to_string(pipe).unwrap()
        });
        // Until the reader has opened it.
        while write_output(&pipe, b"summary").is_err() {
            std::thread::yield_now();
        }
        assert_eq!(reader.join().unwrap(), "summary");
        assert_eq!(names(scratch.path()), ["pipe"]);
        let null = Path::new("/dev/null");
        check_writable(null).unwrap();
        write_output(null, b"x").unwrap();
        assert!(!null.is_file());
        let (file, link) = (scratch.path().join("file"), scratch.path().join("link"));
        write_output(&file, b"x").unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        write_output(&link, b"y").unwrap();
        assert!(link.is_symlink() && fs::read(&file).unwrap() == b"y");
        assert_eq!(names(scratch.path()), ["file", "link", "pipe"]);
    }

    #[test]
    fn a_directory_within_that_of_another_job_is_refused() {
        let scratch = scratch();
        let outer = JobDir::create(&scratch.path().join("job")).unwrap();
        for inner in ["inner", "logs/../a/b", "checkpoints"] {
            let error = JobDir::create(&outer.path().join(inner)).unwrap_err();
            assert!(matches!(error, JobDirError::Nested { .. }), "{error}");
        }
        assert!(JobDir::create(&scratch.path().join("other")).is_ok());
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
    fn a_summary_replaces_a_summary_and_no_file_of_another_kind() {
        let scratch = scratch();
        let path = scratch.path().join("file");
        let is_another = |text: &str| {
            fs::write(&path, text).unwrap();
            is_another_file(&path)
        };
        assert!(!is_another_file(&path) && !is_another_file(Path::new("/dev/null")));
        assert!(!is_another(""), "as mktemp makes it");
        let summary = crate::job::Job::new(crate::job::testing::spec()).summary(Default::default());
        assert!(!is_another(&summary.to_pretty_json()));
        for other in ["1\n2\n", "{}", "[1]", "{\"job\": \"a\", \"state\": \"b\"}"] {
            assert!(is_another(other), "{other}");
        }
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
