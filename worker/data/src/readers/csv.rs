//! Tables as comma-separated values.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ::csv::{ByteRecord, Position, ReaderBuilder};

use super::columns::{Column, Columns, Found, Kind, Source, number_as_class};
use super::files;
use super::packed::TextFile;
use super::row::{Row, Value};
use super::text_table::{self, Format, ROW_BYTES_MAX, Rows, TextTables, text_reader};
use crate::reader::DataError;

/// Reads rows of CSV files whose first line names the columns.
///
/// Name the required columns, with their types, in the order in which they should appear in the
/// [`Row`]; other columns are ignored. Quotes, commas and line breaks within quotes, and blank
/// lines are handled according to RFC 4180. In folders, files that end in `.csv`, `.csv.gz` and
/// `.csv.zst` are read.
///
/// Every field of every file is validated before training starts. Each worker scans a file once to
/// index where its rows begin (half a byte per row), and from then on reads only the requested
/// rows. A file that is compressed with gzip or zstd is held in the memory of each worker,
/// compressed, up to [a limit](Self::compressed_bytes_max) for all such files.
///
/// A field that is empty, but for spaces, is a null, except in columns of text.
///
/// ```
/// # extern crate elasticdl_data as elasticdl;
/// use elasticdl::readers::CsvRows;
///
/// let houses = CsvRows::new().f32("area").i64("rooms").fill(3).text("city").f32("price").label();
/// // 64 pixels and a class, in a file without names.
/// let digits = CsvRows::new().headerless().class("64", 10).label().other_f32s(64);
/// ```
#[derive(Clone, Debug, Default)]
pub struct CsvRows {
    tables: TextTables<Dialect>,
}

#[derive(Clone, Debug)]
struct Dialect {
    is_headerless: bool,
    separator: u8,
    /// Fields that are nulls.
    nulls: Vec<String>,
}

impl Default for Dialect {
    fn default() -> Self {
        Self { is_headerless: false, separator: b',', nulls: Vec::new() }
    }
}

text_reader!(CsvRows);

impl CsvRows {
    /// The first line is a row, too. The names of the columns are their numbers, from `0`.
    pub fn headerless(mut self) -> Self {
        self.tables.format.is_headerless = true;
        self
    }

    /// Fields are separated by this character, for example `b';'` or `b'\t'`, in place of a comma.
    pub fn separator(mut self, separator: u8) -> Self {
        self.tables.format.separator = separator;
        self
    }

    /// Fields with one of these texts are nulls, too, for example `NA`; in columns of text as well.
    pub fn null_texts(mut self, texts: &[&str]) -> Self {
        self.tables.format.nulls = texts.iter().map(|&text| text.to_owned()).collect();
        self
    }
}

impl Format for Dialect {
    fn no_row(&self) -> &'static str {
        "no row below the header"
    }

    fn extensions(&self) -> Vec<String> {
        text_table::with_packed("csv")
    }

    fn open<'a>(
        &'a self,
        text: &'a TextFile,
        columns: &'a Columns,
    ) -> Result<Box<dyn Rows + 'a>, DataError> {
        let limits = Arc::new(Limits::default());
        let source = Bounded { source: text.read()?, at: 0, limits: Arc::clone(&limits) };
        let mut rows = ReaderBuilder::new()
            // A wrong number of columns is reported by this reader.
            .flexible(true)
            .has_headers(!self.is_headerless)
            .delimiter(self.separator)
            .buffer_capacity(BUFFER_BYTES)
            .from_reader(source);
        let header = rows.byte_headers().map_err(|error| csv_error(text.path(), error))?;
        let names: Vec<String> = if self.is_headerless {
            (0..header.len()).map(|field| field.to_string()).collect()
        } else {
            header.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect()
        };
        if !names.is_empty() && limits.is_cut(rows.position().byte()) {
            return Err(text.error_at(0, UNCLOSED.into()));
        }
        let fields = fields(columns, &names).map_err(|reason| text.error_at(0, reason))?;
        let record = ByteRecord::new();
        Ok(Box::new(CsvFile { dialect: self, text, columns, rows, limits, record, names, fields }))
    }
}

/// For each requested value, the numbers of its fields.
fn fields(columns: &Columns, names: &[String]) -> Result<Vec<Vec<usize>>, String> {
    if let ([], Some(first)) = (names, columns.names().next()) {
        return Err(format!("no header where column {first:?} should be named"));
    }
    let by_name = |name: &str| (0..names.len()).filter(|&field| names[field] == name).collect();
    columns.find(names, "the header has", by_name)
}

/// An open file.
struct CsvFile<'a> {
    dialect: &'a Dialect,
    text: &'a TextFile,
    columns: &'a Columns,
    rows: ::csv::Reader<Bounded>,
    limits: Arc<Limits>,
    /// The row that was read last.
    record: ByteRecord,
    names: Vec<String>,
    /// For each requested value, the numbers of its fields.
    fields: Vec<Vec<usize>>,
}

