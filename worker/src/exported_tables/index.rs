//! What the file of an exported model says of the rows of its tables.

use std::collections::HashSet;
use std::path::{Component, Path};

use elasticdl_data::storage::{Storage, StorageError};
use elasticdl_tables::{SHARDS, Table};
use serde::{Deserialize, Serialize};

use crate::paths::previous_of;
use crate::weights::{self, WeightsError};

/// The rows of a model's tables, a note in the model's file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ExportedTables {
    pub(crate) tables: Vec<Table>,
    /// Seed of the rows that no record has touched, which no part contains.
    pub(crate) seed: u64,
    /// Touches of each table that no exported row has: those of rows that were not admitted yet, or
    /// were evicted.
    #[serde(default)]
    pub(crate) touches_without_row: Vec<u64>,
    /// The step after which the exported rows were touched; `None`: they are all rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) changes_since: Option<u64>,
    /// In the order of their indices.
    pub(crate) parts: Vec<ExportedPart>,
}

/// A file with a part of the rows of all tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ExportedPart {
    /// Its path, from the folder of the model's file.
    pub(crate) file: String,
    pub(crate) bytes: u64,
}

impl ExportedTables {
    /// What a file says; `None`: it is of a model without tables, or no model.
    ///
    /// # Errors
    /// [`StorageError::NotFound`], another error of the storage, or a note that can't be.
    pub(crate) fn read(file: &Storage) -> Result<Option<Self>, WeightsError> {
        let Some(note) = weights::note(file, NOTE)? else { return Ok(None) };
        let read = serde_json::from_str(&note).map_err(|error| error.to_string());
        let read = read.and_then(|tables: Self| tables.check().map(|()| tables));
        let mismatch = |reason| {
            let reason = format!("what it says of its tables can't be read: {reason}");
            WeightsError::Mismatch { path: file.address().into(), reason }
        };
        read.map(Some).map_err(mismatch)
    }

    fn check(&self) -> Result<(), String> {
        elasticdl_tables::check(&self.tables)?;
        let parts = self.parts.len() as u64;
        if parts == 0 || !u64::from(SHARDS).is_multiple_of(parts) {
            return Err(format!("{parts} parts"));
        }
        match self.parts.iter().find(|part| !is_within(&part.file)) {
            Some(part) => Err(format!("{:?} is no file in its folder", part.file)),
            None => Ok(()),
        }
    }

    /// Checks that all parts of the model at `address` are there.
    ///
    /// # Errors
    /// Which one is not.
    pub(crate) fn check_parts(&self, address: &str) -> Result<(), WeightsError> {
        let folder = weights::exported(folder_of(address))?;
        for part in &self.parts {
            let found = match folder.bytes(&part.file) {
                Err(StorageError::NotFound { .. }) => None,
                found => Some(found?),
            };
            if found != Some(part.bytes) {
                let path = folder.join(&part.file).address().to_owned();
                let reason = "it is not here as another worker has written it; the model's place \
                              must be a folder that all workers share, or an object store";
                return Err(WeightsError::Mismatch { path, reason: reason.into() });
            }
        }
        Ok(())
    }

    /// Removes the parts of a model that these have replaced at `address`, unless a model that was
    /// kept there has them, too.
    pub(crate) fn remove_replaced(&self, address: &str, replaced: Option<Self>) {
        let Some(replaced) = replaced else { return };
        let mut kept = Vec::new();
        for number in 1.. {
            let previous = weights::exported(&previous_of(address, number));
            match previous.map_err(WeightsError::from).and_then(|file| Self::read(&file)) {
                Ok(found) => kept.extend(found),
                Err(WeightsError::Storage(StorageError::NotFound { .. })) => break,
                Err(error) => {
                    tracing::warn!(%error, "which rows a kept model has is not known; all stay");
                    return;
                }
            }
        }
        let kept = || kept.iter().chain([self]).flat_map(|tables| &tables.parts);
        let kept = kept().map(|part| &part.file).collect::<HashSet<_>>();
        let unused = replaced.parts.iter().filter(|part| !kept.contains(&part.file));
        let removed = Storage::open(folder_of(address))
            .and_then(|folder| unused.into_iter().try_for_each(|part| folder.remove(&part.file)));
        if let Err(error) = removed {
            tracing::warn!(%error, "rows of a replaced model are still there");
        }
    }
}

