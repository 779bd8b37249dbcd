//! Persists a job in its directory, so that another master can resume it.
//!
//! ```text
//!  job.json      how the job was started: written once
//!  record.json   state of the job's core: replaced at each change, before any message about it
//!  files.zst     the list of the data set's files, compressed: written once
//!  processes     one line per started process: launch, process id, start time
//! ```
//!
//! **Invariant:** record.json is never older than what a worker has been sent: if it can't be
//! replaced, it is removed.
//!
//! Writes are not synced to disk. If they are lost, the whole machine has crashed, and the workers
//! are lost too; if only the master dies, the operating system still writes them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use elasticdl_proto::{FileLimits, FileList};
use serde::{Deserialize, Serialize};
use tracing::error;

use super::{FILES, JOB, JobDir, JobDirError, PROCESSES, RECORD, SUMMARY, replace, take_lock};
use crate::job::{DatasetFingerprint, LaunchId, PersistedJob};
use crate::local::{ProcessIdentity, ProgramCopy};
use crate::token::Token;

/// How a job was started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobStart {
    /// Path of the training program.
    pub program: OsString,
    /// Arguments of the program.
    pub args: Vec<OsString>,
    /// Working directory of the command and of the workers.
    pub folder: OsString,
    /// Address at which workers connect to their master.
    pub address: SocketAddr,
    /// Time for which workers wait for a master.
    pub master_timeout: Duration,
    /// Additional path of the summary, chosen by the user.
    pub summary: Option<OsString>,
    /// Address at which metrics are served, if any.
    #[serde(default)]
    pub metrics: Option<SocketAddr>,
    /// Folder of events for TensorBoard, if any.
    #[serde(default)]
    pub tensorboard_dir: Option<OsString>,
    /// Start time of the job.
    pub began: SystemTime,
    /// The program's file at that time, and the job's copy of it, if one could be made.
    #[serde(default)]
    pub copy: Option<ProgramCopy>,
}

/// A job whose master has died.
#[derive(Debug)]
pub struct AbandonedJob {
    /// How it was started.
    pub start: JobStart,
    /// Its persisted state.
    pub record: PersistedJob,
    /// The processes that were started, as far as they were noted.
    pub processes: BTreeMap<LaunchId, ProcessIdentity>,
}

/// The file with the state of the job's core.
#[derive(Debug)]
pub struct PersistedJobFile {
    path: PathBuf,
    /// The list of files that is stored next to it.
    stored: Option<DatasetFingerprint>,
    failed: bool,
}

impl PersistedJobFile {
    /// Replaces the persisted state. A failure is logged: the job continues, but can't be resumed.
    pub(crate) fn write(&mut self, job: &PersistedJob) {
        let json = serde_json::to_vec(&Versioned { version: RECORD_VERSION, content: job })
            .expect("the keys of a job are strings");
        let written = self.write_list(job).and_then(|()| replace(&self.path, &json));
        let Err(failure) = written else {
            self.failed = false;
            return;
        };
        // The old state would lead to a reuse of generations.
        let removed = fs::remove_file(&self.path);
        if !std::mem::replace(&mut self.failed, true) {
            let path = self.path.display();
            let removed = removed.is_ok();
            error!(%path, error = %failure, removed, "can't persist the job; it can't be resumed");
        }
    }
}

impl PersistedJobFile {
    /// Writes the list of files to which the state refers, if it is not stored yet.
    fn write_list(&mut self, job: &PersistedJob) -> io::Result<()> {
        if let Some(list) = job.file_list()
            && self.stored != Some(DatasetFingerprint::of(list))
        {
            replace(&self.path.with_file_name(FILES), list.packed())?;
            self.stored = Some(DatasetFingerprint::of(list));
        }
        Ok(())
    }
}

impl JobDir {
    /// Persists how the job was started.
    ///
    /// # Errors
    /// [`JobDirError::Write`].
    pub fn persist_start(&self, start: &JobStart) -> Result<(), JobDirError> {
        let path = self.root.join(JOB);
        let json = serde_json::to_vec_pretty(&Versioned { version: VERSION, content: start })
            .expect("a start's keys are strings");
        replace(&path, &json).map_err(|source| JobDirError::Write { path, source })
    }

    /// Returns the file with the state of the job's core.
    #[must_use]
    pub fn persisted_job_file(&self) -> PersistedJobFile {
        PersistedJobFile { path: self.root.join(RECORD), stored: None, failed: false }
    }

