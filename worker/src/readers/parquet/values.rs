//! Decodes the values of columns of a row group.

use ::parquet::basic::{Compression, ConvertedType, Type as Physical};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use ::parquet::data_type::{ByteArray, DataType};
use ::parquet::errors::{ParquetError, Result as ParquetResult};
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::file::statistics::Statistics;
use ::parquet::schema::types::{ColumnDescPtr, ColumnDescriptor};

use super::super::columns::{Columns, Kind, number_as_class};
use super::super::parts::{Cell, Content, finite};
use super::super::row::Value;

/// Reader of a column of a row group.
pub(super) struct ColumnValues {
    name: String,
    reader: ColumnReader,
    /// Definition level of values that are not null.
    defined: i16,
    is_list: bool,
    /// What its integers mean.
    meant: ConvertedType,
}

/// For each requested value, the numbers of its columns. A list is requested by its own name, and
/// is a column below it.
pub(super) fn find(
    requested: &Columns,
    columns: &[ColumnDescPtr],
    names: &[String],
) -> Result<Vec<Vec<usize>>, String> {
    let by_name = |name: &str| {
        let is_named = |field: &usize| names[*field] == name;
        let is_below = |field: &usize| {
            let below = names[*field].strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
            below && columns[*field].max_rep_level() > 0
        };
        let exact: Vec<usize> = (0..names.len()).filter(is_named).collect();
        if exact.is_empty() { (0..names.len()).filter(is_below).collect() } else { exact }
    };
    requested.find(names, "the file has", by_name)
}

