//! Persists a job in its directory, so that another master can resume it.
//!
//! ```text
//!  job.json      how the job was started: written once
//!  record.json, record.spare   state of the job's core: replaced at each change, before any message
//!                about it; see `record_file`
//!  files.zst     the list of the data set's files, compressed: written once
//!  processes     one line per started process: launch, process id, start time
//! ```
//!
//! **Invariant:** record.json is never older than what a worker has been sent, or is known to be. A
//! master that takes over from an older one uses no id that may have been used since.
//!
//! The other files are not synced to disk. If they are lost, the whole machine has crashed, and the
//! workers are lost too; if only the master dies, the operating system still writes them.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elasticdl_proto::FileList;
use elasticdl_proto::limits::MESSAGE_BYTES_MAX;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tracing::error;

use super::JobDir;
use super::aside;
use super::contents::is_job_dir;
use super::error::{JobDirError, ResumeError};
use super::files::{FILES, JOB, PROCESSES, RECORD, SPARE, SUMMARY, TOKEN, replace};
use super::guard::Guard;
use super::lock::take_lock;
use super::notes::read_notes;
use super::owner::Owner;
use super::process_identity::ProcessIdentity;
use super::program_copy::ProgramCopy;
use super::record_file::{RecordFile, is_stale};
use super::start_time::StartTime;
use crate::job::{DatasetFingerprint, LaunchId, PersistedJob};
use crate::local::hosts::Hosts;
use crate::persisted_format::{Head, RELEASE, VERSION};
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
    pub metrics: Option<SocketAddr>,
    /// Address at which the dashboard is served, if it is.
    pub dashboard: Option<SocketAddr>,
    /// Folder of events for TensorBoard, if any.
    pub tensorboard_dir: Option<OsString>,
    /// The stores that its addresses are in.
    #[serde(default)]
    pub stores: BTreeSet<String>,
    /// Start time of the job.
    #[serde(flatten)]
    pub began: StartTime,
    /// The hosts of its workers, if they are not on this machine.
    pub hosts: Option<Hosts>,
    /// The program's file at that time, and the job's copy of it, if one could be made.
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
    root: PathBuf,
    guard: Guard,
    record: RecordFile,
    /// The list of files that is stored next to it.
    stored: Option<DatasetFingerprint>,
    failed: bool,
}

impl PersistedJobFile {
    /// Replaces the persisted state. The job continues if that fails. Returns what the user should
    /// know: the first failure, the first success after it, and that the directory was gone.
    pub(crate) fn write(&mut self, job: &PersistedJob) -> Option<String> {
        let restored = self.guard.restore();
        if matches!(restored, Ok(true)) {
            self.stored = None;
        }
        let json = serde_json::to_vec(&Stored::of(job)).expect("the keys of a job are strings");
        let gone = restored.as_ref().is_ok_and(|was_gone| *was_gone);
        let written = restored
            .map_err(|error| io::Error::other(format!("the directory is gone: {error}")))
            .and_then(|_| self.write_list(job))
            .and_then(|()| self.record.write(&json));
        let had_failed = std::mem::replace(&mut self.failed, written.is_err());
        let root = self.root.display();
        match written {
            Err(error) if !had_failed => {
                error!(%root, %error, "can't persist the job");
                Some(format!(
                    "can't write the job's record in {root}: {error}; training goes on, and the \
                     write is tried again. A master that resumed the job now would know an older \
                     state of it"
                ))
            }
            Ok(()) if gone => Some(format!(
                "{root} was removed or renamed while the job runs; it is written again, without \
                 what was in it: earlier logs, and checkpoints"
            )),
            Ok(()) if had_failed => Some("the job's record is written again".into()),
            Ok(()) | Err(_) => None,
        }
    }

    /// Whether the newest write has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed
    }
}

