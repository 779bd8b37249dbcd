//! Files of rows: the shards of the tables that a rank owns, one after the other.
//!
//! ```text
//!   index: for each shard, in the order of the manifest, its length (u64) and its digest (u128)
//!   shards
//! ```
//!
//! All numbers are little-endian. The manifest holds the digest of the index, so each shard can be
//! read, and verified, without the others.

use std::ops::Range;

use bytes::Bytes;
use elasticdl_data::storage::{Storage, StorageError};
use elasticdl_tables::SavedShard;
use xxhash_rust::xxh3::xxh3_128;

use super::load::LoadError;
use super::table_rows::{ENTRY_BYTES, RowsFile};
use crate::session::checkpoint::WrittenRows;

/// Takes in a shard, by its number, or says what is wrong with it.
pub type TakeShard<'a> = dyn FnMut(u32, &[u8]) -> Result<(), String> + 'a;

/// The content of a file, and what the manifest says of it.
///
/// # Errors
/// A row contains a NaN or an infinity.
pub(super) fn encode(shards: Vec<SavedShard>) -> Result<(Vec<Bytes>, WrittenRows), String> {
    let mut index = Vec::with_capacity(shards.len() * ENTRY_BYTES as usize);
    let mut parts = vec![Bytes::new()];
    let mut touches = 0;
    for shard in shards {
        if !shard.is_finite() {
            return Err("a table contains a NaN or an infinity, so no checkpoint is written".into());
        }
        touches += shard.touches();
        let bytes = shard.encode();
        index.extend((bytes.len() as u64).to_le_bytes());
        index.extend(xxh3_128(&bytes).to_le_bytes());
        parts.push(bytes.into());
    }
    let digest = xxh3_128(&index);
    parts[0] = index.into();
    let bytes = parts.iter().map(|part| part.len() as u64).sum();
    Ok((parts, WrittenRows { bytes, digest, touches }))
}

/// Where a shard lies in a file.
struct Place {
    range: Range<u64>,
    digest: u128,
}

/// Reads where each shard of a file lies, in the order of the manifest.
fn places(folder: &Storage, file: &RowsFile) -> Result<Vec<Place>, LoadError> {
    let damaged = |reason: &str| LoadError::Damaged(format!("{}: {reason}", file.file));
    match folder.bytes(&file.file) {
        Ok(bytes) if bytes == file.bytes => {}
        Ok(bytes) => return Err(damaged(&format!("it has {bytes} bytes, not {}", file.bytes))),
        Err(StorageError::NotFound { .. }) => return Err(damaged("it is missing")),
        Err(error) => return Err(LoadError::Storage(error)),
    }
    if file.shards.is_empty() {
        return Ok(Vec::new());
    }
    let mut at = file.shards.len() as u64 * ENTRY_BYTES;
    let index = folder.read_range(&file.file, 0..at).map_err(LoadError::Storage)?;
    if format!("{:032x}", xxh3_128(&index)) != file.digest {
        return Err(damaged("the digest of its index does not match: it has changed"));
    }
    let mut places = Vec::with_capacity(file.shards.len());
    for entry in index.chunks_exact(ENTRY_BYTES as usize) {
        let (len, digest) = entry.split_at(8);
        let len = u64::from_le_bytes(len.try_into().expect("8 bytes were split off"));
        let digest = u128::from_le_bytes(digest.try_into().expect("16 bytes are left"));
        let end = at.checked_add(len).filter(|end| *end <= file.bytes);
        let end = end.ok_or_else(|| damaged("its shards are longer than the file"))?;
        places.push(Place { range: at..end, digest });
        at = end;
    }
    Ok(places)
}

/// Checks that the files are there, with the shards that the manifest names, without reading these.
pub(super) fn check(folder: &Storage, files: &[RowsFile]) -> Result<(), LoadError> {
    files.iter().try_for_each(|file| places(folder, file).map(drop))
}

/// Reads the `wanted` shards, verifies each, and gives it to `take`, with its number.
pub(super) fn read(
    folder: &Storage,
    files: &[RowsFile],
    wanted: impl Fn(u32) -> bool,
    take: &mut TakeShard<'_>,
) -> Result<(), LoadError> {
    for file in files.iter().filter(|file| file.shards.iter().any(|&shard| wanted(shard))) {
        let damaged = |reason: &str| LoadError::Damaged(format!("{}: {reason}", file.file));
        for (&shard, place) in file.shards.iter().zip(places(folder, file)?) {
            if wanted(shard) {
                let bytes =
                    folder.read_range(&file.file, place.range).map_err(LoadError::Storage)?;
                if xxh3_128(&bytes) != place.digest {
                    return Err(damaged(&format!("shard {shard} has changed")));
                }
                take(shard, &bytes).map_err(|reason| damaged(&reason))?;
            }
        }
    }
    Ok(())
}
