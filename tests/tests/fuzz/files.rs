//! Files that users hand in: each is read, or refused with an error.

use std::path::Path;

use elasticdl::fuzzing;

use crate::harness::Target;

/// Declares tests: their names, what is read, the number of inputs, and the bytes in which most
/// changes are.
macro_rules! read_or_refused {
    ($($test:ident: $read:ident, $inputs:literal, $head:expr;)*) => {
        $(
            #[test]
            fn $test() {
                let name = stringify!($read);
                run(Target { name, inputs: $inputs, head: $head }, fuzzing::$read);
            }
        )*
    };
}

read_or_refused! {
    any_arrow_file_is_read_or_refused: arrow, 3000, usize::MAX;
    any_csv_table_is_read_or_refused: csv, 3000, 60;
    any_idx_file_is_read_or_refused: idx, 3000, 20;
    any_image_is_read_or_refused: image, 3000, usize::MAX;
    any_json_lines_are_read_or_refused: json, 3000, 200;
    any_parquet_file_of_lists_is_read_or_refused: parquet_lists, 2000, usize::MAX;
    any_manifest_of_a_checkpoint_is_used_or_refused: manifest, 3000, usize::MAX;
    any_parquet_file_is_read_or_refused: parquet, 2000, usize::MAX;
    any_safetensors_file_is_loaded_or_refused: safetensors, 3000, 150;
    any_tar_file_is_read_or_refused: web_dataset, 3000, 1100;
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