    /// Path of the file in which started processes are noted.
    #[must_use]
    pub fn processes_path(&self) -> PathBuf {
        self.root.join(PROCESSES)
    }

    /// Takes over the directory of a job whose master has died. Changes nothing in it.
    ///
    /// # Errors
    /// [`ResumeError`].
    pub fn resume(root: &Path) -> Result<(Self, AbandonedJob), ResumeError> {
        if !super::contents::is_job_dir(root) {
            return Err(ResumeError::NoSuchJob { path: root.into() });
        }
        let root = root.canonicalize().map_err(|source| ResumeError::Unreadable {
            path: root.into(),
            reason: source.to_string(),
        })?;
        let lock = take_lock(&root).map_err(|error| match error {
            JobDirError::Running { path, pid } => ResumeError::Running { path, pid },
            other => ResumeError::Unreadable { path: root.clone(), reason: other.to_string() },
        })?;
        let summary = root.join(SUMMARY);
        if summary.is_file() {
            return Err(ResumeError::Ended { path: root, summary });
        }
        let start = read(&root, JOB, VERSION)?;
        let mut record: PersistedJob = read(&root, RECORD, RECORD_VERSION)?;
        if record.data().is_some() {
            let list = read_list(&root)?;
            let unreadable = |reason| ResumeError::Unreadable { path: root.join(FILES), reason };
            record.attach_file_list(list).map_err(unreadable)?;
        }
        let unreadable =
            |name, reason: String| ResumeError::Unreadable { path: root.join(name), reason };
        let processes =
            read_notes(&root).map_err(|error| unreadable(PROCESSES, error.to_string()))?;
        let token = fs::read_to_string(root.join(super::TOKEN))
            .map_err(|e| unreadable(super::TOKEN, e.to_string()))?;
        let token = Token::from_hex(&token)
            .ok_or_else(|| unreadable(super::TOKEN, "not a token".into()))?;
        Ok((Self { root, token, _lock: lock }, AbandonedJob { start, record, processes }))
    }
}

/// Returns whether the job in `root` has not ended and has no master, so that it can be resumed.
#[must_use]
pub fn is_abandoned(root: &Path) -> bool {
    let is_persisted =
        root.join(JOB).is_file() && root.join(RECORD).is_file() && !root.join(SUMMARY).is_file();
    // The lock is released immediately.
    is_persisted && take_lock(root).is_ok()
}

/// Notes in the file at `path` that `launch` runs.
pub(crate) fn note_process(
    path: &Path,
    launch: LaunchId,
    started: ProcessIdentity,
) -> io::Result<()> {
    let line = format!("{} {} {}\n", launch.0, started.pid, started.start_ticks);
    // One write of a short line is atomic.
    fs::File::options().append(true).create(true).open(path)?.write_all(line.as_bytes())
}

/// Reads the processes that were noted in the directory `root`.
pub(super) fn read_notes(root: &Path) -> io::Result<BTreeMap<LaunchId, ProcessIdentity>> {
    match fs::read_to_string(root.join(PROCESSES)) {
        Ok(notes) => Ok(notes.lines().filter_map(parse_note).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error),
    }
}

fn parse_note(line: &str) -> Option<(LaunchId, ProcessIdentity)> {
    let mut fields = line.split(' ');
    let mut next = || fields.next()?.parse::<u64>().ok();
    let (launch, pid, at) = (next()?, next()?, next()?);
    Some((LaunchId(launch), ProcessIdentity { pid: u32::try_from(pid).ok()?, start_ticks: at }))
}

fn read_list(root: &Path) -> Result<FileList, ResumeError> {
    let path = root.join(FILES);
    let unlimited =
        FileLimits { files: usize::MAX, path_bytes: u32::MAX as usize, records: u64::MAX };
    let list = fs::read(&path).map_err(|error| error.to_string());
    let list =
        list.and_then(|bytes| FileList::unpack(bytes.into(), unlimited).map_err(|e| e.to_string()));
    list.map_err(|reason| ResumeError::Unreadable { path, reason })
}