/// Checks that `column` can be read as `kind`.
pub(super) fn check(column: &ColumnDescriptor, kind: Kind) -> Result<(), String> {
    let is_list = matches!(kind, Kind::F32List(_));
    match (column.max_rep_level(), is_list) {
        (0, false) | (1, true) => {}
        (0, true) => return Err("is no list: it has one value for each row".into()),
        (_, false) => {
            return Err("is repeated: a list or a map, not one value for each row".into());
        }
        (_, true) => return Err("is a list of lists".into()),
    }
    let meant = column.converted_type();
    if meant == ConvertedType::DECIMAL {
        return Err(format!("is {meant}, which is not supported; write it as DOUBLE or INT64"));
    }
    let is_small = matches!(
        meant,
        ConvertedType::INT_8
            | ConvertedType::INT_16
            | ConvertedType::UINT_8
            | ConvertedType::UINT_16
    );
    let (fits, wanted) = match kind {
        Kind::F32 | Kind::F32List(_) => (
            if is_small {
                &[Physical::INT32][..]
            } else {
                &[Physical::FLOAT, Physical::DOUBLE][..]
            },
            "f32: FLOAT, DOUBLE, or an integer of 8 or 16 bits",
        ),
        Kind::Class(_) | Kind::I64 => (
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
pub(super) fn check_chunk(chunk: &ColumnChunkMetaData, refuses_nulls: bool) -> Result<(), String> {
    let compression = chunk.compression();
    if matches!(compression, Compression::BROTLI(_) | Compression::LZO) {
        return Err(format!(
            "is compressed with {compression}, which is not supported; write it with ZSTD or SNAPPY"
        ));
    }
    // An empty list counts as a null.
    let is_list = chunk.column_descr().max_rep_level() > 0;
    match chunk.statistics().and_then(Statistics::null_count_opt) {
        Some(1) if refuses_nulls && !is_list => {
            Err("has a null where each row needs a value; fill it first".into())
        }
        Some(nulls) if nulls > 1 && refuses_nulls && !is_list => {
            Err(format!("has {nulls} nulls where each row needs a value; fill them first"))
        }
        _ => Ok(()),
    }
}

impl ColumnValues {
    pub(super) fn new(name: String, reader: ColumnReader, column: &ColumnDescriptor) -> Self {
        let (defined, is_list) = (column.max_def_level(), column.max_rep_level() > 0);
        Self { name, reader, defined, is_list, meant: column.converted_type() }
    }

    pub(super) fn name(&self) -> String {
        self.name.clone()
    }

    /// Skips rows. Returns their number.
    pub(super) fn skip(&mut self, rows: usize) -> ParquetResult<usize> {
        match &mut self.reader {
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

    /// Reads the next `count` rows; fewer if the column ends before.
    pub(super) fn read(&mut self, kind: Kind, count: usize) -> ParquetResult<Vec<Cell>> {
        let Self { reader, defined, is_list, meant, .. } = self;
        let shape = (count, *defined, *is_list);
        let integer = |number: i64| match kind {
            Kind::Class(classes) => number_as_class(number, classes),
            // Of 8 or 16 bits.
            Kind::F32 | Kind::F32List(_) => Ok(Value::F32(number as f32)),
            Kind::I64 | Kind::Text => Ok(Value::I64(number)),
        };
        let (is_u32, is_u64) = (*meant == ConvertedType::UINT_32, *meant == ConvertedType::UINT_64);
        let int32 = |&v: &i32| integer(if is_u32 { i64::from(v as u32) } else { v.into() });
        let int64 = |&v: &i64| match v {
            v if is_u64 && v < 0 => Err(format!("{} where an i64 should be", v as u64)),
            v => integer(v),
        };
        match (reader, kind) {
            (ColumnReader::FloatColumnReader(c), Kind::F32 | Kind::F32List(_)) => {
                each(c, shape, |&v| finite(f64::from(v), v))
            }
            (ColumnReader::DoubleColumnReader(c), Kind::F32 | Kind::F32List(_)) => {
                each(c, shape, |&v| finite(v, v as f32))
            }
            (ColumnReader::Int32ColumnReader(c), kind) if kind != Kind::Text => {
                each(c, shape, int32)
            }
            (ColumnReader::Int64ColumnReader(c), Kind::Class(_) | Kind::I64) => {
                each(c, shape, int64)
            }
            (ColumnReader::BoolColumnReader(c), Kind::Class(_) | Kind::I64) => {
                each(c, shape, |&v| integer(v.into()))
            }
            (ColumnReader::ByteArrayColumnReader(c), Kind::Text) => each(c, shape, text),
            _ => Err(ParquetError::General(
                "the column's type has changed since it was validated".into(),
            )),
        }
    }
}

fn text(bytes: &ByteArray) -> Result<Value, String> {
    match std::str::from_utf8(bytes.data()) {
        Ok(text) => Ok(Value::Text(text.to_owned())),
        Err(_) => Err("bytes that are not UTF-8".into()),
    }
}

/// Reads the next `count` rows of a column whose values that are not null have the definition level
/// `defined`.
fn each<T: DataType>(
    column: &mut ColumnReaderImpl<T>,
    (count, defined, is_list): (usize, i16, bool),
    value: impl Fn(&T::T) -> Result<Value, String>,
) -> ParquetResult<Vec<Cell>> {
    let (mut levels, mut repeated, mut found) = (Vec::new(), Vec::new(), Vec::new());
    let mut rows = 0;
    // A column consists of pages, and a read stops at the end of a page.
    while rows < count {
        let repeated = is_list.then_some(&mut repeated);
        let (more, ..) =
            column.read_records(count - rows, Some(&mut levels), repeated, &mut found)?;
        if more == 0 {
            break;
        }
        rows += more;
    }
    let mut found = found.iter();
    if is_list {
        return Ok(lists(&levels, &repeated, defined, || found.next().map(&value)));
    }
    if defined == 0 {
        return Ok(found.map(|found| value(found).map(Content::Value)).collect());
    }
    let row = |&level: &i16| {
        let there = if level == defined { found.next() } else { None };
        there.map_or(Ok(Content::Null), |found| value(found).map(Content::Value))
    };
    Ok(levels.iter().map(row).collect())
}

/// The lists of consecutive rows. A list without elements has one level, as a null has.
fn lists(
    levels: &[i16],
    repeated: &[i16],
    defined: i16,
    mut next: impl FnMut() -> Option<Result<Value, String>>,
) -> Vec<Cell> {
    let mut rows: Vec<Cell> = Vec::new();
    let mut entries: Vec<Vec<i16>> = Vec::new();
    for (&level, &repeated) in levels.iter().zip(repeated) {
        match entries.last_mut() {
            Some(row) if repeated > 0 => row.push(level),
            _ => entries.push(vec![level]),
        }
    }
    for row in entries {
        if row.len() == 1 && row[0] < defined {
            rows.push(Ok(Content::Null));
            continue;
        }
        // All values of the row are taken, also after one that is invalid.
        let elements: Vec<Option<Result<Value, String>>> =
            row.iter().map(|&level| if level == defined { next() } else { None }).collect();
        let numbers = elements.into_iter().map(|element| match element {
            None => Ok(None),
            Some(Ok(Value::F32(number))) => Ok(Some(number)),
            Some(Ok(_)) => Err("an element that is no number".into()),
            Some(Err(reason)) => Err(reason),
        });
        rows.push(numbers.collect::<Result<_, String>>().map(Content::List));
    }
    rows
}
