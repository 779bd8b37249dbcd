//! Tables as JSON objects, one in each line.

use std::io::{BufRead, BufReader, Read as _, Seek as _, SeekFrom};

use serde_json::{Map, Value as Json};

use super::columns::{Column, Columns, Found, Kind, Source, list_method, number_as_class};
use super::files;
use super::packed::TextFile;
use super::row::{Row, Value};
use super::text_table::{self, Format, ROW_BYTES_MAX, Rows, TextTables, text_reader};
use crate::reader::DataError;

/// Reads rows of JSON lines: each line is an object, whose keys are the columns.
///
/// Name the required columns, with their types, in the order in which they should appear in the
/// [`Row`]; other keys are ignored. `a.b` is the key `b` of the object at the key `a`, unless there
/// is a key `a.b`. A key that is missing is a null. `true` and `false` are the integers 1 and 0.
/// In folders, files that end in `.jsonl`, `.ndjson` and either with `.gz` or `.zst` are read.
///
/// Files are validated, indexed and held as by [`CsvRows`](super::CsvRows).
///
/// ```
/// # extern crate elasticdl_data as elasticdl;
/// use elasticdl::readers::JsonRows;
///
/// let reader = JsonRows::new().text("city").f32("size.area").f32_list("embedding", 384);
/// ```
#[derive(Clone, Debug, Default)]
pub struct JsonRows {
    tables: TextTables<JsonLines>,
}

text_reader!(JsonRows);

impl JsonRows {
    list_method!(tables.columns);
}

#[derive(Clone, Debug, Default)]
struct JsonLines;

impl Format for JsonLines {
    fn no_row(&self) -> &'static str {
        "no line with a JSON object"
    }

    fn extensions(&self) -> Vec<String> {
        ["jsonl", "ndjson"].into_iter().flat_map(text_table::with_packed).collect()
    }

    fn open<'a>(
        &'a self,
        text: &'a TextFile,
        columns: &'a Columns,
    ) -> Result<Box<dyn Rows + 'a>, DataError> {
        let lines = BufReader::with_capacity(BUFFER_BYTES, text.read()?);
        Ok(Box::new(JsonFile { text, columns, lines, at: 0, line: Vec::new() }))
    }
}

/// An open file.
struct JsonFile<'a> {
    text: &'a TextFile,
    columns: &'a Columns,
    lines: BufReader<Box<dyn files::Source>>,
    /// The first byte of the next line.
    at: u64,
    /// The line that was read last.
    line: Vec<u8>,
}

impl Rows for JsonFile<'_> {
    fn seek(&mut self, byte: u64) -> Result<(), DataError> {
        self.at = byte;
        let sought = self.lines.seek(SeekFrom::Start(byte)).map(drop);
        sought.map_err(|error| files::io_error(self.text.path(), error))
    }

    fn advance(&mut self) -> Result<Option<u64>, DataError> {
        loop {
            self.line.clear();
            let start = self.at;
            let mut line = self.lines.by_ref().take(ROW_BYTES_MAX);
            let bytes = line
                .read_until(b'\n', &mut self.line)
                .map_err(|error| files::io_error(self.text.path(), error))?;
            if bytes as u64 == ROW_BYTES_MAX && self.line.last() != Some(&b'\n') {
                let reason = format!("a line of more than {} MiB", ROW_BYTES_MAX >> 20);
                return Err(self.text.error_at(start, reason));
            }
            self.at += bytes as u64;
            if bytes == 0 {
                return Ok(None);
            }
            if !self.line.trim_ascii().is_empty() {
                return Ok(Some(start));
            }
        }
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn row(&self) -> Result<Option<Row>, String> {
        let object: Map<String, Json> = serde_json::from_slice(&self.line).map_err(|error| {
            let line = String::from_utf8_lossy(&self.line);
            let reason = error.to_string().replace(" at line 1 ", " at ");
            format!("not a JSON object: {reason}: {}", files::printable(line.trim()))
        })?;
        let values = self.columns.iter().map(|column| self.value(column, &object));
        self.columns.row(values, |column| {
            let name = match &column.source {
                Source::One(name) => name,
                Source::Several(_) | Source::Others(_) => "",
            };
            format!("column {name:?} is null where {} should be", column.kind.wanted())
        })
    }
}

impl JsonFile<'_> {
    fn value(&self, column: &Column, object: &Map<String, Json>) -> Found {
        let number = |name: &str, json: Option<&Json>| match scalar(name, json, Kind::F32)? {
            Some(Value::F32(number)) => Ok(Some(number)),
            _ => Ok(None),
        };
        let null =
            |name: &str| format!("column {name:?} is null where {} should be", Kind::F32.wanted());
        match &column.source {
            Source::One(name) => match (find(object, name), column.kind) {
                (Some(Json::Array(list)), Kind::F32List(len)) if list.len() == len => {
                    let numbers = list.iter().map(|json| number(name, Some(json)));
                    self.columns.numbers(column, numbers, |_| null(name))
                }
                (found, kind) => scalar(name, found, kind),
            },
            Source::Several(names) => {
                let numbers = names.iter().map(|name| number(name, find(object, name)));
                self.columns.numbers(column, numbers, |i| null(&names[i]))
            }
            Source::Others(count) => {
                let is_other = |name: &&String| !self.columns.names().any(|n| n == *name);
                let mut others: Vec<&String> = object.keys().filter(is_other).collect();
                others.sort();
                if others.len() != *count {
                    let found = others.len();
                    return Err(format!("{found} other columns where {count} should be"));
                }
                let numbers = others.iter().map(|name| number(name, object.get(*name)));
                self.columns.numbers(column, numbers, |i| null(others[i]))
            }
        }
    }
}

/// The value at a key, or at a path of keys.
fn find<'a>(object: &'a Map<String, Json>, name: &str) -> Option<&'a Json> {
    if let Some(found) = object.get(name) {
        return Some(found);
    }
    let (first, rest) = name.split_once('.')?;
    find(object.get(first)?.as_object()?, rest)
}

fn scalar(name: &str, json: Option<&Json>, kind: Kind) -> Found {
    let integer = |json: &Json| json.as_i64().or_else(|| json.as_bool().map(i64::from));
    let value = match (json, kind) {
        (None | Some(Json::Null), _) => return Ok(None),
        (Some(json), Kind::Class(classes)) => {
            integer(json).and_then(|class| number_as_class(class, classes).ok())
        }
        (Some(json), Kind::F32) => {
            json.as_f64().map(|n| n as f32).filter(|n| n.is_finite()).map(Value::F32)
        }
        (Some(json), Kind::I64) => integer(json).map(Value::I64),
        (Some(Json::String(text)), Kind::Text) => Some(Value::Text(text.clone())),
        (Some(_), Kind::F32List(_) | Kind::Text) => None,
    };
    value.map(Some).ok_or_else(|| {
        let found = json.map_or_else(String::new, Json::to_string);
        format!("column {name:?} is {} where {} should be", files::printable(&found), kind.wanted())
    })
}

const BUFFER_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
