//! Files of predictions, one for each shard.
//!
//! A file's name gives the range of its records, counted through the whole data set, so the files
//! in the order of their names hold the rows in the order of the records. A file appears
//! atomically: complete or not at all. A worker that processes the same shard again writes the same
//! bytes.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use elasticdl_data::Predictions;
use elasticdl_data::storage::Storage;
use elasticdl_data::worker::{encode, random_digits};
use elasticdl_proto::{Format, RecordRange};

use crate::weights;

/// Destination of the prediction files.
#[derive(Debug)]
pub(super) enum Output {
    /// A folder of this machine.
    Folder(PathBuf),
    Store(Storage),
}

/// Checks that the output at `address` is empty and that it is writable.
///
/// # Errors
/// A message that explains what is wrong, and what the user should do.
pub(crate) fn check_output(address: &str, format: Format) -> Result<(), String> {
    // A format for which this program was not built.
    encode(format, &Predictions::new().i64("class", Vec::new()))?;
    let output = Storage::open(address).map_err(|error| error.to_string())?;
    let path = Path::new(address.strip_prefix("file://").unwrap_or(address));
    if !Storage::is_remote(address) && path.is_file() {
        return Err(format!("{address} is a file; give a folder, which takes a file per shard"));
    }
    let found = output.list("").map_err(|error| error.to_string())?;
    if let Some(first) = found.first() {
        return Err(format!(
            "{address}: the output is not empty, it contains for example {}; empty it or give \
             another folder, so that the rows of different jobs do not mix",
            first.path
        ));
    }
    weights::probe(&format!("{}/part", address.trim_end_matches('/')))
        .map_err(|error| error.to_string())
}

impl Output {
    /// Opens the output at `address`.
    ///
    /// # Errors
    /// `address` is not a valid address, or settings that it needs are missing.
    pub(super) fn open(address: &str) -> Result<Self, String> {
        if Storage::is_remote(address) {
            return Storage::open(address).map(Self::Store).map_err(|error| error.to_string());
        }
        Ok(Self::Folder(address.strip_prefix("file://").unwrap_or(address).into()))
    }

    /// Removes temporary files of killed workers, as far as they can be recognized. Their names
    /// begin with a dot, so they do no harm if they stay.
    pub(super) fn remove_leftovers(&self) {
        if let Self::Folder(folder) = self
            && let Err(error) = remove_leftovers(folder)
        {
            tracing::debug!(%error, folder = %folder.display(), "temporary files not removed");
        }
    }

    /// Writes a file atomically: on failure the previous content stays.
    fn write(&self, name: &str, bytes: Vec<u8>) -> Result<(), String> {
        match self {
            Self::Folder(folder) => replace(folder, name, &bytes)
                .map_err(|error| format!("{}: {error}", folder.join(name).display())),
            // A store shows nothing of what was not written to its end.
            Self::Store(storage) => {
                storage.write(name, vec![Bytes::from(bytes)]).map_err(|error| error.to_string())
            }
        }
    }
}

/// Writes a file under a hidden temporary name, which no reader takes for a part of the output, and
/// renames it to `name`.
fn replace(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let own = folder.join(format!(".{name}.{}", random_digits()));
    let mut file = fs::File::create_new(&own)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&own, folder.join(name))
}

