//! The list of a data set's files, beside the job's record.
//!
//! ```text
//!  anchor, key `files`:  {"packed": "<base64>"}        a short list
//!                        {"parts": 12}                  a longer one:
//!  ConfigMaps <job>-files-<which>-0 … -11               its pieces, in order; the anchor owns them
//! ```
//!
//! It is written once, before the first record that names it. A million files of a hundred bytes
//! each take 3 to 20 MiB. `<which>` stands for this very job and list, so a piece that is there
//! already is the right one, and two masters that were told different lists don't write over each
//! other's.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use elasticdl_proto::{FileLimits, FileList};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use super::anchor::{Anchor, AnchorWriter, Data, FILES, WriteError};
use super::client::ClusterError;
use crate::job::DataMark;

/// What the anchor says of the list.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ListLocation {
    Packed(String),
    Parts(usize),
}

/// Why the list of a job that is to be taken over can't be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// No answer, or no right.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// It is gone, or changed.
    #[error(
        "the list of the data set's files {0}: no master can go on with this job; delete it, and submit it again (with \
         --resume-from, if it has kept checkpoints)"
    )]
    Damaged(String),
}

/// Keeps `list` for the job's next masters.
///
/// # Errors
/// [`WriteError`].
pub(super) async fn store(writer: &AnchorWriter, list: &FileList) -> Result<(), WriteError> {
    let packed = list.packed();
    let location = if packed.len() <= WHOLE_BYTES_MAX {
        ListLocation::Packed(BASE64.encode(packed))
    } else {
        let parts = packed.len().div_ceil(PART_BYTES);
        for index in 0..parts {
            let part = packed.slice(index * PART_BYTES..packed.len().min((index + 1) * PART_BYTES));
            let name = part_name(writer.job(), writer.uid(), DataMark::of(list), index);
            writer.create_part(&name, "files", part.to_vec()).await?;
        }
        ListLocation::Parts(parts)
    };
    let location = serde_json::to_string(&location).expect("a location is valid JSON");
    writer.write(&Data::from([(FILES.into(), location)])).await
}

/// The list of the job `job`, whose anchor has this uid and data, which must be that of `mark`.
///
/// # Errors
/// [`LoadError`].
pub(crate) async fn load(
    anchor: &Anchor,
    (job, uid): (&str, &str),
    data: &Data,
    mark: DataMark,
) -> Result<FileList, LoadError> {
    let damaged = |what: String| LoadError::Damaged(what);
    let location =
        data.get(FILES).ok_or_else(|| damaged(format!("is gone (the anchor's key {FILES})")))?;
    let location =
        serde_json::from_str(location).map_err(|e| damaged(format!("can't be read: {e}")))?;
    let packed: Vec<u8> = match location {
        ListLocation::Packed(text) => {
            BASE64.decode(text).map_err(|e| damaged(format!("can't be read: {e}")))?
        }
        ListLocation::Parts(parts) => {
            let mut packed = Vec::new();
            for index in 0..parts {
                let name = part_name(job, uid, mark, index);
                let part = anchor.read_part(&name).await?;
                packed.extend(part.ok_or_else(|| {
                    damaged(format!("is not complete: ConfigMap {name} is gone"))
                })?);
            }
            packed
        }
    };
    let list = FileList::unpack(Bytes::from(packed), UNLIMITED)
        .map_err(|e| damaged(format!("can't be read: {e}")))?;
    if DataMark::of(&list) != mark {
        return Err(damaged("is not the one that the job was started with".into()));
    }
    Ok(list)
}

fn part_name(job: &str, uid: &str, mark: DataMark, index: usize) -> String {
    let mut hasher = Xxh3Default::new();
    hasher.update(uid.as_bytes());
    hasher.update(&mark.digest.to_le_bytes());
    format!("{job}-files-{:010x}-{index}", hasher.digest() >> 24)
}

/// A list that was checked when it was described.
const UNLIMITED: FileLimits =
    FileLimits { files: usize::MAX, path_bytes: u32::MAX as usize, records: u64::MAX };
/// A longer list gets objects of its own.
const WHOLE_BYTES_MAX: usize = 96 << 10;
/// Of the 1 MiB that an object may have.
const PART_BYTES: usize = 900 << 10;

#[cfg(test)]
mod tests;
