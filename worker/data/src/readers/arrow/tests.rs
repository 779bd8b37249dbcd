#![allow(clippy::single_range_in_vec_init, reason = "a table of one batch is one range")]

use std::ops::Range;
use std::sync::Arc;

use arrow_array::builder::{ListBuilder, PrimitiveBuilder, StringDictionaryBuilder};
use arrow_array::types::{Float64Type, Int8Type, Int32Type};
use arrow_array::{
    Array as _, ArrayRef, BooleanArray, Float32Array, Int16Array, Int32Array, ListArray,
    RecordBatch, StringArray, StructArray, UInt64Array,
};
use arrow_buffer::OffsetBuffer;
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use arrow_schema::{DataType, Field, Schema};

use super::ArrowRows;
use crate::reader::{Purpose, ReadOptions, Reader};
use crate::readers::{Row, Value};

/// Row i of a table: x i/2, small i, n i (null if `is_null`), name "c<i mod 3>", kind the same as a
/// dictionary, is_odd, v [i, i + 0.5], s.id i.
fn batch_of(rows: Range<i32>, is_null: impl Fn(i32) -> bool) -> RecordBatch {
    batch_with(rows, is_null, ["c0", "c1", "c2"])
}

/// The same, with this dictionary.
fn batch_with(
    rows: Range<i32>,
    is_null: impl Fn(i32) -> bool,
    dictionary: [&str; 3],
) -> RecordBatch {
    let name = |i: i32| format!("c{}", i % 3);
    let dictionary = StringArray::from(dictionary.to_vec());
    let mut kinds =
        StringDictionaryBuilder::<Int8Type>::new_with_dictionary(rows.len(), &dictionary).unwrap();
    let mut lists = ListBuilder::new(PrimitiveBuilder::<Float64Type>::new());
    for i in rows.clone() {
        kinds.append(name(i)).unwrap();
        lists.append_value([Some(f64::from(i)), Some(f64::from(i) + 0.5)]);
    }
    let ids: ArrayRef = Arc::new(UInt64Array::from_iter_values(rows.clone().map(|i| i as u64)));
    let id = Arc::new(Field::new("id", DataType::UInt64, false));
    let columns: [(&str, ArrayRef); 8] = [
        ("x", Arc::new(Float32Array::from_iter_values(rows.clone().map(|i| i as f32 / 2.0)))),
        ("small", Arc::new(Int16Array::from_iter_values(rows.clone().map(|i| i as i16)))),
        ("n", Arc::new(Int32Array::from_iter(rows.clone().map(|i| (!is_null(i)).then_some(i))))),
        ("name", Arc::new(StringArray::from_iter_values(rows.clone().map(name)))),
        ("kind", Arc::new(kinds.finish())),
        ("is_odd", Arc::new(BooleanArray::from_iter(rows.map(|i| Some(i % 2 == 1))))),
        ("v", Arc::new(lists.finish())),
        ("s", Arc::new(StructArray::from(vec![(id, ids)]))),
    ];
    let fields: Vec<Field> = columns
        .iter()
        .map(|(name, array)| Field::new(*name, array.data_type().clone(), *name == "n"))
        .collect();
    let columns = columns.into_iter().map(|(_, array)| array).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
}

fn batches(ranges: &[Range<i32>]) -> Vec<RecordBatch> {
    ranges.iter().map(|rows| batch_of(rows.clone(), |i| i % 10 == 7)).collect()
}

/// A file of these rows.
pub(in crate::readers) fn table(ranges: &[Range<i32>]) -> Vec<u8> {
    file(&batches(ranges), Some(CompressionType::ZSTD))
}

fn file(batches: &[RecordBatch], compression: Option<CompressionType>) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(compression).unwrap();
    let mut bytes = Vec::new();
    let schema = batches[0].schema();
    let mut writer = FileWriter::try_new_with_options(&mut bytes, &schema, options).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.finish().unwrap();
    bytes
}

fn stream(batches: &[RecordBatch]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = StreamWriter::try_new(&mut bytes, &batches[0].schema()).unwrap();
    batches.iter().for_each(|batch| writer.write(batch).unwrap());
    writer.finish().unwrap();
    bytes
}

