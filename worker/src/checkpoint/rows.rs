//! Files of rows: the shards of the tables that a rank owns, or its chunks of the optimizer's
//! state, one after the other.
//!
//! ```text
//!   index: for each shard, in the order of the manifest, its length (u64) and its digest (u128)
//!   shards
//! ```
//!
//! All numbers are little-endian. The manifest holds the digest of the index, so each shard can be
//! read, and verified, without the others. If the manifest names a base, the file has what has
//! changed since that checkpoint, of each shard:
//!
//! ```text
//!   step-…200  all rows  ◄── step-…300  changes  ◄── step-…400  changes
//! ```

use std::collections::BTreeMap;
use std::mem;
use std::ops::Range;

use bytes::Bytes;
use elasticdl_data::storage::{Storage, StorageError};
use elasticdl_tables::{
    ComparedShards, InvalidRows, SavedChunk, SavedShard, changed_shard, whole_shard,
};
use xxhash_rust::xxh3::xxh3_128;

use super::load::{LoadError, manifest};
use super::table_rows::{ENTRY_BYTES, RowsFile, TableRows};
use crate::session::checkpoint::WrittenRows;

/// Takes in a shard, by its number, or says what is wrong with it.
pub type TakeShard<'a> = dyn FnMut(u32, &[u8]) -> Result<(), String> + 'a;

/// What a rank owns of what is divided over the group, as of a step, and what it compares with
/// others.
#[derive(Clone, Debug)]
pub enum SavedPart {
    /// Chunks of the optimizer's state.
    Chunks(Vec<SavedChunk>, ComparedShards<Vec<f32>>),
    /// Shards of the model's tables.
    Rows(Vec<SavedShard>, ComparedShards),
}

impl SavedPart {
    /// The rank's [`WrittenRows::balance`]. What it compares is free then.
    pub fn take_balance(&mut self) -> u64 {
        match self {
            Self::Chunks(_, compared) => mem::take(compared).balance(),
            Self::Rows(_, compared) => mem::take(compared).balance(),
        }
    }
}

/// The content of a file, and what the manifest says of it. `base`: step and generation of the
/// checkpoint since which it has the changes of rows.
///
/// # Errors
/// A number is not finite.
pub(super) fn encode(
    owned: SavedPart,
    base: Option<(u64, u64)>,
) -> Result<(Vec<Bytes>, WrittenRows), String> {
    let (parts, written) = match owned {
        SavedPart::Chunks(chunks, _) => encode_all(chunks.into_iter().map(|chunk| {
            let is_finite = chunk.is_finite();
            is_finite.then(|| (0, chunk.encode())).ok_or("the optimizer's state")
        })),
        SavedPart::Rows(shards, _) => encode_all(shards.into_iter().map(|shard| {
            if !shard.is_finite() {
                return Err("a table");
            }
            let touches = shard.touches();
            // The memory of the shard is free when its bytes are there.
            let bytes = match base {
                Some((step, _)) => shard.encode_changes(step),
                None => shard.encode(),
            };
            Ok((touches, bytes))
        })),
    }?;
    Ok((parts, WrittenRows { base, ..written }))
}

