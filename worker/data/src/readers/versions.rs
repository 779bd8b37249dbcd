//! Versions of the files that a job reads.
//!
//! The worker that describes a data set computes a digest of each file's version. The digests are
//! part of the description that all workers receive, including workers that join later. After its
//! first access to a file, each worker compares all later accesses with the version that it found
//! first. A file that has changed, or is missing, cannot be trained on: records that were counted
//! may no longer exist.
//!
//! | | version within a worker | digest across workers |
//! |---|---|---|
//! | an object | length and ETag (or time of modification) | of both |
//! | a file | length and time of modification | of its length and of 17 blocks of 4 KiB, evenly
//! spaced, the last one at its end |
//!
//! The digest of a file is equal for copies of the file on several machines. Files of up to 68 KiB
//! are covered whole. In larger ones, a difference of single bytes between the blocks is not
//! noticed.
//!
//! Where records are left out, half of the digest is that of the records that are: each worker
//! finds them itself, and one that finds others would number all later records otherwise.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::UNIX_EPOCH;

use xxhash_rust::xxh3::Xxh3Default;

use super::away::attempt;
use super::files::io_error;
use crate::reader::DataError;
use crate::storage::{Version, with_retries};

/// The version of a file that this process found first.
#[derive(Clone, Debug)]
struct Known {
    version: Version,
    /// Digest that identifies the version across workers, once it is computed.
    digest: Option<u32>,
}

/// Compares `found` with the known version of the file. The first version that is found becomes the
/// known one.
///
/// # Errors
/// [`DataError::Changed`], if the versions differ.
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

/// The known version of a file; `None` before the first access.
pub(super) fn known(path: &Path) -> Option<Version> {
    lock().get(path).map(|known| known.version.clone())
}

/// Whether this process has accessed any file of the data.
pub(super) fn has_found_any() -> bool {
    !lock().is_empty()
}

/// Version of a local file.
pub(super) fn of_file(metadata: &fs::Metadata) -> Version {
    let written = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let tag =
        written.map_or_else(String::new, |at| format!("{}.{:09}", at.as_secs(), at.subsec_nanos()));
    Version { bytes: metadata.len(), tag }
}

/// Digest that identifies a file's version across workers. `version`: the known version.
///
/// # Errors
/// The file cannot be read.
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
        let name = path.to_string_lossy();
        let file = attempt(path, || fs::File::open(path)).map_err(failed)?;
        let last = version.bytes.saturating_sub(BLOCK_BYTES);
        let mut at = 0;
        for block in 0..=BLOCKS {
            // Blocks of a short file do not overlap.
            at = (last / BLOCKS * block + last % BLOCKS * block / BLOCKS).max(at);
            let mut bytes = vec![0; BLOCK_BYTES.min(version.bytes - at) as usize];
            with_retries(&name, || file.read_exact_at(&mut bytes, at)).map_err(failed)?;
            digest.update(&bytes);
            at += bytes.len() as u64;
        }
    }
    let digest = digest.digest() as u32;
    if let Some(known) = lock().get_mut(path) {
        known.digest = Some(digest);
    }
    Ok(digest)
}

/// The digest of a file of which records are left out. `left_out`: digest of those records.
pub(super) fn with_left_out(digest: u32, left_out: u32) -> u32 {
    digest & FILE_BITS | left_out & !FILE_BITS
}

/// Whether `digest` is that of the file of `described`, whatever is left out of it.
pub(super) fn is_of_same_file(described: u32, digest: u32) -> bool {
    (described ^ digest) & FILE_BITS == 0
}

/// The error for a file that differs from its description by another worker.
pub(super) fn described_otherwise(path: &Path, version: &Version) -> DataError {
    let reason = format!("its content ({} bytes) differs from the description", version.bytes);
    DataError::Changed { path: path.into(), reason }
}

fn changed(path: &Path, known: &Version, found: &Version) -> DataError {
    let reason = match (found.bytes, known.bytes) {
        (now, before) if now != before => format!("{now} bytes where {before} were"),
        _ if is_time(&found.tag) && is_time(&known.tag) => {
            "it was modified since the job began".into()
        }
        _ => format!("version {} where {} was", shown(&found.tag), shown(&known.tag)),
    };
    DataError::Changed { path: path.into(), reason }
}

