//! The list of a data set's files, stored next to the persisted job.
//!
//! ```text
//!  anchor, key `files`:  {"packed": "<base64>"}        a short list
//!                        {"parts": 12}                  a longer one:
//!  ConfigMaps <job>-files-<hash>-0 … -11                its parts, in order; the anchor owns them
//! ```
//!
//! The list is written once, before the first persisted job that refers to it. A million files of a
//! hundred bytes each take 3 to 20 MiB. `<hash>` identifies the job and the list. So a part that
//! exists already has the right content, and two masters with different lists don't overwrite each
//! other's parts.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use elasticdl_proto::FileList;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use super::anchor::{Anchor, AnchorWriter, Data, FILES, WriteError};
use super::client::ClusterError;
use crate::job::DatasetFingerprint;

/// Location of the list: the content of the anchor's key.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ListLocation {
    Packed(String),
    Parts(usize),
}

/// Why the list of a job can't be loaded at a take-over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// There is no answer, or a permission is missing.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The list is missing, or was changed.
    #[error(
        "the list of the data set's files {0}: no master can resume this job; \
         delete it, and submit it again (with --resume-from, if it has checkpoints)"
    )]
    Damaged(String),
}

/// Stores `list` for the job's next masters.
pub(super) async fn store(writer: &AnchorWriter, list: &FileList) -> Result<(), WriteError> {
    let packed = list.packed();
    let location = if packed.len() <= WHOLE_BYTES_MAX {
        ListLocation::Packed(BASE64.encode(packed))
    } else {
        let parts = packed.len().div_ceil(PART_BYTES);
        for index in 0..parts {
            let part = packed.slice(index * PART_BYTES..packed.len().min((index + 1) * PART_BYTES));
            let name = part_name(writer.job(), writer.uid(), DatasetFingerprint::of(list), index);
            writer.create_part(&name, "files", part.to_vec()).await?;
        }
        ListLocation::Parts(parts)
    };
    let location = serde_json::to_string(&location).expect("a location is valid JSON");
    writer.write(&Data::from([(FILES.into(), location)])).await
}

/// Loads the list of job `job`, whose anchor has this uid and data, and checks it against `mark`.
pub(crate) async fn load(
    anchor: &Anchor,
    (job, uid): (&str, &str),
    data: &Data,
    mark: DatasetFingerprint,
) -> Result<FileList, LoadError> {
    let damaged = |what: String| LoadError::Damaged(what);
    let location =
        data.get(FILES).ok_or_else(|| damaged(format!("is missing (the anchor's key {FILES})")))?;
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
                    damaged(format!("is not complete: ConfigMap {name} is missing"))
                })?);
            }
            packed
        }
    };
    let list = FileList::unpack(Bytes::from(packed))
        .map_err(|e| damaged(format!("can't be read: {e}")))?;
    if DatasetFingerprint::of(&list) != mark {
        return Err(damaged("is not the one that the job was started with".into()));
    }
    Ok(list)
}

fn part_name(job: &str, uid: &str, mark: DatasetFingerprint, index: usize) -> String {
    let mut hasher = Xxh3Default::new();
    hasher.update(uid.as_bytes());
    hasher.update(&mark.digest.to_le_bytes());
    format!("{job}-files-{:010x}-{index}", hasher.digest() >> 24)
}

/// Maximum length of a list that is stored in the anchor itself.
const WHOLE_BYTES_MAX: usize = 96 << 10;
/// Length of a part; the limit of an object is 1 MiB.
const PART_BYTES: usize = 900 << 10;

#[cfg(test)]
mod tests;
