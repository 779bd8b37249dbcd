//! Tables in text files, one row after the other.
//!
//! Each worker scans a file once and indexes where every 16th row begins. Later reads seek to the
//! nearest indexed row. Rows that are left out are not numbered, so a scan then converts each row.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use super::columns::Columns;
use super::files;
use super::kept::Kept;
use super::packed::{PACKED_BYTES_MAX, TextFile};
use super::row::Row;
use super::skipped::SkippedLog;
use crate::reader::{Access, DataError, Dataset, File};

/// A format of text that consists of rows.
pub(super) trait Format {
    /// What is wrong with a data set without rows.
    fn no_row(&self) -> &'static str;

    /// Extensions of its files.
    fn extensions(&self) -> Vec<String>;

    /// Opens a text: its rows, from the first one on.
    fn open<'a>(
        &'a self,
        text: &'a TextFile,
        columns: &'a Columns,
    ) -> Result<Box<dyn Rows + 'a>, DataError>;
}

/// The rows of an open text.
pub(super) trait Rows {
    /// Positions the text at a row that begins at `byte`.
    fn seek(&mut self, byte: u64) -> Result<(), DataError>;

    /// Reads the next row. Returns the byte at which it begins, or `None` at the end.
    fn advance(&mut self) -> Result<Option<u64>, DataError>;

    /// Why the row that was read has another shape than its table.
    fn check(&self) -> Result<(), String>;

    /// Converts the row that was read; `None` if it is left out for a null.
    fn row(&self) -> Result<Option<Row>, String>;
}

/// Reads tables in text files.
#[derive(Clone, Debug)]
pub(super) struct TextTables<F> {
    pub(super) format: F,
    pub(super) columns: Columns,
    /// Limit of the memory for compressed files.
    pub(super) packed_bytes_max: u64,
    /// Those that were opened.
    indices: BTreeMap<String, Index>,
}

/// Where the rows of a file begin.
#[derive(Clone, Debug)]
struct Index {
    text: TextFile,
    /// Length of the file.
    bytes: u64,
    /// The rows that are records.
    kept: Kept,
    /// First bytes of rows 0, `STRIDE`, 2·`STRIDE`, …
    starts: Vec<u64>,
}

impl<F: Default> Default for TextTables<F> {
    fn default() -> Self {
        let (format, columns, indices) = Default::default();
        Self { format, columns, packed_bytes_max: PACKED_BYTES_MAX, indices }
    }
}

impl<F: Format> TextTables<F> {
    pub(super) fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let mut dataset = Dataset::default();
        let mut log = SkippedLog::new(self.columns.bad_records_max());
        let listed = files::list_tables(source, &self.format.extensions())?;
        for path in &listed.paths {
            let index = self.scan(path, Some(&mut log))?;
            let text = files::text(path)?;
            let records = index.kept.count();
            if records > 0 {
                let mut version = files::version(&[path])?;
                if self.columns.skips() {
                    version = files::version_without(version, &index.kept);
                }
                let version = Some(version);
                dataset.files.push(File { path: text.clone(), records, version });
            }
            self.indices.insert(text, index);
        }
        dataset.skipped = log.into_skipped();
        listed.note_others(&mut dataset.skipped);
        files::not_empty(source, dataset, self.format.no_row())
    }

    pub(super) fn read_ahead(&self, file: &File, range: Range<u64>) {
        let Some(index) = self.indices.get(&file.path) else { return };
        if index.text.is_compressed() {
            return;
        }
        let at =
            |row: u64| index.starts.get((row / STRIDE) as usize).copied().unwrap_or(index.bytes);
        let (start, end) = (at(range.start), at(range.end + STRIDE));
        files::read_ahead(Path::new(&file.path), start, end.saturating_sub(start));
    }

    /// Reads these runs of rows, in ascending order.
    pub(super) fn read(
        &mut self,
        file: &File,
        runs: impl Iterator<Item = Range<u64>>,
    ) -> Result<Vec<Row>, DataError> {
        self.index(file)?;
        let (index, columns) = (&self.indices[&file.path], &self.columns);
        let path = index.text.path();
        let fewer = |rows: u64| changed(path, &format!("{rows} rows where {} were", file.records));
        let (mut rows, mut at, mut records) = (None, 0, Vec::new());
        for run in runs.filter(|run| !run.is_empty()) {
            if run.end > index.kept.count() {
                return Err(fewer(index.kept.count()));
            }
            let is_open = rows.is_some();
            let rows = match &mut rows {
                Some(open) => open,
                None => rows.insert(self.format.open(&index.text, columns)?),
            };
            // Within a stride, skipping rows is cheaper than seeking.
            if !is_open || run.start < at || run.start / STRIDE > at / STRIDE {
                at = run.start / STRIDE * STRIDE;
                rows.seek(index.starts[(at / STRIDE) as usize])?;
            }
            while at < run.end {
                let Some(byte) = rows.advance()? else { return Err(fewer(at)) };
                // Rows that are left out have no number.
                let is_wanted = at >= run.start;
                if is_wanted || columns.skips() {
                    match rows.row() {
                        Ok(Some(row)) if is_wanted => records.push(row),
                        Ok(Some(_)) => {}
                        Ok(None) => continue,
                        Err(_) if columns.bad_records_max() > 0 => continue,
                        Err(reason) => return Err(index.text.error_at(byte, reason)),
                    }
                }
                at += 1;
            }
        }
        Ok(records)
    }

    /// Indexes the file, unless it is indexed, and checks that it is still the same.
    fn index(&mut self, file: &File) -> Result<(), DataError> {
        let path = Path::new(&file.path);
        files::check_table(file, &[path], self.columns.skips())?;
        if !self.indices.contains_key(&file.path) {
            let index = self.scan(path, None)?;
            self.indices.insert(file.path.clone(), index);
        }
        let index = &self.indices[&file.path];
        if self.columns.skips() {
            files::check_left_out(file, path, &index.kept)?;
        }
        let bytes = files::length(path)?;
        if bytes != index.bytes {
            return Err(changed(path, &format!("{bytes} bytes where {} were", index.bytes)));
        }
        Ok(())
    }

    /// Scans and indexes a file. With a `log`, each row is validated, and what is left out is
    /// recorded.
    fn scan(&self, path: &Path, mut log: Option<&mut SkippedLog>) -> Result<Index, DataError> {
        let columns = &self.columns;
        let bytes = files::length(path)?;
        let held: u64 = self.indices.values().map(|index| index.text.held_bytes()).sum();
        let text = TextFile::open(path, self.packed_bytes_max.saturating_sub(held))?;
        let mut index =
            Index { text: text.clone(), bytes, kept: Kept::default(), starts: Vec::new() };
        let mut rows = self.format.open(&text, columns)?;
        while let Some(byte) = rows.advance()? {
            let is_kept = if log.is_some() || columns.skips() {
                rows.row().map(|row| row.is_some())
            } else {
                rows.check().map(|()| true)
            };
            if is_kept == Ok(true) && index.kept.count().is_multiple_of(STRIDE) {
                index.starts.push(byte);
            }
            index.kept.push(is_kept == Ok(true));
            match (is_kept, &mut log) {
                (Ok(true), _) => {}
                (Ok(false), Some(log)) => log.skip_null(|| text.error_at(byte, NULL.into())),
                (Err(reason), Some(log)) => log.skip_bad(|| text.error_at(byte, reason))?,
                (Ok(false), None) => {}
                (Err(_), None) if columns.bad_records_max() > 0 => {}
                (Err(reason), None) => return Err(text.error_at(byte, reason)),
            }
        }
        Ok(index)
    }
}

