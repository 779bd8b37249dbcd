//! Tables as comma-separated values.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ::csv::{ByteRecord, Position, ReaderBuilder};

use super::files;
use super::row::{Kind, Row, Value};
use crate::reader::{DataError, Dataset, File, Reader};

/// Reads rows of CSV files whose first line names the columns.
///
/// Name the required columns, with their types, in the order in which they should appear in the
/// [`Row`]; other columns are ignored. Quotes, commas and line breaks within quotes, and blank
/// lines are handled according to RFC 4180. In folders, files that end in `.csv` are read.
///
/// Every field of every file is validated before training starts. Each worker scans a file once to
/// index where its rows begin, and from then on reads only the requested rows.
///
/// ```
/// use elasticdl::readers::CsvRows;
///
/// let reader = CsvRows::new().f32("area").i64("rooms").text("city").f32("price");
/// ```
#[derive(Clone, Debug, Default)]
pub struct CsvRows {
    columns: Vec<(String, Kind)>,
    indices: BTreeMap<String, FileIndex>,
}

/// Index of a file's rows and columns.
#[derive(Clone, Debug)]
struct FileIndex {
    /// Length of the scanned file.
    bytes: u64,
    rows: u64,
    /// Positions of rows 0, `STRIDE`, 2·`STRIDE`, …
    positions: Vec<Position>,
    /// Number of columns in the header, and so in each row.
    columns: usize,
    /// For each requested column, its number in the file.
    fields: Vec<usize>,
}

impl CsvRows {
    /// Creates a reader without columns; add the required ones.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a column of finite numbers.
    pub fn f32(self, name: &str) -> Self {
        self.column(name, Kind::F32)
    }

    /// Adds a column of integers.
    pub fn i64(self, name: &str) -> Self {
        self.column(name, Kind::I64)
    }

    /// Adds a column of text.
    pub fn text(self, name: &str) -> Self {
        self.column(name, Kind::Text)
    }

    fn column(mut self, name: &str, kind: Kind) -> Self {
        self.columns.push((name.to_owned(), kind));
        self
    }

    /// Scans and indexes a file, and validates each row with `check`.
    fn scan(
        &self,
        path: &Path,
        check: impl Fn(&ByteRecord, &FileIndex) -> Result<(), String>,
    ) -> Result<FileIndex, DataError> {
        let bytes = files::length(path)?;
        let (mut rows, budget) = open(path)?;
        let header = rows.byte_headers().map_err(|error| csv_error(path, error))?.clone();
        if header.as_slice().starts_with(GZIP) {
            return Err(files::malformed(path, "compressed with gzip: decompress it first"));
        }
        let fields = self.fields(&header).map_err(|reason| error_at(path, 0, reason))?;
        let mut index =
            FileIndex { bytes, rows: 0, positions: Vec::new(), columns: header.len(), fields };
        let mut record = ByteRecord::new();
        while next(path, &mut rows, &budget, &mut record)? {
            let position = record.position().expect("a record that was read has a position");
            if index.rows.is_multiple_of(STRIDE) {
                index.positions.push(position.clone());
            }
            index.rows += 1;
            check(&record, &index).map_err(|reason| error_at(path, position.byte(), reason))?;
        }
        Ok(index)
    }

    /// For each requested column, its number in the header.
    fn fields(&self, header: &ByteRecord) -> Result<Vec<usize>, String> {
        let names = || {
            files::printable(
                &header.iter().map(String::from_utf8_lossy).collect::<Vec<_>>().join(", "),
            )
        };
        let field = |(name, _): &(String, Kind)| {
            let mut fields = (0..header.len()).filter(|&field| header[field] == *name.as_bytes());
            match (fields.next(), fields.next()) {
                (Some(field), None) => Ok(field),
                (None, _) if header.is_empty() => {
                    Err(format!("no header where column {name:?} should be named"))
                }
                (None, _) => Err(format!("no column {name:?}: the header has {}", names())),
                (Some(_), Some(_)) => {
                    Err(format!("more than one column {name:?}: the header has {}", names()))
                }
            }
        };
        self.columns.iter().map(field).collect()
    }

