//! Tables in Parquet files.

use std::collections::BTreeMap;
use std::io::{BufReader, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::parquet::basic::{Compression, ConvertedType, Type as Physical};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use ::parquet::data_type::{ByteArray, DataType};
use ::parquet::errors::{ParquetError, Result as ParquetResult};
use ::parquet::file::metadata::{ColumnChunkMetaData, ParquetMetaData};
use ::parquet::file::reader::{ChunkReader, FileReader as _, Length, SerializedFileReader};
use ::parquet::file::statistics::Statistics;
use ::parquet::schema::types::ColumnDescriptor;
use bytes::Bytes;

use super::files::{self, Source};
use super::row::{Kind, Row, Value};
use crate::reader::{DataError, Dataset, File, Reader};

/// Reads rows of Parquet files.
///
/// Name the required columns, with their types, in the order in which they should appear in the
/// [`Row`]; other columns are not read. A nested column is named by its path, `a.b`. In folders,
/// files that end in `.parquet` are read.
///
/// Each row group is a file of the data set, named `table.parquet#0`, so that shards do not span
/// row groups. Schemas are validated before training starts, values when they are read.
///
/// ```
/// use elasticdl::readers::ParquetRows;
///
/// let reader = ParquetRows::new().f32("area").i64("rooms").text("city").f32("price");
/// ```
#[derive(Default)]
pub struct ParquetRows {
    columns: Vec<(String, Kind)>,
    files: BTreeMap<PathBuf, Arc<SerializedFileReader<Chunks>>>,
    /// Position of the last read: the next read mostly continues there.
    cursor: Option<Cursor>,
}

/// Position in a row group that is being read.
struct Cursor {
    /// Name of the row group in the data set.
    group: String,
    /// Number of rows read or skipped so far.
    at: u64,
    /// The requested columns.
    columns: Vec<Column>,
}

/// Reader of a column of a row group.
struct Column {
    reader: ColumnReader,
    /// Definition level of values that are not null.
    defined: i16,
}

impl ParquetRows {
    /// Creates a reader without columns; add the required ones.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a column of finite numbers: `FLOAT`, or `DOUBLE`, which is rounded to `f32`.
    pub fn f32(self, name: &str) -> Self {
        self.column(name, Kind::F32)
    }

    /// Adds a column of integers: `INT32`, `INT64` or `BOOLEAN`.
    pub fn i64(self, name: &str) -> Self {
        self.column(name, Kind::I64)
    }

    /// Adds a column of text: `BYTE_ARRAY` in UTF-8.
    pub fn text(self, name: &str) -> Self {
        self.column(name, Kind::Text)
    }

    fn column(mut self, name: &str, kind: Kind) -> Self {
        self.columns.push((name.to_owned(), kind));
        self
    }

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

    /// For each requested column, its number in the file.
    fn fields(&self, path: &Path, metadata: &ParquetMetaData) -> Result<Vec<usize>, DataError> {
        let columns = metadata.file_metadata().schema_descr().columns();
        let field = |(name, kind): &(String, Kind)| {
            let field = columns.iter().position(|column| column.path().string() == *name);
            let field = field.ok_or_else(|| {
                let names: Vec<String> =
                    columns.iter().map(|column| column.path().string()).collect();
                format!("no column {name:?}: the file has {}", files::printable(&names.join(", ")))
            })?;
            check(&columns[field], *kind).map_err(|reason| format!("column {name:?} {reason}"))?;
            Ok(field)
        };
        let fields: Result<Vec<usize>, String> = self.columns.iter().map(field).collect();
        fields.map_err(|reason| malformed(path, None, &reason))
    }

    /// Readers of the requested columns of a row group, positioned at its first row.
    fn open(&mut self, path: &Path, group: usize) -> Result<Vec<Column>, DataError> {
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
        let named = self.columns.iter().zip(fields);
        let column = |((name, _), field): (&(String, Kind), usize)| {
            let reader = rows
                .get_column_reader(field)
                .map_err(|error| failed(path, Some(group), &format!("column {name:?}"), error))?;
            let defined = rows.metadata().schema_descr().column(field).max_def_level();
            Ok(Column { reader, defined })
        };
        named.map(column).collect()
    }

    /// Reads `count` rows from the cursor's position.
    fn take(&mut self, path: &Path, group: usize, count: usize) -> Result<Vec<Row>, DataError> {
        let cursor = self.cursor.as_mut().expect("the caller has set the cursor");
        let mut rows: Vec<Vec<Value>> = Vec::new();
        rows.resize_with(count, || Vec::with_capacity(self.columns.len()));
        for ((name, kind), column) in self.columns.iter().zip(&mut cursor.columns) {
            let at =
                || format!("column {name:?}, rows {}..{}", cursor.at, cursor.at + count as u64);
            let values =
                values(column, *kind, count).map_err(|e| failed(path, Some(group), &at(), e))?;
            if values.len() != count {
                let found = values.len();
                let reason = format!("{}: {found} rows where {count} should be", at());
                return Err(malformed(path, Some(group), &reason));
            }
            for (i, (row, value)) in rows.iter_mut().zip(values).enumerate() {
                row.push(value.map_err(|reason| {
                    let at = cursor.at + i as u64;
                    malformed(path, Some(group), &format!("column {name:?}, row {at}: {reason}"))
                })?);
            }
        }
        cursor.at += count as u64;
        Ok(rows.into_iter().map(Row::new).collect())
    }
}

impl Reader for ParquetRows {
    type Record = Row;

    /// Describes each row group as a file, whose path ends in `#` and the number of the row group.
    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let mut dataset = Dataset::default();
        for path in files::list(source, &["parquet".to_owned()])? {
            let file = self.file(&path)?;
            let fields = self.fields(&path, file.metadata())?;
            let text = files::text(&path)?;
            let version = Some(files::version(&[&path])?);
            for (group, metadata) in file.metadata().row_groups().iter().enumerate() {
                let records = u64::try_from(metadata.num_rows())
                    .map_err(|_| malformed(&path, Some(group), "a negative number of rows"))?;
                for ((name, _), &field) in self.columns.iter().zip(&fields) {
                    check_chunk(metadata.column(field)).map_err(|reason| {
                        malformed(&path, Some(group), &format!("column {name:?} {reason}"))
                    })?;
                }
                if records > 0 {
                    dataset.files.push(File { path: format!("{text}#{group}"), records, version });
                }
            }
        }
        files::not_empty(source, dataset, "no row in any row group")
    }

    fn read_ahead(&mut self, file: &File, range: Range<u64>) {
        let named =
            file.path.rsplit_once('#').and_then(|(path, group)| Some((path, group.parse().ok()?)));
        let Some((path, group)) = named.map(|(path, group): (_, usize)| (Path::new(path), group))
        else {
            return;
        };
        let Some(open) = self.files.get(path).cloned() else { return };
        if group >= open.num_row_groups() {
            return;
        }
        let Ok(fields) = self.fields(path, open.metadata()) else { return };
        for field in fields {
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
        let named =
            file.path.rsplit_once('#').and_then(|(path, group)| Some((path, group.parse().ok()?)));
        let Some((path, group)) = named else {
            return Err(malformed(
                Path::new(&file.path),
                None,
                "the path names no row group, as `FILE#0`",
            ));
        };
        let path = Path::new(path);
        files::check(file, &[path])?;
        let count = usize::try_from(range.end.saturating_sub(range.start)).map_err(|_| {
            malformed(path, Some(group), "more rows than fit into the address space")
        })?;
        let continues =
            self.cursor.as_ref().is_some_and(|c| c.group == file.path && c.at <= range.start);
        if !continues {
            let columns = self.open(path, group)?;
            self.cursor = Some(Cursor { group: file.path.clone(), at: 0, columns });
        }
        let cursor = self.cursor.as_mut().expect("the cursor was set above");
        let skipped = range.start - cursor.at;
        for ((name, _), column) in self.columns.iter().zip(&mut cursor.columns) {
            let done = skip(&mut column.reader, skipped as usize)
                .map_err(|error| failed(path, Some(group), &format!("column {name:?}"), error))?;
            if done as u64 != skipped {
                let rows = cursor.at + done as u64;
                let reason =
                    format!("column {name:?}: {rows} rows where more should be: has it changed?");
                return Err(malformed(path, Some(group), &reason));
            }
        }
        cursor.at = range.start;
        let rows = self.take(path, group, count);
        if rows.is_err() {
            self.cursor = None;
        }
        rows
    }
}

/// Checks that `column` can be read as `kind`.
fn check(column: &ColumnDescriptor, kind: Kind) -> Result<(), String> {
    if column.max_rep_level() > 0 {
        return Err("is repeated: a list or a map, not one value for each row".into());
    }
    let meant = column.converted_type();
    if matches!(meant, ConvertedType::DECIMAL | ConvertedType::UINT_32 | ConvertedType::UINT_64) {
        return Err(format!("is {meant}, which is not supported; write it as DOUBLE or INT64"));
    }
    let (fits, wanted) = match kind {
        Kind::F32 => (&[Physical::FLOAT, Physical::DOUBLE][..], "f32: FLOAT or DOUBLE"),
        Kind::I64 => (
            &[Physical::INT32, Physical::INT64, Physical::BOOLEAN][..],
            "i64: INT32, INT64 or BOOLEAN",
        ),
        Kind::Text => (&[Physical::BYTE_ARRAY][..], "text: BYTE_ARRAY"),
    };
    let physical = column.physical_type();
    if !fits.contains(&physical) {
        return Err(format!("is {physical}, which cannot be read as {wanted}"));
    }
    Ok(())
}

/// Checks that a column of a row group can be read, from the metadata in the footer.
fn check_chunk(chunk: &ColumnChunkMetaData) -> Result<(), String> {
    let compression = chunk.compression();
    if matches!(compression, Compression::BROTLI(_) | Compression::LZO) {
        return Err(format!(
            "is compressed with {compression}, which is not supported; write it with ZSTD or SNAPPY"
        ));
    }
    match chunk.statistics().and_then(Statistics::null_count_opt) {
        None | Some(0) => Ok(()),
        Some(1) => Err("has a null where each row needs a value; fill it first".into()),
        Some(nulls) => {
            Err(format!("has {nulls} nulls where each row needs a value; fill them first"))
        }
    }
}

/// A value, or why it is invalid.
type Checked = Result<Value, String>;

/// Reads the next `count` values of a column; fewer if it ends before.
fn values(column: &mut Column, kind: Kind, count: usize) -> ParquetResult<Vec<Checked>> {
    let shape = (count, column.defined);
    let number = |number: f64, found: f32| {
        if !found.is_finite() {
            return Err(format!("{number} where a finite f32 should be"));
        }
        Ok(Value::F32(found))
    };
    let text = |bytes: &ByteArray| match std::str::from_utf8(bytes.data()) {
        Ok(text) => Ok(Value::Text(text.to_owned())),
        Err(_) => Err("bytes that are not UTF-8".into()),
    };
    match (&mut column.reader, kind) {
        (ColumnReader::FloatColumnReader(c), Kind::F32) => {
            each(c, shape, |&v| number(f64::from(v), v))
        }
        (ColumnReader::DoubleColumnReader(c), Kind::F32) => {
            each(c, shape, |&v| number(v, v as f32))
        }
        (ColumnReader::Int32ColumnReader(c), Kind::I64) => {
            each(c, shape, |&v| Ok(Value::I64(v.into())))
        }
        (ColumnReader::Int64ColumnReader(c), Kind::I64) => each(c, shape, |&v| Ok(Value::I64(v))),
        (ColumnReader::BoolColumnReader(c), Kind::I64) => {
            each(c, shape, |&v| Ok(Value::I64(v.into())))
        }
        (ColumnReader::ByteArrayColumnReader(c), Kind::Text) => each(c, shape, text),
        _ => Err(ParquetError::General(
            "the column's type has changed since it was validated".into(),
        )),
    }
}

/// Reads the next `count` rows of a column; a null is an error of its row.
fn each<T: DataType>(
    column: &mut ColumnReaderImpl<T>,
    (count, defined): (usize, i16),
    value: impl Fn(&T::T) -> Checked,
) -> ParquetResult<Vec<Checked>> {
    let (mut levels, mut found) = (Vec::new(), Vec::new());
    let mut rows = 0;
    // A column consists of pages, and a read stops at the end of a page.
    while rows < count {
        let (more, ..) = column.read_records(count - rows, Some(&mut levels), None, &mut found)?;
        if more == 0 {
            break;
        }
        rows += more;
    }
    if defined == 0 {
        return Ok(found.iter().map(value).collect());
    }
    let mut found = found.iter();
    let row = |&level: &i16| {
        let there = if level == defined { found.next() } else { None };
        there.map_or_else(|| Err("a null where a value should be".into()), &value)
    };
    Ok(levels.iter().map(row).collect())
}

fn skip(column: &mut ColumnReader, rows: usize) -> ParquetResult<usize> {
    match column {
        ColumnReader::BoolColumnReader(c) => c.skip_records(rows),
        ColumnReader::Int32ColumnReader(c) => c.skip_records(rows),
        ColumnReader::Int64ColumnReader(c) => c.skip_records(rows),
        ColumnReader::Int96ColumnReader(c) => c.skip_records(rows),
        ColumnReader::FloatColumnReader(c) => c.skip_records(rows),
        ColumnReader::DoubleColumnReader(c) => c.skip_records(rows),
        ColumnReader::ByteArrayColumnReader(c) => c.skip_records(rows),
        ColumnReader::FixedLenByteArrayColumnReader(c) => c.skip_records(rows),
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
    match group {
        Some(group) => files::malformed(path, &format!("row group {group}: {reason}")),
        None => files::malformed(path, reason),
    }
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
