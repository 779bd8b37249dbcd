//! Data sets for the counting model.

use std::io::Write;
use std::path::Path;

/// Writes `records` records over `files` files into `folder`: record `i` holds the number `i`.
///
/// # Errors
/// The system refused.
pub fn counting_data(folder: &Path, records: u64, files: u64) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for file in 0..files {
        let range = records * file / files..records * (file + 1) / files;
        let bytes: Vec<u8> = range.flat_map(u64::to_le_bytes).collect();
        std::fs::File::create(folder.join(format!("part-{file:03}.bin")))?.write_all(&bytes)?;
    }
    Ok(())
}