/// `shards`: the touches of each, and its bytes; or what contains a number that is not finite.
fn encode_all(
    shards: impl ExactSizeIterator<Item = Result<(u64, Vec<u8>), &'static str>>,
) -> Result<(Vec<Bytes>, WrittenRows), String> {
    let mut index = Vec::with_capacity(shards.len() * ENTRY_BYTES as usize);
    let mut parts = vec![Bytes::new()];
    let mut touches = 0;
    for shard in shards {
        let (of_shard, bytes) = shard.map_err(|what| {
            format!("{what} contains a NaN or an infinity, so no checkpoint is written")
        })?;
        touches += of_shard;
        index.extend((bytes.len() as u64).to_le_bytes());
        index.extend(xxh3_128(&bytes).to_le_bytes());
        parts.push(bytes.into());
    }
    let digest = xxh3_128(&index);
    parts[0] = index.into();
    let bytes = parts.iter().map(|part| part.len() as u64).sum();
    Ok((parts, WrittenRows { bytes, digest, touches, balance: 0, base: None }))
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

/// Checks that the files are there, with the shards that the manifest names, and those that they
/// are based on, without reading the shards.
pub(super) fn check(folder: &Storage, rows: &TableRows) -> Result<(), LoadError> {
    rows.files.iter().try_for_each(|file| places(folder, file).map(drop))?;
    rows.bases().into_iter().try_for_each(|name| {
        let (folder, base) = open_base(folder, rows, name)?;
        check(&folder, &base).map_err(|error| of_base(name, error))
    })
}

/// Checks that the files of chunks are there, with the chunks that the manifest names, without
/// reading these.
pub(super) fn check_chunks(folder: &Storage, files: &[RowsFile]) -> Result<(), LoadError> {
    files.iter().try_for_each(|file| places(folder, file).map(drop))
}

/// Reads the `wanted` chunks, verifies each, and gives it to `take`, with its number.
pub(super) fn read_chunks(
    folder: &Storage,
    files: &[RowsFile],
    wanted: &dyn Fn(u32) -> bool,
    take: &mut TakeShard<'_>,
) -> Result<(), LoadError> {
    for file in files.iter().filter(|file| file.shards.iter().any(|&chunk| wanted(chunk))) {
        let damaged = |reason: &str| LoadError::Damaged(format!("{}: {reason}", file.file));
        let places = file.shards.iter().copied().zip(places(folder, file)?);
        for (chunk, Place { range, digest }) in places.filter(|(chunk, _)| wanted(*chunk)) {
            let bytes = folder.read_range(&file.file, range).map_err(LoadError::Storage)?;
            if xxh3_128(&bytes) != digest {
                return Err(damaged(&format!("chunk {chunk} has changed")));
            }
            take(chunk, &bytes).map_err(|reason| damaged(&reason))?;
        }
    }
    Ok(())
}

/// Reads the `wanted` shards, verifies each, and gives it to `take`, with its number.
pub(super) fn read(
    folder: &Storage,
    rows: &TableRows,
    wanted: &dyn Fn(u32) -> bool,
    take: &mut TakeShard<'_>,
) -> Result<(), LoadError> {
    for file in rows.files.iter().filter(|file| file.shards.iter().any(|&shard| wanted(shard))) {
        let damaged = |reason: &str| LoadError::Damaged(format!("{}: {reason}", file.file));
        let invalid = |error: InvalidRows| damaged(error.reason());
        let base = file.base.as_deref();
        let base = base.map(|name| Ok((name, open_base(folder, rows, name)?))).transpose()?;
        let places = file.shards.iter().copied().zip(places(folder, file)?);
        let places: Vec<(u32, Place)> = places.filter(|(shard, _)| wanted(*shard)).collect();
        for some in places.chunks(if base.is_some() { AT_ONCE } else { 1 }) {
            let mut changes = BTreeMap::new();
            for (shard, Place { range, digest }) in some {
                let bytes =
                    folder.read_range(&file.file, range.clone()).map_err(LoadError::Storage)?;
                if xxh3_128(&bytes) != *digest {
                    return Err(damaged(&format!("shard {shard} has changed")));
                }
                let whole = match base {
                    Some(_) => whole_shard(&bytes).map_err(invalid)?,
                    None => Some(&*bytes),
                };
                match whole {
                    Some(whole) => take(*shard, whole).map_err(|reason| damaged(&reason))?,
                    None => _ = changes.insert(*shard, bytes),
                }
            }
            let Some((name, (folder, base))) = &base else { continue };
            let mut take_changed = |shard, older: &[u8]| {
                let bytes = changed_shard(&rows.tables, older, &changes[&shard]);
                take(shard, &bytes.map_err(|error| error.reason().to_owned())?)
            };
            read(folder, base, &|shard| changes.contains_key(&shard), &mut take_changed)
                .map_err(|error| of_base(name, error))?;
        }
    }
    Ok(())
}

/// The rows of the checkpoint of this name, beside the one in `folder`, which is based on it.
fn open_base(
    folder: &Storage,
    rows: &TableRows,
    name: &str,
) -> Result<(Storage, TableRows), LoadError> {
    let damaged = |reason: &str| of_base(name, LoadError::Damaged(reason.into()));
    let folder = folder.beside(name);
    let base = match manifest(&folder) {
        Ok(manifest) => manifest.rows,
        Err(LoadError::Storage(StorageError::NotFound { .. })) => {
            return Err(damaged("it is missing"));
        }
        Err(error) => return Err(of_base(name, error)),
    };
    // A chain ends.
    let base = base.filter(|base| base.chain.changes < rows.chain.changes);
    let base = base.ok_or_else(|| damaged("it has no rows, or later ones"))?;
    match elasticdl_tables::difference(&base.tables, &rows.tables) {
        Some(difference) => Err(damaged(&difference)),
        None => Ok((folder, base)),
    }
}

/// The error of a checkpoint since which another one has the changes.
fn of_base(name: &str, error: LoadError) -> LoadError {
    match error {
        LoadError::Damaged(reason) => {
            LoadError::Damaged(format!("its rows are changes since {name}: {reason}"))
        }
        other => other,
    }
}

/// Number of shards whose changes are in memory at once.
const AT_ONCE: usize = 64;
