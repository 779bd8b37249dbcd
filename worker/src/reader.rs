//! Reading training data.

use std::ops::Range;
use std::path::PathBuf;

use crate::storage::StorageError;

/// A data set: its files in order, with their record counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Dataset {
    /// The files. Records are numbered through them in this order.
    pub files: Vec<File>,
}

impl Dataset {
    /// A data set of these files.
    #[must_use]
    pub fn new(files: Vec<File>) -> Self {
        Self { files }
    }
}

/// One file of a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct File {
    /// Path or address of the file.
    pub path: String,
    /// Number of records in the file.
    pub records: u64,
    /// Version of the file that was described: a digest of its length and its ETag or last bytes.
    /// The readers of this crate refuse another version. `None`: any version is accepted.
    pub version: Option<u32>,
}

impl File {
    /// A file of which any version is accepted.
    #[must_use]
    pub fn new(path: impl Into<String>, records: u64) -> Self {
        Self { path: path.into(), records, version: None }
    }
}

/// Describes a data set and reads ranges of it.
///
/// One worker's reader describes the data set. Every worker has its own reader, which reads ahead
/// in a background thread.
pub trait Reader: Send + 'static {
    /// One record.
    type Record: Send + 'static;

    /// Lists the files of `source` (the job's `--training-data`) with their record counts, in a
    /// fixed order, and validates them: all errors that can be detected before training are
    /// detected here.
    ///
    /// # Errors
    /// The error says what is wrong, where, and what is expected.
    fn describe(&mut self, source: &str) -> Result<Dataset, DataError>;

    /// Announces that records `range` of `file` will be read soon, so that a reader can fetch them
    /// concurrently with other reads. Default: does nothing.
    fn read_ahead(&mut self, _file: &File, _range: Range<u64>) {}

    /// Reads records `range` of `file` in order: exactly `range.end - range.start` records.
    ///
    /// # Errors
    /// The file could not be read, or is not the version that was described.
    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Self::Record>, DataError>;
}

/// Why data cannot be used. The text names the file and, if there is one, the line or record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system returned an error. Check that the path exists and is readable.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// There are no records to train on.
    #[error("{path}: {reason}", path = path.display())]
    Empty {
        /// The file or folder.
        path: PathBuf,
        /// What was expected.
        reason: String,
    },
    /// The data is not what was described when the job started. No worker can continue with it, and
    /// the job ends with the state that it has. Restore the data, or start a new job.
    #[error("{path}: {reason}; it has changed since the job started", path = path.display())]
    Changed {
        /// Path of the file.
        path: PathBuf,
        /// What has changed.
        reason: String,
    },
    /// A file's content is invalid.
    #[error(
        "{path}{at}: {reason}",
        path = path.display(),
        at = line.map(|line| format!(" line {line}")).unwrap_or_default()
    )]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Line number from 1, for text files.
        line: Option<u64>,
        /// What is wrong and what is expected.
        reason: String,
    },
    /// An object store returned an error or did not answer in time.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A user-defined reader failed.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl DataError {
    /// Whether the error affects every worker, so that the job fails, with its newest state saved
    /// and exported. Otherwise only this worker fails, and another worker retries.
    #[must_use]
    pub fn ends_job(&self) -> bool {
        matches!(self, Self::Changed { .. } | Self::Malformed { .. })
    }
}
