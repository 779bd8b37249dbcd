//! Objects of a store, read in blocks.
//!
//! A request to a store takes as long as reading megabytes, and readers request a few records at a
//! time, mostly those after the last. So the process caches the most recently used
//! [blocks](super::blocks) and fetches those ahead that are likely to be read next. The version of
//! an object is requested once; all later replies must have that version.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use bytes::{Bytes, BytesMut};

use super::blocks::{BLOCK_BYTES, Blocks, RUN_BLOCKS};
use super::versions;
use crate::reader::DataError;
use crate::storage::{Storage, StorageError, Transient as _, Version, with_retries};

/// An object, or a prefix of objects.
#[derive(Clone, Debug)]
pub(super) struct Object {
    storage: Storage,
    /// Full address.
    address: PathBuf,
}

/// The object at `path`; `None` for a local path.
pub(super) fn object(path: &Path) -> Result<Option<Object>, StorageError> {
    match path.to_str() {
        Some(address) if Storage::is_remote(address) => {
            Ok(Some(Object { storage: storage(address)?, address: path.into() }))
        }
        _ => Ok(None),
    }
}

impl Object {
    /// The addresses of the objects below this one, or this address alone, if it is an object
    /// itself. Names that begin with a dot are left out. Also returns keys that cannot be used.
    pub(super) fn list(&self) -> Result<(Vec<PathBuf>, Vec<String>), DataError> {
        let address = self.address.to_string_lossy();
        let has_path = address
            .split_once("://")
            .is_none_or(|(_, rest)| rest.trim_end_matches('/').contains('/'));
        // The root of a store is not an object, whatever the store replies.
        if has_path {
            match self.version() {
                Ok(_) => return Ok((vec![self.address.clone()], Vec::new())),
                // Stores have no folders: there may be objects below a missing one.
                Err(DataError::Storage(StorageError::NotFound { .. })) => {}
                Err(error) => return Err(error),
            }
        }
        let listing = self.storage.list_versions("")?;
        let root = address.trim_end_matches('/');
        let mut addresses = Vec::new();
        for (path, version) in listing.files {
            if path.split('/').any(|part| part.starts_with('.')) {
                continue;
            }
            let address = PathBuf::from(format!("{root}/{path}"));
            versions::compare(&address, &version)?;
            addresses.push(address);
        }
        Ok((addresses, listing.left_out))
    }

    /// Version of the object; requested once.
    pub(super) fn version(&self) -> Result<Version, DataError> {
        if let Some(known) = versions::known(&self.address) {
            return Ok(known);
        }
        let found = self.storage.version("")?;
        versions::compare(&self.address, &found)?;
        Ok(found)
    }

    /// Reads bytes `range`; fewer if the object ends before.
    pub(super) fn read(&self, range: Range<u64>) -> Result<Bytes, DataError> {
        let version = self.version()?;
        let range = range.start..range.end.min(version.bytes);
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        if range.end - range.start > RUN_BLOCKS * BLOCK_BYTES {
            return self.fetch(range);
        }
        let mut bytes = BytesMut::with_capacity((range.end - range.start) as usize);
        let last = (range.end - 1) / BLOCK_BYTES;
        for index in range.start / BLOCK_BYTES..=last {
            let block = self.block(&version, index, last)?;
            let begins = index * BLOCK_BYTES;
            let within = |at: u64| at.saturating_sub(begins).min(block.len() as u64) as usize;
            bytes.extend_from_slice(&block[within(range.start)..within(range.end)]);
        }
        Ok(bytes.freeze())
    }

    /// Fetches these bytes in the background.
    pub(super) fn read_ahead(&self, range: Range<u64>) {
        let Some(version) = versions::known(&self.address) else { return };
        let end = range.end.min(version.bytes).div_ceil(BLOCK_BYTES);
        let first = range.start / BLOCK_BYTES;
        self.fetch_in_background(&version, first..end.min(first + RUN_BLOCKS));
    }

