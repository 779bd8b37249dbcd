use std::fs;

use super::*;
use crate::reader::{ReadOptions, Reader as _};

struct Table {
    folder: tempfile::TempDir,
    path: String,
}

fn table(text: impl AsRef<[u8]>) -> Table {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.jsonl").to_str().unwrap().to_owned();
    fs::write(&path, text).unwrap();
    Table { folder, path }
}

fn columns() -> JsonRows {
    JsonRows::new().f32("y").text("name").i64("at.n").f32_list("v", 2)
}

#[test]
fn rows_contain_the_requested_keys_in_the_requested_order() {
    let table = table(
        "{\"v\": [1, 2.5], \"name\": \"a\\n\", \"y\": 0.5, \"at\": {\"n\": 3}}\n\n  \n\
         {\"y\": 1e3, \"more\": [[]], \"v\": [-1,0], \"at.n\": true, \"name\": \"\"}",
    );
    let mut rows = columns();
    let dataset = rows.describe(&table.path).unwrap();
    let read = rows.read(&dataset.files[0], 0..2).unwrap();
    assert_eq!((read[0].f32(0), read[0].text(1), read[0].i64(2)), (0.5, "a\n", 3));
    assert_eq!((read[1].f32(0), read[1].text(1), read[1].i64(2)), (1000.0, "", 1));
    assert_eq!((read[0].f32s(3), read[1].f32s(3)), (&[1.0, 2.5][..], &[-1.0, 0.0][..]));
}

#[test]
fn any_range_reads_the_same_rows() {
    let row = |i: u64| format!("{{\"n\": {i}, \"x\": \"{}\"}}\r\n", "x".repeat(i as usize % 9));
    let table = table((0..5000).map(row).collect::<String>());
    let mut rows = JsonRows::new().i64("n");
    let file = rows.describe(&table.path).unwrap().files[0].clone();
    for range in [0..1, 15..17, 16..32, 4999..5000, 100..100, 31..1000] {
        let read = rows.read(&file, range.clone()).unwrap();
        let numbers: Vec<u64> = read.iter().map(|row| row.i64(0) as u64).collect();
        assert_eq!(numbers, range.collect::<Vec<_>>());
    }
    let picked = rows.read_records(&file, &[3, 4, 900, 4999]).unwrap();
    assert_eq!(picked.iter().map(|row| row.i64(0)).collect::<Vec<_>>(), [3, 4, 900, 4999]);
}

#[test]
fn errors_name_their_line_and_column() {
    let good = "{\"y\": 1, \"name\": \"a\", \"at\": {\"n\": 1}, \"v\": [1, 2]}\n";
    let cases = [
        ("{\"y\": \"1\"}", "column \"y\" is \\\"1\\\" where a finite number should be"),
        ("{\"y\": 1e39}", "column \"y\" is 1e+39 where a finite number should be"),
        ("{}", "column \"y\" is null where a finite number should be"),
        ("{\"y\": 1, \"name\": 3}", "column \"name\" is 3 where a text should be"),
        (
            "{\"y\": 1, \"name\": \"\", \"at\": {\"n\": 1.5}}",
            "column \"at.n\" is 1.5 where an integer should be",
        ),
        (
            "{\"y\": 1, \"name\": \"\", \"at\": {\"n\": 1}, \"v\": [1]}",
            "column \"v\" is [1] where a list of 2 finite numbers should be",
        ),
        (
            "{\"y\": 1, \"name\": \"\", \"at\": {\"n\": 1}, \"v\": [1, null]}",
            "column \"v\" is null where a finite number should be",
        ),
    ];
    for (line, expected) in cases {
        let table = table(format!("{good}\n{line}\n{good}"));
        let error = columns().describe(&table.path).unwrap_err().to_string();
        assert_eq!(error, format!("{} line 3: {expected}", table.path));
    }
    let table = table(format!("{good}[1]\n"));
    let error = columns().describe(&table.path).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{} line 2: not a JSON object: ", table.path)), "{error}");
    assert!(error.ends_with(": [1]"), "{error}");
}

#[test]
fn other_keys_are_one_value_in_the_order_of_their_names() {
    let table = table("{\"b\": 2, \"y\": 1, \"a\": 1}\n{\"a\": 3, \"b\": null, \"y\": 0}\n");
    let mut rows = JsonRows::new().class("y", 2).other_f32s(2).fill(-1.0);
    let dataset = rows.describe(&table.path).unwrap();
    let read = rows.read(&dataset.files[0], 0..2).unwrap();
    assert_eq!((read[0].f32s(1), read[1].f32s(1)), (&[1.0, 2.0][..], &[3.0, -1.0][..]));
    let error = JsonRows::new().class("y", 2).other_f32s(3).describe(&table.path).unwrap_err();
    assert!(error.to_string().ends_with(" line 1: 2 other columns where 3 should be"), "{error}");
}

#[test]
fn compressed_files_in_folders_are_read() {
    let table = table("{\"n\": 1}\n");
    let packed = zstd::encode_all(&b"{\"n\": 2}\n{\"n\": 3}\n"[..], 1).unwrap();
    fs::write(table.folder.path().join("z.ndjson.zst"), packed).unwrap();
    fs::write(table.folder.path().join("z.json"), "[]").unwrap();
    let mut rows = JsonRows::new().i64("n");
    let dataset = rows.describe(table.folder.path().to_str().unwrap()).unwrap();
    assert_eq!(dataset.files.iter().map(|file| file.records).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(rows.read(&dataset.files[1], 1..2).unwrap()[0].i64(0), 3);
}

#[test]
fn bad_lines_are_left_out() {
    let table = table("{\"n\": 1}\n{\"n\": \n{\"n\": 3}\nnothing\n");
    let mut rows = JsonRows::new().i64("n");
    rows.configure(ReadOptions { bad_records_max: 2, ..ReadOptions::default() }).unwrap();
    let dataset = rows.describe(&table.path).unwrap();
    assert_eq!((dataset.files[0].records, dataset.skipped.bad), (2, 2));
    assert_eq!(rows.read(&dataset.files[0], 1..2).unwrap()[0].i64(0), 3);
}