/// Whether a tag is that of a local file: a time with nanoseconds, perhaps after a number.
fn is_time(tag: &str) -> bool {
    let time = tag.rsplit('-').next().and_then(|time| time.split_once('.'));
    let is_number = |digits: &str| digits.bytes().all(|digit| digit.is_ascii_digit());
    time.is_some_and(|(s, ns)| ns.len() == 9 && is_number(s) && is_number(ns))
}

fn shown(tag: &str) -> String {
    tag.trim_matches('"').escape_default().take(64).collect()
}

fn lock() -> MutexGuard<'static, BTreeMap<PathBuf, Known>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

static KNOWN: Mutex<BTreeMap<PathBuf, Known>> = Mutex::new(BTreeMap::new());

/// The part of the digest that is of the file, where records are left out.
const FILE_BITS: u32 = 0xffff_0000;
/// Number of blocks of a file that its digest covers, apart from the one at its end, which reveals
/// appended and truncated files.
const BLOCKS: u64 = 16;
const BLOCK_BYTES: u64 = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reader::Reader as _;
    use crate::readers::FixedRecords;

    fn version(bytes: u64, tag: &str) -> Version {
        Version { bytes, tag: tag.into() }
    }

    #[test]
    fn a_different_version_is_refused_with_the_difference() {
        let path = Path::new("s3://versions/a.csv");
        assert_eq!(known(path), None);
        compare(path, &version(7, "\"x\"")).unwrap();
        compare(path, &version(7, "\"x\"")).unwrap();
        let refused = |found| compare(path, &found).unwrap_err().to_string();
        let end = "data must not change while a job trains on it";
        assert_eq!(
            refused(version(9, "\"x\"")),
            format!("s3://versions/a.csv: 9 bytes where 7 were; {end}")
        );
        assert_eq!(
            refused(version(7, "\"y\x1b\"")),
            format!("s3://versions/a.csv: version y\\u{{1b}} where x was; {end}")
        );
        let path = Path::new("/versions/b.csv");
        compare(path, &version(7, "31-1795693731.813757503")).unwrap();
        assert_eq!(
            compare(path, &version(7, "31-1795693734.839222018")).unwrap_err().to_string(),
            format!("/versions/b.csv: it was modified since the job began; {end}")
        );
    }

    #[test]
    fn a_file_that_was_removed_has_changed_whether_this_process_has_read_it_or_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut records = FixedRecords::new(1);
        for name in ["a", "b"] {
            fs::write(folder.path().join(name), b"12").unwrap();
        }
        let dataset = records.describe(folder.path().to_str().unwrap()).unwrap();
        lock().remove(Path::new(&dataset.files[1].path));
        for file in &dataset.files {
            fs::remove_file(&file.path).unwrap();
            let error = records.read(file, 0..1).unwrap_err();
            assert!(error.ends_job(), "{error}");
            let end = "it was deleted or moved; data must not change while a job trains on it";
            assert_eq!(error.to_string(), format!("{}: {end}", file.path));
        }
    }

    #[test]
    fn copies_of_a_file_have_the_same_digest_and_longer_files_another() {
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

    #[test]
    fn copies_that_differ_in_the_middle_have_different_digests() {
        let folder = tempfile::tempdir().unwrap();
        let mut copies = 0;
        let mut digest_of = |bytes: &[u8]| {
            copies += 1;
            let path = folder.path().join(copies.to_string());
            fs::write(&path, bytes).unwrap();
            digest(&path, &of_file(&fs::metadata(&path).unwrap()), false).unwrap()
        };
        // Each byte of a file that fits into the blocks counts.
        for length in [1, 4095, 4096, 4097, 10_000, 17 * 4096] {
            let whole = vec![7; length];
            let digest = digest_of(&whole);
            for at in (0..length).step_by(1021) {
                let mut other = whole.clone();
                other[at] ^= 1;
                assert_ne!(digest_of(&other), digest, "byte {at} of {length}");
            }
        }
        // Of a larger one, a difference of a sixteenth of it does, wherever it is.
        let whole = vec![7; 3 << 20];
        let digest = digest_of(&whole);
        for part in 0..16 {
            let mut other = whole.clone();
            other[part * (3 << 16)..][..3 << 16].fill(8);
            assert_ne!(digest_of(&other), digest, "part {part}");
        }
    }
}