    /// Returns a block. `last`: last block of the current read.
    fn block(&self, version: &Version, index: u64, last: u64) -> Result<Bytes, DataError> {
        let ahead = BLOCKS.access(&self.address, index);
        self.fetch_in_background(version, ahead.start.max(last + 1)..ahead.end);
        if let Some(block) = BLOCKS.wait(&self.address, index) {
            return Ok(block);
        }
        let run = BLOCKS.claim(&self.address, index..last + 1);
        let range = run.start * BLOCK_BYTES..version.bytes.min(run.end * BLOCK_BYTES);
        let fetched = self.fetch(range);
        BLOCKS.fill(&self.address, &run, fetched.as_ref().ok());
        let bytes = fetched?;
        let begins = ((index - run.start) * BLOCK_BYTES) as usize;
        Ok(bytes.slice(begins..bytes.len().min(begins + BLOCK_BYTES as usize)))
    }

    /// Fetches those of `blocks` that are missing on the storage runtime. Errors are ignored:
    /// failed blocks are requested again when they are read.
    fn fetch_in_background(&self, version: &Version, blocks: Range<u64>) {
        let blocks = blocks.start..blocks.end.min(version.bytes.div_ceil(BLOCK_BYTES));
        let mut rest = blocks;
        while !rest.is_empty() {
            let run =
                BLOCKS.claim(&self.address, rest.start..rest.end.min(rest.start + RUN_BLOCKS));
            rest.start = run.end.max(rest.start + 1);
            if run.is_empty() {
                continue;
            }
            let bytes = run.start * BLOCK_BYTES..version.bytes.min(run.end * BLOCK_BYTES);
            let (address, version) = (self.address.clone(), version.clone());
            self.storage.fetch_in_background(bytes, move |fetched| {
                let bytes = fetched.filter(|(_, found)| *found == version).map(|(bytes, _)| bytes);
                BLOCKS.fill(&address, &run, bytes.as_ref());
            });
        }
    }

    /// Requests bytes from the store, with retries, and waits for them.
    fn fetch(&self, range: Range<u64>) -> Result<Bytes, DataError> {
        let address = self.address.to_string_lossy();
        let fetched = with_retries(&address, || self.storage.fetch(range.clone()));
        match fetched {
            Ok((bytes, found)) => {
                versions::compare(&self.address, &found)?;
                Ok(bytes)
            }
            Err(StorageError::NotFound { .. }) if versions::known(&self.address).is_some() => {
                Err(DataError::Changed {
                    path: self.address.clone(),
                    reason: "it was deleted".into(),
                })
            }
            // The object may have become shorter.
            Err(error) => {
                if !error.is_transient()
                    && !error.is_refusal()
                    && let Ok(found) = self.storage.version("")
                {
                    versions::compare(&self.address, &found)?;
                }
                Err(error.into())
            }
        }
    }

    /// Opens the object for reading and seeking.
    pub(super) fn open(self) -> Result<ObjectFile, DataError> {
        let bytes = self.version()?.bytes;
        Ok(ObjectFile { object: self, at: 0, bytes })
    }
}

/// An object that can be read like a file.
#[derive(Debug)]
pub(super) struct ObjectFile {
    object: Object,
    at: u64,
    bytes: u64,
}

impl Read for ObjectFile {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let end = self.at.saturating_add((buf.len() as u64).min(BLOCK_BYTES)).min(self.bytes);
        if self.at >= end {
            return Ok(0);
        }
        let bytes = self.object.read(self.at..end).map_err(io::Error::other)?;
        buf[..bytes.len()].copy_from_slice(&bytes);
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }
}

impl Seek for ObjectFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (from, offset) = match to {
            SeekFrom::Start(at) => (at, 0),
            SeekFrom::Current(offset) => (self.at, offset),
            SeekFrom::End(offset) => (self.bytes, offset),
        };
        self.at = from.checked_add_signed(offset).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

static BLOCKS: Blocks = Blocks::new();

/// Open stores, by scheme and host.
static STORES: OnceLock<Mutex<BTreeMap<String, Storage>>> = OnceLock::new();

/// Opens the storage at `address`. Connections and credentials of a store are reused by later
/// calls.
fn storage(address: &str) -> Result<Storage, StorageError> {
    let (scheme, rest) = address.split_once("://").expect("a remote address has a scheme");
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let root = format!("{scheme}://{host}");
    Storage::check_key(address)?;
    let mut stores =
        STORES.get_or_init(Default::default).lock().unwrap_or_else(PoisonError::into_inner);
    let store = match stores.get(&root) {
        Some(store) => store.clone(),
        None => {
            let store = Storage::open(&root).map_err(|error| error.renamed(address))?;
            stores.insert(root, store.clone());
            store
        }
    };
    Ok(store.join(path))
}

