#![allow(clippy::single_range_in_vec_init, reason = "a table of one row group is one range")]

use ::parquet::data_type::{ByteArrayType, DoubleType, FloatType, Int32Type, Int64Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;

use super::*;

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
        (ParquetRows::new().f32("rooms"), "column \"rooms\" is INT32, which cannot be read as f32"),
        (ParquetRows::new().i64("area"), "column \"area\" is FLOAT, which cannot be read as i64"),
        (
            ParquetRows::new().text("price"),
            "column \"price\" is DOUBLE, which cannot be read as text",
        ),
        (ParquetRows::new().i64("list"), "column \"list\" is repeated"),
        (ParquetRows::new().i64("cents"), "column \"cents\" is DECIMAL"),
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
    assert!(
        error.starts_with(&format!("{text}: row group 0: column \"city\", rows 30..41: 10 rows")),
        "{error}"
    );
    let other = File::new(format!("{text}#7"), 1);
    let error = reader().read(&other, 0..1).unwrap_err().to_string();
    assert_eq!(error, format!("{text}: row group 7: the file has 1 row groups: has it changed?"));
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