impl PersistedJobFile {
    /// Writes the list of files to which the state refers, if it is not stored yet.
    fn write_list(&mut self, job: &PersistedJob) -> io::Result<()> {
        if let Some(list) = job.file_list()
            && self.stored != Some(DatasetFingerprint::of(list))
        {
            replace(&self.root.join(FILES), list.packed())?;
            self.stored = Some(DatasetFingerprint::of(list));
            // The first worker has checked the data and the options. What can't be removed now is
            // removed at the end.
            let _ = aside::forget(&self.root);
        }
        Ok(())
    }
}

impl JobDir {
    /// Persists how the job was started.
    ///
    /// # Errors
    /// [`JobDirError::Write`].
    pub(crate) fn persist_start(&self, start: &JobStart) -> Result<(), JobDirError> {
        let path = self.root.join(JOB);
        let json =
            serde_json::to_vec_pretty(&Stored::of(start)).expect("a start's keys are strings");
        replace(&path, &json).map_err(|source| JobDirError::Write { path, source })
    }

    /// Returns the file with the state of the job's core.
    pub(crate) fn persisted_job_file(&self) -> PersistedJobFile {
        let record = RecordFile::new(self.root.join(RECORD), self.root.join(SPARE));
        let guard = Guard::new(&self.root);
        PersistedJobFile { root: self.root.clone(), guard, record, stored: None, failed: false }
    }

    /// Path of the file in which started processes are noted.
    pub(crate) fn processes_path(&self) -> PathBuf {
        self.root.join(PROCESSES)
    }