#[cfg(test)]
#[cfg(feature = "full")]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;
    use object_store::path::Path as StorePath;

    use super::*;
    use crate::reader::Reader;
    use crate::readers::{
        ArrowRows, CsvRows, FixedRecords, IdxImages, ImageFolder, ParquetRows, TextWindows,
        WebDataset,
    };

    /// Provides `files` at `s3://bucket`.
    fn mount(bucket: &str, files: &[(&str, &[u8])]) {
        let root = format!("s3://{bucket}");
        let storage = Storage::within(Arc::new(InMemory::new()), StorePath::default(), &*root);
        for (path, bytes) in files {
            storage.write(path, vec![Bytes::copy_from_slice(bytes)]).unwrap();
        }
        STORES.get_or_init(Default::default).lock().unwrap().insert(root, storage);
    }

    /// All records that `reader` finds, read file by file and three at a time, and the names of the
    /// files.
    fn read_all<R: Reader>(mut reader: R, source: &str) -> (Vec<String>, Vec<R::Record>) {
        let dataset = reader.describe(source).unwrap();
        let mut records = Vec::new();
        for file in &dataset.files {
            for start in (0..file.records).step_by(3) {
                records.extend(reader.read(file, start..(start + 3).min(file.records)).unwrap());
            }
        }
        let name = |file: crate::File| file.path.replace(source.trim_end_matches('/'), "");
        (dataset.files.into_iter().map(name).collect(), records)
    }

    #[test]
    fn every_reader_reads_from_a_store_what_it_reads_from_a_folder() {
        let parquet = crate::readers::parquet_table(&[0..20, 20..31]);
        let arrow = crate::readers::arrow_table(&[0..20, 20..31]);
        let png = crate::readers::png_image(4);
        let tar = crate::readers::tar_file(&[("1.png", &png), ("1.cls", b"3"), ("2.cls", b"4")]);
        let files: [(&str, &[u8]); 11] = [
            ("a/x.csv", b"n,y\n1,0.5\n2,1.5\n3,2\n4,8\n"),
            ("a-b/y.csv", b"y,n\n0.25,7\n"),
            ("a/t.arrow", &arrow),
            ("a/t.parquet", &parquet),
            ("a/s.tar", &tar),
            ("p/cat/1.png", &png),
            ("p/dog/b/1.png", &png),
            ("a/w.bin", b"aabbccdd"),
            ("a/.hidden.bin", b"zz"),
            (
                "i/train-images-idx3-ubyte",
                &[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 1, 2, 3, 4],
            ),
            ("i/train-labels-idx1-ubyte", &[0, 0, 8, 1, 0, 0, 0, 2, 7, 8]),
        ];
        mount("every", &files);
        let folder = tempfile::tempdir().unwrap();
        for (path, bytes) in files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
        fn same<R: Reader<Record: PartialEq + std::fmt::Debug>>(
            make: impl Fn() -> R,
            local: &str,
            files: usize,
        ) {
            let (expected, found) = (read_all(make(), local), read_all(make(), "s3://every"));
            assert_eq!(found.0.len(), files);
            assert_eq!(found, expected);
        }
        let local = folder.path().to_str().unwrap();
        same(|| CsvRows::new().f32("y").i64("n"), local, 2);
        same(|| ArrowRows::new().f32("x").text("kind"), local, 2);
        same(|| ParquetRows::new().f32("price").text("city"), local, 2);
        same(|| WebDataset::new().class("cls", 10), local, 1);
        let images = |root: &str| {
            read_all(ImageFolder::new([2, 3, 3], ["cat", "dog"]), &format!("{root}/p"))
        };
        assert_eq!(images("s3://every"), images(local));
        same(|| FixedRecords::new(2).extensions(&["bin"]), local, 1);
        same(|| TextWindows::new(3).extensions(&["csv"]), local, 2);
        let pair = |root: &str| read_all(IdxImages::new(1, 2), &format!("{root}/i"));
        assert_eq!(pair("s3://every").1, pair(local).1);
        let one = |root: &str| read_all(FixedRecords::new(2), &format!("{root}/a/w.bin")).1;
        assert_eq!(one("s3://every"), one(local));
        // It is another key.
        let error = FixedRecords::new(2).describe("s3://every//a/w.bin").unwrap_err().to_string();
        assert!(error.contains("an empty component"), "{error}");
    }

    #[test]
    fn errors_name_the_full_address_of_an_object() {
        mount("lacks", &[("a.csv", b"n,y\n1,x\n"), ("b.bin", b"123")]);
        let describe =
            |source: &str| CsvRows::new().f32("y").describe(source).unwrap_err().to_string();
        let expected =
            "s3://lacks/a.csv line 2: column \"y\" is \"x\" where a finite number should be";
        assert_eq!(describe("s3://lacks"), expected);
        assert_eq!(
            describe("s3://lacks/none"),
            "s3://lacks/none: no files ending in .csv or .csv.gz or .csv.zst in this folder"
        );
        let file = crate::File::new("s3://lacks/b.bin", 2);
        let error = FixedRecords::new(2).read(&file, 0..2).unwrap_err().to_string();
        assert_eq!(
            error,
            "s3://lacks/b.bin: 3 bytes, but data up to byte 4 was expected: has it changed?"
        );
        let file = crate::File::new("s3://lacks/gone.bin", 2);
        let error = FixedRecords::new(2).read(&file, 0..2).unwrap_err().to_string();
        assert_eq!(error, "s3://lacks/gone.bin: no such file");
    }

    fn object_in(storage: Storage) -> Object {
        let address = storage.address().into();
        Object { storage, address }
    }

    fn object(bytes: &[u8]) -> Object {
        // Blocks are cached by address, so each test uses its own.
        let address = format!("mem://{:p}", &raw const *bytes);
        let storage =
            Storage::within(Arc::new(InMemory::new()), StorePath::default(), address).join("a");
        storage.write("", vec![Bytes::copy_from_slice(bytes)]).unwrap();
        object_in(storage)
    }

    fn numbered(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn any_range_is_read_across_blocks_and_to_the_end() {
        let bytes = numbered(2 * BLOCK_BYTES as usize + 100);
        let object = object(&bytes);
        let (block, len) = (BLOCK_BYTES, bytes.len() as u64);
        for range in
            [0..10, block - 1..block + 1, block..block + 5, 5..len, len - 7..len, 3..3 + block]
        {
            let expected = &bytes[range.start as usize..range.end as usize];
            assert!(object.read(range.clone()).unwrap() == expected, "{range:?}");
        }
        assert_eq!(object.read(len - 3..len + 9).unwrap(), bytes[bytes.len() - 3..]);
    }

    #[test]
    fn an_object_is_read_like_a_file() {
        let bytes = numbered(BLOCK_BYTES as usize + 1000);
        let mut file = object(&bytes).open().unwrap();
        let mut found = Vec::new();
        file.read_to_end(&mut found).unwrap();
        assert!(found == bytes);
        assert_eq!(file.seek(SeekFrom::End(-3)).unwrap(), bytes.len() as u64 - 3);
        found.clear();
        file.read_to_end(&mut found).unwrap();
        assert_eq!(found, bytes[bytes.len() - 3..]);
        assert_eq!(
            file.seek(SeekFrom::Start(9)).unwrap() + file.seek(SeekFrom::Current(-2)).unwrap(),
            16
        );
        assert!(file.seek(SeekFrom::Current(-100)).is_err());
        assert_eq!(file.seek(SeekFrom::End(10)).unwrap(), bytes.len() as u64 + 10);
        assert_eq!(file.read(&mut [0; 4]).unwrap(), 0);
    }

    #[test]
    fn listing_a_prefix_gives_its_objects_and_listing_an_object_itself() {
        let object = object(b"1");
        let root =
            Storage::within(Arc::new(InMemory::new()), StorePath::default(), "s3://bucket/data/");
        for path in ["x/b.csv", "a.csv", ".hidden/c.csv", "x/.tmp"] {
            root.write(path, vec![Bytes::from_static(b"1")]).unwrap();
        }
        let found = object_in(root).list().unwrap();
        assert_eq!(
            found,
            (vec!["s3://bucket/data/a.csv".into(), "s3://bucket/data/x/b.csv".into()], vec![])
        );
        assert_eq!(object.list().unwrap(), (vec![object.address], vec![]));
    }
}
