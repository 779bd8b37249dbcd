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
