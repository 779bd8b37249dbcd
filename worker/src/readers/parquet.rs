//! Tables in Parquet files.

use std::collections::BTreeMap;
use std::io::{BufReader, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::parquet::errors::{ParquetError, Result as ParquetResult};
use ::parquet::file::metadata::ParquetMetaData;
use ::parquet::file::reader::{ChunkReader, FileReader as _, Length, SerializedFileReader};
use bytes::Bytes;

use super::columns::{Columns, column_methods, list_method};
use super::files::{self, Source};
use super::kept::Kept;
use super::parts::{self, BLOCK_ROWS, CheckedRow, Parts};
use super::row::Row;
use super::skipped::SkippedLog;
use crate::reader::{Access, DataError, Dataset, File, ReadOptions, Reader};
use values::ColumnValues;

mod values;

/// Reads rows of Parquet files.
///
/// Name the required columns, with their types, in the order in which they should appear in the
/// [`Row`]; other columns are not read. A nested column is named by its path, `a.b`. In folders,
/// files that end in `.parquet` are read.
///
/// Each row group is a file of the data set, named `table.parquet#0`, so that shards do not span
/// row groups. Schemas are validated before training starts, values when they are read. If rows
/// may be left out, for a null or as bad records, all values are read before training starts, and
/// each worker reads a row group once to find those rows.
///
/// | requested | column |
/// |---|---|
/// | `f32` | `FLOAT`; `DOUBLE`, which is rounded; integers of 8 and 16 bits |
/// | `i64`, `class` | integers, `BOOLEAN` |
/// | `text` | `BYTE_ARRAY` in UTF-8 |
/// | `f32_list` | a list of what `f32` reads, named without `.list.element` |
///
/// ```
/// use elasticdl::readers::ParquetRows;
///
/// let reader = ParquetRows::new().f32("area").i64("rooms").text("city").f32("price");
/// ```
#[derive(Default)]
pub struct ParquetRows {
    columns: Columns,
    files: BTreeMap<PathBuf, Arc<SerializedFileReader<Chunks>>>,
    /// The rows of each row group that are not left out, where rows may be.
    kept: BTreeMap<String, Kept>,
    /// Position of the last read: the next read mostly continues there.
    cursor: Option<Cursor>,
}

/// Position in a row group that is being read.
struct Cursor {
    /// Name of the row group in the data set.
    group: String,
    /// Number of rows read or skipped so far.
    at: u64,
    /// For each requested value, its columns.
    columns: Vec<Vec<ColumnValues>>,
}

impl ParquetRows {
    /// Creates a reader without columns; add the required ones.
    pub fn new() -> Self {
        Self::default()
    }

    column_methods!();
    list_method!();

    /// Opens the file at `path`. Its footer is read once.
    fn file(&mut self, path: &Path) -> Result<Arc<SerializedFileReader<Chunks>>, DataError> {
        if let Some(file) = self.files.get(path) {
            return Ok(Arc::clone(file));
        }
        let chunks = Chunks { path: path.into(), bytes: files::length(path)? };
        let file = SerializedFileReader::new(chunks)
            .map_err(|error| failed(path, None, "not a readable Parquet file", error))?;
        let file = Arc::new(file);
        self.files.insert(path.into(), Arc::clone(&file));
        Ok(file)
    }

    /// For each requested value, the numbers of its columns in the file.
    fn fields(
        &self,
        path: &Path,
        metadata: &ParquetMetaData,
    ) -> Result<Vec<Vec<usize>>, DataError> {
        let columns = metadata.file_metadata().schema_descr().columns();
        let names: Vec<String> = columns.iter().map(|column| column.path().string()).collect();
        let fields = values::find(&self.columns, columns, &names);
        let checked = fields.and_then(|fields| {
            for (requested, fields) in self.columns.iter().zip(&fields) {
                for &field in fields {
                    values::check(&columns[field], requested.kind)
                        .map_err(|reason| format!("column {:?} {reason}", names[field]))?;
                }
            }
            Ok(fields)
        });
        checked.map_err(|reason| malformed(path, None, &reason))
    }

    /// Readers of the requested columns of a row group, positioned at its first row.
    fn open(&mut self, path: &Path, group: usize) -> Result<Vec<Vec<ColumnValues>>, DataError> {
        let file = self.file(path)?;
        let fields = self.fields(path, file.metadata())?;
        if group >= file.num_row_groups() {
            let reason =
                format!("the file has {} row groups: has it changed?", file.num_row_groups());
            return Err(malformed(path, Some(group), &reason));
        }
        let rows = file
            .get_row_group(group)
            .map_err(|error| failed(path, Some(group), "it cannot be read", error))?;
        let column = |&field: &usize| {
            let column = rows.metadata().schema_descr().column(field);
            let name = column.path().string();
            let reader = rows
                .get_column_reader(field)
                .map_err(|error| failed(path, Some(group), &format!("column {name:?}"), error))?;
            Ok(ColumnValues::new(name, reader, &column))
        };
        fields.iter().map(|fields| fields.iter().map(column).collect()).collect()
    }

    /// Reads rows `range` of a row group.
    fn read_rows(&mut self, file: &str, range: Range<u64>) -> Result<Vec<CheckedRow>, DataError> {
        let (path, group) = row_group(file)?;
        let count = usize::try_from(range.end.saturating_sub(range.start)).map_err(|_| {
            malformed(path, Some(group), "more rows than fit into the address space")
        })?;
        let continues =
            self.cursor.as_ref().is_some_and(|c| c.group == file && c.at <= range.start);
        if !continues {
            let columns = self.open(path, group)?;
            self.cursor = Some(Cursor { group: file.to_owned(), at: 0, columns });
        }
        let mut cursor = self.cursor.take().expect("the cursor was set above");
        let skipped = range.start - cursor.at;
        for column in cursor.columns.iter_mut().flatten() {
            let name = column.name();
            let done = column
                .skip(skipped as usize)
                .map_err(|error| failed(path, Some(group), &format!("column {name:?}"), error))?;
            if done as u64 != skipped {
                let rows = cursor.at + done as u64;
                let reason =
                    format!("column {name:?}: {rows} rows where more should be: has it changed?");
                return Err(malformed(path, Some(group), &reason));
            }
        }
        cursor.at = range.start;
        let rows = self.take(&mut cursor, (path, group), count)?;
        self.cursor = Some(cursor);
        Ok(rows)
    }

    /// Reads `count` rows from the cursor's position.
    fn take(
        &self,
        cursor: &mut Cursor,
        (path, group): (&Path, usize),
        count: usize,
    ) -> Result<Vec<CheckedRow>, DataError> {
        let at = cursor.at;
        let mut values = Vec::new();
        for (requested, columns) in self.columns.iter().zip(&mut cursor.columns) {
            let mut read = Vec::new();
            for column in columns.iter_mut() {
                let place = format!("column {:?}, rows {at}..{}", column.name(), at + count as u64);
                let found = column
                    .read(requested.kind, count)
                    .map_err(|error| failed(path, Some(group), &place, error))?;
                if found.len() != count {
                    let reason = format!("{place}: {} rows where {count} should be", found.len());
                    return Err(malformed(path, Some(group), &reason));
                }
                read.push(found.into_iter());
            }
            values.push((requested, columns.iter().map(ColumnValues::name).collect(), read));
        }
        cursor.at += count as u64;
        Ok((0..count as u64).map(|i| parts::row(&self.columns, &mut values, at + i)).collect())
    }
}

impl Parts for ParquetRows {
    const NAME: &'static str = "row group";

    fn columns(&self) -> &Columns {
        &self.columns
    }

    fn rows(&mut self, part: &str) -> Result<u64, DataError> {
        let (path, group) = row_group(part)?;
        let file = self.file(path)?;
        let rows = file.metadata().row_groups().get(group).map_or(0, |group| group.num_rows());
        u64::try_from(rows).map_err(|_| malformed(path, Some(group), "a negative number of rows"))
    }

    fn read_rows(&mut self, part: &str, range: Range<u64>) -> Result<Vec<CheckedRow>, DataError> {
        Self::read_rows(self, part, range)
    }

    fn kept(&mut self) -> &mut BTreeMap<String, Kept> {
        &mut self.kept
    }
}

/// The path and the number of a row group that is a file of the data set.
fn row_group(file: &str) -> Result<(&Path, usize), DataError> {
    parts::part(file)
        .ok_or_else(|| malformed(Path::new(file), None, "the path names no row group, as `FILE#0`"))
}

impl Reader for ParquetRows {
    type Record = Row;

    fn configure(&mut self, options: ReadOptions) -> Result<(), DataError> {
        self.columns.configure(options);
        Ok(())
    }

    /// Describes each row group as a file, whose path ends in `#` and the number of the row group.
    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let mut dataset = Dataset::default();
        let mut log = SkippedLog::new(self.columns.bad_records_max());
        let listed = files::list_tables(source, &["parquet".to_owned()])?;
        for path in &listed.paths {
            let file = self.file(path)?;
            let fields = self.fields(path, file.metadata())?;
            let text = files::text(path)?;
            let version = files::version(&[path])?;
            for (group, metadata) in file.metadata().row_groups().iter().enumerate() {
                for (requested, fields) in self.columns.iter().zip(&fields) {
                    let refuses_nulls = self.columns.refuses_nulls(requested);
                    for &field in fields {
                        let chunk = metadata.column(field);
                        values::check_chunk(chunk, refuses_nulls).map_err(|reason| {
                            let name = chunk.column_path().string();
                            malformed(path, Some(group), &format!("column {name:?} {reason}"))
                        })?;
                    }
                }
                let name = format!("{text}#{group}");
                let part = parts::describe(self, name, version, &mut log)?;
                if part.records > 0 {
                    dataset.files.push(part);
                }
            }
        }
        dataset.skipped = log.into_skipped();
        listed.note_others(&mut dataset.skipped);
        files::not_empty(source, dataset, "no row in any row group")
    }

    /// Blocks of rows: values are stored column by column, in pages that are decoded from their
    /// first value on.
    fn access(&self, _dataset: &Dataset) -> Access {
        Access::Block { records: BLOCK_ROWS }
    }

    fn read_ahead(&mut self, file: &File, range: Range<u64>) {
        let Ok((path, group)) = row_group(&file.path) else { return };
        let Some(open) = self.files.get(path).cloned() else { return };
        if group >= open.num_row_groups() {
            return;
        }
        let Ok(fields) = self.fields(path, open.metadata()) else { return };
        for field in fields.into_iter().flatten() {
            let (start, bytes) = open.metadata().row_group(group).column(field).byte_range();
            // The position of a row in a column is unknown; rows are assumed to have about the same
            // size.
            let at = |row: u64| {
                (u128::from(bytes) * u128::from(row) / u128::from(file.records.max(1))) as u64
            };
            let (from, to) = (at(range.start), at(range.end));
            files::read_ahead(path, start + from, to.saturating_sub(from).max(1));
        }
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Row>, DataError> {
        let (path, _) = row_group(&file.path)?;
        files::check_table(file, &[path], self.columns.skips())?;
        parts::read(self, file, range)
    }
}

/// Converts an error of the parquet crate. An error of the file's source is returned unchanged.
fn failed(path: &Path, group: Option<usize>, what: &str, error: ParquetError) -> DataError {
    let text = error.to_string();
    let ParquetError::External(source) = error else {
        return malformed(path, group, &format!("{what}: {text}"));
    };
    match source.downcast::<DataError>() {
        Ok(error) => *error,
        Err(source) => match source.downcast::<std::io::Error>() {
            Ok(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                malformed(path, group, &format!("{what}: {text}"))
            }
            Ok(error) => files::io_error(path, *error),
            Err(_) => malformed(path, group, &format!("{what}: {text}")),
        },
    }
}

fn malformed(path: &Path, group: Option<usize>, reason: &str) -> DataError {
    parts::malformed::<ParquetRows>(path, group, reason)
}

/// Access of the parquet crate to a file or object.
#[derive(Debug)]
struct Chunks {
    path: PathBuf,
    bytes: u64,
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.bytes
    }
}

impl ChunkReader for Chunks {
    type T = BufReader<Box<dyn Source>>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        let mut file = files::open(&self.path).map_err(external)?;
        file.seek(SeekFrom::Start(start))?;
        Ok(BufReader::new(file))
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        Ok(files::read(&self.path, start, length as u64).map_err(external)?.into())
    }
}

fn external(error: DataError) -> ParquetError {
    ParquetError::External(Box::new(error))
}

impl std::fmt::Debug for ParquetRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParquetRows").field("columns", &self.columns).finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(super) mod tests;
