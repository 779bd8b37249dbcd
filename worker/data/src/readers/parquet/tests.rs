#![allow(clippy::single_range_in_vec_init, reason = "a table of one row group is one range")]

use std::ops::Range;
use std::sync::Arc;

use ::parquet::data_type::{
    ByteArray, ByteArrayType, DataType, DoubleType, FixedLenByteArrayType, FloatType, Int32Type,
    Int64Type,
};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;

use super::ParquetRows;
use crate::reader::{DataError, File, ReadOptions, Reader};
use crate::readers::{Row, Value};

const SCHEMA: &str = "message rows {
    required float area; optional int32 rooms; required binary city (UTF8); required double price;
    optional group more { required int64 id; }
    repeated int32 list; required int64 cents (DECIMAL(9, 2)); required binary raw;
}";

/// Row i of a table: area i/2, rooms i (null if `is_null`), city "c<i>", price 1000·i.
fn write_group(
    mut group: SerializedRowGroupWriter<'_, &mut Vec<u8>>,
    rows: Range<i32>,
    is_null: &dyn Fn(i32) -> bool,
) {
    fn column<T: DataType>(
        group: &mut SerializedRowGroupWriter<'_, &mut Vec<u8>>,
        values: &[T::T],
        levels: (Option<&[i16]>, Option<&[i16]>),
    ) {
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<T>().write_batch(values, levels.0, levels.1).unwrap();
        column.close().unwrap();
    }
    let each = |n: usize, level: i16| vec![level; n];
    let n = rows.len();
    let levels: Vec<i16> = rows.clone().map(|i| i16::from(!is_null(i))).collect();
    let rooms: Vec<i32> = rows.clone().filter(|&i| !is_null(i)).collect();
    let text = |i: i32| ByteArray::from(format!("c{i}").as_str());
    column::<FloatType>(
        &mut group,
        &Vec::from_iter(rows.clone().map(|i| i as f32 / 2.0)),
        (None, None),
    );
    column::<Int32Type>(&mut group, &rooms, (Some(&levels), None));
    column::<ByteArrayType>(&mut group, &Vec::from_iter(rows.clone().map(text)), (None, None));
    let prices: Vec<f64> =
        rows.clone().map(|i| if i == 77 { f64::NAN } else { 1000.0 * f64::from(i) }).collect();
    column::<DoubleType>(&mut group, &prices, (None, None));
    let ids: Vec<i64> = rows.clone().map(i64::from).collect();
    column::<Int64Type>(&mut group, &ids, (Some(&each(n, 1)), None));
    column::<Int32Type>(&mut group, &[], (Some(&each(n, 0)), Some(&each(n, 0))));
    column::<Int64Type>(&mut group, &ids, (None, None));
    let raw: Vec<ByteArray> = rows.map(|_| ByteArray::from(vec![0xff])).collect();
    column::<ByteArrayType>(&mut group, &raw, (None, None));
    group.close().unwrap();
}

/// The row groups of a table without nulls.
pub(in crate::readers) fn table(groups: &[Range<i32>]) -> Vec<u8> {
    table_with(groups, |_| false)
}

fn table_with(groups: &[Range<i32>], is_null: impl Fn(i32) -> bool) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
    // Small pages, so that reads cross them.
    let properties = WriterProperties::builder()
        .set_compression(::parquet::basic::Compression::SNAPPY)
        .set_data_page_row_count_limit(10)
        .set_write_batch_size(5);
    let mut bytes = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties.build())).unwrap();
    for rows in groups {
        write_group(writer.next_row_group().unwrap(), rows.clone(), &is_null);
    }
    writer.close().unwrap();
    bytes
}

