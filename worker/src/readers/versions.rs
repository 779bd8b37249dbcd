//! Which versions of files a job reads.
//!
//! The worker that describes a data set notes what tells each file from other versions of it, as a
//! digest that travels with the description to all workers, also those that join later. From its
//! first look on, each worker compares all that it reads with that. A file that has changed can't
//! be trained on: records that were counted may not be there any more.
//!
//! | | told apart by | between workers by |
//! |---|---|---|
//! | an object | its length and ETag (or when it was written) | a digest of these |
//! | a file | its length and when it was written | a digest of its length and last bytes: copies on several machines are one |

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::UNIX_EPOCH;

use xxhash_rust::xxh3::Xxh3Default;

use super::files::io_error;
use crate::reader::DataError;
use crate::storage::Version;

/// What this process knows of a file.
#[derive(Clone, Debug)]
struct Known {
    version: Version,
    /// What others know it by, once that has been worked out.
    digest: Option<u32>,
}

/// Compares a version that was found with the one that is known. The first one that is found is the
/// known one.
///
/// # Errors
/// It is another one.
pub(super) fn compare(path: &Path, found: &Version) -> Result<(), DataError> {
    let mut files = lock();
    let Some(known) = files.get(path) else {
        files.insert(path.into(), Known { version: found.clone(), digest: None });
        return Ok(());
    };
    if known.version == *found {
        return Ok(());
    }
    Err(changed(path, &known.version, found))
}

/// The known version; `None` before the first look.
pub(super) fn known(path: &Path) -> Option<Version> {
    lock().get(path).map(|known| known.version.clone())
}

/// What a file of this machine is told apart by.
pub(super) fn of_file(metadata: &fs::Metadata) -> Version {
    let written = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let tag =
        written.map_or_else(String::new, |at| format!("{}.{:09}", at.as_secs(), at.subsec_nanos()));
    Version { bytes: metadata.len(), tag }
}

/// What workers tell each other of a file. `version` is what this one knows.
///
/// # Errors
/// The file can't be read.
pub(super) fn digest(path: &Path, version: &Version, is_object: bool) -> Result<u32, DataError> {
    if let Some(digest) = lock().get(path).and_then(|known| known.digest) {
        return Ok(digest);
    }
    let mut digest = Xxh3Default::new();
    digest.update(&version.bytes.to_le_bytes());
    if is_object {
        digest.update(version.tag.as_bytes());
    } else {
        let failed = |source| io_error(path, source);
        let mut file = fs::File::open(path).map_err(failed)?;
        file.seek(SeekFrom::Start(version.bytes.saturating_sub(LAST_BYTES))).map_err(failed)?;
        let mut last = Vec::new();
        file.take(LAST_BYTES).read_to_end(&mut last).map_err(failed)?;
        digest.update(&last);
    }
    let digest = digest.digest() as u32;
    if let Some(known) = lock().get_mut(path) {
        known.digest = Some(digest);
    }
    Ok(digest)
}

/// A file is not what another worker has described.
pub(super) fn described_otherwise(path: &Path, version: &Version) -> DataError {
    let reason = format!("its {} bytes are not those that were described", version.bytes);
    DataError::Changed { path: path.into(), reason }
}

fn changed(path: &Path, known: &Version, found: &Version) -> DataError {
    let reason = match (found.bytes, known.bytes) {
        (now, before) if now != before => format!("{now} bytes where {before} were"),
        _ => format!("version {} where {} was", shown(&found.tag), shown(&known.tag)),
    };
    DataError::Changed { path: path.into(), reason }
}

fn shown(tag: &str) -> String {
    tag.trim_matches('"').escape_default().take(64).collect()
}

fn lock() -> MutexGuard<'static, BTreeMap<PathBuf, Known>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

static KNOWN: Mutex<BTreeMap<PathBuf, Known>> = Mutex::new(BTreeMap::new());

/// What was appended to a file, or is left of it, shows at its end.
const LAST_BYTES: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn version(bytes: u64, tag: &str) -> Version {
        Version { bytes, tag: tag.into() }
    }

    #[test]
    fn another_version_is_refused_with_what_is_other() {
        let path = Path::new("s3://versions/a.csv");
        assert_eq!(known(path), None);
        compare(path, &version(7, "\"x\"")).unwrap();
        compare(path, &version(7, "\"x\"")).unwrap();
        let refused = |found| compare(path, &found).unwrap_err().to_string();
        let end = "it was changed since the job began";
        assert_eq!(
            refused(version(9, "\"x\"")),
            format!("s3://versions/a.csv: 9 bytes where 7 were; {end}")
        );
        assert_eq!(
            refused(version(7, "\"y\x1b\"")),
            format!("s3://versions/a.csv: version y\\u{{1b}} where x was; {end}")
        );
    }

    #[test]
    fn copies_of_a_file_are_one_version_and_a_longer_one_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let digest_of = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            fs::write(&path, bytes).unwrap();
            digest(&path, &of_file(&fs::metadata(&path).unwrap()), false).unwrap()
        };
        let one = digest_of("a", b"a,b\n1,2\n");
        assert_eq!(one, digest_of("b", b"a,b\n1,2\n"));
        assert_ne!(one, digest_of("c", b"a,b\n1,2\n3,4\n"));
        assert_ne!(one, digest_of("d", b"a,b\n1,3\n"));
    }
}
