//! Reading training data.

use std::ops::Range;
use std::path::PathBuf;

pub use elasticdl_proto::Access;

use crate::map::Map;
use crate::storage::{StorageError, Transient};

/// A data set: its files in order, with their record counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Dataset {
    /// The files. Records are numbered through them in this order.
    pub files: Vec<File>,
    /// What the files hold and the data set does not; shown in the job's summary.
    pub skipped: Skipped,
}

impl Dataset {
    /// A data set of these files.
    #[must_use]
    pub fn new(files: Vec<File>) -> Self {
        Self { files, skipped: Skipped::default() }
    }
}

/// Records that a reader skips: they are not in the data set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Skipped {
    /// Number of records that cannot be read.
    pub bad: u64,
    /// Number of records that were skipped for a null.
    pub nulls: u64,
    /// The first few of them: file, place and reason.
    pub first: Vec<String>,
    /// Number of files in the folders of the data that are no part of it, for their names.
    pub files: u64,
    /// The first of these files.
    pub first_file: Option<String>,
}

impl Skipped {
    /// Adds the records skipped in another part of the data.
    pub(crate) fn add(&mut self, other: Self) {
        self.bad += other.bad;
        self.nulls += other.nulls;
        self.files += other.files;
        self.first.extend(other.first);
        self.first_file = self.first_file.take().or(other.first_file);
    }
}

/// What records are read for, and what happens to those that cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadOptions {
    /// What the records are for.
    pub purpose: Purpose,
    /// Number of bad records that are skipped (`--bad-records skip:N`); one more is an error.
    /// 0: the first bad record is an error.
    pub bad_records_max: u64,
}

/// What records are read for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Purpose {
    /// Metrics of a model are computed: validation data, and `elasticdl evaluate`.
    Evaluate,
    /// Predictions are made: the data may have no labels.
    Predict,
    /// A model is trained.
    #[default]
    Train,
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

    /// Learns what the records are read for; called once, before all other methods. Default:
    /// accepts every purpose, and refuses to skip bad records.
    ///
    /// # Errors
    /// The reader does not support the options.
    fn configure(&mut self, options: ReadOptions) -> Result<(), DataError> {
        refuse_bad_records(options)
    }

    /// Lists the files of `source` (the job's `--training-data`) with their record counts, in a
    /// fixed order, and validates them: all errors that can be detected before training are
    /// detected here.
    ///
    /// # Errors
    /// The error says what is wrong, where, and what is expected.
    fn describe(&mut self, source: &str) -> Result<Dataset, DataError>;

    /// How records of `dataset` are read well, which decides what `--shuffle` shuffles by default.
    /// Every worker must return the same. Default: in blocks of 1024 records.
    fn access(&self, _dataset: &Dataset) -> Access {
        Access::Block { records: 1024 }
    }

    /// Announces that records `range` of `file` will be read soon, so that a reader can fetch them
    /// concurrently with other reads. Default: does nothing.
    fn read_ahead(&mut self, _file: &File, _range: Range<u64>) {}

    /// Names the epoch of the records that are read next.
    #[doc(hidden)]
    fn begin_epoch(&mut self, _epoch: u32) {}

    /// Reads records `range` of `file` in order: exactly `range.end - range.start` records.
    ///
    /// # Errors
    /// The file could not be read, or is not the version that was described.
    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Self::Record>, DataError>;

    /// Reads these records of `file`, which are in ascending order: as many as are named. Default:
    /// one [`read`](Self::read) for each run of consecutive records.
    ///
    /// # Errors
    /// See [`read`](Self::read).
    fn read_records(
        &mut self,
        file: &File,
        records: &[u64],
    ) -> Result<Vec<Self::Record>, DataError> {
        let mut read = Vec::with_capacity(records.len());
        for run in records.chunk_by(|before, record| before + 1 == *record) {
            read.extend(self.read(file, run[0]..run[0] + run.len() as u64)?);
        }
        Ok(read)
    }

    /// Converts each record in the reader's own thread, while the model computes: what
    /// `Model::feed` need not do, such as decoding or splitting a text into tokens.
    ///
    /// An error of `convert` ends this worker, and another one tries; a
    /// [malformed](DataError::Malformed) record ends the job.
    ///
    /// ```
    /// use elasticdl_data::readers::{CsvRows, Row};
    /// use elasticdl_data::{Map, Reader};
    ///
    /// fn reader() -> Map<CsvRows, Vec<usize>> {
    ///     let lengths = |row: Row| Ok(row.text(0).split(' ').map(str::len).collect());
    ///     CsvRows::new().text("sentence").map(lengths)
    /// }
    /// ```
    fn map<T: Send + 'static>(
        self,
        convert: impl FnMut(Self::Record) -> Result<T, DataError> + Send + 'static,
    ) -> Map<Self, T>
    where
        Self: Sized,
    {
        Map::new(self, convert)
    }
}

/// The reply of a reader that cannot skip records.
///
/// # Errors
/// Records are to be skipped.
pub fn refuse_bad_records(options: ReadOptions) -> Result<(), DataError> {
    if options.bad_records_max == 0 {
        return Ok(());
    }
    let text = "--bad-records skip: this reader cannot skip records; give --bad-records fail";
    Err(DataError::Other(text.into()))
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
    #[error(
        "{path}: {reason}; data must not change while a job trains on it",
        path = path.display()
    )]
    Changed {
        /// Path of the file.
        path: PathBuf,
        /// What has changed.
        reason: String,
    },
    /// This worker finds other records in the data than the worker that described it. Another
    /// worker continues.
    #[error("{path}: {reason}", path = path.display())]
    Differs {
        /// Path of the file.
        path: PathBuf,
        /// What differs.
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

    /// Whether storage did not answer or refused access. A worker that trains has waited for it.
    #[doc(hidden)]
    #[must_use]
    pub fn is_outage(&self) -> bool {
        let is_outage = |error: &dyn Transient| error.is_transient() || error.is_refusal();
        match self {
            Self::Io { source, .. } => is_outage(source),
            Self::Storage(error) => is_outage(error),
            _ => false,
        }
    }
}