/// Removes temporary files of killed workers whose shards have been written since by others.
fn remove_leftovers(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let of = name.to_str().and_then(|name| Some(name.strip_prefix('.')?.rsplit_once('.')?.0));
        if of.is_some_and(|of| of.starts_with("part-") && folder.join(of).is_file()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Writes the rows of a shard.
///
/// # Errors
/// A message that explains what could not be written, and why.
pub(super) fn write_shard(
    output: &Output,
    format: Format,
    shard: RecordRange,
    predictions: &Predictions,
) -> Result<(), String> {
    let RecordRange { start, end, .. } = shard;
    let extension = match format {
        Format::Csv => "csv",
        Format::Jsonl => "jsonl",
        Format::Parquet => "parquet",
    };
    // 13 digits: enough for the largest data set.
    let name = format!("part-{start:013}-{end:013}.{extension}");
    output.write(&name, encode(format, predictions)?)
}

#[cfg(test)]
mod tests {
    use elasticdl_data::readers::{CsvRows, ParquetRows, Row};

    use super::*;
    use crate::Reader;

    fn predictions() -> Predictions {
        Predictions::new()
            .i64("class, \"it\"", vec![i64::MIN, 7, 0])
            .f32("p", vec![0.1, -2.5e-30, 1.0])
            .text("words", vec!["a\nb,\"c\"".into(), "ü".into(), String::new()])
    }

    fn written(format: Format) -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out").to_str().unwrap().to_owned();
        let shard = RecordRange { epoch: 0, start: 40, end: 43 };
        write_shard(&Output::open(&output).unwrap(), format, shard, &predictions()).unwrap();
        let files: Vec<_> =
            fs::read_dir(&output).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 1);
        let path = files[0].to_str().unwrap().to_owned();
        assert!(path.contains("/part-0000000000040-0000000000043."), "{path}");
        (folder, path)
    }

    fn check(mut reader: impl Reader<Record = Row>, path: &str) {
        let dataset = reader.describe(path).unwrap();
        let rows = reader.read(&dataset.files[0], 0..3).unwrap();
        let found: Vec<_> = rows.iter().map(|row| (row.i64(0), row.f32(1), row.text(2))).collect();
        assert_eq!(found, [(i64::MIN, 0.1, "a\nb,\"c\""), (7, -2.5e-30, "ü"), (0, 1.0, "")]);
    }

    #[test]
    fn a_file_is_refused_as_the_place_of_predictions() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = check_output(file.path().to_str().unwrap(), Format::Csv).unwrap_err();
        assert!(error.contains("is a file; give a folder"), "{error}");
    }

    #[test]
    fn csv_and_parquet_files_read_back_what_was_predicted() {
        let (_folder, path) = written(Format::Csv);
        check(CsvRows::new().i64("class, \"it\"").f32("p").text("words"), &path);
        let (_folder, path) = written(Format::Parquet);
        check(ParquetRows::new().i64("class, \"it\"").f32("p").text("words"), &path);
    }

    #[test]
    fn each_line_of_jsonl_is_one_row() {
        let (_folder, path) = written(Format::Jsonl);
        let text = fs::read_to_string(path).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(
            (&lines[0]["class, \"it\""], &lines[0]["words"]),
            (&i64::MIN.into(), &"a\nb,\"c\"".into())
        );
        assert!(
            text.starts_with("{\"class, \\\"it\\\"\":-9223372036854775808,\"p\":0.1,"),
            "{text}"
        );
        let nan = encode(Format::Jsonl, &Predictions::new().f32("p", vec![f32::NAN]));
        assert_eq!(nan.unwrap(), b"{\"p\":null}\n");
    }

    #[test]
    fn temporary_files_of_killed_workers_are_removed_once_the_shard_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let left = ["part-1.csv", ".part-1.csv.77", ".part-2.csv.77", ".other.77", "part-3.csv"];
        for name in left {
            fs::write(folder.path().join(name), "torn").unwrap();
        }
        // A worker on another machine may have the same process id.
        fs::write(folder.path().join(format!(".part-1.csv.{}", std::process::id())), "half")
            .unwrap();
        replace(folder.path(), "part-1.csv", b"whole").unwrap();
        assert!(folder.path().join(format!(".part-1.csv.{}", std::process::id())).exists());
        assert_eq!(fs::read(folder.path().join("part-1.csv")).unwrap(), b"whole");
        remove_leftovers(folder.path()).unwrap();
        let mut names: Vec<String> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, [".other.77", ".part-2.csv.77", "part-1.csv", "part-3.csv"]);
    }

    #[test]
    fn an_output_that_is_not_empty_is_refused() {
        let (folder, path) = written(Format::Csv);
        let output = folder.path().join("out").to_str().unwrap().to_owned();
        let error = check_output(&output, Format::Csv).unwrap_err();
        assert!(error.contains("it contains for example part-"), "{error}");
        fs::remove_file(path).unwrap();
        check_output(&output, Format::Csv).unwrap();
        check_output(&format!("{output}/new/"), Format::Csv).unwrap();
        fs::write(format!("{output}/file"), "").unwrap();
        let error = check_output(&format!("{output}/file"), Format::Csv).unwrap_err();
        assert!(error.contains("/file"), "{error}");
    }
}