fn written(name: &str, bytes: &[u8]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

fn reader() -> ArrowRows {
    let reader = ArrowRows::new().text("kind").f32("x").f32("small").i64("n").fill(-1);
    reader.text("name").class("is_odd", 2).f32_list("v", 2).i64("s.id")
}

fn row(i: i32) -> Row {
    let name = Value::Text(format!("c{}", i % 3));
    let numbers = vec![i as f32, i as f32 + 0.5];
    Row::new(vec![
        name.clone(),
        Value::F32(i as f32 / 2.0),
        Value::F32(i as f32),
        Value::I64(if i % 10 == 7 { -1 } else { i.into() }),
        name,
        Value::Class(i as usize % 2),
        Value::F32s(numbers),
        Value::I64(i.into()),
    ])
}

#[test]
fn batches_of_files_and_streams_are_files_whose_rows_are_read_in_any_order() {
    let all = batches(&[0..20, 20..21, 21..60]);
    let contents = [
        file(&all, None),
        file(&all, Some(CompressionType::LZ4_FRAME)),
        file(&all, Some(CompressionType::ZSTD)),
        stream(&all),
    ];
    for bytes in contents {
        let (_folder, path) = written("a.arrow", &bytes);
        let mut reader = reader();
        let dataset = reader.describe(&path).unwrap();
        let found: Vec<_> = dataset.files.iter().map(|f| (f.path.clone(), f.records)).collect();
        let expected = [(0, 20), (1, 1), (2, 39)].map(|(i, rows)| (format!("{path}#{i}"), rows));
        assert_eq!(found, expected);
        for (file, range, first) in [(0, 0..20, 0), (2, 5..9, 21), (1, 0..1, 20), (0, 3..3, 0)] {
            let rows = range.clone().map(|i| row(first + i as i32));
            let found = reader.read(&dataset.files[file], range.clone()).unwrap();
            assert_eq!(found, rows.collect::<Vec<_>>(), "{file} {range:?}");
        }
    }
}

#[test]
fn a_dictionary_of_a_stream_may_be_replaced() {
    let dictionaries = [["c0", "c1", "c2"], ["c2", "c1", "c0"], ["c1", "c2", "c0"]];
    let all = [0..1, 1..2, 2..4].into_iter().zip(dictionaries);
    let all: Vec<_> =
        all.map(|(rows, dictionary)| batch_with(rows, |_| false, dictionary)).collect();
    let (_folder, path) = written("a.arrows", &stream(&all));
    let mut reader = ArrowRows::new().text("kind");
    let dataset = reader.describe(&path).unwrap();
    let mut kinds = |file: usize| {
        let rows = reader.read(&dataset.files[file], 0..dataset.files[file].records).unwrap();
        rows.iter().map(|row| row.text(0).to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(
        (kinds(2), kinds(0), kinds(1)),
        (vec!["c2".into(), "c0".into()], vec!["c0".into()], vec!["c1".into()])
    );
}

#[test]
fn nulls_are_refused_filled_or_left_out() {
    let (_folder, path) = written("a.arrow", &table(&[0..20]));
    let mut refusing = ArrowRows::new().i64("n");
    let dataset = refusing.describe(&path).unwrap();
    let error = refusing.read(&dataset.files[0], 0..20).unwrap_err().to_string();
    let expected = "batch 0: column \"n\", row 7: a null where a value should be";
    assert_eq!(error, format!("{path}: {expected}"));
    let mut skipping = ArrowRows::new().i64("n").skip_nulls();
    let dataset = skipping.describe(&path).unwrap();
    assert_eq!((dataset.files[0].records, dataset.skipped.nulls), (18, 2));
    let first = format!("{path}: batch 0: row 7: left out for a null");
    assert_eq!(dataset.skipped.first[0], first);
    // Another worker's reader.
    let mut other = ArrowRows::new().i64("n").skip_nulls();
    let rows = other.read(&dataset.files[0], 6..9).unwrap();
    assert_eq!(rows.iter().map(|row| row.i64(0)).collect::<Vec<_>>(), [6, 8, 9]);
}

#[test]
fn an_empty_list_counts_as_a_null_and_a_field_of_a_list_of_structs_is_a_list() {
    let mut lists = ListBuilder::new(PrimitiveBuilder::<Float64Type>::new());
    lists.append_value([Some(1.0), None]);
    lists.append_value([]);
    let numbers: ArrayRef = Arc::new(Float32Array::from(vec![1.0, 2.0, 3.0, 4.0]));
    let field = Arc::new(Field::new("a", DataType::Float32, false));
    let structs = StructArray::from(vec![(field, numbers)]);
    let field = Arc::new(Field::new("item", structs.data_type().clone(), false));
    let pairs = ListArray::new(field, OffsetBuffer::from_lengths([2, 2]), Arc::new(structs), None);
    let columns: [(_, ArrayRef); 2] = [("v", Arc::new(lists.finish())), ("s", Arc::new(pairs))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let (_folder, path) = written("a.arrow", &file(&[batch], None));
    let mut reader = ArrowRows::new().f32_list("v", 2).fill(-1.0).f32_list("s.a", 2);
    let dataset = reader.describe(&path).unwrap();
    let rows = reader.read(&dataset.files[0], 0..2).unwrap();
    let found: Vec<_> = rows.iter().map(|row| (row.f32s(0), row.f32s(1))).collect();
    assert_eq!(found, [(&[1.0, -1.0][..], &[1.0, 2.0][..]), (&[-1.0, -1.0], &[3.0, 4.0])]);
}

#[test]
fn bad_rows_are_left_out_up_to_a_limit() {
    let (_folder, path) = written("a.arrow", &table(&[0..20]));
    let describe = |bad_records_max| {
        let mut reader = ArrowRows::new().class("small", 17);
        reader.configure(ReadOptions { bad_records_max, ..ReadOptions::default() }).unwrap();
        reader.describe(&path)
    };
    let dataset = describe(3).unwrap();
    assert_eq!((dataset.files[0].records, dataset.skipped.bad), (17, 3));
    let error = describe(2).unwrap_err().to_string();
    let expected = "batch 0: column \"small\", row 19: 19 where an integer from 0 to 16 should be; \
                    it is bad record 3";
    assert!(error.starts_with(&format!("{path}: {expected}")), "{error}");
}

#[test]
fn columns_of_other_types_are_refused_before_training() {
    let (_folder, path) = written("a.arrow", &table(&[0..2]));
    let table = [
        (
            ArrowRows::new().f32("size"),
            "no column \"size\": the file has x, small, n, name, kind, is_odd, v, s.id",
        ),
        (ArrowRows::new().f32("n"), "column \"n\" is Int32, which cannot be read as f32"),
        (ArrowRows::new().i64("x"), "column \"x\" is Float32, which cannot be read as i64"),
        (ArrowRows::new().text("n"), "column \"n\" is Int32, which cannot be read as text"),
        (ArrowRows::new().f32_list("x", 2), "column \"x\" is Float32, which is no list"),
        (
            ArrowRows::new().f32("v"),
            "column \"v\" is a list of Float64, not one value for each row",
        ),
    ];
    for (mut reader, expected) in table {
        let error = reader.describe(&path).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{path}: {expected}")), "{error}");
    }
    let mut lists = ArrowRows::new().f32_list("v", 3);
    let dataset = lists.describe(&path).unwrap();
    let error = lists.read(&dataset.files[0], 0..1).unwrap_err().to_string();
    let expected = "batch 0: column \"v\", row 0: a list of 2 where one of 3 should be";
    assert_eq!(error, format!("{path}: {expected}"));
}

#[test]
fn predictions_need_no_label() {
    let (_folder, path) = written("a.arrow", &table(&[0..2]));
    let mut reader = ArrowRows::new().f32("x").class("y", 3).label();
    let options = ReadOptions { purpose: Purpose::Predict, ..ReadOptions::default() };
    reader.configure(options).unwrap();
    let dataset = reader.describe(&path).unwrap();
    let rows = reader.read(&dataset.files[0], 1..2).unwrap();
    assert_eq!(rows, [Row::new(vec![Value::F32(0.5), Value::Class(0)])]);
}

#[test]
fn a_cut_off_or_foreign_file_is_an_error_that_names_it() {
    let all = batches(&[0..20, 20..40]);
    for whole in [file(&all, None), stream(&all)] {
        for bytes in [&whole[..whole.len() / 2], &whole[..9], b"x,y\n1,2\n", b"", b"ARROW1"] {
            let (_folder, path) = written("a.arrow", bytes);
            let error = reader().describe(&path).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{path}: not a readable Arrow IPC file")),
                "{error}"
            );
        }
    }
    let text: ArrayRef = Arc::new(StringArray::from(vec!["a"]));
    let kinds: ArrayRef = Arc::new(Int32Array::from(vec![1]));
    let keys = arrow_array::PrimitiveArray::<Int32Type>::from(vec![0]);
    let dictionary = arrow_array::DictionaryArray::try_new(keys, kinds).unwrap();
    let batch = RecordBatch::try_from_iter([("t", text), ("d", Arc::new(dictionary) as ArrayRef)]);
    let (_folder, path) = written("a.arrow", &file(&[batch.unwrap()], None));
    let error = ArrowRows::new().text("t").describe(&path).unwrap_err().to_string();
    assert_eq!(error, format!("{path}: column \"d\" is a dictionary of Int32, not of Utf8"));
}