    /// Takes over the directory of a job whose master has died. Changes nothing in it.
    ///
    /// # Errors
    /// [`ResumeError`].
    pub fn resume(root: &Path) -> Result<(Self, AbandonedJob), ResumeError> {
        if !is_job_dir(root) {
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
        let start = read_start(&root)?;
        let mut record = read_record(&root)?;
        let unreadable =
            |name, reason: String| ResumeError::Unreadable { path: root.join(name), reason };
        let processes =
            read_notes(&root).map_err(|error| unreadable(PROCESSES, error.to_string()))?;
        if is_stale(&root.join(SPARE)) {
            let newest = processes.keys().next_back().copied().unwrap_or(LaunchId(0));
            record.note_outdated(newest);
        }
        let token =
            fs::read_to_string(root.join(TOKEN)).map_err(|e| unreadable(TOKEN, e.to_string()))?;
        let token =
            Token::from_hex(&token).ok_or_else(|| unreadable(TOKEN, "not a token".into()))?;
        let owner = Owner::of(&root);
        Ok((Self { root, token, owner, _lock: lock }, AbandonedJob { start, record, processes }))
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

/// Reads the persisted state of the job in `root`, with its list of files. The job may be running,
/// or have ended.
///
/// # Errors
/// [`ResumeError`].
pub fn read_record(root: &Path) -> Result<PersistedJob, ResumeError> {
    let mut record = read_newest_record(root)?;
    if record.data().is_some() {
        let unreadable = |reason| ResumeError::Unreadable { path: root.join(FILES), reason };
        record.attach_file_list(read_list(root)?).map_err(unreadable)?;
    }
    Ok(record)
}

/// The folder in which the workers of the job in `root` run; `None` if that is not recorded.
#[must_use]
pub fn working_folder(root: &Path) -> Option<PathBuf> {
    read_start(root).ok().map(|start| start.folder.into())
}

fn read_list(root: &Path) -> Result<FileList, ResumeError> {
    let path = root.join(FILES);
    let unreadable = |reason| ResumeError::Unreadable { path: path.clone(), reason };
    let file = File::open(&path).map_err(|error| unreadable(error.to_string()))?;
    let mut packed = Vec::new();
    let read = file.take(LIST_BYTES_MAX + 1).read_to_end(&mut packed);
    read.map_err(|error| unreadable(error.to_string()))?;
    if packed.len() as u64 > LIST_BYTES_MAX {
        let most = LIST_BYTES_MAX >> 20;
        return Err(unreadable(format!("it is damaged: no list takes more than {most} MiB")));
    }
    FileList::unpack(packed.into()).map_err(|error| unreadable(error.to_string()))
}

/// A worker sends the list to its master in one message.
const LIST_BYTES_MAX: u64 = MESSAGE_BYTES_MAX as u64;

/// Reads the persisted state. If it was lost with the machine's power, the one before it serves: no
/// worker has survived.
pub(super) fn read_newest_record(root: &Path) -> Result<PersistedJob, ResumeError> {
    read_stored(root, RECORD).or_else(|error| match error {
        ResumeError::Unreadable { .. } => read_stored(root, SPARE).map_err(|_| error),
        error => Err(error),
    })
}

/// Reads how the job was started.
pub(crate) fn read_start(root: &Path) -> Result<JobStart, ResumeError> {
    read_stored(root, JOB)
}

/// Reads what the file `name` stores.
fn read_stored<T: DeserializeOwned>(root: &Path, name: &str) -> Result<T, ResumeError> {
    #[derive(Deserialize)]
    struct Content<T> {
        content: T,
    }
    let (path, text) = read_text(root, name)?;
    let unreadable = |error: serde_json::Error| ResumeError::Unreadable {
        path: path.clone(),
        reason: error.to_string(),
    };
    // Only the head is common to all versions.
    let head: Head = serde_json::from_slice(&text).map_err(unreadable)?;
    head.check().map_err(|format| ResumeError::OtherFormat { path: path.clone(), format })?;
    let Content { content } = serde_json::from_slice(&text).map_err(unreadable)?;
    Ok(content)
}

fn read_text(root: &Path, name: &str) -> Result<(PathBuf, Vec<u8>), ResumeError> {
    let path = root.join(name);
    match fs::read(&path) {
        Ok(text) => Ok((path, text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(ResumeError::NotPersisted { path: root.into() })
        }
        Err(error) => Err(ResumeError::Unreadable { path, reason: error.to_string() }),
    }
}

/// The content of a file, with the version of its format.
#[derive(Serialize)]
struct Stored<'a, T> {
    version: u32,
    release: &'a str,
    content: &'a T,
}

impl<'a, T> Stored<'a, T> {
    fn of(content: &'a T) -> Self {
        Self { version: VERSION, release: RELEASE, content }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::job::Job;
    use crate::job::testing::spec;
    use crate::jobdir::note_process;

    fn start() -> JobStart {
        JobStart {
            hosts: None,
            program: "/bin/model".into(),
            args: vec!["--deep".into()],
            folder: "/data".into(),
            address: "127.0.0.1:4711".parse().unwrap(),
            master_timeout: Duration::from_secs(30),
            stores: BTreeSet::from(["http://127.0.0.1:9000".to_owned()]),
            summary: None,
            metrics: Some("127.0.0.1:4712".parse().unwrap()),
            dashboard: Some("127.0.0.1:4713".parse().unwrap()),
            tensorboard_dir: None,
            began: StartTime { at: UNIX_EPOCH + Duration::from_secs(7), uptime: None },
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
        File::options()
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
        File::create(&path).unwrap().set_len(1 << 36).unwrap();
        unreadable("no list takes more than 64 MiB");
        fs::write(&path, FileList::pack([("other", 7)]).packed()).unwrap();
        unreadable("not the one that the job was started with: it has 1 files with 7 records");
        fs::write(&path, list.packed()).unwrap();
        let (dir, abandoned) = JobDir::resume(scratch.path()).unwrap();
        assert!(abandoned.record == record);
        drop(dir);
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
        for (name, text) in [(RECORD, "{"), (JOB, "{\"version\": 4}"), (JOB, "[]")] {
            let before = fs::read(root.join(name)).unwrap();
            fs::write(root.join(name), text).unwrap();
            let error = JobDir::resume(&root).unwrap_err();
            assert!(matches!(error, ResumeError::Unreadable { .. }), "{error}");
            fs::write(root.join(name), before).unwrap();
        }
        fs::write(root.join(JOB), "{\"version\": 2, \"unheard\": []}").unwrap();
        assert!(matches!(JobDir::resume(&root), Err(ResumeError::OtherFormat { .. })));
    }

    #[test]
    fn a_job_of_another_release_is_refused_with_what_to_do_and_nothing_is_changed() {
        let scratch = tempfile::tempdir().unwrap();
        drop(persisted(scratch.path()));
        let path = scratch.path().join(RECORD);
        let mut old: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        old["version"] = 2.into();
        old["content"]["spec"] = true.into();
        fs::write(&path, old.to_string()).unwrap();
        let contents = || {
            let files = fs::read_dir(scratch.path()).unwrap().map(|file| file.unwrap().path());
            let files = files.filter(|file| file.is_file());
            BTreeMap::from_iter(files.map(|file| (file.clone(), fs::read(file).unwrap())))
        };
        let before = contents();
        let error = JobDir::resume(scratch.path()).unwrap_err();
        assert!(matches!(error, ResumeError::OtherFormat { .. }), "{error}");
        let error = error.to_string();
        for part in ["the job is of format 2", "finish it with"] {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
        assert_eq!(contents(), before);
    }

    #[test]
    fn a_state_that_cannot_be_written_is_said_once_and_once_when_it_can() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = persisted(scratch.path());
        let mut file = dir.persisted_job_file();
        let job = Job::new(spec()).to_persisted();
        assert_eq!((file.write(&job), file.has_failed()), (None, false));
        let moved = scratch.path().with_extension("moved");
        fs::rename(scratch.path(), &moved).unwrap();
        fs::write(scratch.path(), "a file in its place").unwrap();
        let said = [(); 2].map(|()| file.write(&job));
        assert!(
            said[0].as_ref().is_some_and(|text| text.contains("directory is gone")),
            "{said:?}"
        );
        assert!(said[1].is_none() && file.has_failed(), "{said:?}");
        fs::remove_file(scratch.path()).unwrap();
        fs::rename(&moved, scratch.path()).unwrap();
        let said = [(); 2].map(|()| file.write(&job));
        assert_eq!(said, [Some("the job's record is written again".into()), None]);
        fs::remove_dir_all(scratch.path()).unwrap();
        let said = [(); 2].map(|()| file.write(&job));
        assert!(said[0].as_ref().is_some_and(|text| text.contains("was removed")), "{said:?}");
        assert!(said[1].is_none() && scratch.path().join(RECORD).exists());
    }

    #[test]
    fn a_record_that_was_torn_by_a_loss_of_power_is_replaced_by_the_one_before() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = persisted(scratch.path());
        let record = Job::new(spec()).to_persisted();
        dir.persisted_job_file().write(&record);
        drop(dir);
        let whole = fs::read(scratch.path().join(RECORD)).unwrap();
        fs::write(scratch.path().join(SPARE), &whole).unwrap();
        fs::write(scratch.path().join(RECORD), vec![0; whole.len()]).unwrap();
        let (dir, abandoned) = JobDir::resume(scratch.path()).unwrap();
        assert_eq!(abandoned.record, record);
        drop(dir);
        fs::write(scratch.path().join(SPARE), "").unwrap();
        let error = JobDir::resume(scratch.path()).unwrap_err().to_string();
        assert!(error.contains(RECORD), "{error}");
    }

    #[test]
    fn no_id_is_used_again_by_a_master_that_resumes_from_a_stale_record() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = persisted(scratch.path());
        for launch in 1..=40 {
            let process = ProcessIdentity { pid: 70, start_ticks: launch };
            note_process(&dir.processes_path(), LaunchId(launch), process).unwrap();
        }
        drop(dir);
        let used = || JobDir::resume(scratch.path()).unwrap().1.record.launches_made;
        assert!(used() < 40);
        fs::write(scratch.path().join(SPARE), "!").unwrap();
        assert_eq!(used(), 40);
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