    /// Converts the requested columns of a record to a row.
    fn row(&self, record: &ByteRecord, index: &FileIndex) -> Result<Row, String> {
        index.check_width(record)?;
        let value = |((name, kind), &field): (&(String, Kind), &usize)| {
            let text = std::str::from_utf8(&record[field])
                .map_err(|_| format!("column {name:?} is not UTF-8"))?;
            let shown = || files::printable(text);
            match kind {
                Kind::F32 => match text.trim().parse::<f32>() {
                    Ok(number) if number.is_finite() => Ok(Value::F32(number)),
                    _ => Err(format!(
                        "column {name:?} is \"{}\" where a finite number should be",
                        shown()
                    )),
                },
                Kind::I64 => match text.trim().parse::<i64>() {
                    Ok(number) => Ok(Value::I64(number)),
                    Err(_) => Err(format!(
                        "column {name:?} is \"{}\" where an integer should be",
                        shown()
                    )),
                },
                Kind::Text => Ok(Value::Text(text.to_owned())),
            }
        };
        Ok(Row::new(self.columns.iter().zip(&index.fields).map(value).collect::<Result<_, _>>()?))
    }
}

impl FileIndex {
    fn check_width(&self, record: &ByteRecord) -> Result<(), String> {
        match record.len() {
            len if len == self.columns => Ok(()),
            1 => Err(format!("1 column where the header has {}", self.columns)),
            len => Err(format!("{len} columns where the header has {}", self.columns)),
        }
    }
}

impl Reader for CsvRows {
    type Record = Row;

    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let mut dataset = Dataset::default();
        for path in files::list(source, &["csv".to_owned()])? {
            let index = self.scan(&path, |record, index| self.row(record, index).map(drop))?;
            if index.rows > 0 {
                let version = Some(files::version(&[&path])?);
                dataset.files.push(File {
                    path: files::text(&path)?,
                    records: index.rows,
                    version,
                });
            }
            self.indices.insert(files::text(&path)?, index);
        }
        files::not_empty(source, dataset, "no row below the header")
    }

    fn read_ahead(&mut self, file: &File, range: Range<u64>) {
        if let Some(index) = self.indices.get(&file.path) {
            let at = |row: u64| {
                index.positions.get((row / STRIDE) as usize).map_or(index.bytes, Position::byte)
            };
            let (start, end) = (at(range.start), at(range.end + STRIDE));
            files::read_ahead(Path::new(&file.path), start, end.saturating_sub(start));
        }
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Row>, DataError> {
        let path = Path::new(&file.path);
        files::check(file, &[path])?;
        if !self.indices.contains_key(&file.path) {
            let index = self.scan(path, |record, index| index.check_width(record))?;
            self.indices.insert(file.path.clone(), index);
        }
        let index = &self.indices[&file.path];
        let changed = |found: String| files::malformed(path, &format!("{found}: has it changed?"));
        let bytes = files::length(path)?;
        if bytes != index.bytes {
            return Err(changed(format!("{bytes} bytes where {} were", index.bytes)));
        }
        if range.end > index.rows {
            return Err(changed(format!("{} rows where {} were", index.rows, file.records)));
        }
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let (mut rows, budget) = open(path)?;
        let start = index.positions[(range.start / STRIDE) as usize].clone();
        rows.seek(start).map_err(|error| csv_error(path, error))?;
        let mut records = Vec::new();
        let mut record = ByteRecord::new();
        for row in range.start / STRIDE * STRIDE..range.end {
            if !next(path, &mut rows, &budget, &mut record)? {
                return Err(changed(format!("{row} rows where {} were", file.records)));
            }
            if row >= range.start {
                let at = record.position().map_or(0, Position::byte);
                let row = self.row(&record, index).map_err(|reason| error_at(path, at, reason))?;
                records.push(row);
            }
        }
        Ok(records)
    }
}

/// Number of rows between two indexed positions: the maximum that a read skips.
const STRIDE: u64 = 1024;
const RECORD_BYTES_MAX: u64 = 16 << 20;
const BUFFER_BYTES: usize = 64 << 10;
const GZIP: &[u8] = &[0x1f, 0x8b];

