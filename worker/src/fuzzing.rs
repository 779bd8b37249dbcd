//! Entry points of the fuzzers: files that users hand in, with any content.
//!
//! A file is read, or refused with an error. It causes no panic, and neither a wait nor memory
//! beyond what its size justifies.

use std::fs;
use std::path::Path;

use elasticdl_data::readers::{
    ArrowRows, CsvRows, IdxImages, ImageFolder, JsonRows, ParquetRows, WebDataset,
};
use elasticdl_data::{ReadOptions, Reader};

use crate::model::NamedTensor;
use crate::{checkpoint, weights};

/// Reads a table with the columns `x`, `n`, `kind`, a text, and `v`, a list of two numbers, and
/// skips the rows with nulls. Returns whether it was read. `folder` is an existing folder for
/// the file, as in the other targets.
#[must_use]
pub fn arrow(folder: &Path, data: &[u8]) -> bool {
    let table = write(folder, "table.arrow", data);
    read_all(ArrowRows::new().f32("x").i64("n").text("kind").f32_list("v", 2).skip_nulls(), &table)
}

/// Reads a table with the columns `x`, `n` and `name`. Returns whether it was read.
#[must_use]
pub fn csv(folder: &Path, data: &[u8]) -> bool {
    let table = write(folder, "table.csv", data);
    read_all(CsvRows::new().f32("x").i64("n").text("name"), &table)
}

/// Reads images of 2 by 2 pixels with ten labels. Returns whether they were read.
#[must_use]
pub fn idx(folder: &Path, data: &[u8]) -> bool {
    write(folder, "train-images-idx3-ubyte", data);
    write(folder, "train-labels-idx1-ubyte", b"\0\0\x08\x01\0\0\0\x0a0123456789");
    read_all(IdxImages::new(2, 2), &folder.display().to_string())
}

/// Reads an image of 2 by 3 pixels, height by width. Returns whether it was read.
#[must_use]
pub fn image(folder: &Path, data: &[u8]) -> bool {
    let classes = folder.join("a");
    fs::create_dir_all(&classes).expect("the caller passes a folder that can be written to");
    write(&classes, "1.png", data);
    read_all(ImageFolder::new([2, 3, 3], ["a"]), &folder.display().to_string())
}

/// Reads lines of JSON with the keys `x`, `n`, `name` and `v`, a list of two numbers, with as many
/// bad lines as there are. Returns whether they were read.
#[must_use]
pub fn json(folder: &Path, data: &[u8]) -> bool {
    let table = write(folder, "table.jsonl", data);
    let reader = || JsonRows::new().f32("x").i64("n").text("name").fill("").f32_list("v", 2);
    let mut skipping = reader().skip_nulls();
    let mut options = ReadOptions::default();
    options.bad_records_max = u64::MAX;
    let _ = skipping.configure(options).map(|()| read_all(skipping, &table));
    read_all(reader(), &table)
}

/// Loads a checkpoint of six parameters with this manifest, to which its digest is added: the
/// fuzzer could not compute it. Returns whether a job could resume from the manifest.
#[must_use]
pub fn manifest(folder: &Path, data: &[u8]) -> bool {
    checkpoint::fuzz_manifest(folder, data)
}

/// Reads a table with the columns `city`, `price` and `rooms`. Returns whether it was read.
#[must_use]
pub fn parquet(folder: &Path, data: &[u8]) -> bool {
    let table = write(folder, "table.parquet", data);
    read_all(ParquetRows::new().text("city").f32("price").i64("rooms"), &table)
}

/// Reads a table with the columns `v`, lists of two numbers, and `small`, and skips the rows with
/// nulls. Returns whether it was read.
#[must_use]
pub fn parquet_lists(folder: &Path, data: &[u8]) -> bool {
    let table = write(folder, "table.parquet", data);
    read_all(ParquetRows::new().f32_list("v", 2).f32("small").skip_nulls(), &table)
}

/// Loads a model of six parameters. Returns whether it was loaded.
#[must_use]
pub fn safetensors(folder: &Path, data: &[u8]) -> bool {
    let file = write(folder, "model.safetensors", data);
    let tensors = [NamedTensor::new("a", [2, 2]), NamedTensor::new("b", [2])];
    weights::load(&file, &tensors, &mut [0.0; 6]).is_ok()
}

/// Reads samples with a class of ten, a text and an image of 2 by 3 pixels. Returns whether they
/// were read.
#[must_use]
pub fn web_dataset(folder: &Path, data: &[u8]) -> bool {
    let tar = write(folder, "samples.tar", data);
    read_all(WebDataset::new().class("cls", 10).text("txt").image("png", [2, 3, 3]), &tar)
}

/// Describes the data, and reads the first and the last records of each file.
fn read_all<R: Reader>(mut reader: R, source: &str) -> bool {
    let Ok(dataset) = reader.describe(source) else { return false };
    dataset.files.iter().all(|file| {
        let ranges = [0..file.records.min(RECORDS_MAX), file.records - 1..file.records];
        ranges.into_iter().all(|range| {
            let count = range.end - range.start;
            reader.read_ahead(file, range.clone());
            reader.read(file, range).is_ok_and(|records| records.len() as u64 == count)
        })
    })
}

fn write(folder: &Path, name: &str, data: &[u8]) -> String {
    let path = folder.join(name);
    fs::write(&path, data).expect("the caller passes a folder that can be written to");
    path.display().to_string()
}

/// Records that are read of a file at once.
const RECORDS_MAX: u64 = 1000;