/// How the rows of a data set are read well.
pub(super) fn access(dataset: &Dataset) -> Access {
    let is_compressed = |file: &File| {
        let path = file.path.to_lowercase();
        files::PACKED.iter().any(|extension| path.ends_with(extension))
    };
    if files::is_remote(dataset) || dataset.files.iter().any(is_compressed) {
        Access::Block { records: BLOCK_ROWS }
    } else {
        Access::Record
    }
}

/// `extension`, and those of its compressed files.
pub(super) fn with_packed(extension: &str) -> Vec<String> {
    let packed = files::PACKED.iter().map(|packed| format!("{extension}{packed}"));
    std::iter::once(extension.to_owned()).chain(packed).collect()
}

/// The methods of a reader of tables in a field `tables`: [`TextTables`].
macro_rules! text_reader {
    ($reader:ident) => {
        impl $reader {
            /// Creates a reader without columns; add the required ones.
            pub fn new() -> Self {
                Self::default()
            }

            $crate::readers::columns::column_methods!(tables.columns);

            /// Limits the memory that a worker uses for compressed files, which it holds
            /// compressed. Default: 1 GiB for all files together. Data that exceeds it is refused.
            pub fn compressed_bytes_max(mut self, bytes: u64) -> Self {
                self.tables.packed_bytes_max = bytes;
                self
            }
        }

        impl $crate::Reader for $reader {
            type Record = $crate::readers::Row;

            fn configure(&mut self, options: $crate::ReadOptions) -> Result<(), $crate::DataError> {
                self.tables.columns.configure(options);
                Ok(())
            }

            fn describe(&mut self, source: &str) -> Result<$crate::Dataset, $crate::DataError> {
                self.tables.describe(source)
            }

            fn access(&self, dataset: &$crate::Dataset) -> $crate::Access {
                $crate::readers::text_table::access(dataset)
            }

            fn read_ahead(&mut self, file: &$crate::File, range: std::ops::Range<u64>) {
                self.tables.read_ahead(file, range);
            }

            fn read(
                &mut self,
                file: &$crate::File,
                range: std::ops::Range<u64>,
            ) -> Result<Vec<$crate::readers::Row>, $crate::DataError> {
                self.tables.read(file, std::iter::once(range))
            }

            fn read_records(
                &mut self,
                file: &$crate::File,
                records: &[u64],
            ) -> Result<Vec<$crate::readers::Row>, $crate::DataError> {
                let runs = records.chunk_by(|before, record| before + 1 == *record);
                self.tables.read(file, runs.map(|run| run[0]..run[0] + run.len() as u64))
            }
        }
    };
}

pub(super) use text_reader;

fn changed(path: &Path, found: &str) -> DataError {
    files::malformed(path, &format!("{found}: has it changed?"))
}

/// Number of rows between two indexed positions: the maximum that a read skips.
const STRIDE: u64 = 16;
/// Rows of a block of an object; a request is for about a quarter of a megabyte.
const BLOCK_ROWS: u64 = 2048;
/// Limit of the bytes of a row.
pub(super) const ROW_BYTES_MAX: u64 = 16 << 20;
const NULL: &str = "left out for a null";
