//! Tables whose files consist of parts that are read by themselves: row groups of Parquet files,
//! record batches of Arrow files. Each part is a file of the data set, named `table.parquet#0`.

use std::ops::Range;
use std::path::Path;
use std::vec::IntoIter;

use super::columns::{Column, Columns, Found, Kind, Source};
use super::files;
use super::kept::Kept;
use super::row::{Row, Value};
use super::skipped::SkippedLog;
use crate::reader::{DataError, File};

/// A row, `None` if it is left out for a null, or why it is invalid.
pub(super) type CheckedRow = Result<Option<Row>, String>;

/// What a column holds in a row, or why it is invalid.
pub(super) type Cell = Result<Content, String>;

#[derive(Debug)]
pub(super) enum Content {
    /// The elements of a list, `None` for a null.
    List(Vec<Option<f32>>),
    Null,
    Value(Value),
}

/// A requested value, the names of its columns, and what they hold in consecutive rows.
pub(super) type Values<'a> = (&'a Column, Vec<String>, Vec<IntoIter<Cell>>);

/// A reader of tables that consist of parts.
pub(super) trait Parts {
    /// What a part is, for errors.
    const NAME: &'static str;

    fn columns(&self) -> &Columns;

    /// The number of rows of a part.
    fn rows(&mut self, part: &str) -> Result<u64, DataError>;

    /// Reads rows `range` of a part.
    fn read_rows(&mut self, part: &str, range: Range<u64>) -> Result<Vec<CheckedRow>, DataError>;

    /// The rows of each part that are not left out, where rows may be, once they are known.
    fn kept(&mut self) -> &mut std::collections::BTreeMap<String, Kept>;
}

/// The path and the number of a part that is a file of the data set.
pub(super) fn part(file: &str) -> Option<(&Path, usize)> {
    let (path, number) = file.rsplit_once('#')?;
    Some((Path::new(path), number.parse().ok()?))
}

/// The error for what is wrong in a part; `None`: in its file.
pub(super) fn malformed<P: Parts>(path: &Path, part: Option<usize>, reason: &str) -> DataError {
    match part {
        Some(part) => files::malformed(path, &format!("{} {part}: {reason}", P::NAME)),
        None => files::malformed(path, reason),
    }
}

/// The part of this name as a file of the data set. Records which of its rows are left out.
/// `version`: of the file that holds it.
pub(super) fn describe<P: Parts>(
    parts: &mut P,
    name: String,
    version: u32,
    log: &mut SkippedLog,
) -> Result<File, DataError> {
    if !parts.columns().skips() {
        let records = parts.rows(&name)?;
        return Ok(File { path: name, records, version: Some(version) });
    }
    let kept = find_kept(parts, &name, Some(log))?;
    let (records, version) = (kept.count(), Some(files::version_without(version, &kept)));
    parts.kept().insert(name.clone(), kept);
    Ok(File { path: name, records, version })
}

/// Reads records `range` of a part.
pub(super) fn read<P: Parts>(
    parts: &mut P,
    described: &File,
    range: Range<u64>,
) -> Result<Vec<Row>, DataError> {
    let file = &*described.path;
    let wrong = |reason: &str| match part(file) {
        Some((path, part)) => malformed::<P>(path, Some(part), reason),
        None => files::malformed(Path::new(file), reason),
    };
    if !parts.columns().skips() {
        let row = |row: CheckedRow| match row {
            Ok(row) => Ok(row.expect("no row is left out")),
            Err(reason) => Err(wrong(&reason)),
        };
        return parts.read_rows(file, range)?.into_iter().map(row).collect();
    }
    if !parts.kept().contains_key(file) {
        let kept = find_kept(parts, file, None)?;
        parts.kept().insert(file.to_owned(), kept);
    }
    let kept = &parts.kept()[file];
    let path = part(file).map_or_else(|| Path::new(file), |(path, _)| path);
    files::check_left_out(described, path, kept)?;
    if range.end > kept.count() {
        let reason = format!("{} rows where more should be: has it changed?", kept.count());
        return Err(wrong(&reason));
    }
    if range.is_empty() {
        return Ok(Vec::new());
    }
    let rows = kept.row(range.start)..kept.row(range.end - 1) + 1;
    Ok(parts.read_rows(file, rows)?.into_iter().filter_map(|row| row.ok()?).collect())
}

/// The rows of a part that are not left out. With a `log`, records the others.
fn find_kept<P: Parts>(
    parts: &mut P,
    file: &str,
    mut log: Option<&mut SkippedLog>,
) -> Result<Kept, DataError> {
    let rows = parts.rows(file)?;
    let place = |reason: &str| match part(file) {
        Some((path, part)) => malformed::<P>(path, Some(part), reason),
        None => files::malformed(Path::new(file), reason),
    };
    let mut kept = Kept::default();
    let mut start = 0;
    while start < rows {
        let end = rows.min(start + BLOCK_ROWS);
        for row in parts.read_rows(file, start..end)? {
            match (&row, &mut log) {
                (Ok(None), Some(log)) => {
                    let row = kept.rows();
                    log.skip_null(|| place(&format!("row {row}: left out for a null")));
                }
                (Err(reason), Some(log)) => log.skip_bad(|| place(reason))?,
                _ => {}
            }
            kept.push(matches!(row, Ok(Some(_))));
        }
        start = end;
    }
    Ok(kept)
}

/// The next row of these values, whose number is `number`; `None` if it is left out for a null.
pub(super) fn row(columns: &Columns, values: &mut [Values<'_>], number: u64) -> CheckedRow {
    let at = |name: &str, reason: &str| format!("column {name:?}, row {number}: {reason}");
    // All values are taken, so that the next row begins at the same place in each column.
    let cells: Vec<Vec<Cell>> = values
        .iter_mut()
        .map(|(_, _, cells)| cells.iter_mut().filter_map(Iterator::next).collect())
        .collect();
    let found = values.iter().zip(cells).map(|((column, names, _), cells)| -> Found {
        let mut cells = cells
            .into_iter()
            .zip(names)
            .map(|(cell, name)| (name, cell.map_err(|reason| at(name, &reason))));
        if !matches!(column.source, Source::One(_)) {
            let number = |(_, cell): (_, Result<Content, String>)| match cell? {
                Content::Value(Value::F32(number)) => Ok(Some(number)),
                _ => Ok(None),
            };
            return columns.numbers(column, cells.map(number), |i| at(&names[i], NULL));
        }
        let Some((name, cell)) = cells.next() else { return Ok(None) };
        match (cell?, column.kind) {
            (Content::Null, _) => Ok(None),
            (Content::Value(value), _) => Ok(Some(value)),
            (Content::List(list), Kind::F32List(len)) if list.len() != len => {
                let found = list.len();
                Err(at(name, &format!("a list of {found} where one of {len} should be")))
            }
            (Content::List(list), _) => {
                columns.numbers(column, list.into_iter().map(Ok), |_| at(name, NULL))
            }
        }
    });
    columns.row(found, |column| match &column.source {
        Source::One(name) => at(name, NULL),
        Source::Several(_) | Source::Others(_) => at("", NULL),
    })
}

/// The number `found`, if it is finite. `number`: what the file holds.
pub(super) fn finite(number: f64, found: f32) -> Result<Value, String> {
    if !found.is_finite() {
        return Err(format!("{number} where a finite f32 should be"));
    }
    Ok(Value::F32(found))
}

/// Rows of a block that is read at once.
pub(super) const BLOCK_ROWS: u64 = 4096;
const NULL: &str = "a null where a value should be";