/// Reads a file of version `newest` or older.
fn read<T: serde::de::DeserializeOwned>(
    root: &Path,
    name: &str,
    newest: u32,
) -> Result<T, ResumeError> {
    let path = root.join(name);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ResumeError::NotPersisted { path: root.into() });
        }
        Err(error) => return Err(ResumeError::Unreadable { path, reason: error.to_string() }),
    };
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let unreadable = |error: serde_json::Error| ResumeError::Unreadable {
        path: path.clone(),
        reason: error.to_string(),
    };
    // Only the version is common to all versions.
    let Version { version } = serde_json::from_slice(&text).map_err(unreadable)?;
    if !(1..=newest).contains(&version) {
        return Err(ResumeError::OtherVersion { path, version, newest });
    }
    let Versioned { content, .. } = serde_json::from_slice(&text).map_err(unreadable)?;
    Ok(content)
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    version: u32,
    content: T,
}

/// Why a job can't be resumed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// It has ended. Start another one.
    #[error("the job in {} has ended; its summary is in {}", path.display(), summary.display())]
    Ended {
        /// Directory of the job.
        path: PathBuf,
        /// Path of its summary.
        summary: PathBuf,
    },
    /// No job ever ran there. Check the path.
    #[error("no such job: {} is not a job's directory", path.display())]
    NoSuchJob {
        /// Directory that was searched.
        path: PathBuf,
    },
    /// Its master died before it had started a worker, or could not write. Start the job again.
    #[error("the job in {} left nothing to resume; start it again", path.display())]
    NotPersisted {
        /// Directory of the job.
        path: PathBuf,
    },
    /// Another version of this program has written the file in another format. Resume with the
    /// version that started the job.
    #[error(
        "{} is of version {version}, and this program reads versions up to {newest}; \
         resume with the program that \
         started the job, or a newer one", path.display()
    )]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// Version of the file.
        version: u32,
        /// Newest version that can be read.
        newest: u32,
    },
    /// Its master still runs. Leave it running.
    #[error(
        "the job in {} is still running{}; there is nothing to resume",
        path.display(), pid.map(|pid| format!(" (master process {pid})")).unwrap_or_default()
    )]
    Running {
        /// Directory of the job.
        path: PathBuf,
        /// Process id of the master, if it has published it.
        pid: Option<u32>,
    },
    /// A file of it can't be read, or has been changed. JobStart the job again.
    #[error("can't resume from {}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// Version of the files; incremented when an older program could not read them correctly.