/// The folder that the file at `address` is in, with a slash at its end.
pub(super) fn folder_of(address: &str) -> &str {
    address.rfind('/').map_or("./", |slash| &address[..=slash])
}

/// The folder of the parts of the model at `address`: its address, and its name.
pub(super) fn parts_folder(address: &str) -> (String, String) {
    let name = address.rsplit('/').next().unwrap_or(address);
    (format!("{address}.tables"), format!("{name}.tables"))
}

/// Name of the Parquet file of a table's rows, in the folder of all tables.
///
/// # Errors
/// The table's name is no path in a folder.
pub(crate) fn parquet_name(table: &str) -> Result<String, String> {
    let file = format!("{table}.parquet");
    match is_within(&file) {
        true => Ok(file),
        false => Err(format!("table {table:?} can't be a file in a folder; rename it")),
    }
}

fn is_within(file: &str) -> bool {
    let mut components = Path::new(file).components();
    !file.is_empty() && components.all(|part| matches!(part, Component::Normal(_)))
}

/// Number of parts for so many rows of each table: enough for several workers to write at the same
/// time, and for each of them to hold one in memory.
pub(crate) fn parts_of(tables: &[Table], rows: &[u64]) -> u32 {
    let bytes = tables.iter().zip(rows).map(|(table, rows)| rows * (12 + 4 * table.dim as u64));
    let bytes = bytes.sum::<u64>();
    let for_speed = (bytes / PART_BYTES_MIN).clamp(1, PARTS_AT_ONCE);
    let parts = bytes.div_ceil(PART_BYTES_MAX).max(for_speed).next_power_of_two();
    parts.min(u64::from(SHARDS)) as u32
}

/// The names of a table's tensors: of its values, ids and touches.
pub(super) fn names_of(table: &Table) -> [String; 3] {
    let name = &table.name;
    [name.clone(), format!("{name}.ids"), format!("{name}.touches")]
}

/// Checks that the tensors of these tables have different names.
///
/// # Errors
/// The table that can't be exported.
pub(crate) fn check_names(tables: &[Table]) -> Result<(), String> {
    let mut found = HashSet::new();
    for table in tables {
        if let Some(name) = names_of(table).into_iter().find(|name| !found.insert(name.clone())) {
            return Err(format!(
                "table {:?} can't be exported, as another one has a tensor {name:?}; rename it",
                table.name
            ));
        }
    }
    Ok(())
}

/// Checks that the rows of a model at `address` have a place and, if they are those `of_changes`
/// alone, that they replace no whole model.
///
/// # Errors
/// What stands there, and what would be right.
pub(crate) fn check_place(address: &str, of_changes: bool) -> Result<(), String> {
    let (folder, _) = parts_folder(address);
    let path = Path::new(&folder);
    if !Storage::is_remote(address) && path.exists() && !path.is_dir() {
        return Err(format!(
            "the rows of the exported model go into the folder {folder}, and a file of this name \
             is there; move it, or name another file of the model"
        ));
    }
    let found = weights::exported(address).ok().map(|file| ExportedTables::read(&file));
    match found {
        Some(Ok(Some(found))) if of_changes && found.changes_since.is_none() => Err(format!(
            "--export-changes-since would leave of the whole model {address} only the rows that \
             have changed; name another file"
        )),
        _ => Ok(()),
    }
}

/// Name of [`ExportedTables`] in the notes of a file.
pub(crate) const NOTE: &str = "elasticdl.tables";
/// About the largest size of a part. A worker holds a few of them at a time.
const PART_BYTES_MAX: u64 = 64 << 20;
/// A part that is smaller is not worth a file.
const PART_BYTES_MIN: u64 = 16 << 10;
const PARTS_AT_ONCE: u64 = 8;