fn folder(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn reader() -> ParquetRows {
    ParquetRows::new().text("city").f32("price").i64("rooms").i64("more.id").f32("area")
}

fn row(i: i32) -> Row {
    let (price, whole) = (Value::F32(1000.0 * i as f32), Value::I64(i.into()));
    let values =
        vec![Value::Text(format!("c{i}")), price, whole.clone(), whole, Value::F32(i as f32 / 2.0)];
    Row::new(values)
}

fn rows(range: Range<i32>) -> Vec<Row> {
    range.map(row).collect()
}

#[test]
fn row_groups_are_files_whose_rows_are_read_in_any_order() {
    let folder = folder(&[
        ("b.parquet", table(&[100..107])),
        ("a.parquet", table(&[0..33, 33..34, 34..60])),
        ("c.txt", vec![]),
    ]);
    let mut reader = reader();
    let dataset = reader.describe(folder.path().to_str().unwrap()).unwrap();
    let name = |file: &File| (file.path.rsplit_once('/').unwrap().1.to_owned(), file.records);
    let expected =
        [("a.parquet#0", 33), ("a.parquet#1", 1), ("a.parquet#2", 26), ("b.parquet#0", 7)];
    assert_eq!(
        dataset.files.iter().map(name).collect::<Vec<_>>(),
        expected.map(|(n, r)| (n.to_owned(), r))
    );
    let [first, second, third, fourth] = &dataset.files[..] else { panic!() };
    assert_eq!(reader.read(first, 0..33).unwrap(), rows(0..33));
    for (file, range, found) in [
        (first, 0..5, 0..5),
        (first, 5..18, 5..18),
        (first, 30..33, 30..33),
        (first, 2..4, 2..4),
        (second, 0..1, 33..34),
        (third, 25..26, 59..60),
        (fourth, 3..3, 0..0),
        (fourth, 0..7, 100..107),
    ] {
        assert_eq!(
            reader.read(file, range.clone()).unwrap(),
            rows(found),
            "{} {range:?}",
            file.path
        );
    }
}

#[test]
fn rows_of_a_large_row_group_are_read_wherever_the_last_read_ended() {
    let folder = folder(&[("a.parquet", table(&[0..25_000]))]);
    let mut reader = reader();
    let dataset = reader.describe(folder.path().to_str().unwrap()).unwrap();
    for range in [
        // Across windows; in the same one, before and after; soon after; far after; far before.
        4090..9000,
        8500..8600,
        8200..8300,
        8300..8400,
        14_000..14_010,
        5..8,
        24_990..25_000,
        100..25_000,
    ] {
        let found = reader.read(&dataset.files[0], range.start as u64..range.end as u64).unwrap();
        assert!(found == rows(range.clone()), "{range:?}");
    }
}

#[test]
fn an_invalid_value_is_an_error_with_its_file_row_group_column_and_row() {
    let folder = folder(&[("a.parquet", table_with(&[0..20, 20..90], |i| i == 35))]);
    let path = folder.path().join("a.parquet").to_str().unwrap().to_owned();
    let mut reader = reader();
    let error = reader.describe(&path).unwrap_err().to_string();
    let expected = "column \"rooms\" has a null where each row needs a value; fill it first";
    assert_eq!(error, format!("{path}: row group 1: {expected}"), "the footer counts nulls");
    let files = [File::new(format!("{path}#0"), 20), File::new(format!("{path}#1"), 70)];
    let mut refusal = |range| reader.read(&files[1], range).unwrap_err().to_string();
    let expected =
        format!("{path}: row group 1: column \"rooms\", row 15: a null where a value should be");
    assert_eq!(refusal(10..20), expected);
    let expected =
        format!("{path}: row group 1: column \"price\", row 57: NaN where a finite f32 should be");
    assert_eq!(refusal(50..60), expected);
    // After an error the reader can read other rows.
    assert_eq!(refusal(15..16), refusal(15..16));
    assert_eq!(reader.read(&files[1], 16..18).unwrap(), rows(36..38));
    let mut raw = ParquetRows::new().text("raw");
    let error = raw.read(&files[0], 3..4).unwrap_err().to_string();
    assert_eq!(
        error,
        format!("{path}: row group 0: column \"raw\", row 3: bytes that are not UTF-8")
    );
}

#[test]
fn columns_of_other_types_are_refused_before_training() {
    let folder = folder(&[("a.parquet", table(&[0..2]))]);
    let path = folder.path().join("a.parquet").to_str().unwrap().to_owned();
    let table = [
        (
            ParquetRows::new().f32("size"),
            "no column \"size\": the file has area, rooms, city, price, more.id,",
        ),
        (ParquetRows::new().f32("rooms"), "column \"rooms\" is Int32, which cannot be read as f32"),
        (ParquetRows::new().i64("area"), "column \"area\" is Float32, which cannot be read as i64"),
        (
            ParquetRows::new().text("price"),
            "column \"price\" is Float64, which cannot be read as text",
        ),
        (ParquetRows::new().i64("list"), "column \"list\" is a list of Int32"),
        (ParquetRows::new().i64("cents"), "column \"cents\" is Decimal128(9, 2)"),
    ];
    for (mut reader, expected) in table {
        let error = reader.describe(&path).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{path}: {expected}")), "{error}");
    }
}

#[test]
fn a_corrupted_file_is_an_error_that_names_it_and_never_a_panic() {
    let whole = table(&[0..40]);
    let folder = folder(&[("a.parquet", whole.clone()), ("empty.parquet", table(&[]))]);
    let path = folder.path().join("a.parquet");
    let text = path.to_str().unwrap().to_owned();
    let dataset = reader().describe(&text).unwrap();
    let error = reader().read(&dataset.files[0], 30..41).unwrap_err().to_string();
    let reason = "40 rows where more should be: has it changed?";
    assert_eq!(error, format!("{text}: row group 0: {reason}"));
    let other = File::new(format!("{text}#7"), 1);
    let error = reader().read(&other, 0..1).unwrap_err().to_string();
    assert_eq!(error, format!("{text}: row group 7: the file has 1 of them: has it changed?"));
    let error =
        reader().describe(folder.path().join("empty.parquet").to_str().unwrap()).unwrap_err();
    assert!(matches!(error, DataError::Empty { .. }), "{error}");
    for len in (0..whole.len()).step_by(97) {
        std::fs::write(&path, &whole[..len]).unwrap();
        let error = reader().describe(&text).unwrap_err().to_string();
        assert!(error.starts_with(&text), "{len}: {error}");
    }
    for at in (0..whole.len()).step_by(13) {
        let mut flipped = whole.clone();
        flipped[at] ^= 0x40;
        std::fs::write(&path, flipped).unwrap();
        // Corrupted data may be read as other values where the format has no checksum. All errors
        // name the file.
        if let Err(error) = reader().read(&dataset.files[0], 0..40) {
            assert!(error.to_string().starts_with(&text), "{at}: {error}");
        }
    }
}

const LISTS: &str = "message rows {
    optional group v (LIST) { repeated group list { optional float element; } }
    optional int32 small (INTEGER(8, true)); required int64 wide (INTEGER(64, false));
}";

