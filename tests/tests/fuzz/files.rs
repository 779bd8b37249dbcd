//! Files that users hand in: each is read, or refused with an error.

use std::path::Path;

use elasticdl::fuzzing;

use crate::harness::Target;

#[test]
fn any_arrow_file_is_read_or_refused() {
    run(Target { name: "arrow", inputs: 3000, head: usize::MAX }, fuzzing::arrow);
}

#[test]
fn any_csv_table_is_read_or_refused() {
    run(Target { name: "csv", inputs: 3000, head: 60 }, fuzzing::csv);
}

#[test]
fn any_idx_file_is_read_or_refused() {
    run(Target { name: "idx", inputs: 3000, head: 20 }, fuzzing::idx);
}

#[test]
fn any_image_is_read_or_refused() {
    run(Target { name: "image", inputs: 3000, head: usize::MAX }, fuzzing::image);
}

#[test]
fn any_json_lines_are_read_or_refused() {
    run(Target { name: "json", inputs: 3000, head: 200 }, fuzzing::json);
}

#[test]
fn any_parquet_file_of_lists_is_read_or_refused() {
    run(Target { name: "parquet_lists", inputs: 2000, head: usize::MAX }, fuzzing::parquet_lists);
}

#[test]
fn any_manifest_of_a_checkpoint_is_used_or_refused() {
    run(Target { name: "manifest", inputs: 3000, head: usize::MAX }, fuzzing::manifest);
}

#[test]
fn any_parquet_file_is_read_or_refused() {
    run(Target { name: "parquet", inputs: 2000, head: usize::MAX }, fuzzing::parquet);
}

#[test]
fn any_safetensors_file_is_loaded_or_refused() {
    run(Target { name: "safetensors", inputs: 3000, head: 150 }, fuzzing::safetensors);
}

#[test]
fn any_tar_file_is_read_or_refused() {
    run(Target { name: "web_dataset", inputs: 3000, head: 1100 }, fuzzing::web_dataset);
}

fn run(target: Target, accepts: fn(&Path, &[u8]) -> bool) {
    let shared_memory = Path::new("/dev/shm");
    let place = if shared_memory.is_dir() { shared_memory.into() } else { std::env::temp_dir() };
    target.run(|data| {
        // A process refuses a file that has changed since it first read it, so each has a new path.
        let folder = tempfile::tempdir_in(&place).unwrap();
        accepts(folder.path(), data)
    });
}
