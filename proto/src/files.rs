//! The compressed list of a data set's files.
//!
//! A data set may have a million files. Their paths take a hundred megabytes as text but only a few
//! megabytes compressed, because each path repeats most of the previous one. The list is packed
//! once, by the worker that describes the data set or by the master that receives the description.
//! From then on it is sent, stored and compared in that form, and read as a stream.
//!
//! **Invariant:** a [`FileList`] can be read to its end: a list from outside has been read
//! completely before it became a `FileList`.

use std::fmt;
use std::io::{self, Read as _, Write as _};

use bytes::{Buf as _, Bytes, buf::Reader};
use xxhash_rust::xxh3::Xxh3Default;

use crate::limits::{DATASET_FILES_MAX, DATASET_RECORDS_MAX, PATH_BYTES_MAX};

/// The files of a data set, in order, with their record counts. Clones share the packed bytes.
#[derive(Clone)]
pub struct FileList {
    packed: Bytes,
    len: usize,
    bytes: u64,
    records: u64,
    digest: u64,
}

/// One file of a [`FileList`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedFile {
    /// Path or URI.
    pub path: String,
    /// Number of records.
    pub records: u64,
    /// Digest that distinguishes this version of the file from others; `None` if it is unknown or
    /// any version is accepted.
    pub version: Option<u32>,
}

/// Why a list is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileListError(String);

impl FileList {
    /// Packs a list of files.
    ///
    /// # Errors
    /// There is no memory to compress the list.
    pub fn try_pack<F: Into<ListedFile>>(
        files: impl IntoIterator<Item = F>,
    ) -> Result<Self, FileListError> {
        let failed = |error| FileListError(format!("it can't be compressed: {error}"));
        let mut packer = Packer::default();
        let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL).map_err(failed)?;
        encoder.window_log(WINDOW_LOG).map_err(failed)?;
        for file in files {
            encoder.write_all(packer.entry(&file.into())).map_err(failed)?;
        }
        Ok(packer.done(encoder.finish().map_err(failed)?.into()))
    }

    /// As [`try_pack`](Self::try_pack).
    ///
    /// # Panics
    /// There is no memory to compress the list.
    pub fn pack<F: Into<ListedFile>>(files: impl IntoIterator<Item = F>) -> Self {
        Self::try_pack(files).expect("there is memory to compress a list")
    }

    /// Reads and checks a packed list.
    ///
    /// # Errors
    /// The list is damaged or exceeds the [limits](crate::limits) of a data set.
    pub fn unpack(packed: Bytes) -> Result<Self, FileListError> {
        let mut packer = Packer::default();
        let mut files = Files::new(packed.clone())?;
        while let Some(file) = files.read(PATH_BYTES_MAX)? {
            if file.path.is_empty() {
                return Err(FileListError("an empty path".into()));
            }
            if packer.len == DATASET_FILES_MAX {
                return Err(FileListError(format!("more than {DATASET_FILES_MAX} files")));
            }
            if packer.records.saturating_add(file.records) > DATASET_RECORDS_MAX {
                return Err(FileListError(format!("more than {DATASET_RECORDS_MAX} records")));
            }
            let _ = packer.entry(&file);
        }
        Ok(packer.done(packed))
    }

    /// The packed form.
    #[must_use]
    pub fn packed(&self) -> &Bytes {
        &self.packed
    }

    /// Size of the unpacked list in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of files.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the list is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of records of one epoch; saturates.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.records
    }

    /// Digest of the unpacked list: independent of the compression.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Iterates over the files, unpacking one at a time.
    #[must_use]
    pub fn iter(&self) -> Files {
        Files::new(self.packed.clone()).expect("the list was read before")
    }
}

impl PartialEq for FileList {
    fn eq(&self, other: &Self) -> bool {
        (self.digest, self.bytes, self.len) == (other.digest, other.bytes, other.len)
    }
}

impl Eq for FileList {}