/// Row i: a list of the numbers i and i + 0.5 (null, empty or with a null for i = 1, 2, 3), -i in 8
/// bits (null for i = 4), and 2^40 + i.
fn table_of_lists(rows: i32) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(LISTS).unwrap());
    let mut bytes = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut bytes, schema, Arc::new(WriterProperties::new())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let (mut values, mut levels, mut repeated) = (vec![], vec![], vec![]);
    for i in 0..rows {
        let row: &[i16] = match i {
            1 => &[0],
            2 => &[1],
            3 => &[3, 2],
            _ => &[3, 3],
        };
        for (at, &level) in row.iter().enumerate() {
            levels.push(level);
            repeated.push(i16::from(at > 0));
            if level == 3 {
                values.push(i as f32 + at as f32 / 2.0);
            }
        }
    }
    let mut column = group.next_column().unwrap().unwrap();
    let typed = column.typed::<FloatType>();
    typed.write_batch(&values, Some(&levels), Some(&repeated)).unwrap();
    column.close().unwrap();
    let levels: Vec<i16> = (0..rows).map(|i| i16::from(i != 4)).collect();
    let small: Vec<i32> = (0..rows).filter(|&i| i != 4).map(|i| -i).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int32Type>().write_batch(&small, Some(&levels), None).unwrap();
    column.close().unwrap();
    let wide: Vec<i64> = (0..rows).map(|i| (1 << 40) + i64::from(i)).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&wide, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    bytes
}

/// What the reader finds, and what it leaves out.
fn read_lists(mut reader: ParquetRows, path: &str) -> (Vec<Row>, crate::reader::Skipped) {
    let dataset = reader.describe(path).unwrap();
    let file = &dataset.files[0];
    let rows = reader.read(file, 0..file.records).unwrap();
    for (i, row) in rows.iter().enumerate().rev() {
        let i = i as u64;
        assert_eq!(reader.read(file, i..i + 1).unwrap(), std::slice::from_ref(row), "row {i}");
    }
    (rows, dataset.skipped)
}

