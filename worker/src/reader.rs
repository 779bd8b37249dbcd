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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Where it is.
    pub path: String,
    /// Records in it.
    pub records: u64,
}

/// Describes a data set and reads ranges of it.
///
/// One reader describes; every worker has one of its own that reads, in a background thread, ahead of need.
pub trait Reader: Send + 'static {
    /// One record.
    type Record: Send + 'static;

    /// Lists the files behind `source` (the job's `--training-data`) with their record counts, in a fixed order, and
    /// checks them: everything that can be found wrong before training is found here.
    ///
    /// # Errors
    /// What is wrong, where, and what would be right.
    fn describe(&mut self, source: &str) -> Result<Dataset, DataError>;

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