impl fmt::Debug for FileList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { packed, len, bytes, records, digest } = self;
        let mut shown = f.debug_struct("FileList");
        shown.field("len", len).field("records", records).field("bytes", bytes);
        shown
            .field("packed", &packed.len())
            .field("digest", &format_args!("{digest:016x}"))
            .finish()
    }
}

impl IntoIterator for &FileList {
    type Item = ListedFile;
    type IntoIter = Files;

    fn into_iter(self) -> Files {
        self.iter()
    }
}

/// Iterator over the files of a [`FileList`], in order.
pub struct Files {
    decoder: zstd::Decoder<'static, io::BufReader<Reader<Bytes>>>,
}

impl Files {
    fn new(packed: Bytes) -> Result<Self, FileListError> {
        zstd::Decoder::new(packed.reader()).map(|decoder| Self { decoder }).map_err(damaged)
    }

    fn read(&mut self, path_bytes_max: usize) -> Result<Option<ListedFile>, FileListError> {
        let (mut len, mut records, mut version) = ([0; 4], [0; 8], [0; 8]);
        if self.decoder.read(&mut len[..1]).map_err(damaged)? == 0 {
            return Ok(None);
        }
        self.decoder.read_exact(&mut len[1..]).map_err(damaged)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > path_bytes_max {
            return Err(FileListError(format!(
                "a path of {len} bytes; at most {path_bytes_max} are possible"
            )));
        }
        // Grows with what is there, not with what the list declares.
        let mut path = Vec::new();
        (&mut self.decoder).take(len as u64).read_to_end(&mut path).map_err(damaged)?;
        if path.len() < len {
            return Err(damaged(io::ErrorKind::UnexpectedEof.into()));
        }
        self.decoder.read_exact(&mut records).map_err(damaged)?;
        self.decoder.read_exact(&mut version).map_err(damaged)?;
        let path =
            String::from_utf8(path).map_err(|_| FileListError("a path is not UTF-8".into()))?;
        let version = match u64::from_le_bytes(version) {
            NO_VERSION => None,
            version => Some(
                u32::try_from(version)
                    .map_err(|_| FileListError("a version of more than 32 bits".into()))?,
            ),
        };
        Ok(Some(ListedFile { path, records: u64::from_le_bytes(records), version }))
    }
}

impl Iterator for Files {
    type Item = ListedFile;

    fn next(&mut self) -> Option<ListedFile> {
        self.read(usize::MAX).expect("the list was read before")
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Files").finish_non_exhaustive()
    }
}

impl<P: Into<String>> From<(P, u64)> for ListedFile {
    fn from((path, records): (P, u64)) -> Self {
        Self { path: path.into(), records, version: None }
    }
}

impl fmt::Display for FileListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for FileListError {}

/// Encodes files and accumulates counts and digest.
#[derive(Default)]
struct Packer {
    len: usize,
    bytes: u64,
    records: u64,
    hasher: Xxh3Default,
    /// Reused buffer of one encoded file.
    entry: Vec<u8>,
}

impl Packer {
    /// Encodes one file.
    fn entry(&mut self, file: &ListedFile) -> &[u8] {
        let ListedFile { path, records, version } = file;
        let len = u32::try_from(path.len()).expect("a path is shorter than 4 GiB");
        self.entry.clear();
        self.entry.extend(len.to_le_bytes());
        self.entry.extend(path.as_bytes());
        self.entry.extend(records.to_le_bytes());
        self.entry.extend(version.map_or(NO_VERSION, u64::from).to_le_bytes());
        self.hasher.update(&self.entry);
        self.bytes += self.entry.len() as u64;
        self.len += 1;
        self.records = self.records.saturating_add(*records);
        &self.entry
    }

    fn done(self, packed: Bytes) -> FileList {
        let Self { len, bytes, records, hasher, .. } = self;
        FileList { packed, len, bytes, records, digest: hasher.digest() }
    }
}

fn damaged(error: io::Error) -> FileListError {
    FileListError(format!("it is damaged: {error}"))
}