#[test]
fn lists_and_small_integers_are_numbers() {
    let folder = folder(&[("a.parquet", table_of_lists(8))]);
    let path = folder.path().join("a.parquet").to_str().unwrap().to_owned();
    let reader =
        || ParquetRows::new().f32_list("v", 2).fill(-1.0).f32("small").fill(9.0).i64("wide");
    let (rows, _) = read_lists(reader(), &path);
    let lists: Vec<&[f32]> = rows.iter().map(|row| row.f32s(0)).collect();
    let expected = [
        [0.0, 0.5],
        [-1.0, -1.0],
        [-1.0, -1.0],
        [3.0, -1.0],
        [4.0, 4.5],
        [5.0, 5.5],
        [6.0, 6.5],
        [7.0, 7.5],
    ];
    assert_eq!(lists, expected);
    let small: Vec<f32> = rows.iter().map(|row| row.f32(1)).collect();
    assert_eq!(small, [0.0, -1.0, -2.0, -3.0, 9.0, -5.0, -6.0, -7.0]);
    assert_eq!(rows[7].i64(2), (1 << 40) + 7);
    let mut wrong = ParquetRows::new().f32_list("v", 3).fill(0.0);
    let dataset = wrong.describe(&path).unwrap();
    let error = wrong.read(&dataset.files[0], 0..1).unwrap_err().to_string();
    let reason = "row 0: a list of 2 where one of 3 should be";
    assert_eq!(error, format!("{path}: row group 0: column \"v.list.element\", {reason}"));
    let error = ParquetRows::new().f32_list("small", 2).describe(&path).unwrap_err().to_string();
    assert!(error.contains("column \"small\" is Int8, which is no list"), "{error}");
}

#[test]
fn rows_with_nulls_and_bad_rows_are_left_out() {
    let folder = folder(&[("a.parquet", table_of_lists(8))]);
    let path = folder.path().join("a.parquet").to_str().unwrap().to_owned();
    let reader = || ParquetRows::new().f32_list("v", 2).i64("small");
    let numbers = |rows: &[Row]| rows.iter().map(|row| row.i64(1)).collect::<Vec<_>>();
    let (rows, skipped) = read_lists(reader().skip_nulls(), &path);
    assert_eq!((numbers(&rows), skipped.nulls, skipped.bad), (vec![0, -5, -6, -7], 4, 0));
    let reason = "row group 0: row 1: left out for a null";
    assert_eq!(skipped.first[0], format!("{path}: {reason}"));
    let configured = |max: u64| {
        let mut rows = reader();
        rows.configure(ReadOptions { bad_records_max: max, ..ReadOptions::default() }).unwrap();
        rows
    };
    let (rows, skipped) = read_lists(configured(4), &path);
    assert_eq!((numbers(&rows), skipped.nulls, skipped.bad), (vec![0, -5, -6, -7], 0, 4));
    let error = configured(3).describe(&path).unwrap_err().to_string();
    assert!(error.contains("bad record 4, and --bad-records skips 3"), "{error}");
    // A worker that has not described the data numbers the same rows.
    let read = configured(4).read(&File::new(format!("{path}#0"), 4), 1..3).unwrap();
    assert_eq!(numbers(&read), [-5, -6]);
}

#[test]
fn predictions_need_no_label() {
    let folder = folder(&[("a.parquet", table_of_lists(2))]);
    let path = folder.path().join("a.parquet").to_str().unwrap().to_owned();
    let reader = || ParquetRows::new().class("class", 10).label().i64("wide");
    assert!(reader().describe(&path).is_err());
    let mut predicting = reader();
    let purpose = crate::reader::Purpose::Predict;
    predicting.configure(ReadOptions { purpose, ..ReadOptions::default() }).unwrap();
    let (rows, _) = read_lists(predicting, &path);
    assert_eq!((rows[1].class(0), rows[1].i64(1)), (0, (1 << 40) + 1));
}

const ANNOTATED: &str = "message rows {
    required binary name (UTF8); required int32 day (DATE); required int64 at (TIMESTAMP_MILLIS);
    required fixed_len_byte_array(2) half (FLOAT16);
    repeated group pair { required float a; optional int32 b (INTEGER(16, true)); }
}";