impl Rows for CsvFile<'_> {
    fn seek(&mut self, byte: u64) -> Result<(), DataError> {
        let mut start = Position::new();
        start.set_byte(byte);
        self.rows.seek(start).map_err(|error| csv_error(self.text.path(), error))
    }

    fn advance(&mut self) -> Result<Option<u64>, DataError> {
        self.limits.budget.store(ROW_BYTES_MAX, Ordering::Relaxed);
        let begins = self.rows.position().byte();
        let read = self.rows.read_byte_record(&mut self.record).map_err(|error| match error.kind() {
            ::csv::ErrorKind::Io(source) if source.kind() == std::io::ErrorKind::FileTooLarge => {
                let reason = format!(
                    "a row of more than {} MiB begins here; is there a missing or a stray quote?",
                    ROW_BYTES_MAX >> 20
                );
                self.text.error_at(begins, reason)
            }
            _ => csv_error(self.text.path(), error),
        })?;
        let start = || self.record.position().expect("a record that was read has a position");
        if read && self.limits.is_cut(self.rows.position().byte()) {
            return Err(self.text.error_at(start().byte(), UNCLOSED.into()));
        }
        Ok(read.then(|| start().byte()))
    }

    fn check(&self) -> Result<(), String> {
        let table = if self.dialect.is_headerless { "first row" } else { "header" };
        match self.record.len() {
            len if len == self.names.len() => Ok(()),
            1 => Err(format!("1 column where the {table} has {}", self.names.len())),
            len => Err(format!("{len} columns where the {table} has {}", self.names.len())),
        }
    }

    fn row(&self) -> Result<Option<Row>, String> {
        self.check()?;
        let values = self.columns.iter().zip(&self.fields);
        let values = values.map(|(column, fields)| self.value(column, fields));
        self.columns.row(values, |column| match &column.source {
            Source::One(name) => invalid(name, "", column.kind),
            Source::Several(_) | Source::Others(_) => invalid("", "", column.kind),
        })
    }
}

impl CsvFile<'_> {
    fn value(&self, column: &Column, fields: &[usize]) -> Found {
        match (&column.source, fields) {
            (Source::One(_), []) => Ok(None),
            (Source::One(_), [field, ..]) => self.field(*field, column.kind),
            (Source::Several(_) | Source::Others(_), fields) => {
                let number = |&field: &usize| match self.field(field, Kind::F32)? {
                    Some(Value::F32(number)) => Ok(Some(number)),
                    _ => Ok(None),
                };
                let null = |i: usize| invalid(&self.names[fields[i]], "", Kind::F32);
                self.columns.numbers(column, fields.iter().map(number), null)
            }
        }
    }

    fn field(&self, field: usize, kind: Kind) -> Found {
        let name = &self.names[field];
        let text = std::str::from_utf8(&self.record[field])
            .map_err(|_| format!("column {name:?} is not UTF-8"))?;
        if self.dialect.nulls.iter().any(|null| null == text.trim()) {
            return Ok(None);
        }
        if kind == Kind::Text {
            return Ok(Some(Value::Text(text.to_owned())));
        }
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Ok(None);
        }
        let value = match kind {
            Kind::Class(classes) => {
                integer(trimmed).and_then(|number| number_as_class(number, classes).ok())
            }
            Kind::F32 => trimmed.parse().ok().filter(|n: &f32| n.is_finite()).map(Value::F32),
            Kind::I64 => integer(trimmed).map(Value::I64),
            Kind::F32List(_) | Kind::Text => None,
        };
        value.map(Some).ok_or_else(|| invalid(name, text, kind))
    }
}

/// The integer in a field. False and true are 0 and 1. A column of integers with nulls is written
/// with decimals by some tools.
fn integer(text: &str) -> Option<i64> {
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    if let Some(number) = ["false", "true"].iter().position(|word| word.eq_ignore_ascii_case(text))
    {
        return i64::try_from(number).ok();
    }
    let number = text.strip_suffix('0').map(|rest| rest.trim_end_matches('0'));
    number.and_then(|rest| rest.strip_suffix('.')).and_then(|whole| whole.parse().ok())
}

fn invalid(name: &str, text: &str, kind: Kind) -> String {
    format!("column {name:?} is \"{}\" where {} should be", files::printable(text), kind.wanted())
}

const BUFFER_BYTES: usize = 64 << 10;

/// A text that returns at most `budget` bytes, which bounds the size of one record: a stray quote
/// makes one record of the rest of the file.
///
/// Two line feeds follow the text. The first one ends the last row, and the second one is part of a
/// row only if a quote of that row is still open.
struct Bounded {
    source: Box<dyn files::Source>,
    at: u64,
    limits: Arc<Limits>,
}

/// What is known of a text while its rows are read.
struct Limits {
    /// Number of bytes that may still be read for the next row.
    budget: AtomicU64,
    /// Length of the text, once its end was reached.
    end: AtomicU64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { budget: AtomicU64::new(ROW_BYTES_MAX), end: AtomicU64::new(UNKNOWN) }
    }
}

impl Limits {
    /// Whether the row that ends at `byte` reaches beyond the end of the text.
    fn is_cut(&self, byte: u64) -> bool {
        let end = self.end.load(Ordering::Relaxed);
        end != UNKNOWN && byte > end + 1
    }
}

impl Read for Bounded {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let budget = self.limits.budget.load(Ordering::Relaxed);
        if budget == 0 {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        let mut bytes = match self.limits.end.load(Ordering::Relaxed) {
            end if self.at >= end => 0,
            _ => self.source.read(buf)?,
        };
        if bytes == 0 && !buf.is_empty() {
            let end = self.limits.end.fetch_min(self.at, Ordering::Relaxed).min(self.at);
            if self.at < end + LINE_FEEDS {
                buf[0] = b'\n';
                bytes = 1;
            }
        }
        self.at += bytes as u64;
        self.limits.budget.store(budget.saturating_sub(bytes as u64), Ordering::Relaxed);
        Ok(bytes)
    }
}

impl Seek for Bounded {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.at = self.source.seek(to)?;
        Ok(self.at)
    }
}

const UNKNOWN: u64 = u64::MAX;
const LINE_FEEDS: u64 = 2;
const UNCLOSED: &str = "a quote opens in this row and is not closed before the end of the file";

fn csv_error(path: &Path, error: ::csv::Error) -> DataError {
    match error.into_kind() {
        ::csv::ErrorKind::Io(source) => files::io_error(path, source),
        kind => files::malformed(path, &format!("{kind:?}")),
    }
}

#[cfg(test)]
mod tests;
