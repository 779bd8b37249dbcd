use std::fs;
use std::io::Write as _;
use std::ops::Range;

use super::*;
use crate::reader::{Access, Dataset, File, Purpose, ReadOptions, Reader as _};

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
    assert_eq!(all.iter().map(|row| row.i64(2)).collect::<Vec<_>>(), (0..5000).collect::<Vec<_>>());
    let mut rows = columns();
    for range in [0..1, 1023..1025, 1024..1024, 1024..2048, 2047..2050, 4999..5000, 5000..5000] {
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
    let error = columns().read(&File { records: 5, ..file.clone() }, 0..5).unwrap_err().to_string();
    assert_eq!(error, format!("{}: 2 rows where 5 were: has it changed?", table.path));
    fs::write(&table.path, "y,name,n\n1,a,1\n").unwrap();
    let error = rows.read(&file, 0..1).unwrap_err().to_string();
    let changed = "15 bytes where 21 were; data must not change while a job trains on it";
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
fn a_quote_that_is_not_closed_is_an_error_in_the_line_of_its_row() {
    let refused = " line 3: a quote opens in this row and is not closed before the end of the file";
    let rows = numbered(2..900);
    let cut = format!("y,name,n\n1,a,1\n2,\"b,2\n{rows}");
    for text in [&*cut, cut.trim_end(), "y,name,n\n\n1,\"a\n", "y,name,n\n1,a,1\n2,b,\"2\n\n\n"] {
        assert_eq!(refusal(text), refused, "{text:?}");
    }
    assert_eq!(refusal("y,\"name,n\n1,a,1\n"), refused.replace("line 3", "line 1"));
    // It ends the description, however many bad records may be skipped.
    let mut reader = columns();
    reader.configure(ReadOptions { bad_records_max: 1000, ..ReadOptions::default() }).unwrap();
    let packed = table(gzip(&cut));
    let error = reader.describe(&packed.path).unwrap_err().to_string();
    assert_eq!(error, format!("{}{refused}", packed.path));
    // Line breaks at the end, within quotes that are closed or after them, are good.
    for end in ["\"b\n\"", "\"b\n\"\n", "\"b\n\n\"\r\n", "b", "b\n\n\n", "\"\"", "\"\"\"\"\n"] {
        let table = table(format!("y,n,name\n1,1,a\n2,2,{end}"));
        let dataset = columns().describe(&table.path).unwrap();
        assert_eq!(dataset.files[0].records, 2, "{end:?}");
        assert_eq!(columns().read(&dataset.files[0], 1..2).unwrap()[0].i64(2), 2);
    }
}

#[test]
fn binary_content_is_escaped_in_errors() {
    let gz = [&[0x1f, 0x8b, 8, 0][..], &[0x1b; 1000]].concat();
    let message = refusal(gz);
    assert!(
        message.starts_with(": cannot be decompressed: ") && !message.contains('\x1b'),
        "{message}"
    );
    let message = refusal([&b"a\x1b[2J"[..], &[b'x'; 2000], b",n\n"].concat());
    assert!(
        message.len() < 500 && !message.contains('\x1b') && message.contains("a\\u{1b}[2J"),
        "{message}"
    );
    let message = refusal("y,name,n\n\x1b[31m,a,1\n");
    assert_eq!(message, " line 2: column \"y\" is \"\\u{1b}[31m\" where a finite number should be");
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

fn numbered(rows: Range<u64>) -> String {
    rows.map(|row| format!("{row},{},0.5\n", "x".repeat(row as usize % 50))).collect()
}

#[test]
fn compressed_files_are_read_as_if_they_were_not() {
    let (one, two) = (format!("n,name,y\n{}", numbered(0..20_000)), numbered(20_000..30_000));
    let plain = table(format!("{one}{two}"));
    // Two members, as `cat a.gz b.gz` makes them.
    let gz = table([gzip(&one), gzip(&two)].concat());
    let zst = table(zstd::encode_all(format!("{one}{two}").as_bytes(), 1).unwrap());
    let expected = columns().read(&File::new(plain.path, 30_000), 0..30_000).unwrap();
    for packed in [gz, zst] {
        let mut rows = columns();
        let dataset = rows.describe(&packed.path).unwrap();
        assert_eq!(dataset.files[0].records, 30_000);
        for range in [29_990..30_000, 0..5, 12_345..12_400, 19_999..20_001] {
            let found = rows.read(&dataset.files[0], range.clone()).unwrap();
            assert_eq!(found, expected[range.start as usize..range.end as usize], "{range:?}");
        }
    }
}

#[test]
fn an_error_in_a_compressed_file_names_its_line() {
    let reason = " line 3: column \"y\" is \"x\" where a finite number should be";
    assert_eq!(refusal(gzip("y,name,n\n1,a,1\nx,b,2\n")), reason);
    let mut cut = gzip(&format!("y,name,n\n{}", numbered(0..5000)));
    cut.truncate(cut.len() / 2);
    let message = refusal(cut);
    assert!(message.starts_with(": cannot be decompressed: "), "{message}");
}

#[test]
fn compressed_files_beyond_the_limit_are_refused() {
    let noise: String = (0..200_000_u64)
        .map(|row| format!("{},a,1\n", row.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
        .collect();
    let table = table(gzip(&format!("y,name,n\n{noise}")));
    let error = columns().compressed_bytes_max(1 << 20).describe(&table.path).unwrap_err();
    assert!(error.to_string().contains("they exceed 1 MiB; decompress it"), "{error}");
}

#[test]
fn blocks_of_compressed_files_are_shuffled() {
    let access = |path: &str| columns().access(&Dataset::new(vec![File::new(path, 9)]));
    assert_eq!(access("a.csv"), Access::Record);
    assert_eq!(access("a.csv.gz"), Access::Block { records: 2048 });
    assert_eq!(access("a.csv.zst"), Access::Block { records: 2048 });
}

#[test]
fn files_without_names_and_with_other_separators_are_read() {
    let table = table("1;2;7\n3;4;8\n5;6;9\n");
    let mut rows = CsvRows::new().headerless().separator(b';').class("2", 10).other_f32s(2);
    let dataset = rows.describe(&table.path).unwrap();
    assert_eq!(dataset.files[0].records, 3);
    let read = rows.read(&dataset.files[0], 0..3).unwrap();
    let values: Vec<_> = read.iter().map(|row| (row.class(0), row.f32s(1).to_vec())).collect();
    assert_eq!(values, [(7, vec![1.0, 2.0]), (8, vec![3.0, 4.0]), (9, vec![5.0, 6.0])]);
    assert_eq!(rows.read(&dataset.files[0], 1..2).unwrap()[0].class(0), 8);
    let refusal = |reader: CsvRows| {
        let mut reader = reader.headerless().separator(b';');
        reader.describe(&table.path).unwrap_err().to_string().replace(&table.path, "")
    };
    assert_eq!(
        refusal(CsvRows::new().class("2", 9).other_f32s(2)),
        " line 3: column \"2\" is \"9\" where an integer from 0 to 8 should be"
    );
    assert_eq!(
        refusal(CsvRows::new().class("2", 10).other_f32s(3)),
        " line 1: 2 other columns where 3 should be: the header has 0, 1, 2"
    );
}

#[test]
fn several_columns_are_one_value() {
    let table = table("a,n,b,c\n1,7,2,3\n4,8,5,\n");
    let reader = || CsvRows::new().f32s(["c", "a"]).fill(-1.0).i64("n");
    let mut rows = reader();
    let dataset = rows.describe(&table.path).unwrap();
    let read = rows.read(&dataset.files[0], 0..2).unwrap();
    assert_eq!((read[0].f32s(0), read[1].f32s(0)), (&[3.0, 1.0][..], &[-1.0, 4.0][..]));
    assert_eq!(read[1].i64(1), 8);
    let error = CsvRows::new().f32s(["c", "a"]).describe(&table.path).unwrap_err().to_string();
    let expected = " line 3: column \"c\" is \"\" where a finite number should be";
    assert_eq!(error, format!("{}{expected}", table.path));
}

#[test]
fn nulls_are_filled_or_their_rows_left_out() {
    let table = table("y,name,n\n1,a,NA\n,b,2\n3,NA,3\n4,c,4\n");
    let reader = || CsvRows::new().null_texts(&["NA"]).f32("y").text("name").fill("?").i64("n");
    let rows = |mut reader: CsvRows| {
        let dataset = reader.describe(&table.path).unwrap();
        let file = &dataset.files[0];
        let rows = reader.read(file, 0..file.records).unwrap();
        // One by one, and by another worker.
        for (i, row) in rows.iter().enumerate() {
            assert_eq!(reader.read(file, i as u64..i as u64 + 1).unwrap()[0], *row);
        }
        (
            dataset.skipped,
            rows.iter()
                .map(|row| (row.f32(0), row.text(1).to_owned(), row.i64(2)))
                .collect::<Vec<_>>(),
        )
    };
    let (skipped, found) = rows(reader().fill(9).skip_nulls());
    assert_eq!(found, [(1.0, "a".into(), 9), (3.0, "?".into(), 3), (4.0, "c".into(), 4)]);
    assert_eq!((skipped.bad, skipped.nulls), (0, 1));
    assert_eq!(skipped.first, [format!("{} line 3: left out for a null", table.path)]);
    let (skipped, found) = rows(reader().skip_nulls());
    assert_eq!(found, [(3.0, "?".into(), 3), (4.0, "c".into(), 4)]);
    assert_eq!(skipped.nulls, 2);
    let error = reader().describe(&table.path).unwrap_err().to_string();
    let expected = " line 2: column \"n\" is \"\" where an integer should be";
    assert_eq!(error, format!("{}{expected}", table.path));
}

#[test]
fn integers_and_truth_values_are_read_as_pandas_writes_them() {
    let table = table("n,y\n1.0,True\n-20.00,False\n3,true\n0.0,FALSE\n10,1.0\n");
    let mut rows = CsvRows::new().i64("n").class("y", 2);
    let dataset = rows.describe(&table.path).unwrap();
    let read = rows.read(&dataset.files[0], 0..5).unwrap();
    let found: Vec<_> = read.iter().map(|row| (row.i64(0), row.class(1))).collect();
    assert_eq!(found, [(1, 1), (-20, 0), (3, 1), (0, 0), (10, 1)]);
    for bad in ["1.5", "1.", ".0", "1e3", "nan", "yes", "10.0.0", "99999999999999999999.0", "--1.0"]
    {
        let error = refusal(format!("y,name,n\n1,a,{bad}\n"));
        assert!(error.ends_with("where an integer should be"), "{bad}: {error}");
    }
}

#[test]
fn classes_are_named() {
    let table = table("kind,x\ndog,1\n cat ,2\n,3\n");
    let reader = || CsvRows::new().class("kind", ["cat", "dog"]);
    let classes = |mut rows: CsvRows| {
        let dataset = rows.describe(&table.path)?;
        let file = &dataset.files[0];
        let read = rows.read(file, 0..file.records)?;
        Ok::<_, DataError>(read.iter().map(|row| row.class(0)).collect::<Vec<_>>())
    };
    assert_eq!(classes(reader().skip_nulls()).unwrap(), [1, 0]);
    assert_eq!(classes(reader().fill("dog")).unwrap(), [1, 0, 1]);
    let mut predicting = reader().label();
    let options = ReadOptions { purpose: Purpose::Predict, ..ReadOptions::default() };
    predicting.configure(options).unwrap();
    assert_eq!(classes(predicting).unwrap(), [1, 0, 0]);
    assert!(classes(reader()).is_err(), "a null");
    let error = classes(CsvRows::new().class("kind", ["cat", "bird"])).unwrap_err().to_string();
    let expected = " line 2: column \"kind\" is \"dog\" where one of cat, bird should be";
    assert_eq!(error, format!("{}{expected}", table.path));
}

#[test]
fn bad_rows_are_left_out_up_to_a_limit() {
    let mut text = "y,name,n\n".to_owned();
    for row in 0..100 {
        text += &if row % 10 == 3 { format!("{row}\n") } else { format!("{row},a,{row}\n") };
    }
    let table = table(text);
    let configured = |max: u64| {
        let mut rows = columns();
        rows.configure(ReadOptions { bad_records_max: max, ..ReadOptions::default() }).unwrap();
        rows
    };
    let mut rows = configured(10);
    let dataset = rows.describe(&table.path).unwrap();
    let file = &dataset.files[0];
    assert_eq!((file.records, dataset.skipped.bad), (90, 10));
    assert_eq!(dataset.skipped.first.len(), 5);
    let expected = format!("{} line 5: 1 column where the header has 3", table.path);
    assert_eq!(dataset.skipped.first[0], expected);
    let kept: Vec<i64> = (0..100).filter(|row| row % 10 != 3).collect();
    // Another worker, which has not described the data.
    let mut other = configured(10);
    for start in [0, 89, 17, 15, 31, 47] {
        let read = other.read(file, start..90).unwrap();
        let numbers: Vec<i64> = read.iter().map(|row| row.i64(2)).collect();
        assert_eq!(numbers, kept[start as usize..], "from {start}");
    }
    let error = configured(9).describe(&table.path).unwrap_err().to_string();
    assert!(error.contains(" line 95: 1 column") && error.contains("bad record 10"), "{error}");
}

#[test]
fn predictions_need_no_label() {
    let table = table("x\n1\n2\n");
    let reader = || CsvRows::new().class("y", 3).label().f32("x");
    let error = reader().describe(&table.path).unwrap_err().to_string();
    assert!(error.ends_with("line 1: no column \"y\": the header has x"), "{error}");
    let mut rows = reader();
    rows.configure(ReadOptions { purpose: Purpose::Predict, ..ReadOptions::default() }).unwrap();
    let dataset = rows.describe(&table.path).unwrap();
    let read = rows.read(&dataset.files[0], 0..2).unwrap();
    assert_eq!((read[1].class(0), read[1].f32(1)), (0, 2.0));
}
