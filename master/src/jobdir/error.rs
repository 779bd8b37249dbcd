//! Errors of the directory of a job.

use std::io;
use std::path::PathBuf;

use super::files::quoted;
use crate::persisted_format::OtherFormat;

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
    /// It is within the directory of another job. Choose another.
    #[error(
        "{} is within the directory of another job, {}; choose another --job-dir",
        path.display(), outer.display()
    )]
    Nested {
        /// The directory.
        path: PathBuf,
        /// Directory of the other job.
        outer: PathBuf,
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
    #[error(
        "can't write {}: {source}; make the file writable, or start the job in another \
         directory with --job-dir",
        path.display()
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Why a job can't be resumed, or what it has recorded can't be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// It has ended. Start another one.
    #[error(
        "the job in {} has ended, and its summary is in {}; another job goes on from its \
         checkpoints with --resume-from",
        path.display(),
        summary.display()
    )]
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
    #[error(
        "no worker of the job in {} has started, so it has recorded nothing; if it has ended, \
         start it again",
        path.display()
    )]
    NotPersisted {
        /// Directory of the job.
        path: PathBuf,
    },
    /// Another release has persisted the job's state. Resume with that release, or start the job
    /// again.
    #[error("can't use {}: {format}; nothing was changed", path.display())]
    OtherFormat {
        /// The file.
        path: PathBuf,
        /// Its format, and what to do.
        format: OtherFormat,
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
    /// A file of it can't be read, or has been changed. Start the job again.
    #[error("can't use {}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}