type Rows = ::csv::Reader<Bounded>;

/// A file that returns at most `budget` bytes, which bounds the size of one record: a stray quote
/// makes one record of the rest of the file.
struct Bounded {
    file: Box<dyn files::Source>,
    budget: Arc<AtomicU64>,
}

impl Read for Bounded {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let budget = self.budget.load(Ordering::Relaxed);
        if budget == 0 {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        let bytes = self.file.read(buf)?;
        self.budget.store(budget.saturating_sub(bytes as u64), Ordering::Relaxed);
        Ok(bytes)
    }
}

impl Seek for Bounded {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.file.seek(to)
    }
}

/// Opens a file. Returns its rows, and the number of bytes that may still be read for the next row.
fn open(path: &Path) -> Result<(Rows, Arc<AtomicU64>), DataError> {
    let budget = Arc::new(AtomicU64::new(RECORD_BYTES_MAX));
    let file = Bounded { file: files::open(path)?, budget: Arc::clone(&budget) };
    // Flexible, so that a wrong number of columns is reported by this reader.
    Ok((
        ReaderBuilder::new().flexible(true).buffer_capacity(BUFFER_BYTES).from_reader(file),
        budget,
    ))
}

/// Reads the next row. Returns `false` at the end of the file.
fn next(
    path: &Path,
    rows: &mut Rows,
    budget: &AtomicU64,
    record: &mut ByteRecord,
) -> Result<bool, DataError> {
    budget.store(RECORD_BYTES_MAX, Ordering::Relaxed);
    let begins = rows.position().byte();
    rows.read_byte_record(record).map_err(|error| match error.kind() {
        ::csv::ErrorKind::Io(source) if source.kind() == std::io::ErrorKind::FileTooLarge => {
            let reason = format!(
                "a row of more than {} MiB begins here; is there a missing or a stray quote?",
                RECORD_BYTES_MAX >> 20
            );
            error_at(path, begins, reason)
        }
        _ => csv_error(path, error),
    })
}

fn csv_error(path: &Path, error: ::csv::Error) -> DataError {
    match error.into_kind() {
        ::csv::ErrorKind::Io(source) => files::io_error(path, source),
        kind => files::malformed(path, &format!("{kind:?}")),
    }
}

fn error_at(path: &Path, byte: u64, reason: String) -> DataError {
    let line = files::open(path).map(|file| line_at(file, byte));
    match line {
        Ok(Ok(line)) => DataError::Malformed { path: path.to_owned(), line: Some(line), reason },
        Ok(Err(source)) => files::io_error(path, source),
        Err(error) => error,
    }
}