const VERSION: u32 = 1;
/// Version of the persisted state. Version 1 contained the list of files.
const RECORD_VERSION: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use crate::job::testing::spec;

    fn start() -> JobStart {
        JobStart {
            program: "/bin/model".into(),
            args: vec!["--deep".into()],
            folder: "/data".into(),
            address: "127.0.0.1:4711".parse().unwrap(),
            master_timeout: Duration::from_secs(30),
            summary: None,
            metrics: Some("127.0.0.1:4712".parse().unwrap()),
            tensorboard_dir: None,
            began: SystemTime::UNIX_EPOCH + Duration::from_secs(7),
            copy: None,
        }
    }

    fn persisted(root: &Path) -> JobDir {
        let dir = JobDir::create(root).unwrap();
        dir.persist_start(&start()).unwrap();
        dir.persisted_job_file().write(&Job::new(spec()).to_persisted());
        dir
    }

    #[test]
    fn the_state_that_a_dead_master_persisted_is_loaded_by_the_next() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = persisted(scratch.path());
        let (token, log) =
            (dir.token().to_hex(), super::super::worker_log(&dir.logs(), LaunchId(1)));
        fs::write(&log, "output").unwrap();
        note_process(
            &dir.processes_path(),
            LaunchId(1),
            ProcessIdentity { pid: 70, start_ticks: 9 },
        )
        .unwrap();
        note_process(
            &dir.processes_path(),
            LaunchId(2),
            ProcessIdentity { pid: 71, start_ticks: 10 },
        )
        .unwrap();
        // A torn line is ignored.
        fs::File::options()
            .append(true)
            .open(dir.processes_path())
            .unwrap()
            .write_all(b"3 72")
            .unwrap();
        drop(dir);
        let (dir, abandoned) = JobDir::resume(scratch.path()).unwrap();
        assert_eq!(dir.token().to_hex(), token);
        assert_eq!((abandoned.start, abandoned.record), (start(), Job::new(spec()).to_persisted()));
        let processes = [
            (LaunchId(1), ProcessIdentity { pid: 70, start_ticks: 9 }),
            (LaunchId(2), ProcessIdentity { pid: 71, start_ticks: 10 }),
        ];
        assert_eq!(abandoned.processes, BTreeMap::from(processes));
        assert_eq!(fs::read_to_string(log).unwrap(), "output");
    }

    #[test]
    fn the_list_of_files_is_written_once_and_another_list_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = persisted(scratch.path());
        let record = crate::job::testing::largest().to_persisted();
        let list = record.file_list().unwrap().clone();
        let mut file = dir.persisted_job_file();
        file.write(&record);
        let path = scratch.path().canonicalize().unwrap().join(FILES);
        fs::remove_file(&path).unwrap();
        file.write(&record);
        assert!(!path.exists(), "it is written at each change");
        drop(dir);
        let unreadable = |text: &str| {
            let error = JobDir::resume(scratch.path()).unwrap_err().to_string();
            assert!(error.contains(FILES) && error.contains(text), "{error}");
        };
        unreadable("No such file");
        fs::write(&path, "{}").unwrap();
        unreadable("damaged");
        fs::write(&path, FileList::pack([("other", 7)]).packed()).unwrap();
        unreadable("not the one that the job was started with: it has 1 files with 7 records");
        fs::write(&path, list.packed()).unwrap();
        let (dir, abandoned) = JobDir::resume(scratch.path()).unwrap();
        assert!(abandoned.record == record);
        drop(dir);
        // The format of version 1.
        fs::remove_file(&path).unwrap();
        let mut old: serde_json::Value =
            serde_json::from_slice(&fs::read(scratch.path().join(RECORD)).unwrap()).unwrap();
        old["version"] = 1.into();
        old["content"].as_object_mut().unwrap().remove("data");
        let file = serde_json::json!({"path": "file-0", "records": 200_000_000});
        old["content"]["dataset"] = serde_json::json!({"files": [file]});
        fs::write(scratch.path().join(RECORD), old.to_string()).unwrap();
        let (_dir, abandoned) = JobDir::resume(scratch.path()).unwrap();
        assert_eq!(abandoned.record.file_list(), Some(&list));
    }

    #[test]
    fn only_an_unfinished_job_without_a_master_is_resumed() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("job");
        assert!(matches!(JobDir::resume(&root), Err(ResumeError::NoSuchJob { .. })));
        drop(JobDir::create(&root).unwrap());
        assert!(matches!(JobDir::resume(&root), Err(ResumeError::NotPersisted { .. })));
        let dir = persisted(&root);
        assert!(matches!(JobDir::resume(&root), Err(ResumeError::Running { .. })));
        assert!(!is_abandoned(&root));
        drop(dir);
        assert!(is_abandoned(&root));
        fs::write(root.join(SUMMARY), "{}").unwrap();
        assert!(matches!(JobDir::resume(&root), Err(ResumeError::Ended { .. })));
        assert!(!is_abandoned(&root));
        fs::remove_file(root.join(SUMMARY)).unwrap();
        for (name, text) in [(RECORD, "{"), (JOB, "{\"version\": 1}"), (JOB, "[]")] {
            let before = fs::read(root.join(name)).unwrap();
            fs::write(root.join(name), text).unwrap();
            let error = JobDir::resume(&root).unwrap_err();
            assert!(matches!(error, ResumeError::Unreadable { .. }), "{error}");
            fs::write(root.join(name), before).unwrap();
        }
        fs::write(root.join(RECORD), "{\"version\": 3, \"unheard\": []}").unwrap();
        assert!(matches!(JobDir::resume(&root), Err(ResumeError::OtherVersion { version: 3, .. })));
    }

    #[test]
    fn a_persisted_job_that_cannot_be_replaced_is_removed() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = persisted(scratch.path());
        let mut file = dir.persisted_job_file();
        // A folder that is not empty can't be replaced, even by root.
        fs::remove_file(&file.path).unwrap();
        fs::create_dir_all(file.path.join("in the way")).unwrap();
        file.write(&Job::new(spec()).to_persisted());
        assert!(file.failed);
        fs::remove_dir_all(&file.path).unwrap();
        file.write(&Job::new(spec()).to_persisted());
        assert!(!file.failed && file.path.is_file());
    }

    #[test]
    fn a_new_run_removes_the_persisted_job() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = persisted(scratch.path());
        note_process(
            &dir.processes_path(),
            LaunchId(1),
            ProcessIdentity { pid: 70, start_ticks: 9 },
        )
        .unwrap();
        drop(dir);
        drop(JobDir::create(scratch.path()).unwrap());
        assert!(matches!(JobDir::resume(scratch.path()), Err(ResumeError::NotPersisted { .. })));
        assert!(!scratch.path().join(PROCESSES).exists());
    }
}
