//! Data that can't be used gives a clear error and exit code 2, and no training.

use std::fs;
use std::path::{Path, PathBuf};

use elasticdl_tests::{Command, Ended, each_once};
use tempfile::TempDir;

use crate::PROGRAMS;

fn train(folder: &TempDir, reader: &str, data: &Path) -> Command {
    let program = [PathBuf::from(env!("CARGO_BIN_EXE_reading")), reader.into()];
    Command::new(PROGRAMS.elasticdl, folder.path().join("job"), program)
        .option("training-data", data)
        .option("num-workers", "3")
}

/// Asserts that the job was refused with all of `words`.
fn assert_refused(ended: &Ended, words: &[&str]) {
    ended.assert_outcome(2, "refused");
    let summary = ended.summary();
    let error = summary.error.as_ref().unwrap();
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
        assert!(ended.output.contains(word), "{word:?} is not in: {}", ended.output);
    }
    assert_eq!((summary.steps, summary.workers.peak), (0, 0));
}

#[test]
fn missing_data_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let ended = train(&folder, "text", Path::new("/no/such/folder")).run();
    assert_refused(&ended, &["/no/such/folder"]);
}

#[test]
fn an_empty_folder_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("empty");
    fs::create_dir(&data).unwrap();
    let ended = train(&folder, "text", &data).run();
    assert_refused(&ended, &[data.to_str().unwrap()]);
}

#[test]
fn a_row_with_too_few_columns_is_named_with_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("points.csv");
    let mut lines = vec!["x,y,name".to_owned()];
    lines.extend((0..30).map(|i| format!("{i},1.5,point")));
    lines[16] = "4,2".into();
    fs::write(&data, lines.join("\n")).unwrap();
    let ended = train(&folder, "csv", &data).run();
    assert_refused(&ended, &[data.to_str().unwrap(), "line 17"]);
}

#[test]
fn a_wrong_magic_and_a_short_file_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("digits");
    fs::create_dir(&data).unwrap();
    let header = |magic: u32, dims: &[u32]| -> Vec<u8> {
        [magic].iter().chain(dims).flat_map(|n| n.to_be_bytes()).collect()
    };
    let write = |images: Vec<u8>| {
        fs::write(data.join("train-images-idx3-ubyte"), images).unwrap();
        let labels = [header(0x801, &[10]), vec![1; 10]].concat();
        fs::write(data.join("train-labels-idx1-ubyte"), labels).unwrap();
    };
    write([header(0x802, &[10, 2, 2]), vec![0; 40]].concat());
    let ended = train(&folder, "idx", &data).run();
    assert_refused(&ended, &["train-images-idx3-ubyte", "magic"]);
    write([header(0x803, &[10, 2, 2]), vec![0; 39]].concat());
    let ended = train(&folder, "idx", &data).run();
    assert_refused(&ended, &["train-images-idx3-ubyte", "55", "56"]);
    write([header(0x803, &[10, 2, 2]), vec![0; 40]].concat());
    let ended = train(&folder, "idx", &data).option("global-batch-size", "5").run();
    assert_eq!((ended.code, ended.summary().records.counted), (Some(0), 10), "{}", ended.output);
}

#[test]
fn a_batch_larger_than_the_data_set_is_refused_with_both_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("text");
    fs::write(&data, "x".repeat(41)).unwrap();
    let ended = train(&folder, "text", &data).option("global-batch-size", "11").run();
    assert_refused(&ended, &["11", "10"]);
}

#[test]
fn bad_rows_are_skipped_and_listed_up_to_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("points.csv");
    let mut lines = vec!["x,y,name".to_owned()];
    lines.extend((0..300).map(|i| format!("{i},1.5,point")));
    lines[16] = "4,2".into();
    lines[200] = "4,east,point".into();
    fs::write(&data, lines.join("\n")).unwrap();
    let ended = train(&folder, "csv", &data).option("bad-records", "skip:1").run();
    assert_refused(&ended, &["line 201", "bad record 2", "line 17"]);
    let ended = train(&folder, "csv", &data).option("bad-records", "skip:2").run();
    ended.assert_outcome(0, "completed");
    let summary = ended.summary();
    assert_eq!(summary.records, each_once(298));
    let skipped = summary.records_skipped.as_ref().unwrap();
    assert_eq!((skipped.bad, skipped.nulls, skipped.first.len()), (2, 0, 2));
    assert!(skipped.first[1].contains("points.csv line 201: column \"y\""), "{skipped:?}");
    assert!(ended.output.contains("2 bad, 0 with nulls"), "{}", ended.output);
}

#[test]
fn a_reader_that_cannot_skip_records_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("text");
    fs::write(&data, "a text that is long enough for a few windows of it").unwrap();
    let ended = train(&folder, "text", &data).option("bad-records", "skip:1").run();
    assert_refused(&ended, &["this reader cannot skip records", "--bad-records fail"]);
}