/// Line number, from 1, of the record that a reader positioned at `byte` finds.
///
/// The line number of the csv crate counts neither blank lines before a record nor the second half
/// of a CR LF.
fn line_at(file: impl Read, byte: u64) -> std::io::Result<u64> {
    let mut bytes = BufReader::new(file);
    let mut line = 1;
    let mut rest = byte;
    loop {
        let buffer = bytes.fill_buf()?;
        let before = rest.min(buffer.len() as u64) as usize;
        line += buffer[..before].iter().filter(|&&byte| byte == b'\n').count() as u64;
        rest -= before as u64;
        let done = buffer.is_empty() || rest == 0;
        bytes.consume(before);
        if done {
            break;
        }
    }
    for byte in bytes.bytes() {
        match byte? {
            b'\n' => line += 1,
            b'\r' => (),
            _ => break,
        }
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Table {
        _folder: tempfile::TempDir,
        path: String,
    }

    fn table(text: impl AsRef<[u8]>) -> Table {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.csv").to_str().unwrap().to_owned();
        fs::write(&path, text).unwrap();
        Table { _folder: folder, path }
    }

    fn columns() -> CsvRows {
        CsvRows::new().f32("y").text("name").i64("n")
    }

    fn refusal(text: impl AsRef<[u8]>) -> String {
        let table = table(text);
        let error = columns().describe(&table.path).unwrap_err().to_string();
        error
            .strip_prefix(&table.path)
            .unwrap_or_else(|| panic!("{error} does not name the file"))
            .to_owned()
    }

    #[test]
    fn rows_contain_the_requested_columns_in_the_requested_order() {
        let table = table("n,skipped,name,y\n3,?,\"a, \"\"b\"\"\",0.5\n\n-4,,c, 1e3\n");
        let mut rows = columns();
        let dataset = rows.describe(&table.path).unwrap();
        assert_eq!((&dataset.files[0].path, dataset.files[0].records), (&table.path, 2));
        let read = rows.read(&dataset.files[0], 0..2).unwrap();
        let values = [Value::F32(0.5), Value::Text("a, \"b\"".to_owned()), Value::I64(3)];
        assert_eq!(read[0].values(), values);
        assert_eq!((read[1].f32(0), read[1].text(1), read[1].i64(2)), (1000.0, "c", -4));
    }

    #[test]
    fn any_range_reads_the_same_rows_without_a_description() {
        let mut text = "n,name,y\n".to_owned();
        for row in 0..5000 {
            // Rows of different lengths, some with line breaks within quotes.
            let name = if row % 7 == 0 { "\"two\nlines\"".to_owned() } else { "x".repeat(row % 5) };
            text += &format!("{row},{name},0.5\r\n");
        }
        let table = table(text);
        let file = File::new(table.path, 5000);
        let all = columns().read(&file, 0..5000).unwrap();
        assert_eq!(
            all.iter().map(|row| row.i64(2)).collect::<Vec<_>>(),
            (0..5000).collect::<Vec<_>>()
        );
        let mut rows = columns();
        for range in [0..1, 1023..1025, 1024..1024, 1024..2048, 2047..2050, 4999..5000, 5000..5000]
        {
            let expected = &all[range.start as usize..range.end as usize];
            assert_eq!(rows.read(&file, range.clone()).unwrap(), expected, "{range:?}");
        }
    }

    #[test]
    fn a_file_is_scanned_once() {
        let table = table("n,name,y\n1,a,0.5\n2,b,0.5\n3,c,0.5\n");
        let file = File::new(&*table.path, 3);
        let mut rows = columns();
        rows.read(&file, 0..1).unwrap();
        // The same length and modification time, but with a row that a second scan would refuse.
        let written = fs::metadata(&table.path).unwrap().modified().unwrap();
        fs::write(&table.path, "n,name,y\n1,a;0.5\n2,b,0.5\n4,c,0.5\n").unwrap();
        fs::File::options().write(true).open(&table.path).unwrap().set_modified(written).unwrap();
        assert_eq!(rows.read(&file, 2..3).unwrap()[0].i64(2), 4);
        let error = rows.read(&file, 0..1).unwrap_err().to_string();
        assert_eq!(error, format!("{} line 2: 2 columns where the header has 3", table.path));
    }

    #[test]
    fn errors_name_their_line() {
        let start = "y,name,n\n1,a,1\n";
        let cases = [
            ("2,b\n", " line 3: 2 columns where the header has 3"),
            ("2,b,3,4\n", " line 3: 4 columns where the header has 3"),
            ("\n\n2\n", " line 5: 1 column where the header has 3"),
            ("x,b,3\n", " line 3: column \"y\" is \"x\" where a finite number should be"),
            ("nan,b,3\n", " line 3: column \"y\" is \"nan\" where a finite number should be"),
            ("1e99,b,3\n", " line 3: column \"y\" is \"1e99\" where a finite number should be"),
            (",b,3\n", " line 3: column \"y\" is \"\" where a finite number should be"),
            ("2,b,3.5\n", " line 3: column \"n\" is \"3.5\" where an integer should be"),
            ("2,\"b\nb\",3\n2,b,?\n", " line 5: column \"n\" is \"?\" where an integer should be"),
        ];
        for (rest, expected) in cases {
            assert_eq!(refusal(format!("{start}{rest}")), expected);
            let windows = format!("{start}{rest}").replace('\n', "\r\n");
            assert_eq!(refusal(windows), expected.replace("\\n", "\\r\\n"), "with CR LF");
        }
        assert_eq!(refusal(b"y,name,n\n1,\xff,1\n"), " line 2: column \"name\" is not UTF-8");
    }

    #[test]
    fn a_header_without_a_requested_column_is_refused_with_its_columns() {
        assert_eq!(refusal("y,n\n1,1\n"), " line 1: no column \"name\": the header has y, n");
        assert_eq!(
            refusal("y,n,name,y\n"),
            " line 1: more than one column \"y\": the header has y, n, name, y"
        );
        assert_eq!(refusal(""), " line 1: no header where column \"y\" should be named");
    }

    #[test]
    fn a_byte_order_mark_is_not_part_of_the_first_name() {
        let table = table("\u{feff}y,name,n\n1,a,1\n");
        let mut rows = columns();
        let dataset = rows.describe(&table.path).unwrap();
        assert_eq!(rows.read(&dataset.files[0], 0..1).unwrap()[0].f32(0), 1.0);
    }

    #[test]
    fn no_rows_are_an_error() {
        assert_eq!(refusal("y,name,n\n"), ": no row below the header");
        assert!(matches!(columns().describe("/nowhere/at all"), Err(DataError::Io { .. })));
    }

    #[test]
    fn a_file_that_has_changed_is_an_error() {
        let table = table("y,name,n\n1,a,1\n2,b,2\n");
        let mut rows = columns();
        let file = rows.describe(&table.path).unwrap().files[0].clone();
        let error =
            columns().read(&File { records: 5, ..file.clone() }, 0..5).unwrap_err().to_string();
        assert_eq!(error, format!("{}: 2 rows where 5 were: has it changed?", table.path));
        fs::write(&table.path, "y,name,n\n1,a,1\n").unwrap();
        let error = rows.read(&file, 0..1).unwrap_err().to_string();
        let changed = "15 bytes where 21 were; it has changed since the job started";
        assert_eq!(error, format!("{}: {changed}", table.path));
        let error = columns().read(&file, 0..1).unwrap_err();
        assert!(matches!(error, DataError::Changed { .. }), "another reader: {error}");
    }

    #[test]
    fn a_worker_that_joins_later_detects_that_a_file_has_changed() {
        let table = table("y,name,n\n1,a,1\n2,b,2\n");
        let version = columns().describe(&table.path).unwrap().files[0].version;
        // Another worker reads this file for the first time: simulated by another file with the
        // same description.
        let other = self::table("y,name,n\n1,a,1\n2,b,2\n3,c,3\n");
        let file = File { path: other.path.clone(), records: 2, version };
        let error = columns().read(&file, 0..1).unwrap_err();
        assert!(matches!(&error, DataError::Changed { .. }), "{error}");
        assert!(error.to_string().starts_with(&other.path), "{error}");
        let copy = self::table("y,name,n\n1,a,1\n2,b,2\n");
        let file = File { path: copy.path, records: 2, version };
        assert_eq!(columns().read(&file, 0..2).unwrap().len(), 2);
    }

    #[test]
    fn a_stray_quote_does_not_read_the_rest_of_the_file_into_memory() {
        let mut text = b"y,name,n\n1,a,1\n2,\"b,2\n".to_vec();
        text.extend(b"3,c,3\n".repeat(4 << 20));
        let reason =
            " line 3: a row of more than 16 MiB begins here; is there a missing or a stray quote?";
        assert_eq!(refusal(text), reason);
    }

    #[test]
    fn binary_content_is_escaped_in_errors() {
        let gz = [&[0x1f, 0x8b, 8, 0][..], &[0x1b; 1000]].concat();
        assert_eq!(refusal(gz), ": compressed with gzip: decompress it first");
        let message = refusal([&b"a\x1b[2J"[..], &[b'x'; 2000], b",n\n"].concat());
        assert!(
            message.len() < 500 && !message.contains('\x1b') && message.contains("a\\u{1b}[2J"),
            "{message}"
        );
        let message = refusal("y,name,n\n\x1b[31m,a,1\n");
        assert_eq!(
            message,
            " line 2: column \"y\" is \"\\u{1b}[31m\" where a finite number should be"
        );
    }
}