/// Encoding of an absent version.
const NO_VERSION: u64 = u64::MAX;
/// Compresses a hundred megabytes in half a second to a tenth or less.
const LEVEL: i32 = 3;

/// Compression looks back so far, as a power of two in bytes: paths resemble their neighbours, and
/// each worker compresses a list. A window of 2 MiB, the default, would stay in its heap.
const WINDOW_LOG: u32 = 15;

#[cfg(test)]
mod tests {
    use super::*;

    fn list(files: &[(&str, u64)]) -> FileList {
        FileList::pack(files.iter().copied())
    }

    #[test]
    fn a_list_round_trips_through_its_packed_form() {
        let files = [("a", 3), ("b/\u{e4}\n", 0), ("c", 1 << 33)];
        let packed = list(&files);
        assert_eq!((packed.len(), packed.records()), (3, (1 << 33) + 3));
        let other = FileList::unpack(packed.packed().clone()).unwrap();
        assert_eq!(other, packed);
        assert_eq!(other.digest(), packed.digest());
        let read: Vec<_> = other.iter().collect();
        assert_eq!(read, files.map(ListedFile::from));
        let empty = list(&[]);
        assert!(empty.is_empty() && empty.iter().next().is_none());
    }

    #[test]
    fn a_list_with_another_path_count_or_order_has_another_digest() {
        let lists = [
            list(&[]),
            list(&[("a", 3), ("b", 4)]),
            list(&[("b", 4), ("a", 3)]),
            list(&[("a", 3), ("b", 5)]),
            list(&[("a", 3), ("c", 4)]),
            list(&[("a", 3)]),
        ];
        for (i, one) in lists.iter().enumerate() {
            for (k, other) in lists.iter().enumerate() {
                assert_eq!(
                    (one == other, one.digest() == other.digest()),
                    (i == k, i == k),
                    "{i} {k}"
                );
            }
        }
    }

    #[test]
    fn a_damaged_or_oversized_list_is_refused_without_a_panic() {
        let refused =
            |list: &FileList| FileList::unpack(list.packed().clone()).unwrap_err().to_string();
        let many = FileList::pack((0..=DATASET_FILES_MAX).map(|_| ("a", 1)));
        assert_eq!(refused(&many), "more than 1048576 files");
        let records = list(&[("a", DATASET_RECORDS_MAX), ("b", 1)]);
        assert_eq!(refused(&records), "more than 1099511627776 records");
        let long = "x".repeat(PATH_BYTES_MAX + 1);
        assert!(refused(&list(&[(&long, 1)])).contains("a path of 4097 bytes"));
        assert_eq!(refused(&list(&[("", 1)])), "an empty path");
        assert!(FileList::unpack(Bytes::from_static(b"no list")).is_err());
        let whole = list(&[("a", 3), ("bb", 4)]);
        let packed = whole.packed();
        for cut in 0..packed.len() {
            let result = FileList::unpack(packed.slice(..cut));
            assert!(result.is_err() || cut == 0, "{cut}");
        }
        for at in 0..packed.len() {
            let mut bytes = packed.to_vec();
            bytes[at] ^= 0x40;
            // Some bytes are ignored by the decoder, or yield another list with another digest.
            if let Ok(other) = FileList::unpack(bytes.into()) {
                assert!(at < 8 || other != whole, "{at}");
            }
        }
    }

    #[test]
    fn long_paths_are_packed_to_a_tenth() {
        let path = |i: u32| {
            format!(
                "s3://corpus/a-project-of-some-name/year=2026/month=07/\
                 part-{i:07}-of-1000000.snappy.parquet"
            )
        };
        let packed = FileList::pack((0..50_000).map(|i| (path(i), 1000)));
        assert!(packed.bytes() > 50_000 * 100, "{packed:?}");
        assert!((packed.packed().len() as u64) < packed.bytes() / 10, "{packed:?}");
        let last = packed.iter().last().unwrap();
        let last = (last.path, last.records);
        assert_eq!((packed.len(), last), (50_000, (path(49_999), 1000)));
    }
}