/// Row i of three: a name, which is not UTF-8 for i = 1, day 20000 + i, time -i, half 1.5, and
/// the pairs (i, 0) and (i + 0.5, null).
fn annotated_table() -> Vec<u8> {
    fn column<T: DataType>(
        group: &mut SerializedRowGroupWriter<'_, &mut Vec<u8>>,
        values: &[T::T],
        levels: Option<&[i16]>,
    ) {
        let mut column = group.next_column().unwrap().unwrap();
        let repeated = levels.map(|_| &[0, 1, 0, 1, 0, 1][..]);
        column.typed::<T>().write_batch(values, levels, repeated).unwrap();
        column.close().unwrap();
    }
    let schema = Arc::new(parse_message_type(ANNOTATED).unwrap());
    let mut bytes = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut bytes, schema, Arc::new(WriterProperties::new())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let names = [&b"a"[..], b"\xff", b"c"].map(|name| ByteArray::from(name.to_vec()));
    column::<ByteArrayType>(&mut group, &names, None);
    column::<Int32Type>(&mut group, &[20000, 20001, 20002], None);
    column::<Int64Type>(&mut group, &[0, -1, -2], None);
    let half = ByteArray::from(half::f16::from_f32(1.5).to_le_bytes().to_vec());
    column::<FixedLenByteArrayType>(&mut group, &vec![half.into(); 3], None);
    column::<FloatType>(&mut group, &[0.0, 0.5, 1.0, 1.5, 2.0, 2.5], Some(&[1; 6]));
    column::<Int32Type>(&mut group, &[0, 0, 0], Some(&[2, 1, 2, 1, 2, 1]));
    group.close().unwrap();
    writer.close().unwrap();
    bytes
}

#[test]
fn times_are_integers_and_a_field_of_repeated_groups_is_a_list() {
    let folder = folder(&[("a.parquet", annotated_table())]);
    let path = folder.path().join("a.parquet").to_str().unwrap().to_owned();
    let reader = ParquetRows::new().i64("day").i64("at").f32("half").f32_list("pair.a", 2);
    let (rows, _) = read_lists(reader.f32_list("pair.b", 2).fill(7.0), &path);
    let expected = [20002.into(), (-2).into(), 1.5.into(), Value::F32s(vec![2.0, 2.5])];
    assert_eq!(rows[2], Row::new([&expected[..], &[Value::F32s(vec![0.0, 7.0])]].concat()));
    let error = ParquetRows::new().f32_list("pair", 2).describe(&path).unwrap_err().to_string();
    assert!(
        error.contains("more than one column \"pair\": the file has name, day, at, half, pair.a,")
    );
}

#[test]
fn a_text_that_is_not_utf8_is_an_error_of_its_row_alone() {
    let folder = folder(&[("a.parquet", annotated_table())]);
    let path = folder.path().join("a.parquet").to_str().unwrap().to_owned();
    let mut reader = ParquetRows::new().text("name");
    let file = reader.describe(&path).unwrap().files.remove(0);
    let error = reader.read(&file, 0..3).unwrap_err().to_string();
    let expected = "row group 0: column \"name\", row 1: bytes that are not UTF-8";
    assert_eq!(error, format!("{path}: {expected}"));
    assert_eq!(reader.read(&file, 2..3).unwrap()[0].text(0), "c");
    let mut skipping = ParquetRows::new().text("name");
    skipping.configure(ReadOptions { bad_records_max: 1, ..ReadOptions::default() }).unwrap();
    let (rows, skipped) = read_lists(skipping, &path);
    assert_eq!((rows.len(), skipped.bad), (2, 1));
}

#[test]
fn a_file_that_changes_while_it_is_read_has_changed() {
    let folder = folder(&[("a.parquet", table(&[0..9000]))]);
    let path = folder.path().join("a.parquet");
    let mut reader = reader();
    let file = reader.describe(path.to_str().unwrap()).unwrap().files.remove(0);
    let file = File { version: None, ..file };
    reader.read(&file, 0..10).unwrap();
    std::fs::write(&path, table(&[0..9001])).unwrap();
    let error = reader.read(&file, 8000..8010).unwrap_err();
    assert!(matches!(error, DataError::Changed { .. }), "{error:?}");
}

#[test]
fn a_column_that_cannot_be_decoded_is_named() {
    let whole = table(&[0..40]);
    let folder = folder(&[("a.parquet", whole.clone())]);
    let path = folder.path().join("a.parquet");
    let file = reader().describe(path.to_str().unwrap()).unwrap().files.remove(0);
    let file = File { version: None, ..file };
    // The header of the first page, of the column `area`.
    let mut broken = whole;
    broken[4..20].fill(0xff);
    let other = path.with_file_name("b.parquet");
    std::fs::write(&other, broken).unwrap();
    let file = File { path: format!("{}#0", other.display()), ..file };
    let error = reader().read(&file, 0..40).unwrap_err().to_string();
    let expected = format!("{}: row group 0: column \"area\", rows 0..40: ", other.display());
    assert!(error.starts_with(&expected), "{error}");
}
