//! Reading training data.

use std::ops::Range;
use std::path::PathBuf;

use crate::storage::StorageError;

/// A data set: its files in order, with their record counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dataset {
    /// The files; records are numbered through them in this order.
    pub files: Vec<File>,
}

/// One file of a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct File {
    /// Where it is.
    pub path: String,
    /// Records in it.
    pub records: u64,
    /// Which version of the file was described: a digest of what tells it from others (its length,
    /// and an ETag or its last bytes). The readers of this crate refuse another one. `None`: any
    /// version will do.
    pub version: Option<u32>,
}

impl File {
    /// A file of any version.
    #[must_use]
    pub fn new(path: impl Into<String>, records: u64) -> Self {
        Self { path: path.into(), records, version: None }
    }
}

/// Describes a data set and reads ranges of it.
///
/// One reader describes; every worker has one of its own that reads, in a background thread, ahead
/// of need.
pub trait Reader: Send + 'static {
    /// One record.
    type Record: Send + 'static;

    /// Lists the files behind `source` (the job's `--training-data`) with their record counts, in a
    /// fixed order, and checks them: everything that can be found wrong before training is found
    /// here.
    ///
    /// # Errors
    /// What is wrong, where, and what would be right.
    fn describe(&mut self, source: &str) -> Result<Dataset, DataError>;

    /// Says that records `range` of `file` will be read soon, so that a reader may have them on the
    /// way while others are read. Default: does nothing.
    fn read_ahead(&mut self, _file: &File, _range: Range<u64>) {}

    /// Reads records `range` of `file` in order: exactly `range.end - range.start` of them.
    ///
    /// # Errors
    /// The file could not be read, or no longer holds what was described.
    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Self::Record>, DataError>;
}

/// Why data can't be used. The text names the file and, where there is one, the line or record.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The system refused. Check that the path exists and may be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// There is nothing to train on.
    #[error("{path}: {reason}", path = path.display())]
    Empty {
        /// The file or folder.
        path: PathBuf,
        /// What was looked for.
        reason: String,
    },
    /// What is read is not what was described when the job began: no worker can go on with it, and
    /// the job ends with the state that it has. Bring the data back as it was, or begin a new job.
    #[error("{path}: {reason}; it was changed since the job began", path = path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// What is different.
        reason: String,
    },
    /// A file doesn't hold what it should.
    #[error("{path}{at}: {reason}", path = path.display(), at = line.map(|l| format!(" line {l}")).unwrap_or_default())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, from 1, in files that have lines.
        line: Option<u64>,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// An object store refused, or did not answer in time.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A reader of the user's own failed.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl DataError {
    /// Whether no worker could read on, so that the job ends as failed, with its newest state kept
    /// and exported. Otherwise the worker fails, and another one tries.
    #[must_use]
    pub fn ends_job(&self) -> bool {
        matches!(self, Self::Changed { .. } | Self::Malformed { .. })
    }
}
